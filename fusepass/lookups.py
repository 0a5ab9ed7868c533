"""Stage 2, regions: embeddings that a fused kernel looks up itself, as Inductor's own kernels do.

A region reads the rows of the table through the positions, so that no kernel has to store them first. Where positions
count up from a number (`arange`) or are all one number, what is looked up is a part of the table, and needs no
positions: `read_slices` says so in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch_compat import detect_fake_mode, is_called
from .row_program import FLOATS, POSITIONS
from .rules import MOVES, VIEWS, rule_of, val

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Lookup:
    """The table of an embedding, (rows, cols), and the positions that it is looked up at."""

    table: fx.Node
    positions: fx.Node


def lookup_of(node: fx.Node) -> Lookup | None:
    """How a kernel may look up what `node` holds.

    None where it is no embedding, where table or positions are not as a kernel reads them, and where something needs
    the rows stored anyway.
    """
    if node.target is not aten.embedding.default or (len(node.args) > 4 and node.args[4]):
        return None
    table, positions = node.args[:2]
    if not isinstance(table, fx.Node) or not isinstance(positions, fx.Node):
        return None
    rows, at = val(table), val(positions)
    if not all(type(t).__name__ in ("FakeTensor", "Tensor", "Parameter") for t in (rows, at)):
        return None
    if rows.ndim != 2 or rows.stride(1) != 1 or rows.dtype not in FLOATS.values() or not _is_in_memory(table):
        return None
    if at.ndim == 0 or at.dtype not in POSITIONS.values() or at.device != rows.device:
        return None
    return None if any(_stores(u) for u in _readers(node)) else Lookup(table, _unexpanded(positions))


def _unexpanded(node: fx.Node) -> fx.Node:
    while node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_in_memory(node: fx.Node) -> bool:
    """Whether a tensor is stored without a kernel that Inductor would not have written for it."""
    while node.target in VIEWS - {aten.clone.default} or node.target in MOVES:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node.op in ("placeholder", "get_attr") or is_called(node.target) or _is_foreign(node.target)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, also by views of it."""
    for user in node.users:
        if user.target in VIEWS | MOVES and rule_of(user) is not None:
            yield from _readers(user)
        else:
            yield user


def _stores(reader: fx.Node) -> bool:
    """Whether a reader needs what it reads in memory: a call, or the end of the graph."""
    return reader.op == "output" or is_called(reader.target) or _is_foreign(reader.target)


def _is_foreign(target: Any) -> bool:
    """Whether this is an operator that Inductor calls as it is: a custom one, or one that takes graphs or kernels."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


# --- positions that are known


def read_slices(graph: fx.Graph, members: Set[fx.Node]) -> bool:
    """Replace the embeddings that `members` read at known positions by parts of their tables; whether there are any."""
    found = False
    for node in list(graph.nodes):
        lookup = lookup_of(node)
        if lookup is None or not node.users or not set(node.users) <= members or _is_written(lookup.table):
            continue
        known = _progression(lookup.positions)
        table_rows = val(lookup.table).shape[0]
        if known is None or not isinstance(table_rows, int) or not known:
            continue
        if not 0 <= known[0] <= known[-1] < table_rows:
            continue
        _read_slice(graph, node, lookup, known)
        found = True
    return found


def _read_slice(graph: fx.Graph, node: fx.Node, lookup: Lookup, known: range) -> None:
    fake_mode = detect_fake_mode([val(node)])
    part = list(val(lookup.positions).shape)
    if len(known) == 1:
        part = [1] * len(part)

    def call(target: Any, source: fx.Node, *args: Any) -> fx.Node:
        new = graph.call_function(target, (source, *args))
        with fake_mode:  # type: ignore[union-attr]
            new.meta = {**node.meta, "val": target(val(source), *args)}
        return new

    with graph.inserting_before(node):
        new = call(aten.slice.Tensor, lookup.table, 0, known[0], known[-1] + 1, known.step)
        new = call(aten.reshape.default, new, [*part, val(node).shape[-1]])
        if list(val(new).shape) != list(val(node).shape):
            size: list[Any] = [d if isinstance(d, int) else None for d in val(node).shape]
            new = call(aten.expand.default, new, size)
    node.replace_all_uses_with(new)
    erase_unread(graph, node)


def _progression(node: fx.Node) -> range | None:
    """The numbers that a node holds, in order, where they are known and count up; one, where all are the same."""
    shape = val(node).shape
    if not all(isinstance(d, int) for d in shape):
        return None
    source = node.args[0] if node.args else None
    if node.target is prims.iota.default and isinstance(source, int):
        start, step = node.kwargs["start"], node.kwargs["step"]
        if isinstance(start, int) and isinstance(step, int) and step > 0:
            return range(start, start + source * step, step)
        return None
    if node.target is aten.full.default and len(node.args) > 1:
        number = node.args[1]
        return range(number, number + 1) if isinstance(number, int) and val(node).numel() else None
    if not isinstance(source, fx.Node) or not isinstance(val(source), torch.Tensor):
        return None
    keeps = val(source).numel() == val(node).numel() and not val(source).dtype.is_floating_point
    if keeps and (node.target in VIEWS or node.target is prims.convert_element_type.default):
        return _progression(source)
    if node.target in (aten.add.Tensor, aten.add.Scalar) and keeps and not node.kwargs and len(node.args) == 2:
        known, more = _progression(source), node.args[1]
        if known and isinstance(more, int):
            return range(known.start + more, known.stop + more, known.step)
    return None


def _is_written(table: fx.Node) -> bool:
    return any(isinstance(u.target, torch._ops.OpOverload) and u.target._schema.is_mutable for u in table.users)


def erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads any more, and what was computed for it alone."""
    if node.op == "call_function" and not node.users and not node.is_impure():
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            erase_unread(graph, source)
