"""The traffic bench: its floor worked out by hand, and Inductor's figures as its generated code has them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import traffic_cases, traffic_floor, training_graphs
from bench.traffic_cases import Model, Site

ROWS, COLS = 64, 256
TILE = ROWS * COLS


def floors(case: traffic_cases.Case) -> list[float]:
    """Tiles at least, forward and backward, per layer."""
    unit = case.rows * case.cols * getattr(torch, case.dtype).itemsize * case.layers
    graphs = training_graphs.capture(case.build)
    assert [g.kind for g in graphs] == ["forward", "backward"]
    return [traffic_floor.least_bytes(g.module.graph, case.rows * case.cols) / unit for g in graphs]


@pytest.mark.parametrize("norm", traffic_cases.NORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dropout", "expected"),
    [
        ("bfloat16", 0.0, [4, 4]),
        ("float32", 0.0, [4, 4]),
        ("bfloat16", 0.1, [4.5, 5.5]),  # the mask: a byte an element; the gradient behind it beside that of the sum
        ("float32", 0.1, [4.25, 5.25]),
    ],
)
def test_floor_of_a_site(
    norm: traffic_cases.Norm, bias: bool, dtype: str, dropout: float, expected: list[float]
) -> None:
    assert floors(Site(norm, ROWS, COLS, dtype, bias, dropout)) == expected


# GPT, backward of an inner layer: GELU's reads its gradient and what it was given, and writes, 4 tiles each: 12; two
# norms 4 each; the gradient of `chunk`, one tile read and three written: 4; all column sums come with these.
# LLaMA: SwiGLU reads three and writes two of 43/16 tiles; the norm behind two Linears reads one more: 5; the other 4.
@pytest.mark.parametrize(
    ("model", "per_layer"), [("gpt", 12 + 4 + 4 + 4), ("llama", 5 * 43 / 16 + 5 + 4)], ids=["gpt", "llama"]
)
def test_floor_of_an_inner_layer(model: Any, per_layer: float) -> None:
    few, many = (floors(Model(model, ROWS, COLS, layers)) for layers in (2, 4))
    assert (4 * many[1] - 2 * few[1]) / 2 == pytest.approx(per_layer, abs=1e-9)


def test_floor_counts_what_passes_between_two_matmuls_once() -> None:
    def build() -> tuple[Any, list[Tensor]]:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            y = torch.relu(x @ w)  # reads and writes a tile
            z = (y @ w).sin() + x  # reads two, writes one
            return torch.cat([z, z]).view(2, ROWS, COLS)[1] * 2  # all one group with z

        return fn, [torch.empty(ROWS, COLS), torch.empty(COLS, COLS)]

    (graph,) = training_graphs.capture(build)
    assert graph.kind == "inference"
    assert traffic_floor.least_bytes(graph.module.graph, TILE) / (4 * TILE) == 5


def test_floor_lets_a_matmul_add_a_tile() -> None:
    def build() -> tuple[Any, list[Tensor]]:
        return lambda x, r, w: F.relu(r + x @ w), [torch.empty(ROWS, n) for n in (COLS, COLS)] + [
            torch.empty(COLS, COLS)
        ]

    (graph,) = training_graphs.capture(build)
    # apart: r and the product read, one written; folded: r read by the matmul, the sum read, one written
    assert traffic_floor.least_bytes(graph.module.graph, TILE) / (4 * TILE) == 3


def test_capture_computes_nothing_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    case = Site("layer_norm", 1 << 20, 1 << 20, dropout=0.1)  # two terabytes a tile
    forward, backward = training_graphs.capture(case.build)
    assert torch.equal(torch.get_rng_state(), state)
    targets = {n.target for n in forward.module.graph.nodes}
    assert torch.ops.prims.inductor_random.default in targets, "random numbers as Inductor draws them"
    sums = [n for n in backward.module.graph.nodes if n.target is torch.ops.aten.sum.dim_IntList and 0 in n.args[1]]
    assert len(sums) == 3, "gradients of weight, bias, and the Linear's bias"


@pytest.fixture(scope="module")
def quick_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of the quick run, by scope, norm and direction."""
    run = subprocess.run(
        [sys.executable, "-m", "bench.traffic_count", "--quick"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 2 * len(traffic_cases.QUICK)
    return {(r["scope"], r["norm"], r["direction"]): r for r in rows}


# At 8192x4096 Inductor sums rows and columns in one kernel (4 tiles), casts both sums, and reads dx again for the
# bias' gradient: 5 tiles; 512 partial sums of two kinds in FP32 are written and read on top.
# At 4096x4096 it sums columns first, then rows: dy, s | dy, s, ds, dx | dx.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tiles", "kernels", "workspace"),
    [
        (("site", "layer_norm", "forward"), 4.0, 1, 0.0),
        (("site", "layer_norm", "backward"), 5.05, 5, 2 * 2 * 512 * 4 / (8192 * 2)),
        (("site", "rms_norm", "forward"), 4.0, 1, 0.0),
        (("site", "rms_norm", "backward"), 7.06, 5, 0.0),
        (("model", "layer_norm", "forward"), 16.34, 10 / 3, 0.0),
        (("model", "layer_norm", "backward"), 35.76, 56 / 3, 0.0),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_inductors_figures(quick_rows: Any, case: Any, tiles: float, kernels: float, workspace: float) -> None:
    row = quick_rows[case]
    assert row["inductor_tiles"] == pytest.approx(tiles, abs=0.01)
    assert row["inductor_kernels"] == pytest.approx(kernels)
    assert row["inductor_workspace_tiles"] == pytest.approx(workspace)


@pytest.mark.slow
def test_fusepass_moves_no_more_than_inductor_and_no_less_than_the_floor(quick_rows: Any) -> None:
    for case, row in quick_rows.items():
        assert row["floor_tiles"] <= row["fusepass_tiles"], case
        assert row["fusepass_tiles"] <= row["inductor_tiles"] + 0.01, case


@pytest.mark.slow
@pytest.mark.parametrize("norm", traffic_cases.NORMS)
def test_a_sites_backward_is_two_kernels_near_the_floor(quick_rows: Any, norm: str) -> None:
    row = quick_rows["site", norm, "backward"]
    assert row["fusepass_tiles"] <= 4.15 and row["floor_tiles"] == 4
    assert row["fusepass_kernels"] <= 2


@pytest.mark.slow
def test_a_models_backward_moves_a_fifth_less(quick_rows: Any) -> None:
    row = quick_rows["model", "layer_norm", "backward"]
    assert row["fusepass_tiles"] <= 0.8 * row["inductor_tiles"]


def test_every_point_of_the_bar_is_among_the_cases() -> None:
    points = {(s.norm, s.rows, s.cols) for s in traffic_cases.SITES if s.bias and not s.dropout}
    for norm in traffic_cases.NORMS:
        for shape in ((8192, 1024), (8192, 4096), (4096, 4096), (2048, 4096), (8192, 8192), (8192, 16384)):
            assert (norm, *shape) in points
    assert {(m.model, m.rows) for m in traffic_cases.MODELS} == {
        (model, rows) for model in ("gpt", "llama") for rows in (1024, 8192)
    }
