"""Interleaved timing: every contender runs in every round, so that a slow spell of the machine hits all of them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Measure = Callable[[], float]
"""Does something once and returns the seconds that it took."""


@dataclass(frozen=True)
class Sample:
    """Times in seconds, one per round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median: how far single rounds lie apart."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / abs(self.median)


def interleave(measures: Mapping[str, Measure], *, rounds: int, warmup: int = 2) -> dict[str, Sample]:
    """Take each measure once per round, in an order drawn anew for every round.

    Args:
        measures: what to take, by name, as `call` and `slope` make them.
        rounds: how many times in all, each; at least 2.
        warmup: rounds that come first and are not counted.
    """
    order = list(measures)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for round_number in range(-warmup, rounds):
        shuffle(order)
        for name in order:
            taken = measures[name]()
            if round_number >= 0:
                seconds[name].append(taken)
    return {name: Sample(tuple(seconds[name])) for name in measures}


def call(function: Callable[[], object]) -> Measure:
    """Seconds of one call, on the clock, until its kernels have ended."""
    return call_with(lambda: None, lambda _: function())


def call_with(prepare: Callable[[], T], function: Callable[[T], object]) -> Measure:
    """Seconds of one call of `function` with what `prepare` returns, which is called each time and not timed."""

    def measure() -> float:
        prepared = prepare()
        _synchronize()
        started = time.perf_counter()
        function(prepared)
        _synchronize()
        return time.perf_counter() - started

    return measure


def queued(prepare: Callable[[], T], function: Callable[[T], object]) -> Measure:
    """Like `call_with`, but the seconds that a GPU takes for what `function` launches, however slow the host is at it.

    The GPU sleeps until all is queued, and only then begins. If it woke up too early, that call does not count, and it
    sleeps longer in the next ones.
    """
    cycles = _SHORTEST_SLEEP

    def measure() -> float:
        nonlocal cycles
        while cycles <= _LONGEST_SLEEP:
            prepared = prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)
            begin.record()
            function(prepared)
            end.record()
            asleep = not begin.query()
            torch.cuda.synchronize()
            if asleep:
                return begin.elapsed_time(end) / 1e3
            cycles *= 4
        raise RuntimeError(f"not all was queued while the GPU slept {cycles // 4} cycles: does it wait for the GPU?")

    return measure


_SHORTEST_SLEEP, _LONGEST_SLEEP = 2**20, 2**30
"""Cycles of a GPU: about half a millisecond, and half a second."""


def slope(short: Measure, long: Measure, steps: int) -> Measure:
    """Seconds per step where `long` does `steps` more than `short`. The two run one after the other."""

    def measure() -> float:
        less = short()
        return (long() - less) / steps

    return measure


@contextlib.contextmanager
def thread_count_kept() -> Iterator[int]:
    """Gives torch's number of threads, and sets it again at the end."""
    before = torch.get_num_threads()
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, on Linux with glibc.

    Otherwise large buffers go back to the system and come again as fresh pages, in one contender's calls and not in
    another's, as luck has it: a chain of sites then takes up to twice as long for reasons that no kernel has.
    """
    trim_threshold, mmap_threshold, largest = -1, -3, 32 << 20
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, largest)
    mallopt(trim_threshold, 2**31 - 1)


class Deadline:
    """So many seconds from now, within which points may begin; None is no end."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.ends = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends

    def note(self, wanted: int, begun: int) -> list[str]:
        """A line of summary if points were left out, or none."""
        return [f"{begun} of {wanted} points: the {self.seconds:g} s were over"] if begun < wanted else []


def rounds_within(budget: float, measures: Iterable[Measure], at_least: int, at_most: int) -> int:
    """How many rounds of all measures fit into `budget` seconds, from one trial round; call it once all are warm."""
    started = time.perf_counter()
    for measure in measures:
        measure()
    return max(at_least, min(at_most, int(budget / (time.perf_counter() - started))))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
