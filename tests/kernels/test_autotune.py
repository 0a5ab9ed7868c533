"""Schedules chosen by measurement: which one, for which kernels, and what becomes of the choice on disk."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusepass.errors import ProgramError
from fusepass.kernels import audit, autotune
from fusepass.kernels.autotune import Job, Layout, Tuner
from fusepass.kernels.schedule import Schedule, candidates, choose, instances
from fusepass.row_program import RowProgram, parse
from tests.kernels.norm_programs import norm_backward_program, norm_program
from tests.kernels.triton_harness import Case, check

H200 = 132  # multiprocessors
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
FORWARD = parse(norm_program("rms_norm", 1024, "bf16"))
BACKWARD = parse(norm_backward_program("layer_norm", 4096, "bf16"))


class Stopwatch:
    """Gives the schedules that it is told of their times, and all others 1 ms; notes what it is asked to measure."""

    def __init__(self, times: dict[Schedule, float | Exception] | None = None) -> None:
        self.times = times or {}
        self.jobs: list[Job] = []
        self.measured: list[Schedule] = []

    def __call__(self, job: Job) -> Callable[[Schedule], float]:
        self.jobs.append(job)
        return self._milliseconds

    def _milliseconds(self, schedule: Schedule) -> float:
        self.measured.append(schedule)
        time = self.times.get(schedule, 1.0)
        if isinstance(time, Exception):
            raise time
        return time


def job(program: RowProgram = FORWARD, rows: int = 1000, pdl: bool = False) -> Job:
    layouts = {o.name: Layout((rows, program.cols), (program.cols, 1), o.dtype) for o in program.operands}
    return Job(program, audit.contiguous_strides(program), rows, {}, layouts, pdl)


def tuner(folder: Path | None, stopwatch: autotune.Stopwatch, device: str = "H200 sm_90") -> Tuner:
    return Tuner(device, H200, folder, stopwatch)


def never(job: Job) -> Callable[[Schedule], float]:
    raise AssertionError("measured again")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("fusepass") and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("program", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_the_fastest_is_chosen(program: RowProgram, tmp_path: Path) -> None:
    for fastest in candidates(program):
        got = tuner(None, Stopwatch({fastest: 0.5})).schedule(job(program, rows=1024))
        equal = {s: instances(program, s, 1024, H200) for s in (got, fastest)}
        assert replace(got, partial_share=1, residents=1) == replace(fastest, partial_share=1, residents=1)
        assert len(set(equal.values())) == 1, "one that launches as many instances of the same kernel"
    assert not list(tmp_path.iterdir())


def test_the_default_stays_where_nothing_is_clearly_faster() -> None:
    default, other, *_ = candidates(FORWARD)
    assert default == choose(FORWARD)
    assert tuner(None, Stopwatch({other: 0.99})).schedule(job()) == default
    assert tuner(None, Stopwatch({other: 0.97})).schedule(job()) == other


def test_a_choice_is_measured_once_and_kept_on_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = candidates(FORWARD)[2]
    stopwatch = Stopwatch({other: 0.5})
    first = tuner(tmp_path / "new" / "folder", stopwatch)
    assert first.schedule(job()) == first.schedule(job()) == other
    assert len(stopwatch.jobs) == 1 and sorted(map(str, stopwatch.measured)) == sorted(map(str, candidates(FORWARD)))
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert FORWARD.digest in path.name
    assert len(json.loads(path.read_text())["measured"]) == len(candidates(FORWARD))
    assert tuner(path.parent, never).schedule(job()) == other
    assert not warnings(caplog)


def test_rows_up_to_the_same_power_of_two_share_a_choice(tmp_path: Path) -> None:
    other = candidates(FORWARD)[1]
    tuner(tmp_path, Stopwatch({other: 0.5})).schedule(job(rows=700))
    for rows in (513, 1000, 1024):
        assert tuner(tmp_path, never).schedule(job(rows=rows)) == other
    for rows in (1, 512, 1025):
        stopwatch = Stopwatch()
        assert tuner(tmp_path, stopwatch).schedule(job(rows=rows)) == choose(FORWARD)
        assert len(stopwatch.jobs) == 1, rows
    assert tuner(tmp_path, never).schedule(job(rows=0)) == choose(FORWARD), "no rows, nothing to measure"


def test_another_device_or_another_text_is_measured_again(tmp_path: Path) -> None:
    tuner(tmp_path, Stopwatch()).schedule(job())
    strided = replace(job(), strides=job().strides | {"x": (2048, 1)})
    for device, other in (("A100 sm_80", job()), ("H200 sm_90", job(pdl=True)), ("H200 sm_90", strided)):
        stopwatch = Stopwatch()
        tuner(tmp_path, stopwatch, device).schedule(other)
        assert len(stopwatch.jobs) == 1
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"key": 1, "schedule": 2}', "older", "unknown field", "no candidate"]
)
def test_a_file_that_is_no_choice_is_replaced(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuner(tmp_path, Stopwatch()).schedule(job())
    (path,) = tmp_path.iterdir()
    entry = json.loads(path.read_text())
    if text == "older":
        entry["key"]["torch"] = "2.0"
    elif text == "unknown field":
        entry["schedule"]["colour"] = 1
    elif text == "no candidate":
        entry["schedule"]["num_warps"] = 1024
    path.write_text(json.dumps(entry) if text[:1].isalpha() else text)
    other = candidates(FORWARD)[1]
    assert tuner(tmp_path, Stopwatch({other: 0.5})).schedule(job()) == other
    (warning,) = warnings(caplog)
    assert path.name in warning
    assert tuner(tmp_path, never).schedule(job()) == other


def test_without_a_folder_to_write_to_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    other = candidates(FORWARD)[1]
    once = tuner(tmp_path / "file" / "folder", Stopwatch({other: 0.5}))
    assert once.schedule(job()) == once.schedule(job()) == other
    assert any("cannot be kept" in text for text in warnings(caplog))


def test_a_candidate_that_fails_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    default, first, second, *_ = candidates(FORWARD)
    times: dict[Schedule, float | Exception] = {first: RuntimeError("out of resources"), second: 0.5}
    assert tuner(tmp_path, Stopwatch(times)).schedule(job()) == second
    assert not warnings(caplog)
    failing: dict[Schedule, float | Exception] = {default: RuntimeError("no launch"), second: 0.5}
    assert tuner(None, Stopwatch(failing)).schedule(job()) == default

    def no_memory(job: Job) -> Callable[[Schedule], float]:
        raise torch.OutOfMemoryError("tensors")

    assert tuner(None, no_memory).schedule(job()) == default
    assert ["not tuned" in text for text in warnings(caplog)] == [True, True]


def test_where_no_kernel_could_run_there_is_no_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autotune.tuner(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert autotune.tuner(torch.device("cuda")) is None
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert autotune.tuner(torch.device("cuda")) is None


def test_candidates() -> None:
    """They differ in warps, rows, stages and instances; each can compute its program."""
    narrow = candidates(parse(norm_program("layer_norm", 256, "bf16")))
    assert len({s.num_warps for s in narrow}) > 2 and len({s.rows_per_program for s in narrow}) > 2
    summing = candidates(BACKWARD)
    assert len({s.num_warps for s in summing}) > 1 and len({s.num_stages for s in summing}) > 1
    counts = {instances(BACKWARD, s, 1024, H200) for s in summing}
    assert min(counts) == instances(BACKWARD, choose(BACKWARD), 1024, H200) == 11
    assert H200 in counts and any(11 < n < H200 for n in counts)
    for kind, cols in (("row", 1), ("row", 4096), ("loop", 65536)):
        found = candidates(parse(norm_program("layer_norm", cols, "f32")))
        assert {s.kind for s in found} == {kind} and len(found) == len(set(found)) > 1
    for kind, cols in (("persistent", 1), ("persistent", 127), ("wide", 16384)):
        found = candidates(parse(norm_backward_program("rms_norm", cols, "f32")))
        assert {s.kind for s in found} == {kind} and len(found) == len(set(found)) > 1
    with pytest.raises(
        ProgramError, match="partial_share and residents of at least 1, got partial_share=14, residents=0"
    ):
        replace(choose(BACKWARD), residents=0).verify(BACKWARD)


def cases(program: str, rows: int) -> list[Case]:
    return [Case(f"{n} of {program}", program, rows, candidate=n) for n in range(len(candidates(parse(program))))]


def test_every_candidate_computes_its_program() -> None:
    check(cases(norm_program("layer_norm", 48, "bf16"), 5))
    check(cases(norm_backward_program("layer_norm", 48, "bf16"), 5))


@pytest.mark.slow
def test_every_candidate_of_wide_rows_computes_its_program() -> None:
    check(cases(norm_program("layer_norm", 65536, "f32"), 2))
    check(cases(norm_backward_program("rms_norm", 16384, "bf16"), 3))
    check(cases(norm_backward_program("layer_norm", 127, "f32"), 9))


@pytest.mark.slow
@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("cols", [256, 1000, 4096, 16384])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_candidate_spills(direction: str, cols: int, target: str) -> None:
    text = norm_program if direction == "forward" else norm_backward_program
    program = parse(text("layer_norm", cols, "bf16"))
    for schedule in {replace(s, partial_share=1, residents=1) for s in candidates(program)}:
        found = audit.compile_for(program, schedule, audit.contiguous_strides(program), target)
        assert found.spills == 0 and found.shared <= SHARED_MEMORY[target], (schedule, found)


def test_tensors_to_measure_with() -> None:
    layouts = {
        "x": Layout((3, 4), (8, 1), torch.bfloat16),
        "repeated": Layout((3, 4), (0, 1), torch.float32),
        "kept": Layout((3, 4), (4, 1), torch.bool),
        "seed": Layout((), (), torch.int64),
        "none": Layout((0, 4), (4, 1), torch.float32),
        "q": Layout((3, 4), (4, 1), torch.float8_e4m3fn),
    }
    tensors = autotune.random_tensors(replace(job(), layouts=layouts), torch.device("cpu"))
    for name, layout in layouts.items():
        t = tensors[name]
        assert (tuple(t.shape), t.stride(), t.dtype) == (layout.size, layout.stride, layout.dtype), name
    assert tensors["x"].float().std() > 0.1


def test_real_tensors_are_measured_while_a_graph_of_fake_ones_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, torch.Tensor]] = []

    def launcher(job: Job, schedule: Schedule, tensors: dict[str, torch.Tensor], count: int) -> Callable[[], None]:
        return lambda: launched.append(tensors)

    def do_bench(launch: Callable[[], None], **options: object) -> float:
        launch()
        return 0.25

    monkeypatch.setattr(autotune, "launcher", launcher)
    monkeypatch.setattr(autotune, "multiprocessors", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    state = torch.get_rng_state()
    with FakeTensorMode():
        milliseconds = autotune._stopwatch(job(), torch.device("cpu"))
        assert [milliseconds(s) for s in candidates(FORWARD)[:2]] == [0.25, 0.25]
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    assert len(launched) == 2 and launched[0] is launched[1], "tensors are made once a kernel"
    assert not any(isinstance(t, FakeTensor) or t.requires_grad for t in launched[0].values())
