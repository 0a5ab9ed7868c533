"""Measures: what is timed, what is not, and how often."""

from __future__ import annotations

import time

import pytest
import torch

from bench import timing
from bench.suite import Options


def test_preparation_is_not_timed() -> None:
    seen: list[str] = []

    def prepare() -> str:
        time.sleep(0.05)
        return "prepared"

    assert timing.call_with(prepare, seen.append)() < 0.04
    assert seen == ["prepared"]
    assert timing.call(lambda: time.sleep(0.05))() >= 0.05


def test_slope_is_the_difference_per_step() -> None:
    order: list[str] = []

    def measure(name: str, seconds: float) -> timing.Measure:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    assert timing.slope(measure("short", 1.0), measure("long", 5.0), 8)() == pytest.approx(0.5)
    assert order == ["short", "long"]


class _Gpu:
    """Stands for torch.cuda: a GPU that wakes up once it has slept, and a host that takes its time."""

    def __init__(self, cycles_of_host: int) -> None:
        self.cycles_of_host = cycles_of_host
        self.slept: list[int] = []

    def synchronize(self) -> None: ...

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles)

    def Event(self, enable_timing: bool) -> _Gpu:
        return self

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.slept[-1] < self.cycles_of_host

    def elapsed_time(self, end: object) -> float:
        return 4.0


def test_a_gpu_sleeps_until_all_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(10 * timing._SHORTEST_SLEEP)
    monkeypatch.setattr(torch, "cuda", gpu)
    calls: list[int] = []
    measure = timing.queued(lambda: len(calls), calls.append)
    assert measure() == measure() == 4e-3
    first = timing._SHORTEST_SLEEP
    assert gpu.slept == [first, 4 * first, 16 * first, 16 * first], "what was long enough is kept"
    assert calls == [0, 1, 2, 3], "each try is prepared anew"


def test_a_call_that_waits_for_the_gpu_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", _Gpu(2 * timing._LONGEST_SLEEP))
    with pytest.raises(RuntimeError, match="does it wait for the GPU"):
        timing.queued(lambda: None, lambda _: None)()


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not timing.Deadline(None).over and timing.Deadline(None).note(3, 3) == []
    late = timing.Deadline(5.0)
    assert not late.over
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert late.over and late.note(9, 4) == ["4 of 9 points: the 5 s were over"]


def test_quick_has_an_end() -> None:
    assert Options().budget is None and Options(seconds=7.0).budget == 7.0
    assert Options(quick=True).budget == 100.0 and Options(quick=True, seconds=7.0).budget == 7.0


def test_interleave_takes_every_measure_once_a_round() -> None:
    calls = {"a": 0, "b": 0}

    def count(name: str) -> timing.Measure:
        def measure() -> float:
            calls[name] += 1
            return float(calls[name])

        return measure

    samples = timing.interleave({n: count(n) for n in calls}, rounds=5, warmup=2)
    assert calls == {"a": 7, "b": 7}
    assert samples["a"].seconds == samples["b"].seconds == (3.0, 4.0, 5.0, 6.0, 7.0), "the first rounds do not count"
    assert samples["a"].median == 5.0
    assert samples["a"].spread == pytest.approx(3.0 / 5.0)
