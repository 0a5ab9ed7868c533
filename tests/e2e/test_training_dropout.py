"""Training with dropout: from the same seed, fusepass draws the masks that Inductor draws, step after step."""

from __future__ import annotations

import pytest
import torch

from bench import text, training
from bench.training import BATCH, TOKENS, build, compile_with, distance, one_rounding_away
from tests.e2e.test_training import DTYPES
from tests.tolerances import ROUNDING_UNIT

STEPS = 50


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def losses(name: str, dtype: torch.dtype, backend: str, *, moved: bool = False, seed: int = 0) -> list[float]:
    torch._dynamo.reset()
    model = build(name, dtype, dropout=0.1)
    if moved:
        one_rounding_away(model)
    run = compile_with(backend, model)
    torch.manual_seed(seed)
    return training.train(model, run, text.batches(STEPS, BATCH, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["pre_norm_causal", "post_norm_encoder", "deep_norm_causal_rms"])
def test_the_curve_is_inductors(name: str, dtype: torch.dtype) -> None:
    inductor = losses(name, dtype, "inductor")
    twin = losses(name, dtype, "inductor", moved=True)
    fused = losses(name, dtype, "fusepass")
    other_masks = losses(name, dtype, "inductor", seed=1)
    chance = distance(twin, inductor)
    assert distance(fused, inductor) <= 2 * chance + ROUNDING_UNIT[torch.float32] * inductor[0]
    assert distance(other_masks, inductor) > 10 * chance, "other masks would have been seen"
