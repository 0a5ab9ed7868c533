"""Where the values of a row program live in its C++ kernel: in which loop each is computed, and what is kept between.

A kernel runs one loop over the columns of a row for each phase of the program. A tile value is computed in the first
loop that needs it. A later loop that needs it too reads it again from where it already lies (an operand, an output),
computes it again where that is a handful of instructions, or reads it from a scratch row in which it was kept.
"""

from __future__ import annotations

from functools import cache, cached_property

import torch

from ..row_ops import POINTWISE
from ..row_program import HALVES, Kind, Operand, Output, RowProgram, Statement
from .cpp_shift import without_waiting

_NOT_WORTH_REPEATING = frozenset({"div", "sqrt", "rsqrt", "reciprocal"})
_MAX_REPEATED = 3  # statements computed again for one value before a scratch row is the better choice


@cache
def overwritable(program: RowProgram) -> tuple[tuple[int, ...], ...]:
    """For each output, the numbers of the operands whose memory it may be written over.

    Each loop reads a column of a row before it writes that column, so an output may take the place of an operand of its
    own dtype and layout that no later loop reads again.
    """
    program = without_waiting(program)
    placement = Placement(program)
    last_read = {o.name: -1 for o in program.operands}
    for loop in range(program.n_phases):
        last_read |= dict.fromkeys(last_read.keys() & placement.computed_in(loop), loop)

    def fits(out: Output, operand: Operand) -> bool:
        value = program.values[out.value]
        tiles = value.kind is operand.kind is Kind.TILE and operand.index == out.index == ("row",)
        is_dead = last_read[operand.name] <= program.phases[out.value]
        return tiles and operand.dtype == value.dtype and is_dead

    return tuple(tuple(i for i, x in enumerate(program.operands) if fits(o, x)) for o in program.outputs)


class Placement:
    """The loops of one program. A loop has the number of its phase; it exists if it has `roots`."""

    def __init__(self, program: RowProgram) -> None:
        self.program = program
        self.phase = program.phases
        self.tile_outputs = [(i, o) for i, o in enumerate(program.outputs) if self.kind(o.value) is Kind.TILE]
        self._computed: list[set[str]] = []
        self.first_loop: dict[str, int] = {}
        for loop in range(program.n_phases):
            self._computed.append(self._needed_in(loop))
            self.first_loop |= dict.fromkeys(self._computed[loop] - self.first_loop.keys(), loop)

    def kind(self, name: str) -> Kind:
        return self.program.values[name].kind

    def dtype(self, name: str) -> torch.dtype:
        return self.program.values[name].dtype

    def is_statement(self, name: str) -> bool:
        return isinstance(self.program.values[name], Statement)

    def reductions_of(self, loop: int) -> list[Statement]:
        return [s for s in self.program.row_reductions if self.phase[s.args[0]] == loop]  # type: ignore[index]

    def col_sums_of(self, loop: int) -> list[Statement]:
        return [s for s in self.program.col_sums if self.phase[s.args[0]] == loop]  # type: ignore[index]

    def outputs_of(self, loop: int) -> list[tuple[int, Output]]:
        return [(i, o) for i, o in self.tile_outputs if self.phase[o.value] == loop]

    def roots(self, loop: int) -> list[str]:
        """The values for whose sake this loop runs."""
        reduced = [str(s.args[0]) for s in (*self.reductions_of(loop), *self.col_sums_of(loop))]
        return [*reduced, *(o.value for _, o in self.outputs_of(loop))]

    def stored_in(self, name: str) -> int | None:
        """The output that holds this tile value, if one does."""
        return next((i for i, o in self.tile_outputs if o.value == name), None)

    def repeated(self, name: str) -> int | None:
        """How many statements computing this tile value in a later loop takes; None if it should be kept instead."""
        value = self.program.values[name]
        if isinstance(value, Operand) or self.stored_in(name) is not None:
            return 0
        tiles = [a for a in value.value_args if self.kind(a) is Kind.TILE]
        is_dear = value.op not in POINTWISE or not POINTWISE[value.op].cheap or value.op in _NOT_WORTH_REPEATING
        if is_dear or len(tiles) > 1 or value.dtype in HALVES:
            return None
        below = self.repeated(tiles[0]) if tiles else 0
        total = None if below is None else below + (value.op != "cast")
        return total if total is not None and total <= _MAX_REPEATED else None

    def computed_in(self, loop: int) -> set[str]:
        """The tile values whose statement or load stands in this loop."""
        return self._computed[loop]

    def _needed_in(self, loop: int) -> set[str]:
        found: set[str] = set()

        def visit(name: str) -> None:
            if name in found or self.kind(name) is not Kind.TILE:
                return
            found.add(name)
            value = self.program.values[name]
            if isinstance(value, Statement) and not self.is_reloaded(name, loop):
                for a in value.value_args:
                    visit(a)

        for root in self.roots(loop):
            visit(root)
        return found

    def is_reloaded(self, name: str, loop: int) -> bool:
        """Whether this loop reads a statement's tile value that an earlier loop has computed and stored."""
        is_older = self.first_loop.get(name, loop) < loop
        return is_older and (self.stored_in(name) is not None or self.repeated(name) is None)

    @cached_property
    def kept(self) -> list[str]:
        """The tile values with a scratch row of their own, in program order."""
        loops = range(self.program.n_phases)
        reloaded = {n for q in loops for n in self.computed_in(q) if self.is_statement(n) and self.is_reloaded(n, q)}
        return [s.name for s in self.program.statements if s.name in reloaded and self.stored_in(s.name) is None]

    @cached_property
    def loaded_cols(self) -> list[str]:
        """The column values that loops over a row read, in program order."""
        tile_args = {a for s in self.program.statements if s.kind is Kind.TILE for a in s.value_args}
        return [n for n in self.program.values if self.kind(n) is Kind.COL and n in tile_args]
