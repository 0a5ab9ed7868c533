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
    """One launch, or two for column sums. `schedule` is (kind, block_n, rows_per_program), or None for the chosen one.

    `layout`: "contiguous" (strides in the text), "padded" (rows further apart than they are long, strides at run time),
    "transposed" (columns apart, rows adjacent, strides at run time) or "expanded" (every row of an operand is the same
    memory). `data`: "normal", "shifted" (10 + normal), "ramp" (1e4 + i * 1e-3) or "tiny" (1e-3 * normal, so that eps
    counts). `edits` change the generated text. `instances` is the number of instances of a program with column sums,
    None for as many as a device with 132 multiprocessors would run; `seed` is what random numbers are drawn from.
    `candidate` is the number of one of `schedule.candidates`, launched as a measurement launches it.
    """

    name: str
    program: str
    rows: int
    schedule: tuple[str, int, int] | None = None
    layout: str = "contiguous"
    data: str = "normal"
    sizes: tuple[int, ...] = ()
    edits: tuple[tuple[str, str], ...] = field(default=())
    instances: int | None = None
    seed: int = 0
    candidate: int | None = None


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


def check(cases: list[Case]) -> None:
    """Fails with every verdict that is not good."""
    failures = {name: text for name, text in run_cases(cases).items() if text}
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


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
    """Replace the interpreter's casts from FP32 to fewer bits, which truncate, by ones that round to nearest even."""
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
    to_another_float = builder.create_fp_to_fp
    fp8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar not in fp8:
            return to_another_float(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).to(fp8[dst_type.scalar])
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), dst_type.scalar)

    builder.create_fp_to_fp = create_fp_to_fp


