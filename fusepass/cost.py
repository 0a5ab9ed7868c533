"""How much memory traffic a site costs, by us and by Inductor, in tiles.

A tile is one read or write of a whole rows x cols tensor. Ours is exact: each operand is read once, each output
written once. Inductor's is an estimate, from its generated code: its kernel for a row reduction reads back a tensor
that it has just stored, on a CPU at every width and on a GPU above 1024 columns, where it loops over the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .regions import Read, Region
from .row_program import Kind, RowProgram, Statement
from .rules import val

_GPU_PERSISTENT_COLS = 1024


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
    return Traffic(reads + writes, reads + writes + (_stored_then_reduced(p) if reloads else 0))


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
