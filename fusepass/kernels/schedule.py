"""How a row program is spread over a GPU: the shape of a program instance's tile, its warps, and how many there are.

Four schedules. `row` holds whole rows in registers: one pass over memory, several rows a program where rows are narrow.
`loop` is for rows that do not fit: one pass over the columns for each row reduction that waits for another. Programs
with column sums loop over the rows as well: `persistent` holds whole rows and all column sums in registers, and `wide`
is for rows that do not fit beside their column sums: first the row values, then piece after piece of the columns.

The shape that `choose` gives depends on the program alone, never on the number of rows: the order in which a row is
summed is part of its result, and a row's result must not depend on how many rows there are. `candidates` are the shapes
that a measurement may prefer to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..errors import ProgramError
from ..row_program import Kind, RowProgram, Statement, lookups
from .column_sums import short_lived_order, sum_dtype

MAX_WARPS = 16  # of 64 lanes on AMD: 1024 threads, the most that a workgroup may have
ELEMENTS_PER_THREAD = 16  # per lane of a 32-lane warp: two 128-bit accesses of 16-bit data, one on AMD's 64 lanes
MAX_ROWS_PER_PROGRAM = 64
REGISTER_FILE = 65_536
MAX_REGISTERS = 255
OVERHEAD_REGISTERS = 40  # addresses, masks, row values: what a kernel takes beside its tiles

SUM_TILE = 32  # partial sums x columns that one step of the kernel that adds them takes; 32 in FP32 are a cache line
SUM_WARPS = 4
MAX_STAGES = 4
MAX_STAGES_WIDE = 3  # a fourth would take more scalar registers than gfx942 has
STAGE_BYTES = 131_072  # of loads under way, in shared memory: sm_80 has 163 KB of it
STATISTICS_ROWS = 8  # whose row values the wide schedule computes together: its inner loop is long enough to pipeline
PIECE_COLS = 512  # for one instance, where no row is reduced: half as many partial sums as 1024 would leave
PARTIAL_SHARE = 14  # per cent of a tile: what writing and reading the partial column sums may cost
FEWEST_INSTANCES = 8  # more than that share would allow, where rows are so few that time matters and traffic does not
BLOCKS_PER_INSTANCE = 16

_PERSISTENT = ((8, 16, 12), (8, 32, 7), (8, 8, 24))
_PERSISTENT_LOOKING_UP = tuple(sorted(_PERSISTENT, key=operator.itemgetter(2)))  # positions take registers too
_WIDE_16_BIT = ((8, 16, 12), (8, 8, 24), (8, 4, 48))
_WIDE_32_BIT = ((8, 8, 24), (8, 4, 48))
_PERSISTENT_UNALIGNED = ((8, 4, 12), (16, 4, 12), (16, 8, 8))
_WIDE_UNALIGNED = ((16, 4, 12), (16, 2, 24), (16, 1, 48))
"""(Warps, elements per thread, how many 32-bit values of each element they hold without spilling), best first.

The values are column sums, columns that do not change, and live tiles; see `held_values`. The numbers come from
compiling backward kernels for every target. Eight warps rather than sixteen: addresses and row values take registers in
each of them. Sixteen elements of a lane are eight on AMD: a 128-bit access of 16-bit data there too. A kernel must not
come out just above 64 registers on sixteen warps, or 128 on eight: ptxas rather spills two than give up a second block.
"""

_NEAR_PERSISTENT = ((8, 16), (8, 32), (8, 8), (16, 8), (4, 32), (4, 16))
"""(Warps, elements per thread) that a measurement may prefer where a thread's registers hold the values of so many."""

Apply = Callable[..., Any]


