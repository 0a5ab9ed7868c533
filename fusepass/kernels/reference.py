"""What a row program means, in plain torch: the yardstick for both printers and for validation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..row_ops import POINTWISE
from ..row_program import Kind, Operand, RowProgram, Statement, compute_dtype, index_terms


def evaluate(
    program: RowProgram,
    rows: int,
    ins: Sequence[torch.Tensor],
    sizes: Sequence[int] = (),
    *,
    fp64: bool = False,
) -> list[torch.Tensor]:
    """The program's outputs, evaluated statement by statement.

    Args:
        program: the program.
        rows: number of rows.
        ins: one tensor per operand. A tile has shape (leading dims..., cols) and a row (leading dims...), one leading
            dim per row-index expression; a col has cols elements, a scalar one.
        sizes: the values of `program.sizes`.
        fp64: keep every value in FP64 and round nowhere, instead of rounding each value to its own dtype.

    Returns:
        One tensor per output: (rows, cols) for a tile, (rows,) for a row, (cols,) for a col, () for a scalar.
    """
    env = dict(zip(program.sizes, sizes, strict=True))
    values: dict[str, torch.Tensor] = {}
    for operand, tensor in zip(program.operands, ins, strict=True):
        value = _read(operand, tensor, rows, program.cols, env)
        values[operand.name] = value.double() if fp64 else value
    for s in program.statements:
        values[s.name] = _apply(s, values, program, fp64)
    return [_as_stored(values[o.value], program.values[o.value].kind, rows, program.cols) for o in program.outputs]


def row_indices(index: Sequence[str], rows: int, env: dict[str, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each row-index expression, the index of every row, as an int64 tensor of shape (rows,)."""
    return tuple(_row_index(e, torch.arange(rows, device=device), env) for e in index)


def _row_index(expr: str, row: torch.Tensor, env: dict[str, int]) -> torch.Tensor:
    terms = index_terms(expr)
    if terms is None:
        return torch.zeros_like(row)
    divisor, modulus = (math.prod(int(t) if t.isdigit() else env[t] for t in factors) for factors in terms)
    row = row // divisor
    return row % modulus if terms[1] else row


def _read(operand: Operand, tensor: torch.Tensor, rows: int, cols: int, env: dict[str, int]) -> torch.Tensor:
    if operand.kind in (Kind.COL, Kind.SCALAR):
        return tensor.reshape(1, cols if operand.kind is Kind.COL else 1)
    index = row_indices(operand.index, rows, env, tensor.device)
    if operand.kind is Kind.ROW:
        return tensor[index].reshape(rows, 1)
    return tensor[index].reshape(rows, cols)


def _apply(s: Statement, values: dict[str, torch.Tensor], program: RowProgram, fp64: bool) -> torch.Tensor:
    dtypes = [program.values[a].dtype for a in s.value_args]
    wide = torch.float64 if fp64 else compute_dtype(s.dtype, *dtypes)
    device = next(iter(values.values())).device
    args = [values[a].to(wide) if isinstance(a, str) else torch.tensor(a, dtype=wide, device=device) for a in s.args]
    if s.op in POINTWISE:
        result = POINTWISE[s.op].torch(*args)
    else:
        result = _REDUCE[s.op](args[0], program.cols)
    return result if fp64 else result.to(s.dtype)


_REDUCE = {
    "row_sum": lambda a, cols: a.sum(1, keepdim=True),
    "row_mean": lambda a, cols: a.sum(1, keepdim=True) / cols,
    "row_max": lambda a, cols: a.amax(1, keepdim=True),
    "row_min": lambda a, cols: a.amin(1, keepdim=True),
    "col_sum": lambda a, cols: a.sum(0, keepdim=True),
}


def _as_stored(value: torch.Tensor, kind: Kind, rows: int, cols: int) -> torch.Tensor:
    full = {Kind.TILE: (rows, cols), Kind.ROW: (rows, 1), Kind.COL: (1, cols), Kind.SCALAR: (1, 1)}[kind]
    stored = {Kind.TILE: (rows, cols), Kind.ROW: (rows,), Kind.COL: (cols,), Kind.SCALAR: ()}[kind]
    return value.expand(full).reshape(stored)
