"""On a GPU the kernel is a plain launch in Inductor's wrapper: no opaque call, no clone. Checked without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def lowered() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.graph.gpu_handoff"], capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", ["residual 8192x4096", "residual 4x512x1000", "position", "strided", "moved"])
def test_one_launch_and_nothing_else(lowered: dict[str, Any], case: str) -> None:
    got = lowered[case]
    assert len(got["launches"]) == 1
    assert got["other_kernels"] == got["opaque_calls"] == []
    assert got["clones"] == 0
    assert got["buffers"] == (1 if case == "position" else 2), "Inductor allocates the outputs and nothing else"
    assert got["scheduler_nodes"] == ["ExternKernelSchedulerNode"]


def test_two_sites_share_one_kernel(lowered: dict[str, Any]) -> None:
    got = lowered["two sites"]
    assert len(got["launches"]) == 2 and got["clones"] == 0 and got["opaque_calls"] == []
    assert got["kernels_defined"] == 1


def test_a_whole_model(lowered: dict[str, Any]) -> None:
    got = lowered["model"]
    assert len(got["launches"]) == 6, "two sites in each of three layers"
    assert got["kernels_defined"] == 1
    assert got["clones"] == 0
