"""Stage 5, validate: a lifted program against the nodes it was lifted from, in FP64, before it may replace them.

The nodes run as ATen, one by one, on small random inputs: the columns as they are, the rows shrunk to a few. Casts are
left out on both sides, so any difference beyond FP64 rounding is a mistake in the lift. Row-index expressions are
checked apart, at the true row shape. Each distinct structure is checked once per process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ._torch_compat import no_dispatch_modes, same_size, size_text
from .kernels.reference import evaluate, row_indices, uniform
from .lift import Lifted, is_move
from .lookups import lookup_of
from .moves import RowOrder
from .region_program import Read, Region
from .row_program import Kind, Operand, RowProgram, lookup
from .rules import CASTS, VIEWS, Role, eager_arguments, is_random, random_op, val
from .verdict import Reason, Rejection

aten = torch.ops.aten

RELATIVE_TOLERANCE = 1e-8
_MOST_ELEMENTS = 1 << 22  # of a tile that is checked at its true size
_TABLE_ROWS = 7  # of a small table
_checked: dict[tuple[str, str], Rejection | None] = {}


def validate(region: Region, lifted: dict[fx.Node, Lifted]) -> Rejection | None:
    """None where the program and the nodes agree; otherwise the rejection, with the first value that differs."""
    key = (str(region.program), _structure(region))
    if key not in _checked:
        with no_dispatch_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            _checked[key] = _check_indices(region) or _check_values(region, lifted)
    return _checked[key]


def _structure(region: Region) -> str:
    """The region's nodes as text, without their names: equal text means equal computation."""
    number = {n: f"%{i}" for i, n in enumerate(region.nodes)}
    lines = []
    for node in region.nodes:
        for source in node.all_input_nodes:
            number.setdefault(source, f"?{len(number)}")
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: number[n])
        tensors = val(node) if isinstance(val(node), (tuple, list)) else [val(node)]
        shapes = [[size_text(d) for d in t.shape] for t in tensors]
        inputs = [
            [size_text(d) for d in val(i).shape] for i in node.all_input_nodes if isinstance(val(i), torch.Tensor)
        ]
        lines.append(f"{node.target} {args} {shapes} {inputs}")
    return "\n".join(lines)


# --- row indices


def _check_indices(region: Region) -> Rejection | None:
    for operand, read in zip(region.program.operands, region.reads, strict=True):
        if read.flatten or read.lookup is not None or operand.kind in (Kind.COL, Kind.SCALAR):
            continue
        if not _index_is_right(read, operand, region):
            detail = f"rows {operand.index} of {read.node.name} are not those that the graph broadcasts"
            return Rejection(Reason.VALIDATION_FAILED, detail)
    return None


def _index_is_right(read: Read, operand: Operand, region: Region) -> bool:
    """Compare the row-index expressions with torch's own broadcasting of the tensor to the region's rows."""
    stand_in: dict[str, int] = {}
    rows = [_concrete(d, stand_in) for d in read.rows]
    sizes = {name: _concrete(size, stand_in) for name, size in region.sizes.items()}
    own = list(val(read.node).shape)
    lead = own[:-1] if read.of_tile else own
    shape = [1 if same_size(d, 1) else r for d, r in zip(lead, rows[len(rows) - len(lead) :], strict=True)]
    if read.lead:
        shape = rows
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    index = row_indices(operand.index, math.prod(rows), sizes, torch.device("cpu"))
    return bool(torch.equal(numbers[index[: len(shape)]], _in_order(numbers.expand(rows), read.order).reshape(-1)))


def _in_order(tensor: torch.Tensor, order: RowOrder | None) -> torch.Tensor:
    """A tensor of another row order, in the region's own."""
    if order is None:
        return tensor
    return tensor.permute(*order.order, *range(len(order.order), tensor.ndim))


