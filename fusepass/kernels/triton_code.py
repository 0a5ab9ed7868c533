"""A row program as Triton source: one readable, self-contained module with one kernel, or two for column sums."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import ProgramError
from ..row_program import Kind, RowProgram
from .column_sums import kept_rows
from .schedule import Schedule
from .triton_loop import loop_schedule, row_schedule
from .triton_sums import persistent_schedule, sum_kernel, wide_schedule
from .triton_writer import Strides, Writer, functions_used, strided

__all__ = ["Strides", "arguments", "generate", "kernel_name", "load", "sum_arguments", "sum_name"]

_SCHEDULES: dict[str, Callable[[Writer], None]] = {
    "row": row_schedule,
    "loop": loop_schedule,
    "persistent": persistent_schedule,
    "wide": wide_schedule,
}


def kernel_name(program: RowProgram) -> str:
    """The name of the kernel in the generated module: the same for equal programs."""
    return f"fusepass_{program.digest}"


def sum_name(program: RowProgram) -> str:
    """The name of the kernel that adds up the partial column sums."""
    return f"{kernel_name(program)}_sums"


def arguments(program: RowProgram, schedule: Schedule, strides: Strides) -> list[str]:
    """The names of the kernel's run-time arguments, in order.

    With column sums there is `partial_ptr`, a buffer (instances, column sums, cols) of `column_sums.sum_dtype`, and for
    the wide schedule `kept_ptr`, one (kept row values, rows) of `column_sums.kept_dtype`.
    """
    pointers = [f"{o.name}_ptr" for o in program.operands]
    pointers += [f"out{i}_ptr" for i, o in enumerate(program.outputs) if program.values[o.value].kind is not Kind.COL]
    pointers += ["partial_ptr"] * bool(program.col_sums)
    pointers += ["kept_ptr"] * (schedule.kind == "wide" and bool(kept_rows(program)))
    run_time = [
        f"{name}_stride{k}" for name, dims in strided(program, strides) for k, s in enumerate(dims) if s is None
    ]
    names = [*pointers, "rows", *program.sizes, *run_time]
    if len(set(names)) != len(names) or set(program.sizes) & set(program.values):
        raise ProgramError(f"two arguments or values of the kernel have one name: {', '.join(names)}")
    return names


def sum_arguments(program: RowProgram) -> list[str]:
    """The names of the run-time arguments of the kernel `sum_name(program)`; `programs` is the number of instances."""
    outs = [f"out{i}_ptr" for i, o in enumerate(program.outputs) if program.values[o.value].kind is Kind.COL]
    return ["partial_ptr", *outs, "programs"]


def generate(program: RowProgram, schedule: Schedule, strides: Strides, pdl: bool = False) -> str:
    """The text of a module whose kernel `kernel_name(program)` computes `program`.

    If the program has column sums, that kernel leaves partial ones, which the kernel `sum_name(program)` adds up.

    Args:
        program: the program.
        schedule: its schedule, see `schedule.choose`.
        strides: see `triton_writer.Strides`.
        pdl: whether kernels around it are launched programmatically dependent, see `triton_writer.AWAIT`.
    """
    sums = {s.name for s in program.col_sums}
    bad = [
        o.value
        for o in program.outputs
        if program.values[o.value].kind in (Kind.COL, Kind.SCALAR) and o.value not in sums
    ]
    if bad:
        raise ProgramError(f"an output must be a tile, a row value or a column sum, but {', '.join(bad)} is none")
    if cpu := [s.name for s in program.statements if s.op == "rand_cpu"]:
        raise ProgramError(f"rand_cpu draws the random numbers of a CPU, not of a GPU: {', '.join(cpu)}")
    names = arguments(program, schedule, strides)
    k = Writer(program, schedule.verify(program), strides, pdl)
    _SCHEDULES[schedule.kind](k)
    kernels = [f"def {kernel_name(program)}({', '.join(names)}):\n{k.body()}"]
    if sums:
        kernels.append(sum_kernel(program, sum_name(program), sum_arguments(program), pdl))
    functions = functions_used("\n".join(kernels))
    s = schedule
    head = [
        f"# {s.kind} schedule: tile {s.rows_per_program} x {s.block_n}, num_warps={s.num_warps}, "
        f"num_stages={s.num_stages}",
        *(f"# {line}" for line in str(program).splitlines()),
        "import triton",
        "import triton.language as tl",
    ]
    if any("libdevice." in f for f in functions):
        head.append("from triton.language.extra import libdevice")
    return "\n".join([*head, *(f"\n\n@triton.jit\n{f}" for f in (*functions, *kernels))]) + "\n"


@cache
def load(source: str, name: str) -> Any:
    """The kernel called `name` of a generated module; one object for equal texts, as Inductor tells kernels by `id`."""
    filename = f"<fusepass {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Triton and Inductor read a kernel's text through `inspect`. An entry without a time stamp is never dropped.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fusepass.generated.{name}", "__file__": filename}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]
