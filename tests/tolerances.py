"""The one table of tolerances. Nothing in it is tuned: an error is allowed if eager makes it too.

A fused result may be 1.1 times as far from FP64 as eager's result is, plus one rounding of the output: two correct
computations may round the last bit differently. `ROUNDING_UNIT` is the largest relative error of one rounding.
"""

from __future__ import annotations

import torch

ROUNDING_UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
EAGER_FACTOR = 1.1
FP64_ROUNDINGS = 32  # eager's error in FP64 cannot be seen from FP64: two norms of about 8 roundings, and their sums
FEW_ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.float16: 16, torch.bfloat16: 4}  # of a norm, ill-placed
COMPOUNDED = 4  # roundings that one statement may add, for programs without a well-behaved eager counterpart


def allowed_error(eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error allowed for each element of a result in `dtype`."""
    exact = _finite(exact.double())
    worst = _eager_error(eager, exact, dtype).amax() if exact.numel() else exact.new_zeros(())
    spacing = 2 * ROUNDING_UNIT[dtype]  # from one value of the dtype to the next, at most
    magnitude = exact.abs() if exact.dim() > 1 else exact.abs().amax()  # one per row or column: sums that cancel out
    return EAGER_FACTOR * worst + spacing * magnitude + torch.finfo(dtype).smallest_normal * spacing


def assert_close_to_fp64(fused: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Fails unless `fused` is about as close to `exact` (FP64) as `eager` is: everywhere, and on average."""
    assert fused.dtype == dtype, f"expected dtype {dtype}, got {fused.dtype}"
    assert fused.shape == exact.shape == eager.shape, f"shapes {fused.shape}, {eager.shape} and {exact.shape} differ"
    if not exact.numel():
        return
    finite = eager.double().isfinite()
    assert torch.equal(finite, fused.double().isfinite()), "infinities or NaNs in other places than eager's"
    error = _finite(fused.double() - exact.double()).abs()
    eager_error = _eager_error(eager, exact.double(), dtype)
    excess = torch.where(finite, error - allowed_error(eager, exact, dtype), -torch.inf)
    worst = int(excess.argmax())
    values = ", ".join(
        f"{name} {t.flatten()[worst]}" for name, t in (("fused", fused), ("eager", eager), ("FP64", exact))
    )
    assert float(excess.flatten()[worst]) <= 0, f"element {worst}: {values}"
    mean, eager_mean = float(error.mean()), float(eager_error.mean())
    unit = ROUNDING_UNIT[dtype] * float(_finite(exact.double()).abs().mean())
    assert mean <= EAGER_FACTOR * eager_mean + unit, f"mean error {mean}, eager's {eager_mean}, one rounding {unit}"


def assert_as_accurate_as_eager(fused: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """For whole models: root mean square errors against FP64, since the largest one is a matter of luck there."""
    assert fused.dtype == eager.dtype and fused.shape == eager.shape == exact.shape
    exact = exact.double()
    error, eager_error = ((t.double() - exact).square().mean().sqrt() for t in (fused, eager))
    unit = ROUNDING_UNIT[fused.dtype] * exact.square().mean().sqrt()
    assert float(error) <= EAGER_FACTOR * float(eager_error) + float(unit), (
        f"error {error:.3e}, eager's {eager_error:.3e}"
    )


def assert_few_roundings_from_eager(fused: torch.Tensor, eager: torch.Tensor) -> None:
    """Where FP64 is not at hand: as near to eager as two orders of the same few operations are. NaNs count as equal."""
    assert fused.dtype == eager.dtype and fused.shape == eager.shape
    got, want = fused.double(), eager.double()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()), "other infinities or NaNs"
    if want.numel():
        allowed = FEW_ROUNDINGS[fused.dtype] * ROUNDING_UNIT[fused.dtype] * (1 + _finite(want).abs())
        error = (_finite(got) - _finite(want)).abs()
        assert bool((error <= allowed).all()), (
            f"error {error.max():.3e}, allowed there {allowed[error > allowed][0]:.3e}"
        )


def assert_same_sums(fused: torch.Tensor, eager: torch.Tensor, summed: int, scale: float = 1) -> None:
    """For sums of up to `summed` terms in another order: roundings add up like a random walk, at the largest scale."""
    assert fused.dtype == eager.dtype and fused.shape == eager.shape
    if eager.numel():
        scale = max(scale, 1 + float(eager.double().abs().amax()))
        allowed = FEW_ROUNDINGS[fused.dtype] * ROUNDING_UNIT[fused.dtype] * scale * max(1.0, summed**0.5)
        error = float((fused.double() - eager.double()).abs().amax())
        assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


def assert_same_within_roundings(
    fused: torch.Tensor, expected: torch.Tensor, coarsest: torch.dtype, statements: int, summed: int, scale: float
) -> None:
    """For random programs over values up to `scale`: each statement may round differently, and each term of a sum."""
    sums_in = torch.float64 if coarsest == torch.float64 else torch.float32
    roundings = statements * ROUNDING_UNIT[coarsest] + summed * ROUNDING_UNIT[sums_in]
    allowed = COMPOUNDED * roundings * max(1.0, scale) ** 2
    error = (fused.double() - expected.double()).abs()
    assert not bool((error > allowed).any() | error.isnan().any()), f"error {error.max():.3e}, allowed {allowed:.3e}"


def _eager_error(eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float64:
        return FP64_ROUNDINGS * ROUNDING_UNIT[dtype] * _finite(exact).abs().amax().expand(exact.shape)
    return _finite(eager.double() - exact).abs()


def _finite(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isfinite(), t, torch.zeros_like(t))
