"""Runs generated Triton kernels in Triton's interpreter, which must be switched on before triton is imported.

`run_cases` starts this file as a process of its own, which reads a list of cases from each line of its input and
answers with a verdict on each. A verdict is "" or says what is wrong.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One launch. `schedule` is (kind, block_n, rows_per_program), or None for the chosen one.

    `layout`: "contiguous" (strides in the text), "padded" (rows further apart than they are long, strides at run time)
    or "transposed" (columns apart, rows adjacent, strides at run time). `data`: "normal", "shifted" (10 + normal),
    "ramp" (1e4 + i * 1e-3) or "tiny" (1e-3 * normal, so that eps counts). `edits` change the generated text.
    """

    name: str
    program: str
    rows: int
    schedule: tuple[str, int, int] | None = None
    layout: str = "contiguous"
    data: str = "normal"
    sizes: tuple[int, ...] = ()
    edits: tuple[tuple[str, str], ...] = field(default=())


_workers: list[subprocess.Popen[str]] = []


def run_cases(cases: list[Case]) -> dict[str, str]:
    """The verdict on every case, by name. Two worker processes live until this one ends; a dead one is replaced."""
    while len(_workers) < 2:
        _workers.append(_start_worker())
    for i, worker in enumerate(_workers):
        assert worker.stdin
        worker.stdin.write(json.dumps([asdict(case) for case in cases[i::2]]) + "\n")
        worker.stdin.flush()
    verdicts: dict[str, str] = {}
    for worker in list(_workers):
        assert worker.stdout
        line = worker.stdout.readline()
        if not line:
            _workers.remove(worker)
            raise RuntimeError(f"the interpreter process died with status {worker.wait()}; its errors are above")
        verdicts.update(json.loads(line))
    if len(verdicts) != len(cases) or {case.name for case in cases} != set(verdicts):
        raise RuntimeError("cases without a verdict, or names used twice")
    return verdicts


