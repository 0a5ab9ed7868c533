"""How much memory traffic a site costs, by us and by Inductor, in tiles.

A tile is one read or write of a whole rows x cols tensor. Ours is exact but for the partial sums of columns: each
operand is read once, each output written once. Inductor's is an estimate, from its generated code:

- Its kernel for a row reduction reads back a tensor that it has just stored, on a CPU at every width and on a GPU above
  1024 columns, where it loops over the row.
- A sum over the columns of a tile that it has just stored is a kernel of its own, which reads the tile again. Other
  sums over columns join the row reductions' kernel only on a GPU and only for many rows (the conditions of torch 2.11
  to 2.14); elsewhere they read their tiles again too.

- It looks embeddings up in the kernel that reads them, and so do we, unless something else needs them in memory. Then
  they are stored by a kernel of their own, and read again; counted on a GPU only, where that kernel's launch comes on
  top: on a CPU the site as a whole was measured as fast as Inductor's or faster, at 768 and 2048 columns.

On a CPU the end of a row costs time too: its sums have to be finished before the row is read again. In the time that
this takes, so many columns could have been moved: a site of narrow rows is as fast without us. The figures were
measured on a machine with AVX-512, at 32 to 200 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .region_program import Read, Region
from .row_program import HALVES, Kind, Operand, RowProgram, Statement
from .rules import val

_COLUMNS_PER_ROW_SUM = {False: 48, True: 96}
"""How many columns are moved in the time that one row reduction takes to end; True where tiles are 16-bit."""

_GPU_PERSISTENT_COLS = 1024
_GPU_FEWEST_ROWS = 4096
_GPU_FEWEST_ELEMENTS = 5 << 20


@dataclass(frozen=True)
class Traffic:
    """Tiles moved by the fused kernel and, by estimate, by Inductor's code for the same nodes.

    `row_ends` is the time that the kernel spends at the ends of rows, in tiles moved meanwhile.
    """

    fusepass: float
    inductor: float
    row_ends: float = 0.0

    @property
    def gains(self) -> bool:
        """Whether the fused kernel is expected to be faster than Inductor's code."""
        return self.fusepass + self.row_ends < self.inductor

    def __str__(self) -> str:
        ends = f" and the time of {self.row_ends:.3g} at the ends of rows" if self.row_ends else ""
        return f"the fused kernel moves {self.fusepass:.4g} tiles{ends}, Inductor's own code {self.inductor:.4g}"


def traffic(region: Region, device_type: str) -> Traffic:
    """The traffic of one region on one kind of device."""
    p = region.program
    reads = sum(_part(r, region) for r in region.reads if r.kind is Kind.TILE)
    writes = sum(p.values[o.value].kind is Kind.TILE for o in p.outputs)
    stored = 0.0 if device_type == "cpu" else _stored_for_us(region)
    reloads = device_type == "cpu" or p.cols > _GPU_PERSISTENT_COLS
    again = (_reduced_then_read(p, device_type) if reloads else 0) + _read_for_column_sums(
        p, _joins_sums(region, device_type)
    )
    ends = _COLUMNS_PER_ROW_SUM[_has_halves(p)] * len(p.row_reductions) / p.cols
    return Traffic(reads + writes + stored, reads + writes + again, ends if device_type == "cpu" else 0.0)


def _stored_for_us(region: Region) -> float:
    """The tiles moved because embeddings are looked up by a kernel of their own: one to store, if none else does, and
    one to read."""
    members = set(region.nodes)
    moved = 0.0
    for read in region.reads:
        if read.node.target is torch.ops.aten.embedding.default and read.kind is Kind.TILE:
            moved += _part(read, region) * (1 + all(u in members for u in read.node.users))
    return moved


def _has_halves(p: RowProgram) -> bool:
    return any(o.kind is Kind.TILE and o.dtype in HALVES for o in p.operands)


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
    size, rows = val(read.source).numel(), region.space.rows
    if isinstance(size, int) and isinstance(rows, int) and rows:
        return min(1.0, size / (rows * region.space.cols))
    return 0.0 if "0" in read.index else 1.0


def _reduced_then_read(p: RowProgram, device_type: str) -> int:
    """How many tiles that a row reduction goes over are read again after it: those that have been stored, and on a CPU
    also the operands."""
    stored = {o.value for o in p.outputs if p.values[o.value].kind is Kind.TILE}
    reduced: set[str] = set()
    for r in p.row_reductions:
        stack = list(r.value_args)
        while stack:
            name = stack.pop()
            value = p.values[name]
            is_operand = isinstance(value, Operand) and value.kind is Kind.TILE and device_type == "cpu"
            if name in stored or is_operand:
                reduced.add(name)
            elif isinstance(value, Statement):
                stack.extend(value.value_args)
    return len(reduced)
