"""How the module that Inductor writes calls a C++ kernel: directly, as it calls its own.

A call of the op `fusepass::row_program_` costs many times what a call of the kernel does: the dispatcher, the lists of
tensors, the checks. But Inductor knows every size and stride when it writes the module, and so what the kernel's
arguments are. The module gets the program's text, from which the kernel is built when the module is loaded, and one
line per call:

    fusepass_1f2e3d4c5b6a = fusepass_kernel('''row_program cols=768 ...''')
    ...
    fusepass_1f2e3d4c5b6a(torch.get_num_threads(), 512, 768, buf0, 768, 1, arg1_1, 768, 1, buf1, 768, 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from .._torch_compat import PlacedTensor, call_directly
from ..row_program import Kind, RowProgram, lookup, parse

_IMPORT = "from fusepass.kernels.ops import loaded as fusepass_kernel"


@cache
def register() -> None:
    """Let Inductor write direct calls from now on; where this torch cannot, it goes on calling the op."""
    call_directly("torch.ops.fusepass.row_program_.default", _IMPORT, direct_call)


def direct_call(
    text: str, rows: Any, ins: Sequence[PlacedTensor], sizes: Sequence[Any], outs: Sequence[PlacedTensor]
) -> tuple[str, str, list[Any]] | None:
    """The kernel's name, what it is defined as, and the arguments of one call: texts, numbers and size expressions.

    None where the tensors have to be looked at when the kernel runs, as the op does.
    """
    program = parse(text)
    arguments: list[Any] = ["torch.get_num_threads()", rows, program.cols, *sizes]
    slots = [(o.name, o.index) for o in program.operands] + [(o.value, o.index) for o in program.outputs]
    for (name, index), tensor in zip(slots, (*ins, *outs), strict=True):
        strides = _strides(program, name, index, rows, tensor)
        if strides is None:
            return None
        arguments += [tensor.text, *strides]
    return f"fusepass_{program.digest}", f"fusepass_kernel('''{text}''')", arguments


def _strides(
    program: RowProgram, name: str, index: tuple[str, ...], rows: Any, tensor: PlacedTensor
) -> list[Any] | None:
    """The strides that the kernel takes for one tensor; None where its shape is not plainly what the program says."""
    value = program.values[name]
    size, stride = list(tensor.size), list(tensor.stride)
    if tensor.dtype is not value.dtype:
        return None
    if value.kind is Kind.SCALAR:
        return [] if all(d == 1 for d in size) else None
    if value.kind is Kind.COL:
        wide = [s for d, s in zip(size, stride, strict=True) if d != 1]
        return (wide or [1]) if len(wide) < 2 and math.prod(size) == program.cols else None
    if value.kind is Kind.TILE and (not size or size[-1] != program.cols):
        return None
    if value.kind is Kind.ROW and len(size) == len(index) + 1 and size[-1] == 1:
        size, stride = size[:-1], stride[:-1]
    leading = len(size) - (value.kind is Kind.TILE)
    if leading == len(index):
        needed = {expr: rows if expr == "row" else _bound(program, expr) for expr in index}
        whole = all(needed[expr] in (None, d) for d, expr in zip(size, index, strict=False))
        return stride if whole else None
    if index != ("row",) or math.prod(size[:leading]) != rows:
        return None
    return _collapsed(size[:leading], stride[:leading], stride[leading:])


def _bound(program: RowProgram, expr: str) -> int | None:
    """The number of rows that a table has to have, where the program says it as a number."""
    found = lookup(expr)
    return int(found[1]) if found and found[1].isdigit() else None


def _collapsed(size: list[Any], stride: list[Any], rest: list[Any]) -> list[Any] | None:
    """The strides with the leading dimensions seen as one; None where they cannot be."""
    dims = [(d, s) for d, s in zip(size, stride, strict=True) if d != 1]
    if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(dims)):
        return None
    return [dims[-1][1] if dims else 1, *rest]
