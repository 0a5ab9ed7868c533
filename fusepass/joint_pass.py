"""What has to be said, or changed, before the partitioner splits a graph into forward and backward.

1. Which norms have a residual sum in front of them. A backward graph may hold no more of a norm than what the forward
   saved for it, so the joint graph, which shows both, leaves a mark on those nodes: the partitioner keeps it.
2. Row statistics that a backward reads are saved in FP32. Where the input of a LayerNorm is 16-bit, PyTorch's CPU
   decomposition rounds the mean and rstd that it saves to 16 bits too, and `n = (z - mean) * rstd` carries the rounding
   of both. Instead, the backward reads the FP32 rstd, and computes the mean again from z, which it reads anyway: one
   FP32 number per row for two 16-bit ones, so no more is saved than before.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ._torch_compat import MUST_BE_IN_BACKWARD, same_size
from .graph_pass import GraphPass
from .residual import RESIDUAL_MARK, look_back, normalised, resembles, residual_sum
from .row_program import HALVES
from .rules import CASTS, REDUCTIONS, VIEWS, reduced_dims, val

aten = torch.ops.aten

_WITHIN = frozenset({aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}) | CASTS | VIEWS
"""What leads from a norm's input to the normalised tile."""
_READERS = frozenset({aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.expand.default})


@dataclass(frozen=True)
class _Rounded:
    """A norm's statistics as a 16-bit backward reads them: `mean` and `rstd` are the casts, `wide` what rstd rounds."""

    z: fx.Node
    mean: fx.Node
    rstd: fx.Node
    wide: fx.Node


class JointPass(GraphPass):
    """Marks and rewrites joint forward and backward graphs."""

    def run(self, graph: fx.Graph) -> None:
        """Everything is found before anything is changed."""
        try:
            for node in graph.nodes:
                _mark(node)
            found = [r for n in graph.nodes if (r := _rounded_statistics(n)) is not None]
            for rounded in found:
                _widen(graph, rounded)
        except Exception as e:
            self.fault("preparing a joint graph", e)


def _mark(node: fx.Node) -> None:
    """Where `node` is a norm's statistic, say on all tiles from the norm's input on whether that is a residual sum."""
    if node.target not in REDUCTIONS or resembles(node) is None:
        return
    z = normalised(node)
    has_sum = residual_sum(z) is not None
    queue = look_back(z)
    reached = set(queue)
    while queue:
        further = [u for u in queue.pop().users if u.target in _WITHIN and u not in reached and _is_as_large(u, z)]
        reached.update(further)
        queue += further
    for n in reached:
        n.meta[RESIDUAL_MARK] = n.meta.get(RESIDUAL_MARK, False) or has_sum


def _is_as_large(node: fx.Node, other: fx.Node) -> bool:
    return same_size(val(node).numel(), val(other).numel())


def _rounded_statistics(node: fx.Node) -> _Rounded | None:
    """The statistics of one `var_mean` over the last dimension, where both are read rounded and nothing prevents it."""
    if node.target is not aten.var_mean.correction or reduced_dims(node) != [val(node.args[0]).ndim - 1]:  # type: ignore[arg-type]
        return None
    z = node.args[0]
    assert isinstance(z, fx.Node)
    parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if set(parts) != {0, 1} or residual_sum(z) is None or val(z).device.type != "cpu":
        return None
    roots = [r for a in parts[0].users for r in a.users if r.target is aten.rsqrt.default]
    if len(roots) != 1:
        return None
    mean, rstd = _half_cast(parts[1]), _half_cast(roots[0])
    if mean is None or rstd is None or not (_is_read_wide(mean) and _is_read_wide(rstd)):
        return None
    return _Rounded(z, mean, rstd, roots[0])


def _half_cast(node: fx.Node) -> fx.Node | None:
    casts = [u for u in node.users if u.target in CASTS and val(u).dtype in HALVES]
    return casts[0] if len(casts) == 1 else None


def _is_read_wide(cast: fx.Node) -> bool:
    """Whether every reader computes with FP32 tiles, so that the statistic alone is rounded."""
    for user in cast.users:
        if user.target not in _READERS:
            return False
        is_rounded = val(user).dtype in HALVES  # as rstd / D is, a 16-bit number per row
        if is_rounded and (not _is_as_large(user, cast) or any(val(u).dtype in HALVES for u in user.users)):
            return False
    return bool(cast.users)


def _widen(graph: fx.Graph, rounded: _Rounded) -> None:
    """Every step leaves a graph that computes the same, should a later one fail."""
    first = min(rounded.mean.users)
    wider = {reader: val(reader).to(torch.float32) for cast in (rounded.mean, rounded.rstd) for reader in cast.users}
    with graph.inserting_before(first):
        mean = graph.call_function(aten.mean.dim, (rounded.z, [-1], True))
    mean.meta.update(first.meta)
    mean.meta |= {"val": val(rounded.mean).to(torch.float32), "partitioner_tag": MUST_BE_IN_BACKWARD}
    for cast, wide in ((rounded.mean, mean), (rounded.rstd, rounded.wide)):
        cast.replace_all_uses_with(wide)
        graph.erase_node(cast)
    for reader, value in wider.items():
        reader.meta["val"] = value
