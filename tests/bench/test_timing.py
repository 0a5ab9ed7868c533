"""Measures: what is timed, what is not, and how often."""

from __future__ import annotations

import time

import pytest

from bench import timing


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
