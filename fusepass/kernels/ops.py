"""The op that runs a row program: `fusepass::row_program_(program, rows, ins, sizes, *, outs)`.

It writes into `outs`, which the caller has allocated. On a CPU it launches the generated C++ kernel; on any other
device, and where the kernel cannot be built, it evaluates the program with plain torch operations. Its fake
implementation does nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from .._torch_compat import in_the_pool
from ..errors import KernelError, PositionError
from ..row_program import Kind, RowProgram, bracketed, lookup, lookups, parse
from . import cpp_build, reference

log = logging.getLogger(__name__)

Tensors = Sequence[torch.Tensor]
Launcher = Callable[[int, Tensors, Sequence[int], Tensors], None]

_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("needs_exact_strides", "needs_fixed_stride_order") if hasattr(torch.Tag, name)
)[:1]

_loading = threading.RLock()
_launchers: dict[str, Launcher] = {}
_kernels: dict[str, cpp_build.Kernel | None] = {}
_builds: dict[str, Callable[[], cpp_build.Kernel]] = {}


def prefetch(program: str) -> None:
    """Start compiling the kernel for `program` in the background. A failure shows when the kernel is first run."""
    if program not in _kernels and program not in _builds:
        try:
            _builds[program] = cpp_build.start(parse(program))
        except Exception as error:
            _builds[program] = partial(_raise, error)


def built(program: str) -> None:
    """Wait until the kernel for `program` has been built. Raises what its build raised, which `run` would not."""
    with _loading:
        if _kernels.get(program) is None:
            _kernels.pop(program, None)  # one that has failed is built again, for its error
            prefetch(program)
            _kernels[program] = _with_position_errors(parse(program), _builds.pop(program)())


def run(program: str, rows: int, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
    """Run `program` on CPU tensors. Raises KernelError, naming the operand, where a tensor does not fit it."""
    (_launchers.get(program) or _load(program))(rows, ins, sizes, outs)


def run_eagerly(program: str, rows: int, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
    """Run `program` with plain torch operations, on any device."""
    _launch_reference(parse(program), rows, ins, sizes, outs)


def loaded(program: str) -> Any:
    """What calls the kernel with `cpp_code.argument_types`: for modules that Inductor writes, which wait for it.

    Where it cannot be built, plain torch operations take the same arguments.
    """
    prefetch(program)
    return in_the_pool(lambda: _kernel(program) or partial(_run_by_position, parse(program)))


def _raise(error: Exception) -> cpp_build.Kernel:
    raise error


def _kernel(program: str) -> cpp_build.Kernel | None:
    """The built kernel; None where there is no compiler, or it fails: slower, but right."""
    with _loading:
        if program not in _kernels:
            try:
                built(program)
            except Exception as error:
                digest = parse(program).digest
                log.warning("kernel %s could not be built and runs as plain torch operations: %s", digest, error)
                _kernels[program] = None
        return _kernels[program]


def _with_position_errors(program: RowProgram, kernel: cpp_build.Kernel) -> cpp_build.Kernel:
    """`kernel`, raising `PositionError` for what C++ can only raise as a RuntimeError."""
    if not any(lookups(o.index) for o in program.operands):
        return kernel

    def looking_up(*arguments: Any) -> None:
        try:
            kernel(*arguments)
        except RuntimeError as error:
            if "is not in the range from 0 to" not in str(error):
                raise
            raise PositionError(str(error)) from None

    return looking_up


def _load(program: str) -> Launcher:
    with _loading:
        if program not in _launchers:
            parsed, kernel = parse(program), _kernel(program)
            _launchers[program] = _cpp_launcher(parsed, kernel) if kernel else partial(_launch_reference, parsed)
        return _launchers[program]


# ---- what a tensor has to be ----


class _Slot:
    """One operand or output of a program: how its tensor is checked and turned into kernel arguments."""

    def __init__(
        self, program: RowProgram, name: str, label: str, index: tuple[str, ...], is_output: bool = False
    ) -> None:
        value = program.values[name]
        self.is_output = is_output
        self.label, self.kind, self.dtype, self.index = label, value.kind, value.dtype, index
        self.last = {Kind.TILE: (program.cols,)}.get(value.kind, ())
        self.cols = program.cols
        self.extents = [_extent(expr, program.sizes) for expr in index]

    def fast(self, i: int) -> tuple[str, list[str]] | None:
        """For tensor number `i`: a test that it is contiguous and fits, and then its arguments; None: there is none."""
        is_row_wise = self.kind in (Kind.TILE, Kind.ROW)
        if is_row_wise and (self.index != ("row",) or self.cols == 1):  # one column: the tensor might have no dimension
            return None
        count = {Kind.TILE: f"rows * {self.cols}", Kind.ROW: "rows", Kind.COL: f"{self.cols}", Kind.SCALAR: "1"}[
            self.kind
        ]
        strides = {Kind.TILE: [f"{self.cols}", "1"], Kind.ROW: ["1"], Kind.COL: ["1"], Kind.SCALAR: []}[self.kind]
        test = f"t{i}.dtype is dtypes[{i}] and t{i}.is_contiguous() and t{i}.numel() == {count}"
        return test + f" and t{i}.shape[-1] == {self.cols}" * (self.kind is Kind.TILE), [f"t{i}", *strides]

    def fail(self, expected: str, given: object) -> KernelError:
        return KernelError(f"{self.label}: expected {expected}, given {given}")

    def resolve(self, tensor: torch.Tensor, rows: int, sizes: Sequence[int]) -> torch.Tensor:
        """The tensor with one leading dimension per row-index expression: a view, or a copy where there is no view."""
        if tensor.dtype is not self.dtype:
            raise self.fail(f"dtype {self.dtype}", tensor.dtype)
        shape = tuple(tensor.shape)
        if self.kind in (Kind.COL, Kind.SCALAR):
            count = self.cols if self.kind is Kind.COL else 1
            if tensor.numel() != count:
                raise self.fail(f"{count} elements", f"shape {shape}")
            return tensor.reshape(count)
        if self.kind is Kind.TILE and shape[-1:] != self.last:
            raise self.fail(f"a last dimension of cols={self.cols}", f"shape {shape}")
        if self.kind is Kind.ROW and tensor.dim() == len(self.index) + 1 and shape[-1] == 1:
            tensor = tensor.squeeze(-1)
        leading = tensor.dim() - len(self.last)
        if leading != len(self.index):
            if len(self.index) > 1:
                raise self.fail(f"one leading dimension for each of [{', '.join(self.index)}]", f"shape {shape}")
            tensor = tensor.reshape(math.prod(tensor.shape[:leading]), *self.last)
        for size, expr, extent in zip(tensor.shape, self.index, self.extents, strict=False):
            needed = extent(rows, *sizes)
            if size < needed or (expr == "row" and size != needed):
                raise self.fail(f"a dimension of {needed} for {expr!r} with rows={rows}", f"shape {shape}")
        return tensor


def _extent(expr: str, sizes: Sequence[str]) -> Callable[..., int]:
    """`(rows, *sizes) -> int`: how long a dimension has to be to be indexed by `expr` for every row."""
    quotient, _, modulus = bracketed(expr).partition(" % ")
    last = quotient.replace("row", "(rows - 1)") + " + 1"
    bound = f"min({last}, {modulus})" if modulus else "1" if expr == "0" else last
    if found := lookup(expr):
        bound = found[1]
    text = f"lambda {', '.join(['rows', *sizes])}: {bound} if rows else 0"  # of verified names and numbers
    return cast(Callable[..., int], eval(text, {"__builtins__": {"min": min}}))


def _slots(program: RowProgram) -> tuple[list[_Slot], list[_Slot]]:
    ins = [_Slot(program, o.name, f"operand {o.name}", o.index) for o in program.operands]
    outs = [_Slot(program, o.value, f"output {i} ({o.value})", o.index, True) for i, o in enumerate(program.outputs)]
    return ins, outs


def _check_counts(program: RowProgram, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
    for what, expected, given in (
        ("operands", len(program.operands), len(ins)),
        ("sizes", len(program.sizes), len(sizes)),
        ("outputs", len(program.outputs), len(outs)),
    ):
        if expected != given:
            raise KernelError(f"row program {program.digest}: expected {expected} {what}, given {given}")


# ---- launching ----


def _cpp_launcher(program: RowProgram, kernel: cpp_build.Kernel) -> Launcher:
    """A function that checks its tensors and calls `kernel`."""
    in_slots, out_slots = _slots(program)

    def launch(rows: int, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
        _check_counts(program, ins, sizes, outs)
        arguments: list[Any] = [torch.get_num_threads(), rows, program.cols, *sizes]
        copies = []
        for slot, tensor in zip((*in_slots, *out_slots), (*ins, *outs), strict=True):
            resolved = slot.resolve(tensor, rows, sizes)
            arguments += (resolved, *(resolved.stride() if slot.kind is not Kind.SCALAR else ()))
            if slot.is_output and resolved.data_ptr() != tensor.data_ptr():
                copies.append((tensor, resolved))
        kernel(*arguments)
        for tensor, copy in copies:
            tensor.copy_(copy.reshape(tensor.shape))

    return _fast_launcher(program, kernel, launch)


def _fast_launcher(program: RowProgram, kernel: cpp_build.Kernel, launch: Launcher) -> Launcher:
    """`launch`, with a short cut where all tensors are contiguous over `[row]`.

    It is written as text, without a loop over the tensors: it runs before every kernel, and a loop doubles its time.
    """
    in_slots, out_slots = _slots(program)
    slots = [*in_slots, *out_slots]
    checks = [check for i, slot in enumerate(slots) if (check := slot.fast(i))]
    if program.sizes or len(checks) != len(slots):
        return launch
    names = [f"t{i}" for i in range(len(slots))]
    arguments = ", ".join(argument for _, arguments in checks for argument in arguments)
    text = f"""
