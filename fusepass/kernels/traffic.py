"""What a kernel moves between memory and a GPU: worked out from its program and schedule, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..row_program import Kind, RowProgram, index_terms, lookup
from .column_sums import kept_dtype, kept_rows, piece_statements, sum_dtype
from .schedule import Schedule, instances
from .triton_loop import PassPlan, plan_pass


def tile_traffic(program: RowProgram, schedule: Schedule) -> tuple[int, int]:
    """How many tiles the kernel reads and writes. Masks count as tiles."""
    writes = sum(program.values[o.value].kind is Kind.TILE for o in program.outputs)
    return sum(1 for _ in _tiles_read(program, schedule)), writes


def moved_bytes(program: RowProgram, schedule: Schedule, rows: int, multiprocessors: int) -> int:
    """All bytes that the kernel, and the one that adds up its column sums, read and write for so many rows.

    Every reading of a tile counts, and every reading of a row value by a piece of a wide row. A column operand counts
    once, however many program instances read it, and so does a tile that repeats over the rows: caches hold them.
    """
    values = program.values
    moved = sum(_bytes(values[name], rows, program.cols) for name in _tiles_read(program, schedule))
    row_passes = 1 + (-(-program.cols // schedule.block_n) if schedule.kind == "wide" else 0)
    in_pieces = {a for s in piece_statements(program) for a in s.value_args}
    for o in program.operands:
        if o.kind is not Kind.TILE:
            moved += _bytes(o, rows, program.cols) * (row_passes if o.kind is Kind.ROW and o.name in in_pieces else 1)
    moved += sum(_bytes(values[o.value], rows, program.cols) for o in program.outputs)
    if schedule.kind == "wide":
        moved += rows * len(kept_rows(program)) * kept_dtype(program).itemsize * row_passes
    return moved + partial_bytes(program, schedule, rows, multiprocessors)


def partial_bytes(program: RowProgram, schedule: Schedule, rows: int, multiprocessors: int) -> int:
    """The bytes of partial column sums that are written and read."""
    sums = len(program.col_sums)
    if not sums:
        return 0
    written: int = (
        instances(program, schedule, rows, multiprocessors) * sums * program.cols * sum_dtype(program).itemsize
    )
    return 2 * written


def _tiles_read(program: RowProgram, schedule: Schedule) -> Iterator[str]:
    """The tile that each pass over one reads, by name."""
    operands = [o.name for o in program.operands if o.kind is Kind.TILE]
    if schedule.kind in ("row", "persistent"):
        yield from operands
    elif schedule.kind == "loop":
        for phase in range(program.n_phases):
            plan = plan_pass(program, phase)
            yield from plan.tiles
            yield from (program.outputs[i].value for i in plan.reloads)
    else:
        for phase in range(program.n_phases):
            yield from PassPlan(program, phase, statistics_only=True).tiles
        used = {a for s in piece_statements(program) for a in s.value_args}
        used |= {s.value_args[0] for s in program.col_sums} | {o.value for o in program.outputs}
        yield from (name for name in operands if name in used)


def _bytes(value: Any, rows: int, cols: int) -> int:
    """The bytes of a value in memory: fewer where it repeats over the rows and the program says how often."""
    if value.kind in (Kind.COL, Kind.SCALAR):
        return (cols if value.kind is Kind.COL else 1) * value.dtype.itemsize
    distinct = 1
    for expr in getattr(value, "index", ()) or ("row",):
        if found := lookup(expr):
            distinct *= min(rows, _product((found[1],)) or rows)
        elif (terms := index_terms(expr)) is not None:
            divisor, modulus = (_product(factors) for factors in terms)
            count = -(-rows // (divisor or 1))
            distinct *= min(count, modulus) if terms[1] and modulus else count
    return min(rows, distinct) * (cols if value.kind is Kind.TILE else 1) * value.dtype.itemsize


def _product(factors: tuple[str, ...]) -> int:
    """The product of numbers, 0 if one is a name: its value is not in the program."""
    product = 1
    for f in factors:
        product *= int(f) if f.isdigit() else 0
    return product
