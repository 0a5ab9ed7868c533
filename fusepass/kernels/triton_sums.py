"""Schedules for programs with column sums: a bounded number of program instances, each of which loops over its rows.

An instance adds up its rows in registers and stores one partial sum per column; a second kernel adds the partial sums
in a fixed order. There are no atomics: the same bits on every run.

The loads of a loop are pipelined (`tl.range` with `num_stages`): there is about one instance per multiprocessor, and
what keeps the memory busy is the rows on their way to it, not other instances.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..row_program import Kind, RowProgram, Statement
from .column_sums import kept_dtype, kept_rows, piece_statements, short_lived_order, sum_dtype
from .schedule import SUM_TILE
from .triton_loop import PassPlan, column_pass, row_statements
from .triton_writer import AWAIT, READY, TL_DTYPES, Loads, Writer, local


def persistent_schedule(k: Writer) -> None:
    """Whole rows, and all column sums, in registers: block after block of rows, each tile is read once.

    Where no row is reduced, an instance takes one of `pieces` of the columns.
    """
    p, rows = k.program, k.shape[0]
    k.constants()
    k.columns(f"tl.program_id(2) * {k.shape[1]} + " if k.schedule.pieces > 1 else "")
    _fixed_values(k, (Kind.COL, Kind.SCALAR))
    _zero_sums(k)
    count = "rows" if rows == 1 else f"(rows + {rows - 1}) // {rows}"
    with k.block(f"for block in {_pipelined(k, f'tl.program_id(0), {count}, tl.num_programs(0)')}:"):
        k.rows_from(f"block * tl.full([], {rows}, tl.int64)")
        k.masks()
        loads = Loads(k, (Kind.TILE, Kind.ROW), stores=p.values)
        _run_and_sum(k, loads, short_lived_order(p))
        loads.need(output.value for output in p.outputs)
    _store_sums(k)


def wide_schedule(k: Writer) -> None:
    """Rows that do not fit: first the row values of all rows, then piece after piece of the columns, over all rows."""
    p, piece = k.program, k.shape
    k.constants()
    _fixed_values(k, (Kind.SCALAR,))
    k.emit("count = (rows + (tl.num_programs(0) - 1)) // tl.num_programs(0)")
    k.emit("begin = tl.program_id(0).to(tl.int64) * count")
    k.emit("end = tl.minimum(begin + count, rows)")
    _row_values(k)
    k.tile_shape(*piece)
    with k.block(f"for start in range(0, {p.cols} + zero, {piece[1]}):"):
        k.columns("start + ")
        _fixed_values(k, (Kind.COL,))
        _zero_sums(k)
        with k.block(f"for offset in {_pipelined(k, f'0, end - begin, {piece[0]}')}:"):
            k.rows_from("begin + offset", "end")
            k.masks()
            for i, s in enumerate(kept_rows(p)):
                mask = ", mask=row_mask, other=0.0" if k.row_masked else ""
                narrow = ".to(tl.float32)" if kept_dtype(p) is torch.float64 is not s.dtype else ""
                k.emit(f"{local(s.name)} = tl.load({_kept(p, i)}{mask}){narrow}")
            tiles = {o.value for o in p.outputs if p.values[o.value].kind is Kind.TILE}
            loads = Loads(k, (Kind.TILE, Kind.ROW), stores=tiles)
            _run_and_sum(k, loads, piece_statements(p))
            loads.need(tiles)
        _store_sums(k)


def _row_values(k: Writer) -> None:
    """Compute the row values of all rows of this instance: store those that are outputs, and keep those for tiles."""
    p, kept = k.program, kept_rows(k.program)
    row_outputs = {o.value for o in p.outputs if p.values[o.value].kind is Kind.ROW}
    if not kept and not row_outputs:
        return
    rows = k.schedule.statistics_rows
    k.tile_shape(rows, k.shape[0] * k.shape[1] // rows)
    with k.block(f"for offset in range(0, end - begin, {rows}):"):
        k.rows_from("begin + offset", "end")
        loads = Loads(k, (Kind.ROW,), stores=row_outputs)
        for phase in range(p.n_phases):
            plan = PassPlan(p, phase, statistics_only=True)
            loads.run(s for s in row_statements(p, phase) if s.kind is Kind.ROW)
            loads.need(name for s in plan.statements for name in s.value_args)
            loads.need(plan.positions)
            column_pass(k, plan)
            for s in plan.reductions:
                k.stores({s.name} & row_outputs)
        loads.need(row_outputs)
        mask = ", mask=row_mask" if k.row_masked else ""
        for i, s in enumerate(kept):
            k.emit(f"tl.store({_kept(p, i)}, {local(s.name)}{mask})")
    if kept:
        k.emit("tl.debug_barrier()  # what other threads kept is read below")


def _kept(p: RowProgram, i: int) -> str:
    """Where the i-th of `kept_rows` lies: those of one row are neighbours."""
    n = len(kept_rows(p))
    return f"kept_ptr + row{f' * {n}' if n > 1 else ''}{f' + {i}' if i else ''}"


def _pipelined(k: Writer, span: str) -> str:
    return f"tl.range({span}, num_stages={k.schedule.num_stages})"


def _fixed_values(k: Writer, kinds: tuple[Kind, ...]) -> None:
    """What does not change from row to row: loaded and computed ahead of the loop."""
    fixed = Loads(k, kinds, stores=(), as_tiles=True)
    fixed.run(s for s in k.program.statements if s.kind in kinds and s not in k.program.col_sums)
    fixed.need(o.name for o in k.program.operands)


def _zero_sums(k: Writer) -> None:
    for s in k.program.col_sums:
        k.emit(f"{local(s.name)}_sum = tl.zeros({list(k.shape)}, {TL_DTYPES[k.wide(s)]})")


def _run_and_sum(k: Writer, loads: Loads, statements: Iterable[Statement]) -> None:
    """Compute the statements, and add each tile to its column sums. A column beyond the last sums up what it likes."""
    sums: dict[str, list[Statement]] = {}
    for s in k.program.col_sums:
        sums.setdefault(s.value_args[0], []).append(s)

    def add(name: str) -> None:
        for s in sums.pop(name, []):
            value = k.argument(name, k.wide(s), typed=False)
            k.emit(f"{local(s.name)}_sum += {f'tl.where(row_mask, {value}, 0.0)' if k.row_masked else value}")

    for statement in statements:
        loads.run([statement])
        add(statement.name)
    for name in list(sums):
        loads.need([name])
        add(name)


def _store_sums(k: Writer) -> None:
    sums = k.program.col_sums
    cols, masked = k.program.cols, ", mask=col_mask" if k.col_masked else ""
    k.emit(f"partial = partial_ptr + tl.program_id(0).to(tl.int64) * {len(sums) * cols} + col{k.ready}")
    for i, s in enumerate(sums):
        total = f"{local(s.name)}_sum"
        if k.shape[0] > 1:
            total = f"tl.sum({total}, 0)[None, :]"
        k.emit(f"tl.store(partial{f' + {i * cols}' if i else ''}, {total}{masked})")


def sum_kernel(program: RowProgram, name: str, arguments: Iterable[str], pdl: bool) -> str:
    """The text of the second kernel: `[SUM_TILE, SUM_TILE]` partial sums at a time, one instance per block of columns
    and column sum."""
    sums, n = program.col_sums, len(program.col_sums)
    masked = program.cols % SUM_TILE != 0
    dtype = TL_DTYPES[sum_dtype(program)]
    lines = [
        f"def {name}({', '.join(arguments)}):",
        *([f"    {AWAIT}"] if pdl else []),
        f"    col = tl.program_id(0) * {SUM_TILE} + tl.arange(0, {SUM_TILE})[None, :]{READY if pdl else ''}",
        f"    total = tl.zeros([{SUM_TILE}, {SUM_TILE}], {dtype})",
        f"    for start in range(0, programs, {SUM_TILE}):",
        f"        program = start + tl.arange(0, {SUM_TILE})[:, None]",
        f"        partial = partial_ptr + (program.to(tl.int64) * {n} + tl.program_id(1)) * {program.cols} + col",
        f"        mask = {f'(program < programs) & (col < {program.cols})' if masked else 'program < programs'}",
        "        total += tl.load(partial, mask=mask, other=0.0)",
        "    total = tl.sum(total, 0)[None, :]",
    ]
    for which, s in enumerate(sums):
        if n > 1:
            lines.append(f"    if tl.program_id(1) == {which}:")
        text = "total" if s.dtype == sum_dtype(program) else f"total.to({TL_DTYPES[s.dtype]})"
        if sum_dtype(program) is torch.float64 and s.dtype.itemsize == 2:
            text = f"total.to(tl.float32).to({TL_DTYPES[s.dtype]})"
        for i, output in enumerate(program.outputs):
            if output.value == s.name:
                store = f"tl.store(out{i}_ptr + col, {text}{f', mask=col < {program.cols}' if masked else ''})"
                lines.append("    " * (2 if n > 1 else 1) + store)
    return "\n".join(lines)
