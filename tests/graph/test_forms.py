"""The forms of a residual-add + norm site: how the sum is written, how it is used, how the norm is spelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import STATISTICS, Captured, fuse
from tests.tolerances import assert_as_accurate_as_eager, assert_few_roundings_from_eager

D = 48
Fn = Callable[..., object]


def layer_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(s, (s.shape[-1],), w, b)


def by_hand_layer_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = s.mean(-1, keepdim=True)
    return w * (s - mean) / torch.sqrt(s.var(-1, keepdim=True, unbiased=False) + 1e-5) + b


def from_squares_layer_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = s - s.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * w + b


def rms_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.rms_norm(s, (s.shape[-1],), w, 1e-6)


def llama_rms_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = s.float() if s.dtype in (torch.bfloat16, torch.float16) else s
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(s.dtype)


def gemma_rms_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = s.float() if s.dtype in (torch.bfloat16, torch.float16) else s
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + w.to(wide.dtype))).to(s.dtype)


def divided_rms_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return s / torch.sqrt((s * s).sum(-1, keepdim=True) / s.shape[-1] + 1e-6) * w


def powered_rms_norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return s * (s.square().mean(dim=-1).unsqueeze(-1) + 1e-6) ** -0.5 * w


NORMS = [
    layer_norm,
    by_hand_layer_norm,
    from_squares_layer_norm,
    rms_norm,
    llama_rms_norm,
    gemma_rms_norm,
    divided_rms_norm,
    powered_rms_norm,
]

SUMS: dict[str, Fn] = {
    "plain": lambda x, r, w: x + r,
    "swapped": lambda x, r, w: r + x,
    "alpha on the residual": lambda x, r, w: x * 1.7 + r,
    "alpha on the branch": lambda x, r, w: x + r * 0.3,
    "alpha= of add": lambda x, r, w: torch.add(x, r, alpha=2),
    "biased": lambda x, r, w: x + (r + w),
    "biased outside": lambda x, r, w: (x + r) + w,
    "cast": lambda x, r, w: (x.float() + r.float()).to(x.dtype),
    "dropout in evaluation": lambda x, r, w: x + F.dropout(r, 0.1, training=False),
    "in place": lambda x, r, w: x.clone().add_(r),
    "three-way": lambda x, r, w: x + r + 0.5 * r,
    "layer scale": lambda x, r, w: x + w * r,
    "scaled after": lambda x, r, w: (x + r) * 0.5,
    "through a view": lambda x, r, w: (x.reshape(-1, x.shape[-1]) + r.reshape(-1, r.shape[-1])).view(x.shape),
}

USES: dict[str, Fn] = {
    "norm only": lambda s, y, w: y,
    "both outputs": lambda s, y, w: (s, y),
    "the sum used again": lambda s, y, w: s + torch.mm(y.reshape(-1, D), w.expand(D, D)).view(s.shape),
    "norm used twice": lambda s, y, w: (torch.mm(y.reshape(-1, D), w.expand(D, D)), y.reshape(-1, D) * 2),
    "norm cast": lambda s, y, w: y.double(),
    "the sum used before": lambda s, y, w: (s.relu(), y),
}


def inputs(*lead: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(*lead, D, generator=g) for _ in range(2))
    w, b = (torch.randn(D, generator=g) for _ in range(2))
    return tuple(t.to(dtype) for t in (x, r, 1 + 0.1 * w, b))  # type: ignore[return-value]


def check(fn: Fn, args: tuple[Tensor, ...], kernels: int = 1, dynamic: bool | None = None) -> Captured:
    """Fused in `kernels` kernels, nothing of a norm left, and as near to FP64 as eager is."""
    with torch.no_grad():
        captured = fuse(fn, *args, dynamic=dynamic)
        eager = fn(*args)
        exact = fn(*(a.double() for a in args))
    assert captured.reasons == []
    assert len(captured.kernels) == kernels
    left = captured.ops()
    assert sum(left[op] for op in STATISTICS) == 0
    for got, want, truth in zip(_list(captured.result), _list(eager), _list(exact), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        dtype = args[0].dtype
        assert_as_accurate_as_eager(got.to(dtype), want.to(dtype), truth)
        assert_few_roundings_from_eager(got.to(dtype), want.to(dtype))
    return captured


def _list(value: object) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]  # type: ignore[list-item]


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spelling_of_the_norm(norm: Fn, dtype: torch.dtype) -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, norm(s, w, b)  # type: ignore[return-value]

    captured = check(site, inputs(2, 3, dtype=dtype))
    assert torch.equal(captured.result[0], (lambda x, r, *_: x + r)(*inputs(2, 3, dtype=dtype)))
    assert captured.sites[0].norm == ("layer_norm" if "layer" in norm.__name__ else "rms_norm")


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [layer_norm, llama_rms_norm], ids=lambda f: f.__name__)
def test_spelling_of_the_sum(how: str, dtype: torch.dtype, norm: Fn) -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = SUMS[how](x, r, w)
        return s, norm(s, w, b)  # type: ignore[return-value]

    args = inputs(2, 3, dtype=dtype)
    captured = check(site, args)
    assert torch.equal(captured.result[0], SUMS[how](*args[:3])), "the sum must be eager's, bit for bit"  # type: ignore[arg-type]


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uses_of_the_results(how: str, dtype: torch.dtype) -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> object:
        s = x + r
        return USES[how](s, layer_norm(s, w, b), w)

    check(site, inputs(2, 3, dtype=dtype))


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
def test_with_and_without_weight_and_bias(affine: str) -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(
            x + r, (D,), w if affine in ("both", "weight") else None, b if affine in ("both", "bias") else None
        )

    captured = check(site, inputs(5))
    assert captured.programs[0].count(": col") == {"both": 2, "weight": 1, "bias": 1, "none": 0}[affine]


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3), (2, 1, 1, 2)], ids=str)
def test_any_leading_rank(lead: tuple[int, ...]) -> None:
    check(lambda x, r, w, b: rms_norm(x + r, w, b), inputs(*lead))


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(lead: tuple[int, ...]) -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r, w, b: (x + r, rms_norm(x + r, w, b)), *inputs(*lead))
    assert [t.shape for t in captured.result] == [(*lead, D)] * 2


@pytest.mark.parametrize("shape", [(1, 3, D), (2, 1, D), (3, D), (1, 1, 3, D)], ids=str)
def test_a_tile_that_repeats_over_the_rows(shape: tuple[int, ...]) -> None:
    x, _, w, b = inputs(2, 3)
    position = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    captured = check(lambda x, p, w, b: layer_norm(x + p, w, b), (x, position, w, b))
    assert "%" in captured.programs[0] or "//" in captured.programs[0]


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_strided_inputs(norm: Fn) -> None:
    x, r, w, b = inputs(4, 6)
    site = lambda x, r, w, b: (x + r, norm(x + r, w, b))  # noqa: E731
    check(site, (x.transpose(0, 1), r.reshape(6, 4, D), w, b))
    check(site, (x.flip(0)[::2], r[::2], w, b))
    check(site, (x, r[:1].expand(4, 6, D), w, b))
    check(site, (torch.randn(4, D, 6).transpose(1, 2), r, w, b))


@pytest.mark.parametrize("position", [(2, 3, D), (1, 3, D), (2, 1, D), (3, D)], ids=str)
def test_rows_may_be_symbolic(position: tuple[int, ...]) -> None:
    _, _, w, b = inputs(2, 3)

    def site(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return x + p, layer_norm(x + p, w, b)

    def exact(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return x + p, layer_norm(x + p, w.double(), b.double())

    x, p = torch.randn(2, 3, D), torch.randn(*position)
    for tensor in (x, p):
        for dim, size in enumerate(tensor.shape[:-1]):
            if size != 1:
                torch._dynamo.mark_dynamic(tensor, dim)
    with torch.no_grad():
        captured = fuse(site, x, p)
        assert len(captured.kernels) == 1 and captured.reasons == []
        for got, want, truth in zip(captured.result, site(x, p), exact(x.double(), p.double()), strict=True):
            assert_as_accurate_as_eager(got, want, truth)
            assert_few_roundings_from_eager(got, want)


def test_mixed_dtypes() -> None:
    x, r, w, b = inputs(2, 3)
    half = torch.bfloat16
    wide = lambda x, r, w, b: (x + r, rms_norm(x + r, w, b))  # noqa: E731
    with torch.no_grad():
        captured = fuse(wide, x, r.to(half), w, b)
    assert len(captured.kernels) == 1 and captured.result[0].dtype is torch.float32
    assert torch.equal(captured.result[0], x + r.to(half))
    assert "cast" not in captured.programs[0], "a bf16 branch meets an FP32 residual without a cast of its own"


def test_double_and_half() -> None:
    site = lambda x, r, w, b: (x + r, layer_norm(x + r, w, b))  # noqa: E731
    check(site, inputs(2, 3, dtype=torch.float64))
    check(site, inputs(2, 3, dtype=torch.float16))


def test_two_norms_of_one_sum_share_their_statistics() -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return layer_norm(s, w, b), layer_norm(s, w + 1, b - 1)

    captured = check(site, inputs(2, 3))
    assert captured.programs[0].count("row_mean") == 2
    assert [s.fused for s in captured.sites] == [True, True]


def test_norm_of_the_branch_then_norm_of_the_sum_is_one_kernel() -> None:
    def sandwich(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = x + rms_norm(r, w, b)
        return s, rms_norm(s, w + 1, b)

    captured = check(sandwich, inputs(2, 3))
    assert [(s.residual, s.fused) for s in captured.sites] == [(False, True), (True, True)]


def test_outputs_share_no_storage() -> None:
    site = lambda x, r, w, b: (x + r, layer_norm(x + r, w, b), (x + r).view(-1))  # noqa: E731
    args = inputs(2, 3)
    with torch.no_grad():
        s, y, flat = fuse(site, *args).result
    before = y.clone()
    s.add_(1)
    assert torch.equal(y, before)
    assert {s.data_ptr(), flat.data_ptr()}.isdisjoint({a.data_ptr() for a in args} | {y.data_ptr()})


@pytest.mark.parametrize("cols", [1, 2, 3, 17, 1000])
def test_any_number_of_columns(cols: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, r = (torch.randn(4, cols, generator=g) for _ in range(2))
    w, b = (torch.randn(cols, generator=g) for _ in range(2))
    check(lambda x, r, w, b: (x + r, layer_norm(x + r, w, b)), (x, r, w, b))
