"""On a GPU the kernel is a plain launch in Inductor's wrapper: no opaque call, no clone. Checked without a GPU."""

from __future__ import annotations

import json
import re
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
    assert "every input is mutated" not in run.stderr, "Inductor must see what a kernel writes"
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "case", ["residual 8192x4096", "residual 4x512x1000", "position", "strided", "moved", "embeddings"]
)
def test_one_launch_and_nothing_else(lowered: dict[str, Any], case: str) -> None:
    got = lowered[case]
    assert len(got["launches"]) == 1
    assert got["other_kernels"] == got["opaque_calls"] == []
    assert got["clones"] == 0
    assert got["buffers"] == (1 if case == "position" else 2), "Inductor allocates the outputs and nothing else"
    assert got["scheduler_nodes"] == ["ExternKernelSchedulerNode"]


def test_tokens_are_asserted_to_be_in_their_table(lowered: dict[str, Any]) -> None:
    (text,) = lowered["embeddings"]["ours"]
    assert text.count("tl.device_assert(") == 1 and "index out of bounds: 0 <= p0 < 999" in text


def test_two_sites_share_one_kernel(lowered: dict[str, Any]) -> None:
    got = lowered["two sites"]
    assert len(got["launches"]) == 2 and got["clones"] == 0 and got["opaque_calls"] == []
    assert got["kernels_defined"] == 1


def test_a_whole_model(lowered: dict[str, Any]) -> None:
    got = lowered["model"]
    assert len(got["launches"]) == 6, "two sites in each of three layers"
    assert got["kernels_defined"] == 1
    assert got["clones"] == 0


def test_cuda_graphs_capture_every_case(lowered: dict[str, Any]) -> None:
    """By Inductor's own tests; nothing in the wrapper waits for the device, and no input is written."""
    for case, got in lowered.items():
        assert got["no_cudagraph"] == got["host_waits"] == [], case


def test_nothing_is_tried_out_at_run_time(lowered: dict[str, Any]) -> None:
    """A kernel with one configuration is never benchmarked, so that a capture cannot run into it."""
    for case, got in lowered.items():
        assert set(got["configurations"]) == {1}, case


def test_under_programmatic_dependent_launch_every_kernel_waits(lowered: dict[str, Any]) -> None:
    """Ours before its first access. Inductor's behind it too: ours may still be running when that one is launched."""
    plain, pdl = lowered["between others, pdl=False"], lowered["between others, pdl=True"]
    assert plain["launches"] == pdl["launches"] and plain["other_kernels"] == pdl["other_kernels"]
    assert plain["clones"] == pdl["clones"] == 0 and plain["buffers"] == pdl["buffers"]
    assert len(pdl["launches"]) == 1 and len(pdl["other_kernels"]) >= 2
    for text in (*plain["ours"], *plain["others"]):
        assert "griddepcontrol" not in text and "gdc_" not in text and "_ready" not in text
    for text in pdl["ours"]:
        assert text.splitlines()[1].startswith("    ready = _ready()")
    for text in pdl["others"]:
        first = next(line for line in text.splitlines() if re.search(r"gdc_wait|tl\.load|tl\.store", line))
        assert "gdc_wait" in first, text


def test_a_tuner_is_asked_for_where_the_option_says_so(lowered: dict[str, Any]) -> None:
    assert lowered["two sites, tuned"]["asked_for_a_tuner"] == ["cuda:0"] * 2
    assert lowered["two sites"]["asked_for_a_tuner"] == []
    assert lowered["two sites, tuned"]["launches"] == lowered["two sites"]["launches"]
