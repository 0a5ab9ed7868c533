"""A fused kernel's launch on a GPU, as a graph node that Inductor's wrapper turns into a plain Triton launch.

Inductor treats the generated kernel as it treats a user's own: its text goes into the compiled module, its outputs are
Inductor's buffers, and CUDA graphs, the C++ wrapper and AOTInductor work as for any other launch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from .._torch_compat import kernel_side_table, triton_kernel_wrapper_functional
from ..row_program import Kind, RowProgram
from . import schedule as schedules
from . import triton_code

Call = Callable[..., fx.Node]


def append_launch(
    call: Call, program: RowProgram, rows: Any, ins: Sequence[fx.Node], sizes: Sequence[Any], outs: Sequence[fx.Node]
) -> list[fx.Node]:
    """Append the launch of `program`'s kernel with `call(target, *args, **kwargs)`; return one node per output."""
    schedule = schedules.choose(program, rows if isinstance(rows, int) else None)
    tensors = {o.name: node for o, node in zip(program.operands, ins, strict=True)}
    tensors |= {f"out{i}": node for i, node in enumerate(outs)}
    indexed = [o.name for o in program.operands if o.kind in (Kind.TILE, Kind.ROW)] + [
        f"out{i}" for i in range(len(outs))
    ]
    strides = {name: tuple(s if isinstance(s, int) else None for s in _strides(tensors[name])) for name in indexed}
    arguments = triton_code.arguments(program, strides)
    values = {f"{name}_ptr": node for name, node in tensors.items()}
    values |= {"rows": rows} | dict(zip(program.sizes, sizes, strict=True))
    for name in indexed:
        for k, stride in enumerate(strides[name]):
            if stride is None:
                values[f"{name}_stride{k}"] = call(torch.ops.aten.sym_stride.int, tensors[name], k)
    launch = call(
        triton_kernel_wrapper_functional,
        kernel_idx=kernel_side_table.add_kernel(_kernel(program, schedule, tuple(strides.items()))),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(_grid(call, schedule, rows), 1, 1)],
        tma_descriptor_metadata={},
        kwargs={name: values[name] for name in arguments},
        tensors_to_clone=[f"out{i}_ptr" for i in range(len(outs))],
    )
    return [call(operator.getitem, launch, f"out{i}_ptr") for i in range(len(outs))]


def _strides(node: fx.Node) -> Sequence[Any]:
    return tuple(node.meta["val"].stride())


def _grid(call: Call, schedule: schedules.Schedule, rows: Any) -> Any:
    per_program = schedule.rows_per_program
    if isinstance(rows, int):
        return -(-rows // per_program)
    if per_program == 1:
        return rows
    return call(operator.floordiv, call(operator.add, rows, per_program - 1), per_program)


@cache
def _kernel(program: RowProgram, schedule: schedules.Schedule, strides: tuple[tuple[str, Any], ...]) -> Any:
    """The generated kernel with its warps and stages; one object for equal kernels: Inductor tells them by identity."""
    import triton

    source = triton_code.generate(program, schedule, dict(strides))
    kernel = triton_code.load(source, triton_code.kernel_name(program))
    config = triton.Config({}, num_warps=schedule.num_warps, num_stages=schedule.num_stages)
    return triton.autotune(configs=[config], key=[])(kernel)
