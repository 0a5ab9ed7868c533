"""Whether a norm has a residual sum in front of it: read off the graph, backwards from the norm's input.

A backward graph may hold no more of a norm than what the forward saved for it; there the mark tells that the joint pass
has left, or else what is left of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ._torch_compat import BatchNorm, same_size
from .provenance import is_made_by
from .rules import CASTS, MOVES, VIEWS, reduced_dims, val

aten = torch.ops.aten

RESIDUAL_MARK = "fusepass_residual"
"""In a node's meta: whether the norm that the node belongs to has a residual sum in front of it."""

_FACTORS = frozenset(
    {
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.neg.default,
    }
)
_ROOTS = frozenset({aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar, aten.reciprocal.default})
_MAKES_A_SUM_OR_NORM = frozenset(f"aten.{op}" for op in ("add.Tensor", "native_layer_norm.default", "mul.Tensor"))


def residual_sum(node: fx.Node) -> fx.Node | None:
    """The add of two activations that `node` is, seen through casts, views, dropout and factors; or None."""
    for n in look_back(node):
        if n.target is aten.add.Tensor and is_residual_add(n):
            return n
    return None


def look_back(node: fx.Node) -> list[fx.Node]:
    """`node` and what it is, seen through casts, views, moves of rows, masks, and sums and products with vectors."""
    chain = [node]
    while True:
        inner = _inner(chain[-1])
        if inner is None:
            return chain
        chain.append(inner)


def _inner(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in VIEWS | CASTS | MOVES:
        return node.args[0]
    if node.target in _FACTORS:
        operands = [a for a in node.args[:2] if isinstance(a, fx.Node) and not _is_vector(a, node)]
        return operands[0] if len(operands) == 1 else None
    return None


def is_residual_add(node: fx.Node) -> bool:
    return all(isinstance(a, fx.Node) and _is_tile(a, node) for a in node.args[:2])


def _is_tile(arg: fx.Node, user: fx.Node) -> bool:
    """Whether `arg` varies over the rows and the columns of the tile `user` (it may repeat over some of the rows)."""
    return not _is_vector(arg, user) and val(arg).ndim > 0 and same_size(val(arg).shape[-1], val(user).shape[-1])


def _is_vector(arg: fx.Node, user: fx.Node) -> bool:
    """Whether `arg` is a scalar, a per-column vector, or a dropout mask, beside the tile `user`."""
    tensor, out = val(arg), val(user)
    if not isinstance(tensor, torch.Tensor) or not isinstance(out, torch.Tensor):
        return True
    if tensor.dtype is torch.bool or (tensor.ndim < out.ndim and same_size(tensor.numel(), 1)):
        return True
    one_row = all(same_size(d, 1) for d in out.shape[:-1])
    return all(same_size(d, 1) for d in tensor.shape[:-1]) and (tensor.ndim < out.ndim or not one_row)


def gradient_sum(nodes: Sequence[fx.Node], gradient: fx.Node, start: fx.Node) -> fx.Node | None:
    """What tells that a norm's gradient, among `nodes`, belongs to a residual sum; or None. `start` is its input.

    That is the joint pass's mark. Without it (this pass alone, in a user's own set-up) it is the sum, saved or computed
    again, or the normalised row, of which nobody can tell; or else the add that joins the gradient with the residual
    stream's own.
    """
    chain = look_back(start)
    marked = next((n for n in chain if RESIDUAL_MARK in n.meta), None)
    if marked is not None:
        return marked if marked.meta[RESIDUAL_MARK] else None
    if chain[-1].op == "placeholder" and str(chain[-1].meta.get("original_aten")) in _MAKES_A_SUM_OR_NORM:
        return chain[-1]
    adds = (n for n in nodes if n.target is aten.add.Tensor and is_residual_add(n))
    return residual_sum(start) or next((n for n in adds if _reads(n, gradient)), None)


def _reads(node: fx.Node, source: fx.Node) -> bool:
    """Whether `source`, seen through casts and views, is added by `node`, or is such a sum itself."""
    return any(isinstance(a, fx.Node) and source in look_back(a) for a in node.args[:2]) or node is source


# --- what looks like a norm, in or outside a region


def resembles(node: fx.Node) -> str | None:
    """The norm that a reduction outside every region belongs to, by the square before it and the root after it."""
    dims, ndim = reduced_dims(node), val(node.args[0]).ndim  # type: ignore[arg-type]
    if ndim == 0 or (ndim > 2 and dims == [0, *range(2, ndim)]) or is_made_by(node, BatchNorm):
        return None  # a number, or BatchNorm: over the batch and all of each channel
    if node.target in (aten.var_mean.correction, aten.var.correction, aten.std.correction):
        kind = "layer_norm"
    elif node.target in (aten.mean.dim, aten.sum.dim_IntList) and _square_of(node) is not None:
        inner = _square_of(node)
        kind = "layer_norm" if inner is not None and inner.target is aten.sub.Tensor else "rms_norm"
    else:
        return None
    return kind if _reaches_root(node) else None


def _square_of(node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or not source.args or not isinstance(source.args[0], fx.Node):
        return None
    is_square = (source.target is aten.pow.Tensor_Scalar and source.args[1] == 2) or (
        source.target is aten.mul.Tensor and source.args[0] is source.args[1]
    )
    return source.args[0] if is_square or source.target is aten.square.default else None


def normalised(node: fx.Node) -> fx.Node:
    """The node whose values are normalised: what is squared, before its mean is subtracted."""
    inner = _square_of(node)
    if inner is None:
        inner = node.args[0]  # type: ignore[assignment]
    elif inner.target is aten.sub.Tensor and isinstance(inner.args[0], fx.Node):
        inner = inner.args[0]
    assert isinstance(inner, fx.Node)
    return inner


def _reaches_root(node: fx.Node, steps: int = 6) -> bool:
    """Whether a root is taken of this statistic, a few small pointwise steps on."""
    frontier = [node]
    for _ in range(steps):
        frontier = [u for n in frontier for u in n.users]
        if any(u.target in _ROOTS and not (u.target is aten.pow.Tensor_Scalar and u.args[1] == 2) for u in frontier):
            return True
        small = val(node)[0] if isinstance(val(node), (tuple, list)) else val(node)
        frontier = [
            u for u in frontier if not isinstance(val(u), torch.Tensor) or same_size(val(u).numel(), small.numel())
        ]
    return False