def fast_launch(rows, ins, sizes, outs):
    if len(ins) == {len(in_slots)} and len(outs) == {len(out_slots)} and not sizes:
        [{", ".join(names[: len(in_slots)])}] = ins
        [{", ".join(names[len(in_slots) :])}] = outs
        if {" and ".join(test for test, _ in checks)}:
            return kernel(get_num_threads(), rows, {program.cols}, {arguments})
    return launch(rows, ins, sizes, outs)
"""
    scope = {
        "dtypes": [slot.dtype for slot in slots],
        "kernel": kernel,
        "launch": launch,
        "get_num_threads": torch.get_num_threads,
    }
    exec(text, scope)
    return cast(Launcher, scope["fast_launch"])


def _launch_reference(program: RowProgram, rows: int, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
    _check_counts(program, ins, sizes, outs)
    in_slots, out_slots = _slots(program)
    resolved = [slot.resolve(tensor, rows, sizes) for slot, tensor in zip(in_slots, ins, strict=True)]
    results = reference.evaluate(program, rows, resolved, sizes)
    env = dict(zip(program.sizes, sizes, strict=True))
    for slot, out, result in zip(out_slots, outs, results, strict=True):
        target = slot.resolve(out, rows, sizes)
        if slot.index:
            target[reference.row_indices(slot.index, rows, env, target.device)] = result
        else:
            target.copy_(result.reshape(target.shape))
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.reshape(out.shape))


def _run_by_position(program: RowProgram, _threads: int, rows: int, _cols: int, *rest: Any) -> None:
    """`_launch_reference` with the arguments of the C++ kernel."""
    sizes, rest = rest[: len(program.sizes)], rest[len(program.sizes) :]
    tensors = []
    in_slots, out_slots = _slots(program)
    for slot in (*in_slots, *out_slots):
        size = [extent(rows, *sizes) for extent in slot.extents]
        size += {Kind.TILE: [program.cols], Kind.COL: [program.cols]}.get(slot.kind, [])
        base, stride, rest = rest[0], rest[1 : 1 + len(size)], rest[1 + len(size) :]
        tensors.append(base.as_strided(size, stride, base.storage_offset()))
    _launch_reference(program, rows, tensors[: len(in_slots)], sizes, tensors[len(in_slots) :])


def _do_nothing(program: str, rows: int, ins: Tensors, sizes: Sequence[int], outs: Tensors) -> None:
    """The op under fake and meta tensors: the outputs exist already."""


_library = torch.library.Library("fusepass", "FRAGMENT")
# `outs` is keyword-only: for lists that an op writes into, among its positional arguments, torch.cond raises an error.
_library.define(
    "row_program_(str program, SymInt rows, Tensor[] ins, SymInt[] sizes, *, Tensor(a!)[] outs) -> ()", tags=_TAGS
)
_library.impl("row_program_", run, "CPU")
_library.impl("row_program_", _do_nothing, "Meta")
_library.impl("row_program_", run_eagerly, "CompositeExplicitAutograd")
