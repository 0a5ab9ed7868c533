"""Stage 2, regions: the row program of a region, what it reads and what it writes.

The program is canonical: statements are ordered depth-first from the outputs, values are named by first use, and equal
statements are merged, so that equal sites of a model give the same text and share one kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ._torch_compat import same_size, size_text
from .lift import Lifted, Space
from .lookups import Lookup, lookup_of
from .moves import RowOrder, row_orders
from .regions import REPEATABLE
from .row_ops import COL_REDUCTIONS, GENERATORS, POINTWISE, ROW_REDUCTIONS
from .row_program import Kind, Operand, Output, RowProgram, Statement, lookups
from .rules import Role, val

_REDUCES = (Role.REDUCTION, Role.COLUMN_SUM)


@dataclass(frozen=True)
class Read:
    """A tensor that a region reads.

    `index` has one row-index expression per leading dimension of `node`, unless `flatten`: then the leading dimensions
    are seen as one; or `lead`: then they are seen as these. `rows` is the shape of the region's rows where the tensor
    is used, which the index is relative to, in the order `order` where they are moved; `of_tile` says that it is used
    beside a tile, so that its last dimension is the column (or one). Of a table, `lookup` is the embedding that is
    looked up in it.
    """

    node: fx.Node
    kind: Kind
    index: tuple[str, ...]
    flatten: bool
    rows: tuple[Any, ...] = ()
    of_tile: bool = True
    order: RowOrder | None = None
    lead: tuple[Any, ...] = ()
    lookup: fx.Node | None = None

    @property
    def source(self) -> fx.Node:
        """The node whose value the operand is, row by row."""
        return self.lookup or self.node


@dataclass
class Region:
    """A connected set of nodes and the row program that computes the values it hands out."""

    space: Space
    nodes: list[fx.Node]
    program: RowProgram
    reads: tuple[Read, ...]
    writes: tuple[fx.Node, ...]  # the node whose value each of the program's outputs replaces
    sizes: dict[str, Any]  # the value (a SymInt) of each of the program's sizes
    value_of: dict[fx.Node, Any]  # node -> the name of its value (or a tuple of names)
    tile: fx.Node  # a node with the region's rows and columns
    made_by: dict[str, fx.Node]  # the node that a statement was written for
    repeated: dict[fx.Node, list[Any]]  # members smaller than a tile, and the shape of the tile that they repeat in
    orders: dict[fx.Node, RowOrder]  # members whose rows lie in another order

    def node_of(self, value: str) -> fx.Node:
        """The first node, in graph order, that holds a value of the program; or else the one it was computed for."""
        return next((n for n in self.nodes if self.value_of.get(n) == value), self.made_by[value])

    def is_col_sum(self, node: fx.Node) -> bool:
        """Whether a member holds a column sum."""
        return self.program.values.get(str(self.value_of.get(node))) in self.program.col_sums

    def holder_of(self, value: str) -> fx.Node:
        """The node that holds a value of the program: a member, or the node that an operand reads."""
        names = [o.name for o in self.program.operands]
        return self.reads[names.index(value)].source if value in names else self.node_of(value)


class Unsupported(Exception):
    """A region cannot be written as a row program; the message says which node and why."""


class Narrow(Unsupported):
    """A node that is a tile, or reduces one, by its shape; but the value varies over the rows or the columns alone."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.name} computes with a tile that does not vary over rows and columns")
        self.node = node


def build_region(nodes: list[fx.Node], lifted: dict[fx.Node, Lifted]) -> Region:
    """The region of these nodes with its canonical program. Raises `Unsupported`."""
    while True:
        try:
            return _Builder(nodes, lifted).build()
        except Narrow as e:  # cheap to compute outside, from what it is made of
            if not any(lifted[n].rule.role in _REDUCES for n in nodes if n is not e.node):
                raise
            nodes = [n for n in nodes if n is not e.node]