def _start_worker() -> subprocess.Popen[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    atexit.register(_stop, worker)
    return worker


def _stop(worker: subprocess.Popen[str]) -> None:
    worker.communicate("")  # the end of its input is the end of its work


# Below: only in the worker process.


def make_the_interpreter_round() -> None:
    """Replace the interpreter's casts between FP32 and bfloat16, which truncate, by ones that round to nearest even."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        data = np.ascontiguousarray(src.data)
        if pair == (tl.float32, tl.bfloat16):
            bits = torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        elif pair == (tl.bfloat16, tl.float32):
            bits = (data.astype(np.uint32) << 16).view(np.float32)
        else:
            return original(self, src, dst_type)
        return interpreter.TensorHandle(bits, dst_type.scalar)

    builder.cast_impl = cast_impl


def give_the_interpreter_libdevice() -> None:
    """The interpreter has no libdevice: stand in for the two functions that kernels use."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    for name in ("exp", "tanh"):
        ufunc = getattr(np, name)
        setattr(libdevice, name, lambda a, f=ufunc: tl.tensor(TensorHandle(f(a.handle.data), a.dtype.scalar), a.type))


class Buffer:
    """A tensor inside a larger block, so that strays show: NaN around an input, a value of its own around an output."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, layout: str, values: Any = None) -> None:
        import torch

        pad = 4096
        if layout == "contiguous" or not shape:
            strides = [1] * len(shape)
            for k in range(len(shape) - 2, -1, -1):
                strides[k] = strides[k + 1] * max(1, shape[k + 1])
        elif layout == "padded":
            strides = [1] * len(shape)
            for k in range(len(shape) - 2, -1, -1):
                strides[k] = (strides[k + 1] * max(1, shape[k + 1])) + 5
        else:
            strides = [1] * len(shape)
            for k in range(1, len(shape)):
                strides[k] = strides[k - 1] * max(1, shape[k - 1]) + 3
        extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        self.around = float("nan") if values is not None else 12288.0
        self.block = torch.full((extent + 2 * pad,), self.around, dtype=dtype)
        self.view = self.block.as_strided(shape, strides, pad)
        self.strides = strides
        self.view.copy_(torch.tensor(float("nan")) if values is None else values)

    def stray_writes(self) -> int:
        """How many elements around an output have changed. Destroys the tensor."""
        self.view.fill_(self.around)
        return int((self.block != self.around).sum())


def verdict(case: Case) -> str:
    import torch

    from fusepass.kernels import reference, triton_code
    from fusepass.kernels.schedule import Schedule, choose
    from fusepass.row_program import Kind, parse
    from tests.tolerances import EAGER_FACTOR, ROUNDING_UNIT, allowed_error, assert_close_to_fp64

    program = parse(case.program)
    schedule = Schedule(*case.schedule, num_warps=4) if case.schedule else choose(program, case.rows)
    env = dict(zip(program.sizes, case.sizes, strict=True))
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")

    def shape(kind: Kind, index: tuple[str, ...]) -> tuple[int, ...]:
        if kind is Kind.SCALAR:
            return ()
        indices = reference.row_indices(index, case.rows, env, cpu)
        leading = [int(i.max()) + 1 if len(i) else 0 for i in indices]
        return (*leading, *([program.cols] if kind in (Kind.TILE, Kind.COL) else []))

    def data(kind: Kind, shape: tuple[int, ...]) -> Any:
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind is not Kind.TILE:
            return normal
        if case.data == "ramp":
            return 5e3 + torch.arange(program.cols, dtype=torch.float64).expand(shape) * 5e-4
        return {"normal": normal, "shifted": 5 + normal, "tiny": 1e-3 * normal}[case.data]

    ins = [Buffer(s := shape(o.kind, o.index), o.dtype, case.layout, data(o.kind, s)) for o in program.operands]
    values = [program.values[o.value] for o in program.outputs]
    outs = [Buffer(shape(v.kind, o.index), v.dtype, case.layout) for v, o in zip(values, program.outputs, strict=True)]
    strides, run_time = {}, []
    named = [(o.name, o.index, b) for o, b in zip(program.operands, ins, strict=True)]
    named += [(f"out{i}", o.index, b) for i, (o, b) in enumerate(zip(program.outputs, outs, strict=True))]
    for name, index, buffer in named:
        if index:
            strides[name] = [s if case.layout == "contiguous" else None for s in buffer.strides]
            run_time += [] if case.layout == "contiguous" else buffer.strides
    source = triton_code.generate(program, schedule, strides)
    for old, new in case.edits:
        if old not in source:
            return f"edit does not apply: {old!r}"
        source = source.replace(old, new)
    kernel = triton_code.load(source, triton_code.kernel_name(program))
    arguments = [*(b.view for b in ins), *(b.view for b in outs), case.rows, *case.sizes, *run_time]
    assert len(arguments) == len(triton_code.arguments(program, strides))
    before = [b.block.clone() for b in ins]
    launches = triton_code.grid(program, schedule, case.rows)
    if launches:
        kernel[(launches,)](*arguments)

    tensors = [b.view for b in ins]
    rounded = reference.evaluate(program, case.rows, tensors, case.sizes)
    exact = reference.evaluate(program, case.rows, tensors, case.sizes, fp64=True)
    if any(not torch.equal(a.nan_to_num(7), b.block.nan_to_num(7)) for a, b in zip(before, ins, strict=True)):
        return "an input was written"
    for i, (out, value) in enumerate(zip(outs, values, strict=True)):
        got = out.view[reference.row_indices(program.outputs[i].index, case.rows, env, cpu)]
        got = got.reshape(rounded[i].shape).clone()
        if stray := out.stray_writes():
            return f"out {i} ({value.name}): {stray} writes outside the tensor"
        if not got.numel():
            continue
        if torch.isnan(got).any():
            return f"out {i} ({value.name}): {int(torch.isnan(got).sum())} of {got.numel()} elements are NaN"
        if not _APPROXIMATE & set(_ops_behind(program, value.name)):
            if not torch.equal(got, rounded[i]):
                return f"out {i} ({value.name}): not bit-equal to torch in {int((got != rounded[i]).sum())} elements"
            continue
        scale = float(exact[i].abs().max())
        if value.kind is Kind.ROW:  # the terms of a sum may cancel: its error is measured against them
            scale = max(scale, *(float(t.abs().max()) for t in tensors if t.numel()))
            error, torchs = (float((r.double() - exact[i]).abs().max()) for r in (got, rounded[i]))
            if error > EAGER_FACTOR * torchs + 4 * ROUNDING_UNIT[value.dtype] * scale:
                return (
                    f"out {i} ({value.name}): error {error:.3g} against FP64, torch's {torchs:.3g}, scale {scale:.3g}"
                )
        elif case.data in (
            "shifted",
            "ramp",
        ):  # every element of a row shares its mean's error: an average says nothing
            excess = (got.double() - exact[i]).abs() - allowed_error(rounded[i], exact[i], value.dtype)
            if bool((excess > 0).any()):
                return f"out {i} ({value.name}): {int((excess > 0).sum())} errors above 1.1 times torch's largest"
        else:
            try:
                assert_close_to_fp64(got, rounded[i], exact[i], value.dtype)
            except AssertionError as e:
                return f"out {i} ({value.name}): {e}"
        # A rounding of the program that is left out lowers the error: it shows against torch's result alone. (On a
        # ramp, whose mean is far above its spread, the order of summation shows as well.)
        noise = 2.0**-46 if any(v.dtype == torch.float64 for v in program.values.values()) else 2.0**-18
        allowed = torch.finfo(value.dtype).eps * rounded[i].double().abs() + noise * scale
        if case.data != "ramp" and bool((excess := (got.double() - rounded[i].double()).abs() - allowed).max() > 0):
            return f"out {i} ({value.name}): {int((excess > 0).sum())} elements are over a rounding away from torch's"
    return ""


_APPROXIMATE = {"exp", "tanh", "erf", "sigmoid", "rsqrt", "row_sum", "row_mean"}


def _ops_behind(program: Any, name: str) -> list[str]:
    """The operations that a value is computed with."""
    value = program.values[name]
    return [value.op, *(op for a in value.value_args for op in _ops_behind(program, a))] if hasattr(value, "op") else []


def main() -> None:
    make_the_interpreter_round()
    give_the_interpreter_libdevice()
    for line in sys.stdin:
        verdicts = {}
        for raw in json.loads(line):
            schedule = raw.pop("schedule")
            case = Case(**raw, schedule=tuple(schedule) if schedule else None)
            try:
                verdicts[case.name] = verdict(case)
            except Exception:
                verdicts[case.name] = traceback.format_exc()
        sys.stdout.write(json.dumps(verdicts) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
