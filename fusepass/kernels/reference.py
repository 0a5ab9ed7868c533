"""What a row program means, in plain torch: the yardstick for both printers and for validation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import PositionError
from ..row_ops import GENERATORS, POINTWISE
from ..row_program import POSITIONS, Kind, Operand, RowProgram, Statement, compute_dtype, index_terms, lookup


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
        value = _read(operand, tensor, rows, program.cols, env, values)
        values[operand.name] = value.double() if fp64 and value.dtype not in POSITIONS.values() else value
    for s in program.statements:
        if s.op in GENERATORS:
            values[s.name] = uniform(s.op, values[s.value_args[0]], rows, program.cols)
        else:
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


def _read(
    operand: Operand, tensor: torch.Tensor, rows: int, cols: int, env: dict[str, int], values: dict[str, torch.Tensor]
) -> torch.Tensor:
    if operand.kind in (Kind.COL, Kind.SCALAR):
        return tensor.reshape(1, cols if operand.kind is Kind.COL else 1)
    row = torch.arange(rows, device=tensor.device)
    index = tuple(_looked_up(e, operand, env, values) if lookup(e) else _row_index(e, row, env) for e in operand.index)
    if operand.kind is Kind.ROW:
        return tensor[index].reshape(rows, 1)
    return tensor[index].reshape(rows, cols)


def _looked_up(expr: str, operand: Operand, env: dict[str, int], values: dict[str, torch.Tensor]) -> torch.Tensor:
    name, bound = lookup(expr)  # type: ignore[misc]
    positions, end = values[name].reshape(-1).long(), int(env.get(bound, bound))
    outside = positions[(positions < 0) | (positions >= end)]
    if positions.device.type == "cpu" and outside.numel():
        raise PositionError(
            f"operand {operand.name}: position {int(outside[0])} is not in the range from 0 to {end - 1}"
        )
    return positions


def _apply(s: Statement, values: dict[str, torch.Tensor], program: RowProgram, fp64: bool) -> torch.Tensor:
    dtypes = [program.values[a].dtype for a in s.value_args]
    wide = torch.float64 if fp64 else compute_dtype(s.dtype, *dtypes)
    device = next(iter(values.values())).device
    args = [values[a].to(wide) if isinstance(a, str) else torch.tensor(a, dtype=wide, device=device) for a in s.args]
    if s.op in POINTWISE:
        result = POINTWISE[s.op].torch(*args)
    else:
        result = _REDUCE[s.op](args[0], program.cols)
    return result.to(wide) if fp64 else result.to(s.dtype)


def uniform(op: str, seed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The FP32 random numbers of `rand` or `rand_cpu`, shape (rows, cols), for an int64 seed.

    Element i is the first word of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
    with counter (i, 0, 0, 0). The key is the seed: all 64 bits of it for `rand`, the low 32 for `rand_cpu`.
    """
    low = 0xFFFFFFFF
    counter = torch.arange(rows * cols, dtype=torch.int64, device=seed.device) & low
    c = [counter, *(torch.zeros_like(counter) for _ in range(3))]
    key = [seed & low, (seed >> 32) & low if op == "rand" else torch.zeros_like(seed)]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]  # wraps at 64 bits, as their unsigned words do
        c = [
            (product1 >> 32) & low ^ c[1] ^ key[0],
            product1 & low,
            (product0 >> 32) & low ^ c[3] ^ key[1],
            product0 & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    word = c[0]
    if op == "rand":  # as tl.rand: the word as a signed number, negative ones mirrored
        word = torch.where(word >= 1 << 31, low - word, word)
    else:
        word = word & 0x7FFFFFFF
    return (word.float() * 4.6566127342e-10).reshape(rows, cols)


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
