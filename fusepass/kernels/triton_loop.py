"""Schedules that hold whole rows, or pass over the columns of a row again for each phase of a program.

What a phase is, see `RowProgram.phases`. A pass has a plan: what it loads, computes, sums up and stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from ..row_ops import GENERATORS, POINTWISE, ROW_REDUCTIONS
from ..row_program import Kind, RowProgram, Statement, lookups
from .triton_writer import TL_DTYPES, Loads, Writer, local, neutral

_GENERATOR_BYTES = 8  # drawing a random number takes as long as reading some bytes: read a saved mask back instead


def row_schedule(k: Writer) -> None:
    """The whole row at once: every operand is read once, where it is first used."""
    rows = k.shape[0]
    k.rows_from("tl.program_id(0).to(tl.int64)" + (f" * {rows}" if rows > 1 else ""))
    k.constants()
    k.columns()
    k.masks()
    loads = Loads(k, tuple(Kind), stores=k.program.values)
    loads.run(k.program.statements)
    loads.need(output.value for output in k.program.outputs)


def loop_schedule(k: Writer) -> None:
    """One pass over the columns for each phase: blocks are read again, not held."""
    p, rows = k.program, k.shape[0]
    k.rows_from("tl.program_id(0).to(tl.int64)" + (f" * {rows}" if rows > 1 else ""))
    k.constants()
    once = Loads(k, (Kind.ROW, Kind.SCALAR), stores=p.values)
    plans = [plan_pass(p, phase) for phase in range(p.n_phases)]
    for phase, plan in enumerate(plans):
        once.run(row_statements(p, phase))
        once.need(name for s in plan.statements for name in s.value_args)
        once.need(plan.positions)
        if phase == 0:
            once.need(output.value for output in p.outputs)
        later = {t for after in plans[phase + 1 :] for t in after.tiles}
        column_pass(k, plan, later)
        for s in plan.reductions:
            k.stores([s.name])


def row_statements(p: RowProgram, phase: int) -> list[Statement]:
    """The statements of a phase that need no tile."""
    return [
        s
        for s in p.statements
        if p.phases[s.name] == phase and s.kind in (Kind.ROW, Kind.SCALAR) and s.op not in ROW_REDUCTIONS
    ]


def column_pass(k: Writer, plan: PassPlan, later: Collection[str] = ()) -> None:
    """The loop that `plan` describes, and the row reductions that it is for. `later` are the tiles to be read again."""
    p = k.program
    if not plan.roots:
        return
    if plan.reloads:
        k.emit("tl.debug_barrier()  # what other threads stored is read back below")
    for s in plan.reductions:
        k.emit(f"{local(s.name)}_block = tl.full({list(k.shape)}, {neutral(s)}, {TL_DTYPES[k.wide(s)]})")
    # A trip count that the compiler knows makes it unroll the loop, and spill.
    span = f"0, {p.cols} + zero, {k.shape[1]}"
    pipelined = k.schedule.num_stages > 1
    with k.block(
        f"for start in {f'tl.range({span}, num_stages={k.schedule.num_stages})' if pipelined else f'range({span})'}:"
    ):
        k.columns("start + ")
        k.masks()
        loads = Loads(k, (Kind.TILE, Kind.COL), plan.stores, keep=later)
        for i, output in enumerate(p.outputs):
            if i in plan.reloads:
                value = p.values[output.value]
                k.read(output.value, f"out{i}", value.kind, output.index, value.dtype, keep=True)
                loads.waiting.pop(output.value, None)
        for s in plan.statements:
            loads.run([s])
            _accumulate(k, plan, s.name)
        loads.need(plan.roots)
        for name in plan.roots:
            if not isinstance(p.values[name], Statement):
                _accumulate(k, plan, name)
    for s in plan.reductions:
        k.reduce(s, f"{local(s.name)}_block")


def _accumulate(k: Writer, plan: PassPlan, name: str) -> None:
    """Take the tile `name` into every reduction of it."""
    for s in plan.reductions:
        if s.args[0] == name:
            total, tile = f"{local(s.name)}_block", k.reduction_argument(s)
            function = {"row_max": "_maximum", "row_min": "_minimum"}.get(s.op)
            k.emit(f"{total} = {function}({total}, {tile})" if function else f"{total} += {tile}")


class PassPlan:
    """What one pass over the columns does: load `tiles`, compute `statements`, store `stores`, sum up `reductions`.

    `positions` are those that its tiles are looked up at, `reloads` the outputs that it reads back instead of
    computing, `roots` the values that it is for. A pass for the row reductions alone stores nothing.
    """

    def __init__(
        self, program: RowProgram, phase: int, reloads: frozenset[int] = frozenset(), statistics_only: bool = False
    ) -> None:
        phases, values = program.phases, program.values
        tile_outputs = {o.value for o in program.outputs if values[o.value].kind is Kind.TILE}
        self.stores = set() if statistics_only else {name for name in tile_outputs if phases[name] == phase}
        self.reductions = [s for s in program.row_reductions if phases[s.name] == phase + 1]
        self.roots = [n for n in values if n in self.stores or any(s.args[0] == n for s in self.reductions)]
        read_back = {program.outputs[i].value for i in reloads}
        needed: set[str] = set()
        pending = list(self.roots)
        while pending:
            name = pending.pop()
            value = values[name]
            if name in needed or value.kind in (Kind.ROW, Kind.SCALAR):
                continue
            needed.add(name)
            if isinstance(value, Statement) and name not in read_back:
                pending += value.value_args
        self.reloads = frozenset(i for i in reloads if program.outputs[i].value in needed)
        self.statements = [s for s in program.statements if s.name in needed and s.name not in read_back]
        self.tiles = [
            o.name for o in program.operands if o.name in needed and o.kind is Kind.TILE and o.name not in read_back
        ]
        self.positions = [p for o in program.operands if o.name in self.tiles for p, _ in lookups(o.index)]
        moved = [*(values[t] for t in self.tiles), *(values[program.outputs[i].value] for i in self.reloads)]
        drawn = sum(s.op in GENERATORS for s in self.statements)
        costly = sum(s.op in POINTWISE and not POINTWISE[s.op].cheap for s in self.statements)
        self.bytes = sum(v.dtype.itemsize for v in moved)
        self.cost = (self.bytes + _GENERATOR_BYTES * drawn, costly, len(self.reloads))


def plan_pass(program: RowProgram, phase: int) -> PassPlan:
    """The plan that reads the fewest bytes, then computes least again, then needs no barrier."""
    stored = [
        i
        for i, o in enumerate(program.outputs)
        if program.values[o.value].kind is Kind.TILE and program.phases[o.value] < phase
    ][:6]
    choices = itertools.chain.from_iterable(itertools.combinations(stored, n) for n in range(len(stored) + 1))
    return min((PassPlan(program, phase, frozenset(c)) for c in choices), key=lambda plan: plan.cost)