def give_the_interpreter_libdevice() -> None:
    """The interpreter has no libdevice: stand in for the functions that kernels use."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    for name in ("exp", "tanh", "rint"):
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
        elif layout in ("padded", "expanded"):
            strides = [1] * len(shape)
            for k in range(len(shape) - 2, -1, -1):
                strides[k] = (strides[k + 1] * max(1, shape[k + 1])) + 5
        else:
            strides = [1] * len(shape)
            for k in range(1, len(shape)):
                strides[k] = strides[k - 1] * max(1, shape[k - 1]) + 3
        if layout == "expanded" and values is not None and len(shape) > 1:
            strides, values = [*(0 for _ in shape[:-1]), 1], values[:1]
        extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        has_nan = dtype.is_floating_point
        self.around = float("nan") if values is not None and has_nan else 2.0**8 if has_nan else 0
        self.block = torch.full((extent + 2 * pad,), self.around, dtype=dtype)
        self.view = self.block.as_strided(shape, strides, pad)
        self.strides = strides
        if values is None:
            self.view.fill_(float("nan") if has_nan else 1)
        else:
            self.view[: len(values)].copy_(values) if shape else self.view.copy_(values)

    def stray_writes(self) -> int:
        """How many elements around an output have changed. Destroys the tensor."""
        self.view.fill_(self.around)
        return int((self.block != self.around).sum())


class Launch:
    """A case's tensors, and the kernels run on them."""

    def __init__(self, case: Case) -> None:
        import torch

        from fusepass.kernels import reference
        from fusepass.kernels.schedule import Schedule, candidates, choose
        from fusepass.row_program import lookups, parse

        self.case = case
        self.program = p = parse(case.program)
        self.schedule = choose(p, case.rows) if case.candidate is None else candidates(p)[case.candidate]
        if case.schedule:
            kind, block_n, rows = case.schedule
            stages, together = (3, min(8, rows * block_n)) if kind in ("persistent", "wide") else (1, 1)
            self.schedule = Schedule(kind, block_n, rows, 4, stages, together if kind == "wide" else 1)  # type: ignore[arg-type]
        self.env = dict(zip(p.sizes, case.sizes, strict=True))
        self.generator = torch.Generator().manual_seed(0)
        found = [lookup for o in p.operands for lookup in lookups(o.index)]
        self.bounds = {positions: self.env.get(bound) or int(bound) for positions, bound in found}
        self.values = [p.values[o.value] for o in p.outputs]
        self.ins = [
            Buffer(s := self._shape(o.kind, o.index), o.dtype, case.layout, self._data(o.name, o.kind, o.dtype, s))
            for o in p.operands
        ]
        cpu = torch.device("cpu")
        self.rows_of_outputs = [reference.row_indices(o.index, case.rows, self.env, cpu) for o in p.outputs]

    def _shape(self, kind: Any, index: tuple[str, ...]) -> tuple[int, ...]:
        import torch

        from fusepass.kernels import reference
        from fusepass.row_program import Kind, lookups

        if kind is Kind.SCALAR:
            return ()
        if found := lookups(index):
            leading = [self.bounds[positions] for positions, _ in found]
        else:
            indices = reference.row_indices(index, self.case.rows, self.env, torch.device("cpu"))
            leading = [int(i.max()) + 1 if len(i) else 0 for i in indices]
        return (*leading, *([self.program.cols] if kind in (Kind.TILE, Kind.COL) else []))

    def _data(self, name: str, kind: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        import torch

        from fusepass.row_program import Kind

        if name in self.bounds:
            return torch.randint(self.bounds[name], shape, generator=self.generator)
        if dtype is torch.int64:
            return torch.tensor(self.case.seed)
        normal = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if dtype is torch.bool:
            return normal > 0.3
        if kind is not Kind.TILE:
            return normal
        if self.case.data == "ramp":
            return 5e3 + torch.arange(self.program.cols, dtype=torch.float64).expand(shape) * 5e-4
        return {"normal": normal, "shifted": 5 + normal, "tiny": 1e-3 * normal}[self.case.data]

    def run(self) -> list[Buffer]:
        """The outputs, in new buffers. Raises ValueError if an edit of the text does not apply."""
        import torch

        from fusepass.kernels import autotune, column_sums, schedule, triton_code
        from fusepass.row_program import Kind

        case, p = self.case, self.program
        outs = [
            Buffer(self._shape(v.kind, o.index), v.dtype, "contiguous" if v.kind is Kind.COL else case.layout)
            for v, o in zip(self.values, p.outputs, strict=True)
        ]
        named = [(o.name, o.index, b) for o, b in zip(p.operands, self.ins, strict=True)]
        named += [(f"out{i}", o.index, b) for i, (o, b) in enumerate(zip(p.outputs, outs, strict=True))]
        strides, given = {}, {f"{name}_ptr": b.view for name, _, b in named}
        for name, index, buffer in named:
            if index:
                strides[name] = [s if case.layout == "contiguous" else None for s in buffer.strides]
                given |= {f"{name}_stride{k}": s for k, s in enumerate(buffer.strides)}
        if case.candidate is not None:
            job = autotune.Job(p, strides, case.rows, self.env, {})
            autotune.launcher(job, self.schedule, {name: b.view for name, _, b in named}, 132)()
            return outs
        source = triton_code.generate(p, self.schedule, strides)
        for old, new in case.edits:
            if old not in source:
                raise ValueError(f"edit does not apply: {old!r}")
            source = source.replace(old, new)
        grid = schedule.instances(p, self.schedule, case.rows, 132)
        sums, kept = p.col_sums, column_sums.kept_rows(p)
        if sums:
            grid = case.instances or grid
            poison = float("nan")  # a partial sum, or a row value, that is read without having been written
            given["partial_ptr"] = torch.full((grid, len(sums), p.cols), poison, dtype=column_sums.sum_dtype(p))
            given["kept_ptr"] = torch.full((case.rows, len(kept)), poison, dtype=column_sums.kept_dtype(p))
        given |= {"rows": case.rows, "programs": grid} | self.env
        if grid:
            kernel = triton_code.load(source, triton_code.kernel_name(p))
            kernel[(grid, 1, self.schedule.pieces)](
                *(given[name] for name in triton_code.arguments(p, self.schedule, strides))
            )
        if sums:
            kernel = triton_code.load(source, triton_code.sum_name(p))
            kernel[schedule.sum_grid(p)](*(given[name] for name in triton_code.sum_arguments(p)))
        return outs


def verdict(case: Case) -> str:
    import torch

    from fusepass.kernels import reference
    from fusepass.kernels.column_sums import sum_dtype
    from fusepass.row_program import Kind
    from tests.tolerances import EAGER_FACTOR, ROUNDING_UNIT, allowed_error, assert_close_to_fp64

    launch = Launch(case)
    program, ins = launch.program, launch.ins
    before = [b.block.clone() for b in ins]
    outs = launch.run()
    if program.col_sums:
        again = launch.run()
        if any(not torch.equal(a.view.nan_to_num(7), b.view.nan_to_num(7)) for a, b in zip(outs, again, strict=True)):
            return "a second run gives other bits"
    tensors = [b.view for b in ins]
    rounded = reference.evaluate(program, case.rows, tensors, case.sizes)
    exact = reference.evaluate(program, case.rows, tensors, case.sizes, fp64=True)
    if any(not torch.equal(a.nan_to_num(7), b.block.nan_to_num(7)) for a, b in zip(before, ins, strict=True)):
        return "an input was written"
    for i, (out, value) in enumerate(zip(outs, launch.values, strict=True)):
        got = out.view[launch.rows_of_outputs[i]] if value.kind is not Kind.COL else out.view
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
            scale = max(scale, *(float(t.double().abs().max()) for t in tensors if t.numel()))
            error, torchs = (float((r.double() - exact[i]).abs().max()) for r in (got, rounded[i]))
            if error > EAGER_FACTOR * torchs + 4 * ROUNDING_UNIT[value.dtype] * scale:
                return (
                    f"out {i} ({value.name}): error {error:.3g} against FP64, torch's {torchs:.3g}, scale {scale:.3g}"
                )
        elif value.kind is Kind.COL:  # so may those of a column sum, whose order is another than torch's
            scale = max(
                scale, case.rows**0.5 * max((float(t.double().abs().max()) for t in tensors if t.numel()), default=0.0)
            )
            unit = ROUNDING_UNIT[sum_dtype(program)]
            excess = (got.double() - exact[i]).abs() - allowed_error(rounded[i], exact[i], value.dtype)
            if float(excess.max()) > 4 * unit * scale:
                return f"out {i} ({value.name}): error {float(excess.max()):.3g} above torch's, scale {scale:.3g}"
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
        # Where a program rounds twice, one element in 10,000 may have its first rounding go the other way. A column
        # sum has as many of them as there are rows.
        far = int(((got.double() - rounded[i].double()).abs() > allowed).sum())
        if case.data != "ramp" and far > got.numel() * (case.rows if value.kind is Kind.COL else 1) // 10_000:
            return f"out {i} ({value.name}): {far} elements are over a rounding away from torch's"
    return ""


_APPROXIMATE = {"exp", "tanh", "erf", "sigmoid", "rsqrt", "row_sum", "row_mean", "col_sum"}


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
