"""Schedules chosen by measurement on the GPU that a graph is compiled for, and remembered on disk.

Each candidate is launched on random tensors of the sizes and strides that the kernel will get, and timed; the default
is kept unless another is clearly faster. What is known of a kernel holds for all numbers of rows up to the same power
of two, so that another batch size finds it. A file holds one choice and is replaced as a whole: processes may share a
folder. Whatever goes wrong is logged, and the default is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .._torch_compat import inductor_cache_dir, multiprocessors, no_dispatch_modes
from ..row_program import RowProgram, lookups
from . import schedule as schedules
from . import triton_code
from .column_sums import kept_dtype, kept_rows, sum_dtype
from .schedule import PARTIAL_SHARE, Schedule

log = logging.getLogger("fusepass.kernels.autotune")

MARGIN = 0.98  # of the default's time, which a candidate must stay below: two runs of one kernel differ by as much
WARMUP_MS, REPEAT_MS = 10, 50


@dataclass(frozen=True)
class Layout:
    """A tensor to come: its sizes, strides and dtype."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Job:
    """A kernel to be launched. `strides` are those that its text is written for, `layouts` those of its tensors."""

    program: RowProgram
    strides: triton_code.Strides
    rows: int
    sizes: Mapping[str, int]
    layouts: Mapping[str, Layout]
    pdl: bool = False

    @property
    def bucket(self) -> int:
        """The number of rows that stands for this one."""
        return schedules.next_power_of_two(self.rows)

    def source(self, schedule: Schedule) -> str:
        return triton_code.generate(self.program, schedule, self.strides, self.pdl)


Stopwatch = Callable[[Job], Callable[[Schedule], float]]
"""Makes a job's tensors; what it returns gives the milliseconds that a schedule takes, or raises."""


class Tuner:
    """Chooses schedules for one device.

    Args:
        device: its name; choices are kept apart by it.
        multiprocessors: how many it has.
        folder: where choices are kept, None for nowhere.
        stopwatch: see `Stopwatch`.
    """

    def __init__(self, device: str, multiprocessors: int, folder: Path | None, stopwatch: Stopwatch) -> None:
        self.device, self.multiprocessors, self.folder, self.stopwatch = device, multiprocessors, folder, stopwatch
        self.known: dict[str, Schedule] = {}

    def schedule(self, job: Job) -> Schedule:
        """The fastest of the candidates for `job`: as known, as found on disk, or as measured now."""
        default, *others = self._distinct(job)
        if not others or not job.rows:
            return default
        key = self._key(job, default)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        path = self.folder / f"{job.program.digest}-{job.bucket}-{digest}.json" if self.folder else None
        chosen = self.known.get(digest) or (path and _read(path, key, schedules.candidates(job.program)))
        if not chosen:
            try:
                times = self._measure(job, [default, *others])
            except Exception as error:
                log.warning("kernel %s is not tuned: %s: %s", job.program.digest, type(error).__name__, error)
                return default
            chosen = _fastest(times, default)
            log.info("kernel %s, up to %d rows: %s", job.program.digest, job.bucket, chosen)
            if path:
                _write(path, key, chosen, times)
        self.known[digest] = chosen
        return chosen

    def _distinct(self, job: Job) -> list[Schedule]:
        """The candidates, the default first, without those that come to as many instances of an equal kernel."""
        found: dict[tuple[Schedule, int], Schedule] = {}
        for s in schedules.candidates(job.program):
            count = schedules.instances(job.program, s, job.rows, self.multiprocessors)
            found.setdefault((replace(s, partial_share=PARTIAL_SHARE, residents=1), count), s)
        return list(found.values())

    def _key(self, job: Job, default: Schedule) -> dict[str, Any]:
        """All that a choice depends on; the kernel's text holds the program, the strides and how it is launched."""
        import triton

        return {
            "device": self.device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kernel": hashlib.sha256(job.source(default).encode()).hexdigest(),
            "layouts": {name: [str(t.dtype), *t.stride] for name, t in job.layouts.items() if 0 in t.stride},
            "rows": job.bucket,
        }

    def _measure(self, job: Job, candidates: Sequence[Schedule]) -> dict[Schedule, float]:
        """Milliseconds of every candidate that runs. Raises what the first, the default, raises."""
        milliseconds = self.stopwatch(job)
        times: dict[Schedule, float] = {}
        for s in candidates:
            try:
                times[s] = milliseconds(s)
            except Exception as error:
                if s is candidates[0]:
                    raise
                log.info("kernel %s does not run as %s: %s", job.program.digest, s, error)
        return times


def _fastest(times: Mapping[Schedule, float], default: Schedule) -> Schedule:
    best = min(times, key=times.__getitem__)
    return best if times[best] < MARGIN * times[default] else default


