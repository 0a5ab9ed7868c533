"""The statements of a row program as C++ text: over one number, and over one step of columns.

A value is held in FP32 (FP64 where the program says f64), a truth value as 1 or 0, and is rounded where the program
rounds. A seed is held as the Philox stream that starts from it.
"""

from __future__ import annotations

import math
import re

import torch

from ..errors import ProgramError
from ..row_ops import GENERATORS, POINTWISE
from ..row_program import HALVES, Kind, RowProgram, Statement, compute_dtype

C_TYPE = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.bool: "bool",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int8: "int8_t",
    torch.float8_e4m3fn: "c10::Float8_e4m3fn",
    torch.float8_e5m2: "c10::Float8_e5m2",
}


def held(dtype: torch.dtype) -> str:
    """The C++ type of one number of a value of this dtype."""
    return "double" if dtype == torch.float64 else "float"


def vector(dtype: torch.dtype) -> str:
    """The C++ type of one step of columns of a value of this dtype."""
    return "Doubles" if dtype == torch.float64 else "Floats"


def c_name(name: str) -> str:
    """The variable for a value: its own name, with an underscore where that might be a word of C++ or of this text."""
    return name if re.fullmatch(r"[a-z]\d+", name) else f"{name}_"


def check(program: RowProgram) -> None:
    """Raises `ProgramError` for an operation that has no C++ form."""
    for s in program.statements:
        if s.op in GENERATORS and GENERATORS[s.op] != "cpu":
            raise ProgramError(f"{s.name} = {s.op}(...): runs on {GENERATORS[s.op]}, expected rand_cpu in a C++ kernel")


def number_statement(program: RowProgram, s: Statement) -> str:
    """A statement whose value is one number (per row, or for all rows)."""
    wide = computed_in(program, s)
    args = [_argument(program, a, wide, Kind.ROW) for a in s.args]
    return f"const {held(s.dtype)} {c_name(s.name)} = {rounded(POINTWISE[s.op].cpp.format(*args), wide, s.dtype)};"


def vector_statement(program: RowProgram, s: Statement, packed: bool = False) -> list[str]:
    """A statement over the step of columns that begins at column `c` of row `row`.

    With `packed` (a 16-bit value that is stored) it is also at hand as `NAME_rounded.packed`.
    """
    name = c_name(s.name)
    if s.op in GENERATORS:
        return [f"const Floats {name} = {s.op}({c_name(s.value_args[0])}, row * cols + c);"]
    wide = computed_in(program, s)
    args = [_argument(program, a, wide, Kind.TILE) for a in s.args]
    value = rounded(POINTWISE[s.op].cpp.format(*args), wide, s.dtype)
    if not packed:
        return [f"const {vector(s.dtype)} {name} = {value};"]
    both = value.replace("round_to<", "round_and_pack<", 1)
    return [f"const auto {name}_rounded = {both};", f"const Floats {name} = {name}_rounded.floats;"]


def rounded(value: str, wide: torch.dtype, dtype: torch.dtype) -> str:
    """An expression that was computed in `wide`, rounded to `dtype`."""
    if wide == torch.float64 and dtype != torch.float64:
        value = f"to_floats({value})"
    return f"round_to<{C_TYPE[dtype]}>({value})" if dtype in HALVES else value


def summand(program: RowProgram, s: Statement) -> str:
    """What a reduction adds up: one step of columns."""
    return _argument(program, s.args[0], computed_in(program, s), Kind.TILE)


def computed_in(program: RowProgram, s: Statement) -> torch.dtype:
    """The dtype that a statement computes in, before it rounds."""
    return compute_dtype(s.dtype, *(program.values[a].dtype for a in s.value_args))


def _argument(program: RowProgram, arg: str | float, wide: torch.dtype, context: Kind) -> str:
    """An argument in the dtype that the statement computes in; a number stands for a whole step of columns."""
    type_ = held(wide) if context is Kind.ROW else vector(wide)
    if not isinstance(arg, str):
        return f"{type_}({_literal(arg)})"
    value = program.values[arg]
    if value.kind in (Kind.ROW, Kind.SCALAR):
        is_same = context is Kind.ROW and held(value.dtype) == held(wide)
        return c_name(arg) if is_same else f"{type_}({c_name(arg)})"
    return f"to_doubles({c_name(arg)})" if vector(value.dtype) != vector(wide) else c_name(arg)


def _literal(number: float) -> str:
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return repr(number)
