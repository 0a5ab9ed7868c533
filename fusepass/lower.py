"""Stage 6a, lower: the graph nodes that call a fused kernel, for the device it runs on.

On a CPU: `fusepass::row_program_`, an op that writes into outputs that Inductor allocates, behind
`auto_functionalized_v2` (an op that allocated its own would lose Inductor's buffer reuse). On a GPU: a
`triton_kernel_wrapper_functional` node, which Inductor's wrapper turns into a plain launch of the generated kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch_compat import auto_functionalized_v2, inductor_config
from .kernels import ops, wrapper_call
from .kernels.cpp_placement import overwritable
from .row_program import Kind, RowProgram

aten = torch.ops.aten

Call = Callable[..., fx.Node]
"""`call(target, *args, **kwargs)`: append a node with its fake value in `meta["val"]`."""


@dataclass(frozen=True)
class KernelCall:
    """One use of a row program in a graph.

    `rows` and `sizes` are ints or nodes that hold a SymInt. `leads` has the leading dimensions of each output, one for
    each of its row-index expressions. `dying` numbers the operands whose memory is free
    after the kernel: on a CPU an output is written over one of them where it can be, which spares a buffer and the
    reading of its cache lines before they are written. `autotune` asks for a measured schedule on a GPU.
    """

    program: RowProgram
    rows: Any
    ins: Sequence[fx.Node]
    sizes: Sequence[Any]
    device: torch.device
    leads: Sequence[Sequence[Any]]
    dying: frozenset[int] = frozenset()
    autotune: bool = False


def lower(call: Call, kernel: KernelCall) -> list[fx.Node]:
    """Append the nodes that run `kernel`; return one node per output, of shape (*lead, cols), (*lead,) or (cols,)."""
    return (_lower_cpp if kernel.device.type == "cpu" else _lower_triton)(call, kernel)


def _new_output(call: Call, kernel: KernelCall, number: int) -> fx.Node:
    p = kernel.program
    value = p.values[p.outputs[number].value]
    lead = kernel.leads[number]
    shape = {Kind.TILE: [*lead, p.cols], Kind.ROW: [*lead], Kind.COL: [p.cols]}[value.kind]
    return call(aten.empty.memory_format, shape, dtype=value.dtype, device=kernel.device)


def _lower_cpp(call: Call, kernel: KernelCall) -> list[fx.Node]:
    # Inductor's C++ wrapper copies strings into its source as they are.
    text = kernel.program.one_line if inductor_config.cpp_wrapper else str(kernel.program)
    outs: list[fx.Node] = []
    free = set(kernel.dying)
    for number, candidates in enumerate(overwritable(kernel.program)):
        over = next((i for i in candidates if i in free), None)
        free.discard(over)
        outs.append(_new_output(call, kernel, number) if over is None else kernel.ins[over])
    wrapper_call.register()
    ops.prefetch(text)
    fused = call(
        auto_functionalized_v2,
        torch.ops.fusepass.row_program_.default,
        program=text,
        rows=kernel.rows,
        ins=list(kernel.ins),
        sizes=list(kernel.sizes),
        _outs_length=len(outs),
        **{f"_outs_{i}_base_index": i for i in range(len(outs))},
        _all_bases=outs,
    )
    return [call(operator.getitem, fused, i + 1) for i in range(len(outs))]


def _lower_triton(call: Call, kernel: KernelCall) -> list[fx.Node]:
    from .kernels import triton_launch

    outs = [_new_output(call, kernel, i) for i in range(len(kernel.program.outputs))]
    return triton_launch.append_launch(
        call, kernel.program, kernel.rows, kernel.ins, kernel.sizes, outs, kernel.device, kernel.autotune
    )