@dataclass(frozen=True)
class Schedule:
    """The tile of one program instance is `rows_per_program x block_n`.

    `num_stages` is the depth of pipelined loops, 1 for none. `statistics_rows` is for the wide schedule: its row values
    are computed from tiles of the same size but of so many rows. `pieces` is for persistent programs without row
    reductions: the columns are shared out among so many instances, which leave fewer partial sums of each.
    `partial_share` and `residents` limit the instances of a program with column sums, see `instances`.
    """

    kind: Literal["row", "loop", "persistent", "wide"]
    block_n: int
    rows_per_program: int
    num_warps: int
    num_stages: int = 1
    statistics_rows: int = 1
    pieces: int = 1
    partial_share: int = PARTIAL_SHARE
    residents: int = 1

    def verify(self, program: RowProgram) -> Schedule:
        """Check that this schedule can compute `program`, and return it."""
        if self.pieces > 1 and (self.kind != "persistent" or program.row_reductions):
            raise ProgramError(f"a {self.kind} schedule computes whole rows here, got pieces={self.pieces}")
        if self.partial_share < 1 or self.residents < 1:
            raise ProgramError(
                f"expected partial_share and residents of at least 1, got partial_share={self.partial_share}, "
                f"residents={self.residents}"
            )
        for name in ("block_n", "rows_per_program", "num_warps", "statistics_rows"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ProgramError(f"expected {name} to be a power of two, got {name}={value}")
        if self.kind in ("row", "persistent") and self.block_n * self.pieces < program.cols:
            raise ProgramError(
                f"a {self.kind} schedule needs block_n >= cols, got block_n={self.block_n}, cols={program.cols}"
            )
        if (self.kind in ("persistent", "wide")) != bool(program.col_sums):
            raise ProgramError(f"a {self.kind} schedule is not for {len(program.col_sums)} column sums")
        if self.statistics_rows > self.rows_per_program * self.block_n:
            raise ProgramError(
                f"expected statistics_rows <= {self.rows_per_program * self.block_n}, the elements of a tile, "
                f"got statistics_rows={self.statistics_rows}"
            )
        return self


def choose(program: RowProgram, rows: int | None = None) -> Schedule:
    """The schedule for `program`. `rows` (None where symbolic) is taken for completeness and must not matter.

    Fewer rows a program, and fewer warps with them, would leave a row's sum as it is only where all accesses are wide:
    Triton gives each thread as many adjacent columns as one access holds, and then warps to what is left of the row.
    Where a tensor's rows lie at odd addresses (which the program does not tell), eight rows of 256 columns on four
    warps are summed by four warps a row, two rows on one warp by one.
    """
    if program.col_sums:
        return _choose_summing(program)
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


def _choose_summing(program: RowProgram) -> Schedule:
    """Large tiles: there is one instance per multiprocessor, which must keep all of it busy."""
    values = held_values(program)
    shapes: Sequence[tuple[int, int, int]] = _PERSISTENT if _aligned(program) else _PERSISTENT_UNALIGNED
    if _aligned(program) and any(lookups(o.index) for o in program.operands):
        shapes = _PERSISTENT_LOOKING_UP
    for warps, elements, most in shapes:
        if values <= most and (schedule := _persistent(program, warps, elements)):
            return schedule
    options = _wide_options(program)
    warps, elements, _ = next((o for o in options if values <= o[2]), options[-1])
    return _wide(program, warps, elements)


def _persistent(program: RowProgram, warps: int, elements: int) -> Schedule | None:
    """The persistent schedule of so many warps and elements per thread, if a row and two stages of it fit."""
    block_n, tile = next_power_of_two(program.cols), 32 * warps * elements
    if not program.row_reductions:
        block_n = min(block_n, PIECE_COLS)
    stages = _stages(program, tile, MAX_STAGES)
    if block_n > tile or stages == 1:
        return None
    rows_per_program = min(MAX_ROWS_PER_PROGRAM, tile // block_n)
    num_warps = max(1, rows_per_program * block_n // (32 * elements))
    return Schedule("persistent", block_n, rows_per_program, num_warps, stages, pieces=-(-program.cols // block_n))


def _wide_options(program: RowProgram) -> Sequence[tuple[int, int, int]]:
    itemsize = _narrowest_tile(program)
    if not _aligned(program):
        return _WIDE_UNALIGNED
    if itemsize <= 2:
        return _WIDE_16_BIT
    warps, elements, _ = _WIDE_32_BIT[0]
    full = program.cols % (32 * warps * elements) == 0
    return _WIDE_32_BIT if full else [(warps, 16 // itemsize, 0)]  # a mask for the last piece takes registers


def _wide(program: RowProgram, warps: int, elements: int) -> Schedule:
    block_n, tile = next_power_of_two(program.cols), 32 * warps * elements
    stages = _stages(program, tile, MAX_STAGES_WIDE)
    return Schedule("wide", min(block_n, tile), max(1, tile // block_n), warps, stages, STATISTICS_ROWS)


def _stages(program: RowProgram, tile: int, most: int) -> int:
    row_bytes = sum(o.dtype.itemsize for o in program.operands if o.kind is Kind.TILE)
    return min(most, 1 + STAGE_BYTES // max(1, row_bytes * tile))


def candidates(program: RowProgram) -> list[Schedule]:
    """Schedules for `program` that a measurement may choose from: `choose`'s first, and none that would spill."""
    first = choose(program)
    near = _near_rows(program, first) if not program.col_sums else _near_sums(program, first)
    return [s.verify(program) for s in dict.fromkeys((first, *near))]


def _near_rows(program: RowProgram, first: Schedule) -> Iterator[Schedule]:
    """More and fewer warps, elements per thread and rows."""
    live = live_tiles(program)
    elements_of_first = first.rows_per_program * first.block_n // (32 * first.num_warps)
    most = ELEMENTS_PER_THREAD * 2 if _aligned(program) else ELEMENTS_PER_THREAD // 2
    for elements in (e for e in (elements_of_first * 2, elements_of_first, elements_of_first // 2) if 1 <= e <= most):
        if first.kind == "loop":
            shapes = [(1, warps * 32 * elements, warps) for warps in (MAX_WARPS, MAX_WARPS // 2)]
        else:
            few_and_many = (first.rows_per_program // 4, first.rows_per_program, first.rows_per_program * 2)
            shapes = [(r, first.block_n, r * first.block_n // (32 * elements)) for r in few_and_many]
        for rows, block_n, warps in shapes:
            most_warps = MAX_WARPS if elements <= ELEMENTS_PER_THREAD else MAX_WARPS // 4  # ptxas spills beyond
            inside = 1 <= rows <= MAX_ROWS_PER_PROGRAM and 1 <= warps <= most_warps
            if inside and block_n <= next_power_of_two(program.cols) and _fits(live, rows * block_n, warps):
                yield replace(first, block_n=block_n, rows_per_program=rows, num_warps=warps)


def _near_sums(program: RowProgram, first: Schedule) -> Iterator[Schedule]:
    """More instances, whose partial sums stay in the second-level cache; other warps, elements and stages."""
    many = 16 * PARTIAL_SHARE
    yield replace(first, partial_share=4 * PARTIAL_SHARE)
    yield replace(first, partial_share=many)
    if first.num_stages > 2:
        yield replace(first, num_stages=2)
        yield replace(first, num_stages=2, partial_share=many, residents=2)
    values = held_values(program)
    shapes: list[Schedule | None] = []
    if first.kind == "wide":
        shapes = [_wide(program, warps, elements) for warps, elements, most in _wide_options(program) if values <= most]
    elif not _aligned(program):
        shapes = [_persistent(program, warps, elements) for warps, elements, m in _PERSISTENT_UNALIGNED if values <= m]
    else:
        for warps, elements in _NEAR_PERSISTENT:
            registers = min(MAX_REGISTERS, REGISTER_FILE // (32 * warps)) - OVERHEAD_REGISTERS
            if values * elements <= registers:
                shapes.append(_persistent(program, warps, elements))
    for shape in filter(None, shapes):
        yield from (shape, replace(shape, partial_share=many))


def instances(
    program: RowProgram,
    schedule: Schedule,
    rows: Any,
    multiprocessors: int,
    apply: Apply = lambda function, *args: function(*args),
) -> Any:
    """How many program instances share out `rows` rows: the kernel's grid, for each of `schedule.pieces`.

    With column sums each instance leaves a partial sum of every column, so that there are at most `schedule.residents`
    for each multiprocessor of the device, and no more than keep the reading and writing of those sums within
    `schedule.partial_share` per cent of a tile. At least one: no rows sum up to zero.
    `apply(function, *args)` calls a function of the operator module or `torch.sym_min` or `torch.sym_max`, on ints or,
    where rows are symbolic, on whatever stands for them.
    """
    blocks = rows
    if schedule.rows_per_program > 1:
        blocks = apply(operator.add, rows, schedule.rows_per_program - 1)
        blocks = apply(operator.floordiv, blocks, schedule.rows_per_program)
    if not program.col_sums:
        return blocks
    moved = 2 * sum_dtype(program).itemsize * len(program.col_sums) * 100
    cheap = apply(
        operator.floordiv, apply(operator.mul, rows, schedule.partial_share * _narrowest_tile(program)), moved
    )
    few = apply(operator.floordiv, apply(operator.add, blocks, BLOCKS_PER_INSTANCE - 1), BLOCKS_PER_INSTANCE)
    wanted = apply(torch.sym_max, cheap, apply(torch.sym_min, few, FEWEST_INSTANCES))
    most = apply(torch.sym_min, blocks, max(1, multiprocessors * schedule.residents // schedule.pieces))
    return apply(torch.sym_max, 1, apply(torch.sym_min, most, wanted))


def sum_grid(program: RowProgram) -> tuple[int, int]:
    """The grid of the kernel that adds up the partial column sums: blocks of columns by column sums."""
    return -(-program.cols // SUM_TILE), len(program.col_sums)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def held_values(program: RowProgram) -> int:
    """How many 32-bit values of each element a schedule with column sums holds at once."""
    sums = sum(_weight(program.values[s.value_args[0]].dtype, s.dtype) for s in program.col_sums)
    fixed = sum(_weight(o.dtype) for o in program.operands if o.kind is Kind.COL)
    loaded = sum(o.dtype.itemsize for o in program.operands if o.kind is Kind.TILE)
    return sums + fixed + max(live_tiles(program, short_lived_order(program)), -(-loaded // 4))


def _weight(*dtypes: torch.dtype) -> int:
    return 2 if torch.float64 in dtypes else 1


def live_tiles(program: RowProgram, order: Sequence[Statement] | None = None) -> int:
    """The most 32-bit tile values that are alive at once when statement after statement runs, in the given order."""
    statements = program.statements if order is None else order
    last_use: dict[str, int] = {}
    for i, s in enumerate(statements):
        last_use.update(dict.fromkeys(s.value_args, i))
    alive: dict[str, int] = {}
    peak = 1
    for i, s in enumerate(statements):
        for name in (*s.value_args, s.name):
            value = program.values[name]
            if value.kind is Kind.TILE:
                alive[name] = _weight(value.dtype)
        peak = max(peak, sum(alive.values()) - (s.name in alive and _dies_here(program, s.value_args, last_use, i)))
        alive = {name: weight for name, weight in alive.items() if last_use.get(name, -1) > i}
    return peak


def _aligned(program: RowProgram) -> bool:
    """Whether adjacent rows all begin at a 16-byte boundary. If not, each element is an access with its own address."""
    return program.cols * _narrowest_tile(program) % 16 == 0


def _narrowest_tile(program: RowProgram) -> int:
    """The bytes of an element of the narrowest tile operand that is no mask."""
    tiles = [o.dtype.itemsize for o in program.operands if o.kind is Kind.TILE and o.dtype is not torch.bool]
    return min(tiles, default=4)


def _dies_here(program: RowProgram, names: tuple[str, ...], last_use: dict[str, int], i: int) -> int:
    """What the result may overwrite: the registers of one argument that nothing later reads."""
    weights = [
        _weight(program.values[n].dtype) for n in names if program.values[n].kind is Kind.TILE and last_use[n] == i
    ]
    return max(weights, default=0)


def _fits(live: int, elements: int, num_warps: int) -> bool:
    registers = min(MAX_REGISTERS, REGISTER_FILE // (32 * num_warps))
    return live * elements // (32 * num_warps) + OVERHEAD_REGISTERS <= registers
