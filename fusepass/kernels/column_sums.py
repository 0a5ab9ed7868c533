"""What a program with column sums needs of its schedule: what is summed, in which order, and what is kept meanwhile."""

from __future__ import annotations

import torch

from ..row_program import Kind, RowProgram, Statement


def sum_dtype(program: RowProgram) -> torch.dtype:
    """The dtype of the partial sums: FP32, or FP64 if any of them is."""
    values = program.values
    double = any(values[s.value_args[0]].dtype is torch.float64 for s in program.col_sums)
    double |= any(s.dtype is torch.float64 for s in program.col_sums)
    return torch.float64 if double else torch.float32


def kept_rows(program: RowProgram) -> tuple[Statement, ...]:
    """The row values that the wide schedule keeps in memory: those that tiles are computed from."""
    used = {a for s in piece_statements(program) for a in s.value_args}
    return tuple(s for s in program.statements if s.kind is Kind.ROW and s.name in used)


def piece_statements(program: RowProgram) -> list[Statement]:
    """The tile statements that outputs and column sums need once the row values are known."""
    pending = [o.value for o in program.outputs]
    needed: set[str] = set()
    while pending:
        value = program.values[pending.pop()]
        if isinstance(value, Statement) and value.kind in (Kind.TILE, Kind.COL) and value.name not in needed:
            needed.add(value.name)
            pending += value.value_args
    return [s for s in program.statements if s.name in needed and s.kind is Kind.TILE]


def kept_dtype(program: RowProgram) -> torch.dtype:
    """The dtype in which `kept_rows` are held."""
    return torch.float64 if any(s.dtype is torch.float64 for s in kept_rows(program)) else torch.float32


def short_lived_order(program: RowProgram) -> list[Statement]:
    """The tile and row statements, each computed late, but what column sums and outputs need before the row reductions
    that they do not wait for: few tiles are alive where a reduction waits for all threads."""
    phases = program.phases
    ends = [s.value_args[0] for s in program.col_sums] + [o.value for o in program.outputs]
    order: dict[str, Statement] = {}

    def compute(name: str) -> None:
        value = program.values[name]
        if isinstance(value, Statement) and value.kind in (Kind.TILE, Kind.ROW) and name not in order:
            for a in value.value_args:
                compute(a)
            order[name] = value

    for phase in range(program.n_phases):
        for name in ends:
            if phases[name] == phase:
                compute(name)
        for s in program.row_reductions:
            if phases[s.name] == phase + 1:
                compute(s.name)
    return list(order.values())
