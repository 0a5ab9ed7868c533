"""How much memory traffic a site costs, by us and by Inductor, in tiles.

A tile is one read or write of a whole rows x cols tensor. Ours is exact but for the partial sums of columns: each
operand is read once, each output written once. Inductor's is an estimate, from its generated code:

- Its kernel for a row reduction reads back a tensor that it has just stored, on a CPU at every width and on a GPU above
  1024 columns, where it loops over the row.
- A sum over the columns of a tile that it has just stored is a kernel of its own, which reads the tile again. Other
  sums over columns join the row reductions' kernel only on a GPU and only for many rows (the conditions of torch 2.11
  to 2.14); elsewhere they read their tiles again too.
"""

from __future__ import annotations

from dataclasses import dataclass

from .region_program import Read, Region
from .row_program import Kind, Operand, RowProgram, Statement
from .rules import val

_GPU_PERSISTENT_COLS = 1024
_GPU_FEWEST_ROWS = 4096
_GPU_FEWEST_ELEMENTS = 5 << 20


@dataclass(frozen=True)
class Traffic:
    """Tiles moved by the fused kernel and, by estimate, by Inductor's code for the same nodes."""

    fusepass: float
    inductor: float


def traffic(region: Region, device_type: str) -> Traffic:
    """The traffic of one region on one kind of device."""
    p = region.program
    reads = sum(_part(r, region) for r in region.reads if r.kind is Kind.TILE)
    writes = sum(p.values[o.value].kind is Kind.TILE for o in p.outputs)
    reloads = device_type == "cpu" or p.cols > _GPU_PERSISTENT_COLS
    again = (_stored_then_reduced(p) if reloads else 0) + _read_for_column_sums(p, _joins_sums(region, device_type))
    return Traffic(reads + writes, reads + writes + again)


def sums_what_it_stores(p: RowProgram) -> bool:
    """Whether the program sums the columns of a tile that it also stores, which Inductor would read again."""
    return _read_for_column_sums(p, joined=True) > 0


def _joins_sums(region: Region, device_type: str) -> bool:
    """Whether Inductor computes sums over columns in the same kernel as the row reductions."""
    rows, cols = region.space.rows, region.space.cols
    if device_type == "cpu" or not isinstance(rows, int):
        return False
    return rows >= 2 * cols and rows >= _GPU_FEWEST_ROWS and rows * cols >= _GPU_FEWEST_ELEMENTS


def _read_for_column_sums(p: RowProgram, joined: bool) -> int:
    """How many tiles are read only for sums over their columns."""
    stored = {o.value for o in p.outputs if p.values[o.value].kind is Kind.TILE}
    again: set[str] = set()
    for s in p.col_sums:
        stack = list(s.value_args)
        while stack:
            name = stack.pop()
            value = p.values[name]
            if name in stored or (isinstance(value, Operand) and value.kind is Kind.TILE and not joined):
                again.add(name)
            elif isinstance(value, Statement):
                stack.extend(value.value_args)
    return len(again)


def _part(read: Read, region: Region) -> float:
    """How much of a tile an operand is: less than one where it repeats over some of the rows."""
    size, rows = val(read.node).numel(), region.space.rows
    if isinstance(size, int) and isinstance(rows, int) and rows:
        return min(1.0, size / (rows * region.space.cols))
    return 0.0 if "0" in read.index else 1.0


def _stored_then_reduced(p: RowProgram) -> int:
    stored = {o.value for o in p.outputs if p.values[o.value].kind is Kind.TILE}
    reduced: set[str] = set()
    for r in p.row_reductions:
        stack = list(r.value_args)
        while stack:
            name = stack.pop()
            value = p.values[name]
            if name in stored:
                reduced.add(name)
            elif isinstance(value, Statement):
                stack.extend(value.value_args)
    return len(reduced)
