"""Stage 1, lift: which nodes of a post-grad ATen graph may join a region, and where each belongs.

`lift` walks the graph once and gives every node that has a rule (see `rules`) its space, its kind and its depth.

Depth is the largest number of barriers on a path from a liftable node. Two nodes of equal depth that touch have no
barrier between them, so a connected set of nodes of equal depth is convex. A pointwise node sinks to its users' depth,
so that a cheap node (DeepNorm's `alpha * x`, a cast) is computed where it is used. A column sum is a barrier to what
reads it: it is known only after the last row. So is a move of the rows, which regions cross only where `moves` says.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ._torch_compat import has_fp8, same_size
from .row_program import FLOATS, MAX_COLS, QUANTISED, Kind
from .rules import CASTS, COMPARISONS, VIEWS, Role, Rule, is_random, rule_of, val


class Space(NamedTuple):
    """A rows x cols space. `rows` is an int or a `torch.SymInt`; spaces are compared with `same_space`."""

    rows: Any
    cols: int


@dataclass
class Lifted:
    """A node that may join a region."""

    node: fx.Node
    rule: Rule
    space: Space
    kind: Kind  # TILE, ROW, or COL for a column sum
    depth: int
    after_reduction: bool  # a row reduction of the same depth comes before it
    order: int


def same_space(a: Space, b: Space) -> bool:
    return a.cols == b.cols and same_size(a.rows, b.rows)


def is_move(entry: Lifted) -> bool:
    """Whether a node gives the rows another order."""
    return entry.rule.role is Role.MOVE


def first_mutation(graph: fx.Graph) -> fx.Node | None:
    """The first node that writes into a tensor; post-grad graphs have such nodes at their end only, if at all."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return node
    return None


_FLOATS = frozenset(FLOATS.values())
_FP8 = frozenset(QUANTISED.values()) - {torch.int8}


def lift(graph: fx.Graph) -> dict[fx.Node, Lifted]:
    """Every node of `graph` that may join a region, in graph order, with its space, kind and (sunk) depth."""
    lifted: dict[fx.Node, Lifted] = {}
    depth: dict[fx.Node, int] = {}
    follows: set[fx.Node] = (
        set()
    )  # the nodes that come after some liftable node: only there can a barrier stand between
    for order, node in enumerate(graph.nodes):
        before = max((depth[i] for i in node.all_input_nodes), default=0)
        entry = _lift_node(node, lifted, before, order)
        if entry is not None:
            lifted[node] = entry
        if any(i in follows or i in lifted for i in node.all_input_nodes):
            follows.add(node)
        is_barrier = entry is None or entry.rule.role in (Role.COLUMN_SUM, Role.MOVE)
        depth[node] = before + (is_barrier and node in follows)
        if entry is not None and is_move(entry):
            entry.depth = depth[node]
    _sink(graph, lifted, depth)
    return lifted


def _lift_node(node: fx.Node, lifted: dict[fx.Node, Lifted], depth: int, order: int) -> Lifted | None:
    rule = rule_of(node)
    if rule is None:
        return None
    if rule.role is Role.PROJECT:
        source = lifted.get(node.args[0])  # type: ignore[arg-type]
        if source is None or source.rule.role is not Role.REDUCTION:
            return None
        return Lifted(node, rule, source.space, Kind.ROW, depth, True, order)
    if not _is_computable(node, rule):
        return None
    inputs = [lifted[i] for i in node.all_input_nodes if i in lifted and lifted[i].depth == depth]
    after = rule.role is Role.REDUCTION or any(i.after_reduction for i in inputs)
    placed = _place(node, rule, lifted)
    return None if placed is None else Lifted(node, rule, placed[0], placed[1], depth, after, order)


def _is_computable(node: fx.Node, rule: Rule) -> bool:
    """Whether the printers can express this call: tensors of one device, of dtypes they know, and numbers."""
    if is_random(node):
        return True
    results = val(node) if isinstance(val(node), (tuple, list)) else [val(node)]
    inputs = [val(i) for i in node.all_input_nodes]
    if rule.role is Role.VIEW:  # whose shape may be symbolic
        inputs = [v for v in inputs if not isinstance(v, torch.SymInt)]
    tensors = [*results, *inputs]
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
        return False
    given: Set[torch.dtype] = {torch.bool} if node.target in COMPARISONS else _FLOATS
    if node.target in CASTS:
        given = _FLOATS | frozenset(QUANTISED.values())
        if val(node).dtype in _FP8 and not has_fp8(val(node).device):
            return False
    if not all(t.dtype in given for t in results) or not all(t.dtype in _FLOATS | {torch.bool} for t in inputs):
        return False
    if len({t.device for t in tensors}) != 1:
        return False
    if any(type(t).__name__ not in ("FakeTensor", "Tensor", "Parameter") for t in tensors):
        return False
    if any(isinstance(a, float) and math.isnan(a) for a in (*node.args, *node.kwargs.values())):
        return False
    return bool(node.args) and isinstance(node.args[0], fx.Node | int | float)