def _concrete(size: Any, stand_in: dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    return stand_in.setdefault(size_text(size), 3 + 2 * len(stand_in))


# --- values


class _Shrunk:
    """Small shapes in place of the graph's: each factor of the row shape becomes 2 or 3, the columns stay.

    With `full`, the graph's own shapes, for views that regroup the rows in ways that have no common factors.
    """

    def __init__(self, region: Region, lifted: dict[fx.Node, Lifted], *, full: bool = False) -> None:
        members = [n for n in region.nodes if n not in region.orders and not is_move(lifted[n])]
        tiles = [val(n) for n in members if lifted[n].kind is Kind.TILE and isinstance(val(n), torch.Tensor)]
        tiles = [t for t in tiles if same_size(math.prod(t.shape[:-1]), region.space.rows)] or [val(region.tile)]
        finest = max(tiles, key=lambda t: sum(not same_size(d, 1) for d in t.shape[:-1]))
        self.atoms = [d for d in finest.shape[:-1] if not same_size(d, 1)]
        # One tensor read in two orders needs equal sizes for both; elsewhere unequal ones tell more.
        self.small = [3 if region.orders else 2 + i % 2 for i in range(len(self.atoms))]
        self.rows = math.prod(self.small)
        self.full = full
        if full:
            self.rows = int(region.space.rows)

    def dims(self, shape: Sequence[Any], order: RowOrder | None = None) -> list[int]:
        """The small counterpart of the row part of a shape. Raises ValueError where it is no grouping of the atoms."""
        if self.full:
            return [int(d) for d in shape]
        atoms, smalls = self.atoms, self.small
        if order is not None:
            own = self.dims(order.own)
            moved = [(d, own[order.order.index(i)]) for i, d in enumerate(order.lead) if not same_size(d, 1)]
            atoms, smalls = [d for d, _ in moved], [small for _, small in moved]
        result, at = [], 0
        for d in shape:
            size, small = 1, 1
            while not same_size(size, d):
                if at == len(atoms):
                    raise ValueError(f"rows {tuple(shape)} do not follow from {tuple(atoms)}")
                size, small, at = size * atoms[at], small * smalls[at], at + 1
            result.append(small)
        return result

    def aligned(self, own: Sequence[Any], user: Sequence[Any], small_user: Sequence[int]) -> list[int]:
        """The small counterpart of a shape that broadcasts to `user`."""
        pad = len(user) - len(own)
        return [1 if same_size(d, 1) else small_user[pad + i] for i, d in enumerate(own)]


def _check_values(region: Region, lifted: dict[fx.Node, Lifted]) -> Rejection | None:
    shrunk = _Shrunk(region, lifted)
    try:
        values, ins = _inputs_and_values(region, lifted, shrunk)
    except (ValueError, RuntimeError) as e:  # no grouping of the atoms, or shapes that match only at their true size
        rows = region.space.rows
        if not isinstance(rows, int) or rows * region.space.cols > _MOST_ELEMENTS:
            return Rejection(Reason.VALIDATION_FAILED, f"the nodes cannot be run on small inputs: {e}")
        shrunk = _Shrunk(region, lifted, full=True)
        values, ins = _inputs_and_values(region, lifted, shrunk)
    outputs = evaluate(_flat(region.program), shrunk.rows, ins, fp64=True)
    for node, ours in zip(region.writes, outputs, strict=True):
        theirs = values[node].double()
        if node in region.orders and not region.is_col_sum(node):
            theirs = _flat_tile(theirs, region.orders[node], shrunk)
        theirs = theirs.reshape(ours.shape)
        scale = float(theirs.abs().nan_to_num(0, 0, 0).amax()) if theirs.numel() else 0.0
        if not torch.allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * scale, equal_nan=True):
            worst = float((ours - theirs).abs().nan_to_num(math.inf).amax())
            return Rejection(
                Reason.VALIDATION_FAILED, f"the program's {node.name} differs from the graph's by {worst:.3g}"
            )
    return None


def _inputs_and_values(
    region: Region, lifted: dict[fx.Node, Lifted], shrunk: _Shrunk
) -> tuple[dict[fx.Node, Any], list[torch.Tensor]]:
    values = _run_nodes(region, lifted, shrunk)
    return values, [_flat_input(values[r.node], r, region, shrunk) for r in region.reads]


@lru_cache(maxsize=1024)
def _flat(program: RowProgram) -> RowProgram:
    """The program with every row operand read as (rows, cols) or (rows,): index expressions are checked apart."""
    operands = tuple(Operand(o.name, o.kind, o.dtype, _flat_index(o.index)) for o in program.operands)
    return RowProgram(program.cols, operands, program.statements, program.outputs)


def _flat_index(index: tuple[str, ...]) -> tuple[str, ...]:
    if found := next(filter(None, map(lookup, index)), None):
        return (f"{found[0]} < {_TABLE_ROWS}",)
    return ("row",) if index else ()


def _flat_input(small: torch.Tensor, read: Read, region: Region, shrunk: _Shrunk) -> torch.Tensor:
    if read.kind in (Kind.COL, Kind.SCALAR) or read.lookup is not None:
        return small
    lead = shrunk.dims(read.rows, read.order)
    if read.kind is Kind.TILE:
        full = small.reshape(*lead, -1) if read.lead else small.expand(*lead, region.space.cols)
        return _in_order(full, read.order).reshape(-1, region.space.cols)
    if read.of_tile:  # its last dimension is one
        small = small.squeeze(-1)
    return _in_order(small.expand(*lead), read.order).reshape(-1)


