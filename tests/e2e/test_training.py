"""Training with fusepass is the same training: gradients at the first step, and the loss of 200 steps.

Every reference model, one layer of it (which has every kind of site; C++ compilers take most of the time here), learns
sums spelled out in letters, in FP32 and in BF16.

What is allowed is what others need too. A gradient may be 1.1 times as far from FP64 as eager's is, or as Inductor's
is where Inductor's is the worse one: its matmuls are eager's, but its sums are its own, and fusepass leaves many of
them to it. A loss curve may lie twice as far from eager's (root mean square over the steps) as Inductor's does, or as
that of a second eager run whose weights start one rounding away, and one rounding of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from bench import models, text, training
from bench.training import BATCH, STEPS, TOKENS, build, contenders, curves, distance
from tests.tolerances import ROUNDING_UNIT, assert_as_accurate_as_eager

SAMPLES = 64
"""Batches over which errors of gradients are averaged: of one batch's 32 roundings, luck makes 1.5 times as many."""
DTYPES = (torch.float32, torch.bfloat16)
INDUCTOR_FAILS = [("parallel_causal_rms", torch.bfloat16)]
"""What Inductor cannot compile; see `contenders`. With fusepass it compiles: the sums are in the norm's kernel."""


def check_gradients(name: str, model: models.Transformer, runs: Mapping[str, training.Run]) -> None:
    """Every parameter's gradient, against FP64 with the very same weights."""
    double = build(name, torch.float64, layers=model.config.layers)
    double.load_state_dict(model.state_dict())
    exact = gradients(double, double)
    found = {n: gradients(model, run) for n, run in runs.items()}
    assert set(exact) == set(dict(model.named_parameters())) == set(found["fusepass"])
    failures = []
    for parameter, truth in exact.items():
        fused, *others = (found[n][parameter] for n in ("fusepass", *(n for n in found if n != "fusepass")))
        worse = max(others, key=lambda t: float((t.double() - truth).norm()))
        try:
            assert_as_accurate_as_eager(fused, worse, truth)
        except AssertionError as e:
            failures.append(f"{parameter}: {e}")
    assert not failures, "\n".join(failures)


def gradients(model: models.Transformer, run: training.Run) -> dict[str, Tensor]:
    """For each parameter its gradients for many batches from the same weights, one below the other."""
    batches = [training.gradients(model, run, ids) for ids in text.batches(SAMPLES, BATCH, TOKENS)]
    return {parameter: torch.stack([b[parameter] for b in batches]) for parameter in batches[0]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def check_curves(found: Mapping[str, Sequence[float]]) -> None:
    """`found` by contender; "twin" is eager's from weights one rounding away."""
    eager, fused = found["eager"], found["fusepass"]
    assert all(math.isfinite(v) for curve in found.values() for v in curve)
    for losses in found.values():
        assert mean(losses[-20:]) < 0.7 * losses[0], f"{losses[0]:.3f} has not fallen, to {mean(losses[-20:]):.3f}"
    rounding = ROUNDING_UNIT[torch.float32] * eager[0]
    for steps in (slice(None), slice(-20, None)):
        others = {n: distance(found[n][steps], eager[steps]) for n in ("inductor", "twin") if n in found}
        got = distance(fused[steps], eager[steps])
        assert got <= 2 * max(others.values()) + rounding, f"{steps}: {got:.2e} from eager, others {others}"
    last = abs(mean(fused[-20:]) - mean(eager[-20:]))
    allowed = 2 * max(distance(found[n][-20:], eager[-20:]) for n in ("inductor", "twin") if n in found) + rounding
    assert last <= allowed, f"the last losses differ by {last:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("name", ["pre_norm_causal", "deep_norm_causal_rms"])
def test_gradients_of_the_first_step(name: str) -> None:
    model = build(name, torch.float32, layers=2)
    check_gradients(name, model, contenders(model))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", models.REFERENCE)
def test_two_hundred_steps(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    runs = contenders(model)
    assert ("inductor" in runs) == ((name, dtype) not in INDUCTOR_FAILS)
    check_gradients(name, model, runs)
    check_curves(curves(model, runs))


def test_curves_that_are_no_training_or_another_one_are_found() -> None:
    fallen = [5 * 0.99**i for i in range(STEPS)]
    near = [v + 1e-3 * (-1) ** i for i, v in enumerate(fallen)]
    good = {"eager": fallen, "inductor": near, "twin": fallen, "fusepass": near}
    check_curves(good)
    with pytest.raises(AssertionError, match="has not fallen"):
        check_curves({n: [5.0] * STEPS for n in good})
    for wrong in ([v + 0.01 for v in fallen], [*fallen[:-20], *(v + 0.01 for v in fallen[-20:])]):
        with pytest.raises(AssertionError, match="from eager"):
            check_curves({**good, "fusepass": wrong})
