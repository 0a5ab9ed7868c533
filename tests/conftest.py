"""What every test run shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported. Workers that share the cores and wait for each other's threads spend most of their
    # time there: the tests of training took four times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests are of small shapes, for which the fused kernels are not meant: `test_profitability.py` asks for "auto".
os.environ.setdefault("FUSEPASS_PROFITABILITY", "always")

import torch

from fusepass.kernels import ops
from fusepass.row_program import parse

HAS_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if HAS_GPU else ["gpu/*"]

# How long drawing an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fusepass", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fusepass")


def pytest_report_header(config: pytest.Config) -> str:
    if HAS_GPU:
        return f"GPU: {torch.cuda.get_device_name()}"
    return (
        "GPU: none, so tests/gpu is not collected; kernels run in the Triton interpreter and are compiled ahead of time"
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers in every run."""
    torch.manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels share their rows out, however many threads the test run has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels are computed by the reference evaluator: many of them would take longer to compile than to test."""
    monkeypatch.setattr(ops, "prefetch", lambda program: None)
    monkeypatch.setattr(ops, "built", lambda program: None)
    monkeypatch.setattr(ops, "_kernel", lambda program: None)
    monkeypatch.setattr(ops, "_load", lambda program: partial(ops._launch_reference, parse(program)))


class _Fallbacks(logging.Handler):
    """The kernels that did not compile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "could not be built" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def fallbacks() -> Iterator[list[str]]:
    """A kernel that does not compile runs as torch operations, right and slow: no test passes unless it expects that.

    One that does takes this list and empties it.
    """
    handler = _Fallbacks()
    ops.log.addHandler(handler)
    yield handler.messages
    ops.log.removeHandler(handler)
    assert handler.messages == []