def _read(path: Path, key: Mapping[str, Any], candidates: Sequence[Schedule]) -> Schedule | None:
    """The choice that a file holds, if it was made for `key` and is still among the candidates."""
    try:
        entry = json.loads(path.read_text())
        if entry["key"] == key and (chosen := Schedule(**entry["schedule"])) in candidates:
            return chosen
        log.warning("%s holds no choice among today's candidates and is replaced", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read and is replaced: %s: %s", path, type(error).__name__, error)
    return None


def _write(path: Path, key: Mapping[str, Any], chosen: Schedule, times: Mapping[Schedule, float]) -> None:
    measured = [{"schedule": asdict(s), "milliseconds": t} for s, t in times.items()]
    entry = {"key": key, "schedule": asdict(chosen), "measured": measured}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entry, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        log.warning("a tuned schedule cannot be kept: %s", error)


# ---- on a GPU ----


def tuner(device: torch.device) -> Tuner | None:
    """The tuner for a GPU; None where there is none that could run a kernel."""
    built = torch.backends.cuda.is_built() and torch.cuda.is_available()
    if device.type != "cuda" or not built or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        root = inductor_cache_dir()
    except OSError as error:
        log.warning("tuned schedules are not kept: %s", error)
        root = None
    return _tuner(torch.device("cuda", index), root)


@cache
def _tuner(device: torch.device, root: str | None) -> Tuner:
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name} {getattr(properties, 'gcnArchName', '') or f'sm_{properties.major}{properties.minor}'}"
    folder = Path(root, "fusepass", "".join(c if c.isalnum() else "-" for c in name)) if root else None
    return Tuner(name, multiprocessors(device), folder, lambda job: _stopwatch(job, device))


def _stopwatch(job: Job, device: torch.device) -> Callable[[Schedule], float]:
    """Times launches on `device`, with the second-level cache cleared before each."""
    from triton.testing import do_bench

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured")
    with no_dispatch_modes(), torch.no_grad(), torch.cuda.device(device):
        tensors = random_tensors(job, device)

    def milliseconds(schedule: Schedule) -> float:
        with no_dispatch_modes(), torch.no_grad(), torch.cuda.device(device):
            launch = launcher(job, schedule, tensors, multiprocessors(device))
            return float(do_bench(launch, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median"))

    return milliseconds


def random_tensors(job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    """A tensor for every layout of `job`; positions are of rows that their table has."""
    generator = torch.Generator(device).manual_seed(0)
    bounds = dict(found for o in job.program.operands for found in lookups(o.index))
    tensors = {}
    for name, layout in job.layouts.items():
        extent = 1 + sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
        values = torch.zeros(extent if math.prod(layout.size) else 0, device=device, dtype=layout.dtype)
        if layout.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            values.normal_(generator=generator)
        elif bound := bounds.get(name):
            values.random_(int(job.sizes.get(bound, bound)), generator=generator)
        tensors[name] = values.as_strided(layout.size, layout.stride)
    return tensors


def launcher(
    job: Job, schedule: Schedule, tensors: Mapping[str, torch.Tensor], multiprocessors: int
) -> Callable[[], None]:
    """What runs `job`'s kernels on `tensors`, which hold its operands and outputs by name."""
    program, source = job.program, job.source(schedule)
    device = next(iter(tensors.values())).device
    grid = schedules.instances(program, schedule, job.rows, multiprocessors)
    given: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    given |= {f"{name}_stride{k}": s for name, tensor in tensors.items() for k, s in enumerate(tensor.stride())}
    given |= {"rows": job.rows, "programs": grid, **job.sizes}
    names = triton_code.arguments(program, schedule, job.strides)
    if "partial_ptr" in names:
        size = (grid, len(program.col_sums), program.cols)
        given["partial_ptr"] = torch.empty(size, dtype=sum_dtype(program), device=device)
    if "kept_ptr" in names:
        given["kept_ptr"] = torch.empty(job.rows, len(kept_rows(program)), dtype=kept_dtype(program), device=device)
    calls = [(triton_code.kernel_name(program), (grid, 1, schedule.pieces), names, schedule.num_warps)]
    if program.col_sums:
        summed = triton_code.sum_arguments(program)
        calls.append((triton_code.sum_name(program), (*schedules.sum_grid(program), 1), summed, schedules.SUM_WARPS))
    kernels = [
        (triton_code.load(source, name)[grid], [given[a] for a in arguments], warps)
        for name, grid, arguments, warps in calls
    ]

    def launch() -> None:
        for kernel, arguments, warps in kernels:
            kernel(*arguments, num_warps=warps, num_stages=1)

    return launch