def _flat_tile(small: torch.Tensor, order: RowOrder, shrunk: _Shrunk) -> torch.Tensor:
    """A member of another row order as (rows, cols), in the region's own."""
    return _in_order(small.reshape(*shrunk.dims(order.lead, order), -1), order).reshape(-1, small.shape[-1])


def _run_nodes(region: Region, lifted: dict[fx.Node, Lifted], shrunk: _Shrunk) -> dict[fx.Node, Any]:
    """The value of every node, and of every input, in FP64 on small random inputs."""
    generator = torch.Generator().manual_seed(0)
    values: dict[fx.Node, Any] = {}
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source not in values and isinstance(val(source), torch.Tensor):
                _make_input(source, node, values, shrunk, region, lifted, generator)
        literal_args, kwargs = eager_arguments(node)
        args: Any = fx.node.map_arg(literal_args, values.get)
        if node.target in CASTS:
            values[node] = args[0].double()
        elif is_random(node):
            drawn = uniform(random_op(node), args[1], shrunk.rows, region.space.cols)
            values[node] = drawn.double().reshape(_small_shape(node, shrunk, region, lifted))
        elif node.target in VIEWS:
            shape = _small_shape(node, shrunk, region, lifted)
            values[node] = args[0].reshape(shape) if args[0].numel() == math.prod(shape) else args[0].expand(shape)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
    return values


def _small_shape(node: fx.Node, shrunk: _Shrunk, region: Region, lifted: dict[fx.Node, Lifted]) -> list[int]:
    tensor = val(node)[0] if isinstance(val(node), (tuple, list)) else val(node)
    shape = list(tensor.shape)
    if region.is_col_sum(node):
        return shape
    if node in region.repeated:
        tile = region.repeated[node]
        return shrunk.aligned(shape, tile, [*shrunk.dims(tile[:-1], region.orders.get(node)), tile[-1]])
    if not same_size(math.prod(shape[:-1]), region.space.rows) and not same_size(tensor.numel(), region.space.rows):
        return shape  # a per-column value
    if lifted[node].kind is Kind.TILE and lifted[node].rule.role is not Role.REDUCTION:
        return [*shrunk.dims(shape[:-1], region.orders.get(node)), shape[-1]]
    return shrunk.dims(shape)


def _make_input(
    source: fx.Node,
    user: fx.Node,
    values: dict[fx.Node, Any],
    shrunk: _Shrunk,
    region: Region,
    lifted: dict[fx.Node, Lifted],
    generator: torch.Generator,
) -> None:
    own = list(val(source).shape)
    reduces = lifted[user].rule.role in (Role.REDUCTION, Role.COLUMN_SUM)
    if lifted[user].rule.role is Role.VIEW or reduces:
        of_tile = lifted[user].kind is Kind.TILE or reduces
        shape = [*shrunk.dims(own[:-1], region.orders.get(user)), own[-1]] if of_tile else shrunk.dims(own)
    else:
        full = list(val(user).shape)
        shape = shrunk.aligned(own, full, _small_shape(user, shrunk, region, lifted))
    base = source
    while base.target is aten.expand.default and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    base_shape = shrunk.aligned(list(val(base).shape), own, shape) if base is not source else shape
    if any(base is r.lookup for r in region.reads):
        tensor = _look_up(base, base_shape, values, shrunk, generator)
    elif val(source).dtype is torch.bool:
        tensor = torch.rand(base_shape, generator=generator) < 0.5
    elif val(source).dtype is torch.int64:
        tensor = torch.randint(1 << 40, base_shape, generator=generator)
    elif all(d == 1 for d in base_shape):
        tensor = torch.rand(base_shape, generator=generator, dtype=torch.float64) + 0.5
    else:
        tensor = torch.randn(base_shape, generator=generator, dtype=torch.float64)
    values[base] = tensor
    values[source] = tensor.expand(shape)


def _look_up(
    node: fx.Node, shape: list[int], values: dict[fx.Node, Any], shrunk: _Shrunk, generator: torch.Generator
) -> torch.Tensor:
    """What an embedding looks up, at random positions of a small table."""
    lookup = lookup_of(node)
    assert lookup is not None and isinstance(node.args[1], fx.Node)
    own = shrunk.aligned(val(lookup.positions).shape, val(node.args[1]).shape, shape[:-1])
    for source, make in (
        (lookup.table, lambda: torch.randn(_TABLE_ROWS, shape[-1], generator=generator, dtype=torch.float64)),
        (lookup.positions, lambda: torch.randint(_TABLE_ROWS, own, generator=generator)),
    ):
        if source not in values:
            values[source] = make()
    return values[lookup.table][values[lookup.positions].expand(shape[:-1])]
