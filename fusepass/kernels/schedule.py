"""How a row program is spread over a GPU: the shape of a program instance's tile, and its warps.

Two schedules. `row` holds whole rows in registers: one pass over memory, several rows a program where rows are narrow.
`loop` is for rows that do not fit: one pass over the columns for each row reduction that waits for another.

The shape depends on the program alone, never on the number of rows: the order in which a row is summed is part of its
result, and a row's result must not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ProgramError
from ..row_program import Kind, RowProgram

MAX_WARPS = 16  # of 64 lanes on AMD: 1024 threads, the most that a workgroup may have
ELEMENTS_PER_THREAD = 16  # per lane of a 32-lane warp: two 128-bit accesses of 16-bit data, one on AMD's 64 lanes
MAX_ROWS_PER_PROGRAM = 64
REGISTER_FILE = 65_536
MAX_REGISTERS = 255
OVERHEAD_REGISTERS = 40  # addresses, masks, row values: what a kernel takes beside its tiles


@dataclass(frozen=True)
class Schedule:
    """The tile of one program instance is `rows_per_program x block_n`."""

    kind: Literal["row", "loop"]
    block_n: int
    rows_per_program: int
    num_warps: int
    num_stages: int = 1

    def verify(self, program: RowProgram) -> Schedule:
        """Check that this schedule can compute `program`, and return it."""
        for name in ("block_n", "rows_per_program", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ProgramError(f"expected {name} to be a power of two, got {name}={value}")
        if self.kind == "row" and self.block_n < program.cols:
            raise ProgramError(f"a row schedule needs block_n >= cols, got block_n={self.block_n}, cols={program.cols}")
        return self


def choose(program: RowProgram, rows: int | None = None) -> Schedule:
    """The schedule for `program`. `rows` (None where symbolic) is taken for completeness and must not matter."""
    block_n = next_power_of_two(program.cols)
    live = live_tiles(program)
    for elements in (ELEMENTS_PER_THREAD, ELEMENTS_PER_THREAD // 2)[not _aligned(program) :]:
        rows_per_program = max(1, min(MAX_ROWS_PER_PROGRAM, 4 * 32 * elements // block_n)) if block_n <= 512 else 1
        num_warps = min(MAX_WARPS, max(1, rows_per_program * block_n // (32 * elements)))
        if _fits(live, rows_per_program * block_n, num_warps):
            return Schedule("row", block_n, rows_per_program, num_warps)
    elements = ELEMENTS_PER_THREAD
    while elements > 1 and not _fits(live, MAX_WARPS * 32 * elements, MAX_WARPS):
        elements //= 2
    return Schedule("loop", min(block_n, MAX_WARPS * 32 * elements), 1, MAX_WARPS)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def live_tiles(program: RowProgram) -> int:
    """The most 32-bit tile values that are alive at once when the program runs statement by statement."""
    last_use: dict[str, int] = {}
    for i, s in enumerate(program.statements):
        last_use.update(dict.fromkeys(s.value_args, i))
    alive: dict[str, int] = {}
    peak = 1
    for i, s in enumerate(program.statements):
        for name in (*s.value_args, s.name):
            value = program.values[name]
            if value.kind is Kind.TILE:
                alive[name] = 2 if value.dtype == torch.float64 else 1
        peak = max(peak, sum(alive.values()) - (s.name in alive and _dies_here(program, s.value_args, last_use, i)))
        alive = {name: weight for name, weight in alive.items() if last_use.get(name, -1) > i}
    return peak


def _aligned(program: RowProgram) -> bool:
    """Whether adjacent rows all begin at a 16-byte boundary. If not, each element is an access with its own address."""
    tiles = [o.dtype.itemsize for o in program.operands if o.kind is Kind.TILE]
    return program.cols * min(tiles, default=4) % 16 == 0


def _dies_here(program: RowProgram, names: tuple[str, ...], last_use: dict[str, int], i: int) -> int:
    """What the result may overwrite: the registers of one argument that nothing later reads."""
    weights = [
        2 if program.values[n].dtype == torch.float64 else 1
        for n in names
        if program.values[n].kind is Kind.TILE and last_use[n] == i
    ]
    return max(weights, default=0)


def _fits(live: int, elements: int, num_warps: int) -> bool:
    registers = min(MAX_REGISTERS, REGISTER_FILE // (32 * num_warps))
    return live * elements // (32 * num_warps) + OVERHEAD_REGISTERS <= registers