def _natural_space(tensor: torch.Tensor) -> Space | None:
    """A tensor of shape (..., cols) read as rows x cols; None where cols is symbolic, zero, or too large."""
    if tensor.ndim == 0 or not isinstance(tensor.shape[-1], int) or not 1 <= tensor.shape[-1] <= MAX_COLS:
        return None
    return Space(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _place(node: fx.Node, rule: Rule, lifted: dict[fx.Node, Lifted]) -> tuple[Space, Kind] | None:
    if rule.role in (Role.REDUCTION, Role.COLUMN_SUM):
        source = node.args[0]
        if isinstance(source, fx.Node) and source in lifted and lifted[source].kind is Kind.ROW:
            return None
        space = _natural_space(val(source))  # type: ignore[arg-type]
        return None if space is None else (space, Kind.ROW if rule.role is Role.REDUCTION else Kind.COL)
    row_inputs = [lifted[i] for i in node.all_input_nodes if i in lifted and lifted[i].kind is Kind.ROW]
    if rule.role is Role.MOVE and row_inputs:
        return None
    if not row_inputs:
        return _place_tile(node, rule)
    space = row_inputs[0].space
    if not all(same_space(r.space, space) for r in row_inputs):
        return None
    out = val(node)
    if _is_tile_of(out, space) and (
        space.cols > 1 or any(_is_tile_input(i, lifted, space) for i in node.all_input_nodes)
    ):
        aligned = rule.role is Role.VIEW or all(
            r.node.meta["val"].ndim > 0 and val(r.node).shape[-1] == 1 for r in row_inputs
        )
        return (space, Kind.TILE) if aligned and _broadcasts_rows(node, row_inputs) else None
    return (space, Kind.ROW) if same_size(out.numel(), space.rows) and _same_rows(node, row_inputs) else None


def _place_tile(node: fx.Node, rule: Rule) -> tuple[Space, Kind] | None:
    space = _natural_space(val(node))
    if space is None:
        return None
    if rule.role is Role.VIEW:  # the same rows: a view that regroups the last dimension, or repeats rows, is a barrier
        source = _natural_space(val(node.args[0]))  # type: ignore[arg-type]
        if source is None or not same_space(source, space):
            return None
    return space, Kind.TILE


def _is_tile_of(tensor: torch.Tensor, space: Space) -> bool:
    natural = _natural_space(tensor)
    return natural is not None and same_space(natural, space)


def _is_tile_input(node: fx.Node, lifted: dict[fx.Node, Lifted], space: Space) -> bool:
    return node in lifted and lifted[node].kind is Kind.TILE and same_space(lifted[node].space, space)


def _broadcasts_rows(node: fx.Node, row_inputs: list[Lifted]) -> bool:
    """Whether each row input has one value for every row of the tile `node`, so that row i meets row i."""
    out = val(node)
    for r in row_inputs:
        shape = val(r.node).shape
        if len(shape) > out.ndim:
            return False
        lead = out.shape[: out.ndim - len(shape)]
        if not all(same_size(d, 1) for d in lead):
            return False
        if not all(same_size(a, b) for a, b in zip(shape[:-1], out.shape[out.ndim - len(shape) : -1], strict=True)):
            return False
    return True


def _same_rows(node: fx.Node, row_inputs: list[Lifted]) -> bool:
    """Whether a row-valued node pairs row i of each input with row i (views always do: they keep the order)."""
    shapes = [val(r.node).shape for r in row_inputs]
    if node.target in VIEWS:
        return True
    out = val(node).shape
    return all(len(s) == len(out) and all(same_size(a, b) for a, b in zip(s, out, strict=True)) for s in shapes)


def _sink(graph: fx.Graph, lifted: dict[fx.Node, Lifted], depth: dict[fx.Node, int]) -> None:
    for node in reversed(graph.nodes):
        entry = lifted.get(node)
        if entry is None or entry.after_reduction or entry.rule.role in (Role.PROJECT, Role.COLUMN_SUM, Role.MOVE):
            continue
        users = [u for u in node.users if u.op != "output"]
        if not users:
            continue
        latest = min(depth[u] - 1 if u not in lifted or is_move(lifted[u]) else lifted[u].depth for u in users)
        entry.depth = max(entry.depth, latest)
