"""A sum of a centred row that need not wait for the mean: one loop less in the backward of a LayerNorm in 16 bits.

Such a backward computes the mean of x again (see `joint_pass`), and then `sum(a * r * (x - mean))`, a loop each. With p
any element of the row, and r one number per row, both come out of one loop:

    mean = p + mean(x - p)
    sum(a * r * (x - mean)) = r * (sum(a * (x - p)) - mean(x - p) * sum(a))

What cancels in the difference is bounded: `|mean - p| <= sqrt(cols) * std` for every element of a row (one term of the
variance's sum), so that at most 7 of FP32's 24 bits are lost at 16,384 columns, where x and the results have 11 or 8.
For that reason this is done for 16-bit x only, and not where the mean itself is a result. The rewritten program has an
operation that is no other program's, `row_first`, the first element of a row of an operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from ..row_program import HALVES, Kind, Operand, RowProgram, Statement

ROW_FIRST = "row_first"
FLOAT = torch.float32


@cache
def without_waiting(program: RowProgram) -> RowProgram:
    """The program with such sums rewritten, where that saves a loop; or else the program as it is."""
    results = {out.value for out in program.outputs}
    means = {s.name for s in program.row_reductions if _is_mean_of_halves(program, s)} - results
    waiting = {s.name: found for s in program.row_reductions if (found := _centred(program, s, means))}
    if not waiting:
        return program
    statements: list[Statement] = []
    shifted = {mean for _, _, mean in waiting.values()}
    for s in program.statements:
        if s.name in shifted:
            statements += _shifted_mean(program, s)
        elif s.name in waiting:
            statements += _sum(program, s, *waiting[s.name])
        else:
            statements.append(s)
    result = replace(program, statements=_used(program, statements))
    return result if result.n_phases < program.n_phases else program


def _used(program: RowProgram, statements: list[Statement]) -> tuple[Statement, ...]:
    used = {out.value for out in program.outputs}
    for s in reversed(statements):
        if s.name in used:
            used.update(s.value_args)
    return tuple(s for s in statements if s.name in used)


def _is_mean_of_halves(program: RowProgram, s: Statement) -> bool:
    x = program.values[s.value_args[0]]
    if isinstance(x, Statement) and x.op == "cast":
        x = program.values[x.value_args[0]]
    return s.op == "row_mean" and s.dtype == FLOAT and isinstance(x, Operand) and x.dtype in HALVES


def _centred(program: RowProgram, s: Statement, means: set[str]) -> tuple[str, list[str], str] | None:
    """For the sum, or mean, of `a * r... * (x - mean)`: the tile a, the row values r and the mean.

    Neither a nor r waits for a reduction.
    """
    if s.op not in ("row_sum", "row_mean") or s.dtype != FLOAT:
        return None
    tiles: list[str] = []
    factors: list[str] = []
    mean = ""
    for name in _product(program, s.value_args[0]):
        value = program.values[name]
        if isinstance(value, Statement) and value.op == "sub" and value.dtype == FLOAT and value.args[1] in means:
            x, m = value.value_args
            if mean or x != program.values[m].value_args[0]:  # type: ignore[union-attr]
                return None
            mean = m
        elif program.phases[name] > 0:
            return None
        else:
            (factors if value.kind is Kind.ROW else tiles).append(name)
    return (tiles[0], factors, mean) if mean and len(tiles) == 1 and factors else None


def _product(program: RowProgram, name: str) -> Iterator[str]:
    """The factors of an FP32 product of the centred tile; a product that does not wait for the mean is one factor."""
    value = program.values[name]
    is_product = isinstance(value, Statement) and (value.op, value.dtype, len(value.value_args)) == ("mul", FLOAT, 2)
    if not is_product or program.phases[name] == 0:
        yield name
        return
    for arg in value.value_args:  # type: ignore[union-attr]
        yield from _product(program, arg)


def _shifted_mean(program: RowProgram, mean: Statement) -> list[Statement]:
    """The first element of the row, the mean's distance from it, and the mean under its own name."""
    (x,) = mean.value_args
    operand = program.values[x].value_args[0] if isinstance(program.values[x], Statement) else x  # type: ignore[union-attr]
    first, apart, distance = (f"{mean.name}_{what}" for what in ("first", "apart", "distance"))
    return [
        Statement(first, ROW_FIRST, (operand,), Kind.ROW, FLOAT),
        Statement(apart, "sub", (x, first), Kind.TILE, FLOAT),
        Statement(distance, "row_mean", (apart,), Kind.ROW, FLOAT),
        Statement(mean.name, "add", (first, distance), Kind.ROW, FLOAT),
    ]


def _sum(program: RowProgram, s: Statement, tile: str, factors: list[str], mean: str) -> Iterator[Statement]:
    """The sum under its own name, from sums that need no mean."""
    before = program.statements[: program.statements.index(s)]
    whole = next((r.name for r in before if r.op == s.op and r.args == (tile,)), "")
    if not whole:
        whole = f"{s.name}_whole"
        yield Statement(whole, s.op, (tile,), Kind.ROW, FLOAT)
    part, apart, less, difference = (f"{s.name}_{what}" for what in ("part", "apart", "less", "difference"))
    yield Statement(part, "mul", (tile, f"{mean}_apart"), Kind.TILE, FLOAT)
    yield Statement(apart, s.op, (part,), Kind.ROW, FLOAT)
    yield Statement(less, "mul", (f"{mean}_distance", whole), Kind.ROW, FLOAT)
    yield Statement(difference, "sub", (apart, less), Kind.ROW, FLOAT)
    product = difference
    for i, factor in enumerate(factors):
        last = i == len(factors) - 1
        name = s.name if last else f"{s.name}_{i}"
        yield Statement(name, "mul", (factor, product), Kind.ROW, FLOAT)
        product = name
