"""Kernels with column sums are two plain launches in Inductor's wrapper, with symbolic rows too. Without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def lowered() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kernels.triton_handoff"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "every input is mutated" not in run.stderr, "Inductor must see what a kernel writes"
    return dict(json.loads(run.stdout.splitlines()[-1]))


CASES = [
    "layer_norm 2048x4096",
    "rms_norm dropout",
    "wide",
    "no rows",
    "one row",
    "symbolic",
    "symbolic wide",
    "random",
]


@pytest.mark.parametrize("case", CASES)
def test_two_launches_and_nothing_else(lowered: dict[str, Any], case: str) -> None:
    got = lowered[case]
    assert len(got["launches"]) == 2
    assert got["launches"][1].startswith(got["launches"][0].rpartition("_")[0] + "_sums")
    assert got["other_kernels"] == got["opaque_calls"] == []
    assert got["clones"] == 0
    assert got["scheduler_nodes"] == ["ExternKernelSchedulerNode"] * 2


def test_buffers_are_the_outputs_and_the_partial_sums(lowered: dict[str, Any]) -> None:
    def shapes(case: str) -> list[str]:
        return [b.split("), (")[0].strip("( ,") for b in lowered[case]["buffers"]]

    assert shapes("layer_norm 2048x4096") == ["2048, 4096", "4096", "4096", "4096", "23, 3, 4096"]
    assert shapes("wide")[-2:] == ["8, 3, 16384", "256, 3"]
    assert shapes("no rows") == ["0, 256", "256", "256", "1, 2, 256"]


@pytest.mark.parametrize(("case", "size"), [("symbolic", ", 3, 1024"), ("symbolic wide", ", 2, 16384")])
def test_symbolic_rows_bound_the_instances(lowered: dict[str, Any], case: str, size: str) -> None:
    """The same expression is the grid, the size of the buffer, and what the second kernel adds up; 132 is its bound."""
    got = lowered[case]
    (buffer,) = (b for b in got["buffers"] if size in b)
    count = buffer.removeprefix("(").split(size)[0]
    assert f", {count}, 1, 1, " in got["launch_arguments"][0]
    assert f", {count}, " in got["launch_arguments"][1]
    symbol = re.findall(r"s\d+", count)[0]
    values = [eval(count, {symbol: rows, "max": max, "min": min}) for rows in (0, 1, 2048, 1 << 20)]
    assert values == ([1, 1, 23, 132] if case == "symbolic" else [1, 1, 35, 132])


def test_equal_programs_share_their_kernels(lowered: dict[str, Any]) -> None:
    got = lowered["two equal"]
    assert len(got["launches"]) == 4 and len(set(got["launches"])) == got["kernels_defined"] == 2
    assert len(got["buffers"]) == 9, "the second pair uses the partial sums' buffer of the first again"


def test_no_column_sums_no_second_launch(lowered: dict[str, Any]) -> None:
    assert len(lowered["forward"]["launches"]) == 1


def test_a_tuned_schedule_is_what_is_launched(lowered: dict[str, Any]) -> None:
    """The tuner is asked once a kernel, with the sizes of the call; its choice changes the grid and the warps."""
    plain, got = lowered["layer_norm 2048x4096"], lowered["layer_norm 2048x4096, tuned"]
    (chosen,), (layouts,) = got["chosen"], got["layouts"]
    assert got["buckets"] == [2048] and got["scheduler_nodes"] == plain["scheduler_nodes"] and got["clones"] == 0
    assert got["warps"][0] == chosen["num_warps"] and got["buffers"] != plain["buffers"]
    assert layouts["dy"] == layouts["out0"] == [[2048, 4096], [4096, 1], "torch.bfloat16"]
    assert set(layouts) == {"dy", "w", "s", "mean", "rstd", "ds", *(f"out{i}" for i in range(4))}
    forward = lowered["forward, tuned"]
    assert forward["buckets"] == [512] and forward["warps"][0] == forward["chosen"][0]["num_warps"]


def test_symbolic_rows_are_tuned_for_those_of_the_call(lowered: dict[str, Any]) -> None:
    got = lowered["symbolic, tuned"]
    assert got["buckets"] == [2048]
    assert got["layouts"][0]["dy"][0] == [2048, 1024]
    assert any("s" in size for size in got["buffers"]), "the launch itself stays symbolic"


@pytest.mark.parametrize("case", ["wide", "symbolic", "random"])
def test_under_programmatic_dependent_launch_both_kernels_wait(lowered: dict[str, Any], case: str) -> None:
    plain, pdl = lowered[case], lowered[f"{case}, pdl"]
    assert (plain["awaits"], pdl["awaits"]) == (0, 2)
    for what in ("launches", "launch_arguments", "buffers", "clones", "scheduler_nodes"):
        assert plain[what] == pdl[what]