class _Builder:
    def __init__(self, nodes: list[fx.Node], lifted: dict[fx.Node, Lifted]) -> None:
        self.nodes = nodes
        self.members = set(nodes)
        self.lifted = lifted
        reductions = [n for role in _REDUCES for n in nodes if lifted[n].rule.role is role]
        reduction = reductions[0]
        self.space = lifted[reduction].space
        assert isinstance(reduction.args[0], fx.Node)
        self.tile = reduction.args[0]
        self.operands: dict[Any, Operand] = {}
        self.reads: dict[str, Read] = {}
        self.statements: dict[Any, Statement] = {}
        self.named: dict[str, Operand | Statement] = {}
        self.sizes: dict[str, Any] = {}
        self.value_of: dict[fx.Node, Any] = {}
        self.made_by: dict[str, fx.Node] = {}
        self.current = reduction
        self.repeated = self._repeated()
        orders = row_orders(nodes, lifted)
        if orders is None:
            raise Unsupported(f"the rows of {reduction.name} and what it is computed of have no order in common")
        self.orders = orders

    def build(self) -> Region:
        writes = self.escaping()
        for node in writes:
            self.value(node)
        outputs = []
        for node in writes:
            name = self.value_of[node]
            if self.is_col_sum(name):
                outputs.append(Output(name))
                continue
            if self.named[name].kind not in (Kind.TILE, Kind.ROW):
                raise Narrow(node)
            if self.named[name].kind is Kind.ROW and self.lifted[node].kind is Kind.TILE:
                raise Narrow(node)
            outputs.append(Output(name, self._moved_index(self.orders[node]) if node in self.orders else ("row",)))
        renamed = self._live_names([o.value for o in outputs])
        program = RowProgram(
            self.space.cols,
            tuple(o for o in self.operands.values() if o.name in renamed),
            tuple(_rename(s, renamed) for s in self.statements.values() if s.name in renamed),
            tuple(Output(renamed[o.value], o.index) for o in outputs),
            tuple(self.sizes),
        )
        value_of = {n: _rename_value(v, renamed) for n, v in self.value_of.items()}
        reads = tuple(self.reads[o.name] for o in program.operands)
        made_by = {renamed[v]: n for v, n in self.made_by.items() if v in renamed}
        return Region(
            self.space,
            self.nodes,
            program.verify(),
            reads,
            tuple(writes),
            self.sizes,
            value_of,
            self.tile,
            made_by,
            self.repeated,
            self.orders,
        )

    def _repeated(self) -> dict[fx.Node, list[Any]]:
        found: dict[fx.Node, list[Any]] = {}
        for node in reversed(self.nodes):
            shape = list(val(node).shape) if isinstance(val(node), torch.Tensor) else []
            some_rows = len(shape) > 1 and not all(same_size(d, 1) for d in shape[:-1])
            is_full = same_size(math.prod(shape[:-1]), self.space.rows)
            if node.target in REPEATABLE and some_rows and not is_full and same_size(shape[-1], self.space.cols):
                user = next(iter(node.users))
                found[node] = found.get(user, list(val(user).shape))
        return found

    def _live_names(self, outputs: list[str]) -> dict[str, str]:
        """Old to new name of every value that the outputs need, numbered without gaps."""
        by_name = {s.name: s for s in self.statements.values()}
        at = {o.name: [positions for positions, _ in lookups(o.index)] for o in self.operands.values()}
        live: set[str] = set()
        stack = list(outputs)
        while stack:
            name = stack.pop()
            if name not in live:
                live.add(name)
                stack.extend(by_name[name].value_args if name in by_name else at[name])
        renamed = {o.name: o.name for o in self.operands.values() if o.name in live}
        return renamed | {name: f"v{i}" for i, name in enumerate(n for n in by_name if n in live)}

    def escaping(self) -> list[fx.Node]:
        """The nodes whose value is needed outside. A view never is: it is applied again to what it views."""
        outside: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if any(u not in self.members or (self.is_alias(u) and u in outside) for u in node.users):
                outside.add(node)
        return [
            n for n in self.nodes if n in outside and not self.is_alias(n) and not isinstance(val(n), (tuple, list))
        ]

    def is_alias(self, node: fx.Node) -> bool:
        return self.lifted[node].rule.role in (Role.VIEW, Role.MOVE)

    def value(self, node: fx.Node) -> Any:
        """The name of a member's value; emits the statements that it needs, depth first."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [i for i in top.all_input_nodes if i in self.members and i not in self.value_of]
            if top in self.value_of:
                stack.pop()
            elif missing:
                stack.extend(reversed(missing))
            else:
                self.current = top
                args = [self.argument(a, top) if isinstance(a, fx.Node) else a for a in top.args]
                self.value_of[top] = self.lifted[top].rule.emit(self.emit, top, args)
                stack.pop()
        return self.value_of[node]

    def argument(self, arg: fx.Node, user: fx.Node) -> Any:
        return self.value_of[arg] if arg in self.members else self.operand(arg, user)

    def emit(self, op: str, *args: Any, dtype: torch.dtype) -> str:
        values = tuple(a if isinstance(a, str) else float(a) for a in args)
        if op in ("add", "mul"):  # commutative to the bit: one order, so that swapped spellings give one program
            values = tuple(sorted(values, key=lambda a: (isinstance(a, float), str(a))))
        if op in ROW_REDUCTIONS and self.named[str(values[0])].kind in (
            Kind.ROW,
            Kind.SCALAR,
        ):  # of one value, repeated
            return self.emit("mul", values[0], float(self.space.cols if op == "row_sum" else 1), dtype=dtype)
        if op == "cast" and isinstance(values[0], str) and self.is_col_sum(values[0]):  # rounded once, when it is done
            return self.emit("col_sum", *self.named[values[0]].args, dtype=dtype)  # type: ignore[union-attr]
        key = (op, tuple(repr(a) for a in values), dtype)  # 0.0 and -0.0 are equal, but not the same
        if op == "cast" and isinstance(values[0], str) and self.named[values[0]].dtype is dtype:
            return values[0]
        if key not in self.statements:
            kinds = [self.named[a].kind for a in values if isinstance(a, str)]
            if op in POINTWISE:
                kind = Kind.join(kinds)
            elif op in GENERATORS:
                kind = Kind.TILE
            else:
                kind = Kind.COL if op in COL_REDUCTIONS else Kind.ROW
                if kinds != [Kind.TILE]:
                    raise Narrow(self.current)
            name = f"v{len(self.statements)}"
            self.statements[key] = self.named[name] = Statement(name, op, values, kind, dtype)
            self.made_by[name] = self.current
        return self.statements[key].name

    def is_col_sum(self, name: str) -> bool:
        value = self.named[name]
        return isinstance(value, Statement) and value.op in COL_REDUCTIONS

    # --- operands

    def operand(self, node: fx.Node, user: fx.Node) -> str:
        shape = list(val(user).shape) if not isinstance(val(user), (tuple, list)) else list(val(node).shape)
        shape = self.repeated.get(user, shape)
        if self.lifted[user].rule.role in (Role.VIEW, *_REDUCES):
            shape = list(val(node).shape)
        while node.target is torch.ops.aten.expand.default and isinstance(node.args[0], fx.Node):
            if same_size(val(node.args[0]).numel(), 1):
                break  # one gradient for all, as `.sum().backward()` hands out: it takes the place of a tile
            node = node.args[0]  # read the tensor itself: its index says which rows repeat
        of_tile = self.lifted[user].kind is Kind.TILE or self.lifted[user].rule.role in _REDUCES
        if user in self.orders:
            read = self._read_moved(node, shape, self.orders[user])
        else:
            read = self._read(node, shape, of_tile)
        if of_tile and read.kind in (Kind.TILE, Kind.COL) and (lookup := lookup_of(node)):
            read = self._look_up(node, lookup, read, shape[:-1])
        prefix = {Kind.TILE: "x", Kind.ROW: "r", Kind.COL: "w", Kind.SCALAR: "a"}[read.kind]
        return self._named(read, prefix)

    def _named(self, read: Read, prefix: str) -> str:
        key = (read.node, read.kind, read.index, len(read.lead))
        if key not in self.operands:
            name = f"{prefix}{sum(o.name.startswith(prefix) for o in self.operands.values())}"
            self.operands[key] = self.named[name] = Operand(name, read.kind, val(read.node).dtype, read.index)
            self.reads[name] = read
        return self.operands[key].name

    def _look_up(self, node: fx.Node, lookup: Lookup, read: Read, lead: list[Any]) -> Read:
        """How `node`, an embedding that would be read as `read`, is looked up in its table."""
        at = lookup.positions
        if read.order is not None:
            if read.lead or at is not node.args[1] or len(read.index) != val(at).ndim:
                return read
            by_row = Read(at, Kind.ROW, read.index, False, read.rows, False, read.order)
        elif all(same_size(d, 1) for d in val(at).shape):
            by_row = Read(at, Kind.ROW, ("0",) * val(at).ndim, False, tuple(lead), False)
        else:
            by_row = self._read(at, lead, False)
        table_rows = val(lookup.table).shape[0]
        bound = str(table_rows) if isinstance(table_rows, int) else self._size_name(table_rows)
        index = (f"{self._named(by_row, 'p')} < {bound}",)
        return Read(lookup.table, Kind.TILE, index, False, by_row.rows, True, lookup=node)

    def _read(self, node: fx.Node, shape: list[Any], of_tile: bool) -> Read:
        """How `node`, broadcast to `shape` (that of a tile, or of a row-valued node), is indexed by row and column."""
        own = list(val(node).shape)
        full_rows = of_tile and _same_shape(own, shape) and same_size(math.prod(shape[:-1]), self.space.rows)
        if full_rows and same_size(own[-1], self.space.cols):
            return self._read_full_tile(node, shape[:-1])
        if all(same_size(d, 1) for d in own):
            return Read(node, Kind.SCALAR, (), False)
        lead = shape[:-1] if of_tile else shape
        pad = len(shape) - len(own)
        own_lead = own[:-1] if of_tile else own
        varies = of_tile and same_size(own[-1], self.space.cols)
        if of_tile and not varies and not same_size(own[-1], 1):
            raise Unsupported(f"{node.name} has last dimension {own[-1]}, expected {self.space.cols} or 1")
        if all(same_size(d, 1) for d in own_lead):
            return Read(node, Kind.COL, (), False)
        kind = Kind.TILE if varies else Kind.ROW
        full = all(same_size(d, 1) for d in lead[:pad])
        full = full and all(same_size(a, b) for a, b in zip(own_lead, lead[pad:], strict=True))
        if full and collapses(val(node), drop_last=of_tile):
            return Read(node, kind, ("row",), True, tuple(lead), of_tile)
        index = self._indices(own_lead, lead[pad:], lead[:pad])
        if kind is Kind.ROW and of_tile:
            index = (*index, "0")
        return Read(node, kind, index, False, tuple(lead), of_tile)

    def _read_moved(self, node: fx.Node, shape: list[Any], order: RowOrder) -> Read:
        """How `node`, broadcast to `shape` on the other side of a move, is indexed by the region's row and column."""
        own, lead = list(val(node).shape), list(order.lead)
        if all(same_size(d, 1) for d in own[:-1]):
            return self._read(node, shape, True)
        index = self._moved_index(order)
        if _same_shape(own, shape) and same_size(math.prod(own[:-1]), self.space.rows):
            regrouped = () if _same_shape(own[:-1], lead) else order.lead
            return Read(node, Kind.TILE, index, False, order.lead, True, order, regrouped)
        if not _same_shape(shape[:-1], lead):
            raise Unsupported(f"{node.name} repeats over rows {tuple(shape[:-1])} that are moved as {order.lead}")
        pad = len(shape) - len(own)
        index = tuple("0" if same_size(d, 1) else index[pad + i] for i, d in enumerate(own[:-1]))
        kind = Kind.TILE if same_size(own[-1], self.space.cols) else Kind.ROW
        return Read(node, kind, index if kind is Kind.TILE else (*index, "0"), False, order.lead, True, order)

    def _moved_index(self, order: RowOrder) -> tuple[str, ...]:
        """The row-index expressions, one per leading dimension, of a full tile whose rows are moved."""
        own = list(order.own)
        indices = self._indices(own, own, [])
        return tuple(indices[order.order.index(i)] for i in range(len(own)))

    def _read_full_tile(self, node: fx.Node, lead: list[Any]) -> Read:
        if collapses(val(node)):
            return Read(node, Kind.TILE, ("row",), True, tuple(lead))
        return Read(node, Kind.TILE, self._indices(lead, lead, []), False, tuple(lead))

    def _indices(self, own: list[Any], shape: list[Any], outer: list[Any]) -> tuple[str, ...]:
        result = []
        for i, (size, full) in enumerate(zip(own, shape, strict=True)):
            if same_size(size, 1):
                result.append("0")
                continue
            if not same_size(size, full):
                raise Unsupported(f"cannot tell how size {size} broadcasts to {full}")
            inner = [s for s in shape[i + 1 :] if not same_size(s, 1)]
            text = "row" + (f" // {self._product(inner)}" if inner else "")
            outermost = all(same_size(s, 1) for s in [*outer, *shape[:i]])
            result.append(text if outermost else f"{text} % {self._product([full])}")
        return tuple(result)

    def _product(self, factors: list[Any]) -> str:
        number = 1
        names = []
        for f in factors:
            if isinstance(f, int):
                number *= max(f, 1)  # without rows, no index is ever taken
            else:
                names.append(self._size_name(f))
        return "*".join([*names, *([str(number)] if number != 1 or not names else [])])

    def _size_name(self, size: Any) -> str:
        for name, known in self.sizes.items():
            if size_text(known) == size_text(size):
                return name
        name = f"n{len(self.sizes)}"
        self.sizes[name] = size
        return name


def collapses(tensor: torch.Tensor, *, drop_last: bool = True) -> bool:
    """Whether all leading dimensions can be seen as one, without a copy."""
    if same_size(tensor.numel(), 0):
        return True
    dims = [
        (size, stride)
        for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[: -1 if drop_last else None]
        if not same_size(size, 1)
    ]
    return all(same_size(outer[1], inner[0] * inner[1]) for outer, inner in pairwise(dims))


def _same_shape(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def _rename(s: Statement, names: dict[str, str]) -> Statement:
    return replace(s, name=names[s.name], args=tuple(names[a] if isinstance(a, str) else a for a in s.args))


def _rename_value(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_rename_value(v, names) for v in value)
    return names.get(value)
