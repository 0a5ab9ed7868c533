"""A fused kernel's launch on a GPU, as graph nodes that Inductor's wrapper turns into plain Triton launches.

Inductor treats the generated kernel as it treats a user's own: its text goes into the compiled module, its outputs are
Inductor's buffers, and CUDA graphs, the C++ wrapper and AOTInductor work as for any other launch. A program with column
sums takes two launches: the second adds up the partial sums that the first leaves in a buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from .._torch_compat import kernel_side_table, multiprocessors, pdl, size_hint, triton_kernel_wrapper_functional
from ..row_program import Kind, RowProgram
from . import autotune as tuning
from . import schedule as schedules
from . import triton_code
from .column_sums import kept_dtype, kept_rows, sum_dtype

aten = torch.ops.aten

Call = Callable[..., fx.Node]


class _UnknownSize(Exception):
    """A symbolic size has no value in the call that is being compiled."""


def append_launch(
    call: Call,
    program: RowProgram,
    rows: Any,
    ins: Sequence[fx.Node],
    sizes: Sequence[Any],
    outs: Sequence[fx.Node],
    device: torch.device,
    autotune: bool = False,
) -> list[fx.Node]:
    """Append the launches of `program`'s kernels with `call(target, *args, **kwargs)`; return one node per output."""
    tensors = {o.name: node for o, node in zip(program.operands, ins, strict=True)}
    tensors |= {f"out{i}": node for i, node in enumerate(outs)}
    indexed = [o.name for o in program.operands if o.kind in (Kind.TILE, Kind.ROW)]
    indexed += [f"out{i}" for i, o in enumerate(program.outputs) if o.index]
    strides = {name: tuple(s if isinstance(s, int) else None for s in _strides(tensors[name])) for name in indexed}

    waits = pdl(device)
    tuner = tuning.tuner(device) if autotune else None
    job = _job(program, strides, rows, sizes, tensors, waits) if tuner else None
    schedule = tuner.schedule(job) if tuner and job else schedules.choose(program)

    def apply(function: Any, *args: Any) -> Any:
        return call(function, *args) if any(isinstance(a, fx.Node) for a in args) else function(*args)

    sums = program.col_sums
    processors = multiprocessors(device) if sums else 0  # nothing else asks for them
    grid = schedules.instances(program, schedule, rows, processors, apply)
    if sums:
        size = [grid, len(sums), program.cols]
        tensors["partial"] = call(aten.empty.memory_format, size, dtype=sum_dtype(program), device=device)
    if schedule.kind == "wide" and kept_rows(program):
        size = [rows, len(kept_rows(program))]
        tensors["kept"] = call(aten.empty.memory_format, size, dtype=kept_dtype(program), device=device)
    values = {f"{name}_ptr": node for name, node in tensors.items()}
    values |= {"rows": rows} | dict(zip(program.sizes, sizes, strict=True))
    for name in indexed:
        for k, stride in enumerate(strides[name]):
            if stride is None:
                values[f"{name}_stride{k}"] = call(aten.sym_stride.int, tensors[name], k)
    results = [f"out{i}_ptr" for i in range(len(outs))]
    arguments = triton_code.arguments(program, schedule, strides)
    writes = [name for name in (*results, "partial_ptr", "kept_ptr") if name in arguments]
    source = _source(program, schedule, tuple(strides.items()), waits)
    kernel = _kernel(source, triton_code.kernel_name(program), schedule.num_warps)
    written = _launch(call, kernel, (grid, 1, schedule.pieces), {name: values[name] for name in arguments}, writes)
    if sums:
        values |= written | {"programs": grid}
        arguments = triton_code.sum_arguments(program)
        writes = [name for name in results if name in arguments]
        kernel = _kernel(source, triton_code.sum_name(program), schedules.SUM_WARPS)
        sum_grid = (*schedules.sum_grid(program), 1)
        written |= _launch(call, kernel, sum_grid, {name: values[name] for name in arguments}, writes)
    return [written[name] for name in results]


def _launch(
    call: Call, kernel: Any, grid: tuple[Any, ...], arguments: dict[str, Any], writes: Sequence[str]
) -> dict[str, fx.Node]:
    """One launch; for each argument among `writes`, the buffer as it is afterwards."""
    launch = call(
        triton_kernel_wrapper_functional,
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[grid],
        tma_descriptor_metadata={},
        kwargs=arguments,
        tensors_to_clone=list(writes),
    )
    return {name: call(operator.getitem, launch, name) for name in writes}


def _job(
    program: RowProgram,
    strides: triton_code.Strides,
    rows: Any,
    sizes: Sequence[Any],
    tensors: dict[str, fx.Node],
    waits: bool,
) -> tuning.Job | None:
    """The launch as the call that is being compiled would make it; None where a size of that call is not known."""

    def known(size: Any) -> int:
        hint = size_hint(size.meta["val"] if isinstance(size, fx.Node) else size)
        if hint is None:
            raise _UnknownSize
        return hint

    try:
        layouts = {}
        for name, node in tensors.items():
            value = node.meta["val"]
            layouts[name] = tuning.Layout(
                tuple(map(known, value.shape)), tuple(map(known, value.stride())), value.dtype
            )
        named_sizes = dict(zip(program.sizes, map(known, sizes), strict=True))
        return tuning.Job(program, strides, known(rows), named_sizes, layouts, waits)
    except _UnknownSize:
        return None


def _strides(node: fx.Node) -> Sequence[Any]:
    return tuple(node.meta["val"].stride())


@cache
def _source(
    program: RowProgram, schedule: schedules.Schedule, strides: tuple[tuple[str, Any], ...], waits: bool
) -> str:
    """The text of the kernels, written once for equal sites."""
    return triton_code.generate(program, schedule, dict(strides), waits)


@cache
def _kernel(source: str, name: str, num_warps: int) -> Any:
    """A generated kernel with its warps; one object for equal kernels: Inductor tells them by identity."""
    import triton

    # One stage for all loops that do not say otherwise.
    config = triton.Config({}, num_warps=num_warps, num_stages=1)
    return triton.autotune(configs=[config], key=[])(triton_code.load(source, name))
