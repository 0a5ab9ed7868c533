"""Every rounding that a graph spells is kept, whatever the dtypes: a fused site is eager's own, and its dtype too."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import fuse
from tests.tolerances import assert_few_roundings_from_eager

D = 32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("by_reference")


def check(fn: Callable[..., tuple[Tensor, Tensor]], *args: Tensor) -> Tensor:
    """One kernel; the sum is eager's to the bit; returns the fused norm, beside which eager's was a few roundings."""
    with torch.no_grad():
        captured = fuse(fn, *args)
        wanted = fn(*args)
    assert len(captured.kernels) == 1 and captured.reasons == []
    s, y = captured.result
    assert s.dtype == wanted[0].dtype and torch.equal(s, wanted[0])
    assert_few_roundings_from_eager(y, wanted[1])
    return y  # type: ignore[no-any-return]


@pytest.mark.parametrize(("x", "r", "w"), list(itertools.product(FLOATS, FLOATS, FLOATS)), ids=str)
def test_every_combination_of_dtypes(x: torch.dtype, r: torch.dtype, w: torch.dtype) -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        wide = s.float()
        return s, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    check(fn, torch.randn(6, D).to(x), torch.randn(6, D).to(r), torch.randn(D).to(w))


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "promoted": lambda x, r: x.float() + r,
    "both cast": lambda x, r: x.float() + r.float(),
    "cast after": lambda x, r: (x + r).float(),
    "round trip": lambda x, r: (x.float() + r.float()).bfloat16().float(),
    "kept in FP32 and rounded for the norm": lambda x, r: (x.float() + r.float()).bfloat16(),
}


@pytest.mark.parametrize("name", SUMS)
def test_where_the_sum_is_rounded(name: str) -> None:
    """The same numbers in exact arithmetic, and other bits."""

    def fn(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = SUMS[name](x, r)
        return s, F.rms_norm(s, (D,))

    check(fn, torch.randn(6, D).bfloat16(), torch.randn(6, D).bfloat16())


def unit(s: Tensor) -> Tensor:
    wide = s.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Llama: rounded, then weighted": lambda s, w: w * unit(s).to(s.dtype),
    "Gemma: one plus weight in FP32, then rounded": lambda s, w: (unit(s) * (1 + w.float())).to(s.dtype),
    "weighted in FP32, then rounded": lambda s, w: (unit(s) * w.float()).to(s.dtype),
    "one plus weight in BF16": lambda s, w: unit(s).to(s.dtype) * (1 + w),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_where_the_weight_is_rounded(name: str) -> None:
    """A weight of 2^-9 is lost in `1 + w` in BF16, and kept in FP32."""

    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, WEIGHTS[name](s, w)

    args = torch.randn(6, D).bfloat16(), torch.randn(6, D).bfloat16(), torch.full((D,), 2.0**-9).bfloat16()
    got = check(fn, *args)
    wanted = fn(*args)[1]
    assert float((got != wanted).float().mean()) < 0.05, "a few ties may fall the other way, and no more"


ORDERS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize(("sum_", "root", "weight"), ORDERS)
def test_the_order_of_operands_is_nothing(sum_: bool, root: bool, weight: bool) -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x if sum_ else x + r
        rstd = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = rstd * s if root else s * rstd
        return s, w * y if weight else y * w

    check(fn, torch.randn(6, D), torch.randn(6, D), torch.randn(D))


def test_squares_in_fp16_overflow_as_eagers_do() -> None:
    """A graph that squares in FP16 gets FP16's infinities; one that widens first gets the right numbers."""
    x = torch.full((2, D), 300.0, dtype=torch.float16)

    def narrow(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)

    def wide(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, unit(s).to(s.dtype)

    assert torch.equal(check(narrow, x, x), torch.zeros_like(x))
    assert torch.equal(check(wide, x, x), torch.ones_like(x))
