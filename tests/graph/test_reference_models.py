"""Every reference model: the exact number of fused kernels, nothing left of a fused norm, and the right numbers."""

from __future__ import annotations

import pytest
import torch

from bench import models
from tests.graph.capture import STATISTICS, Captured, fuse
from tests.tolerances import assert_as_accurate_as_eager


def _run(name: str, dtype: torch.dtype, grad: bool = False) -> tuple[Captured, torch.Tensor, torch.Tensor]:
    model, args = models.example(name)
    exact = model.double()(*args).detach()
    model = model.to(dtype)
    with torch.set_grad_enabled(grad):
        return fuse(model, *args), model(*args).detach(), exact


@pytest.mark.parametrize("name", models.REFERENCE)
def test_every_site_is_fused_and_no_other_norm_is_touched(name: str) -> None:
    config = models.REFERENCE[name]
    captured, eager, exact = _run(name, torch.float32)
    assert len(captured.sites) == config.norms
    assert len(captured.kernels) == config.sites
    assert sum(s.residual for s in captured.sites) == config.sites
    assert [s.fused for s in captured.sites] == [s.residual for s in captured.sites]
    assert captured.reasons == ["NO_RESIDUAL"] * (config.norms - config.sites)
    left = captured.ops()
    assert sum(left[op] for op in STATISTICS) == 2 * (config.norms - config.sites)  # a statistic and its root
    assert_as_accurate_as_eager(captured.result, eager, exact)


@pytest.mark.parametrize(
    "name", ["pre_norm_causal", "pre_norm_causal_rms", "tutorial_post_norm", "deep_norm_encoder_rms"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    captured, eager, exact = _run(name, dtype)
    assert len(captured.kernels) == models.REFERENCE[name].sites
    assert_as_accurate_as_eager(captured.result, eager, exact)


@pytest.mark.parametrize("name", ["pre_norm_causal", "post_norm_causal_rms", "deep_norm_causal", "parallel_causal_rms"])
def test_the_forward_of_training_is_fused_too(name: str) -> None:
    captured, eager, exact = _run(name, torch.float32, grad=True)
    forward = [s for s in captured.sites if s.graph == "forward"]
    assert sum(s.fused for s in forward) == models.REFERENCE[name].sites
    assert_as_accurate_as_eager(captured.result.detach(), eager, exact)


def test_equal_sites_share_one_program() -> None:
    model, args = models.example("post_norm_causal", layers=6)
    with torch.no_grad():
        captured = fuse(model, *args)
    assert len(captured.kernels) == 12
    assert len(set(captured.programs)) == 1


def test_a_three_way_sum_is_one_kernel() -> None:
    model, args = models.example("parallel_causal_rms")
    with torch.no_grad():
        captured = fuse(model, *args)
    assert [p.count(": tile f32 [row]") for p in captured.programs] == [0, 3, 3], "the first looks embeddings up"
    assert ["v1: tile f32 = add(v0, x2)" in p for p in captured.programs] == [False, True, True]
