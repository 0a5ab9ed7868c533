"""Dropout, stochastic depth and layer scale inside the kernels: the masks are those that Inductor draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.tolerances import assert_same_sums

STRICT = {"fusepass.strict": True}
D = 100
ROWS = 37


def under(backend: str, fn: Callable[..., Any], args: list[Tensor], seed: int = 1, **options: Any) -> list[Tensor]:
    """The outputs, then the gradients of `args` for output gradients that are the same for every backend."""
    torch._dynamo.reset()
    options |= {"fx_graph_cache": False}  # a graph from the cache is not rewritten again, and leaves no dump
    options |= STRICT if backend == "fusepass" else {}
    run = fn if backend == "eager" else torch.compile(fn, backend=backend, options=options)
    args = [a.detach().clone().requires_grad_() for a in args]
    torch.manual_seed(seed)
    outputs = run(*args)
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    torch.autograd.backward(outputs, given)
    return [*(o.detach() for o in outputs), *(a.grad for a in args if a.grad is not None)]


def site(x: Tensor, r: Tensor, w: Tensor, p: float) -> tuple[Tensor, Tensor]:
    s = x + F.dropout(r, p)
    return s, F.rms_norm(s, (s.shape[-1],), w, 1e-6)


def inputs(dtype: torch.dtype, sites: int = 1) -> list[Tensor]:
    """x = 0, r = 1 and the weights of each site: the sum is the mask, scaled."""
    return [
        t.to(dtype) for _ in range(sites) for t in (torch.zeros(ROWS, D), torch.ones(ROWS, D), 1 + 0.1 * torch.randn(D))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_masks_are_inductors_own(dtype: torch.dtype, tmp_path: Path) -> None:
    probabilities = (0.0, 0.1, 0.5, 1.0, 0.1)

    def fn(*args: Tensor) -> list[Tensor]:
        return [t for i, p in enumerate(probabilities) for t in site(*args[3 * i : 3 * i + 3], p)]

    args = inputs(dtype, len(probabilities))
    ours = under("fusepass", fn, args, **{"fusepass.dump": str(tmp_path)})
    inductors = under("inductor", fn, args)
    n = len(probabilities)
    masks = [ours[2 * i] for i in range(n)]
    for i, p in enumerate(probabilities):
        assert torch.equal(masks[i], inductors[2 * i]), f"p={p}: another mask than Inductor's"
        assert abs(float((masks[i] == 0).float().mean()) - p) < 0.05
        gradient = ours[2 * n + 3 * i + 1]
        kept = masks[i] != 0
        assert not gradient[~kept].any(), f"p={p}: the backward has another mask than the forward"
        if p < 1:  # bf16 gradients cancel out here and there
            assert float((gradient[kept] != 0).float().mean()) > 0.99
    assert not torch.equal(masks[1], masks[4]), "two dropouts draw two masks"
    for got, want in zip(ours, inductors, strict=True):
        assert_same_sums(got, want, summed=1 if got.ndim > 1 else ROWS)
    forward = (tmp_path / "forward-after-0.txt").read_text()
    assert "inductor_random" not in forward, "the random numbers are drawn in the kernels"
    assert any("rand_cpu(" in f.read_text() for f in tmp_path.glob("fusepass_*.txt"))


def test_another_seed_gives_another_mask() -> None:
    args = inputs(torch.float32)
    fn = lambda *a: site(*a, 0.5)  # noqa: E731
    first, again, other = (under("fusepass", fn, args, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_fallback_random_draws_eagers_masks() -> None:
    args = inputs(torch.float32)
    fn = lambda *a: site(*a, 0.3)  # noqa: E731
    ours = under("fusepass", fn, args, fallback_random=True)
    eager = under("eager", fn, args)
    assert torch.equal(ours[0], eager[0])
    for got, want in zip(ours, eager, strict=True):
        assert_same_sums(got, want, summed=1 if got.ndim > 1 else ROWS)


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_draws_the_forwards_masks_again(inside: bool) -> None:
    """Against the same layers without checkpointing, where every gradient shows the mask that it was made with."""

    def layer(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return site(x, r, w, 0.5)[1]

    def recomputed(x: Tensor, r: Tensor, w: Tensor, layer: Callable[..., Tensor] = layer) -> tuple[Tensor]:
        return (checkpoint(layer, x, r, w, use_reentrant=False, preserve_rng_state=True),)

    args = inputs(torch.float32)
    if inside:
        got = under("fusepass", recomputed, args)
    else:
        run = torch.compile(layer, backend="fusepass", options=STRICT)
        got = under("eager", lambda *a: recomputed(*a, layer=run), args)
    kept = got[0] != 0
    assert 0.3 < float(kept.float().mean()) < 0.7
    assert torch.equal(got[2] != 0, kept), "the gradient of r belongs to another mask"


def test_stochastic_depth_and_layer_scale_are_in_the_kernel(tmp_path: Path) -> None:
    """Drop path zeroes whole samples, by a mask of (batch, 1, 1); layer scale is a factor per column, and trained."""

    def fn(x: Tensor, r: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7) / 0.7
        s = x + r * scale * keep
        return s, F.layer_norm(s, (D,), w)

    args = [torch.randn(8, 5, D), torch.randn(8, 5, D), torch.randn(D), torch.randn(D)]
    ours = under("fusepass", fn, args, **{"fusepass.dump": str(tmp_path)})
    inductors = under("inductor", fn, args)
    for got, want in zip(ours, inductors, strict=True):
        assert_same_sums(got, want, summed=1 if got.ndim > 1 else 8 * 5)
    programs = [f.read_text() for f in tmp_path.glob("fusepass_*.txt")]
    assert len(programs) == 2 and any(p.count("col_sum") == 2 for p in programs), "\n".join(programs)
    for kind in ("forward", "backward"):
        after = (tmp_path / f"{kind}-after-0.txt").read_text()
        assert after.count("fusepass.row_program_") == 1 and "var_mean" not in after


def test_dropout_in_evaluation_is_nothing() -> None:
    args = inputs(torch.float32)
    ours = under("fusepass", lambda x, r, w: (x + F.dropout(r, 0.5, training=False),), args)
    assert torch.equal(ours[0], args[1])
