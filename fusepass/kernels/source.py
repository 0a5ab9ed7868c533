"""The generated source of a program's kernel, to be read: C++ for a CPU, Triton for a GPU."""

from __future__ import annotations

from ..row_program import Kind, RowProgram
from . import cpp_code, schedule, triton_code


def source(program: RowProgram, device_type: str) -> tuple[str, str]:
    """(file suffix, text) of the kernel for tensors that are contiguous."""
    if device_type == "cpu":
        return ".cpp", cpp_code.generate(program)
    named = [(o.name, o.kind, o.index) for o in program.operands]
    named += [(f"out{i}", program.values[o.value].kind, o.index) for i, o in enumerate(program.outputs)]
    strides = {name: _contiguous(program, kind, len(index)) for name, kind, index in named if index}
    return ".py", triton_code.generate(program, schedule.choose(program), strides)


def _contiguous(program: RowProgram, kind: Kind, dims: int) -> tuple[int | None, ...]:
    """Strides where they are known: the innermost row's and the column's. Those of outer dimensions are arguments."""
    inner = (program.cols, 1) if kind is Kind.TILE else (1,)
    return (None,) * (dims - 1) + inner
