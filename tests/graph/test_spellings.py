"""Every algebraically equal spelling of a norm and of a residual sum is one fused site, in FP32 and in BF16.

Each is traced twice, checked against eager and FP64, and counted: one kernel, one norm, nothing left of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import STATISTICS, fuse
from tests.tolerances import assert_as_accurate_as_eager, assert_few_roundings_from_eager

D = 24
EPS = 1e-5
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Sum = Callable[[Tensor, Tensor, Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("by_reference")


def wide(t: Tensor) -> Tensor:
    """As models do: statistics of 16-bit values in FP32."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def centred(s: Tensor) -> Tensor:
    return s - s.mean(-1, keepdim=True)


def mean_square(s: Tensor) -> Tensor:
    return wide(s).pow(2).mean(-1, keepdim=True)


def unit(s: Tensor) -> Tensor:
    return wide(s) * torch.rsqrt(mean_square(s) + EPS)


def standard(s: Tensor) -> Tensor:
    x = wide(s)
    return centred(x) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS)


def by_moments(s: Tensor) -> Tensor:
    x = wide(s)
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + EPS)


def by_moments_of_products(s: Tensor) -> Tensor:
    x = wide(s)
    mean = x.sum(-1, keepdim=True) / D
    return (x - mean) / torch.sqrt((x * x).sum(-1, keepdim=True) / D - mean * mean + EPS)


def by_var_mean(s: Tensor) -> Tensor:
    variance, mean = torch.var_mean(wide(s), dim=-1, keepdim=True, correction=0)
    return (wide(s) - mean) * torch.rsqrt(variance + EPS)


def by_std(s: Tensor) -> Tensor:
    x = wide(s)
    return centred(x) / torch.sqrt(x.std(-1, keepdim=True, unbiased=False) ** 2 + EPS)


def folded(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As a multiply and an add per element: x * scale + shift."""
    x = wide(s)
    scale = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * w
    return x * scale + (b - x.mean(-1, keepdim=True) * scale)


EPS_BUFFER = torch.tensor(EPS)

LAYER_NORMS: dict[str, Norm] = {
    "functional": lambda s, w, b: F.layer_norm(s, (D,), w, b, EPS),
    "functional, no bias": lambda s, w, b: F.layer_norm(s, (D,), w, None, EPS),
    "functional, no weight": lambda s, w, b: F.layer_norm(s, (D,), None, b, EPS),
    "functional, bare": lambda s, w, b: F.layer_norm(s, (D,)),
    "functional, keywords": lambda s, w, b: F.layer_norm(s, normalized_shape=[D], weight=w, bias=b, eps=1e-6),
    "functional in FP32": lambda s, w, b: F.layer_norm(wide(s), (D,), wide(w), wide(b), EPS).to(s.dtype),
    "torch.layer_norm": lambda s, w, b: torch.layer_norm(s, (D,), w, b, EPS),
    "native": lambda s, w, b: torch.native_layer_norm(s, [D], w, b, EPS)[0],
    "affine outside": lambda s, w, b: F.layer_norm(s, (D,)) * w + b,
    "addcmul": lambda s, w, b: torch.addcmul(b, F.layer_norm(s, (D,)), w),
    "one plus weight": lambda s, w, b: F.layer_norm(s, (D,), w + 1, b),
    "rsqrt": lambda s, w, b: w * standard(s) + b,
    "rsqrt, weight on the right": lambda s, w, b: standard(s) * w + b,
    "weight before the root": lambda s, w, b: (
        centred(wide(s)) * w * torch.rsqrt(wide(s).var(-1, keepdim=True, unbiased=False) + EPS) + b
    ),
    "over sqrt": lambda s, w, b: (
        centred(wide(s)) / torch.sqrt(wide(s).var(-1, keepdim=True, unbiased=False) + EPS) * w + b
    ),
    "one over sqrt": lambda s, w, b: (
        centred(wide(s)) * (1 / torch.sqrt(wide(s).var(-1, keepdim=True, unbiased=False) + EPS)) * w + b
    ),
    "reciprocal of sqrt": lambda s, w, b: (
        centred(wide(s)) * torch.sqrt(wide(s).var(-1, keepdim=True, unbiased=False) + EPS).reciprocal() * w + b
    ),
    "power -0.5": lambda s, w, b: (
        centred(wide(s)) * (wide(s).var(-1, keepdim=True, unbiased=False) + EPS).pow(-0.5) * w + b
    ),
    "power 0.5": lambda s, w, b: (
        centred(wide(s)) / (wide(s).var(-1, keepdim=True, unbiased=False) + EPS) ** 0.5 * w + b
    ),
    "mean of centred squares": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(centred(wide(s)).pow(2).mean(-1, keepdim=True) + EPS) * w + b
    ),
    "mean of centred products": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt((centred(wide(s)) * centred(wide(s))).mean(-1, keepdim=True) + EPS) * w + b
    ),
    "sum of centred squares over D": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(centred(wide(s)).square().sum(-1, keepdim=True) / D + EPS) * w + b
    ),
    "sum of centred squares times 1/D": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(centred(wide(s)).square().sum(-1, keepdim=True) * (1 / D) + EPS) * w + b
    ),
    "moments": lambda s, w, b: by_moments(s) * w + b,
    "moments of sums": lambda s, w, b: by_moments_of_products(s) * w + b,
    "var_mean": lambda s, w, b: by_var_mean(s) * w + b,
    "std": lambda s, w, b: by_std(s) * w + b,
    "unbiased variance made biased": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(wide(s).var(-1, keepdim=True) * ((D - 1) / D) + EPS) * w + b
    ),
    "folded": folded,
    "eps on the left": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(EPS + wide(s).var(-1, keepdim=True, unbiased=False)) * w + b
    ),
    "eps in a tensor": lambda s, w, b: (
        centred(wide(s)) * torch.rsqrt(wide(s).var(-1, keepdim=True, unbiased=False) + EPS_BUFFER.to(wide(s).dtype)) * w
        + b
    ),
    "keepdim by unsqueeze": lambda s, w, b: (
        (wide(s) - wide(s).mean(-1).unsqueeze(-1))
        * torch.rsqrt(wide(s).var(-1, unbiased=False) + EPS).unsqueeze(-1)
        * w
        + b
    ),
    "keepdim by indexing": lambda s, w, b: (
        (wide(s) - wide(s).mean(-1)[..., None]) / torch.sqrt(wide(s).var(-1, correction=0)[..., None] + EPS) * w + b
    ),
    "vectors of rank 3": lambda s, w, b: standard(s) * w.view(1, 1, D) + b.view(1, 1, D),
    "no eps": lambda s, w, b: centred(wide(s)) / wide(s).std(-1, keepdim=True, unbiased=False) * w + b,
}

RMS_NORMS: dict[str, Norm] = {
    "functional": lambda s, w, b: F.rms_norm(s, (D,), w, EPS),
    "functional, no weight": lambda s, w, b: F.rms_norm(s, (D,), None, EPS),
    "functional, its own eps": lambda s, w, b: F.rms_norm(s, (D,), w),
    "torch.rms_norm": lambda s, w, b: torch.rms_norm(s, [D], w, EPS),
    "functional in FP32": lambda s, w, b: F.rms_norm(wide(s), (D,), wide(w), EPS).to(s.dtype),
    "llama": lambda s, w, b: w * unit(s).to(s.dtype),
    "llama, weight on the right": lambda s, w, b: unit(s).to(s.dtype) * w,
    "gemma": lambda s, w, b: (unit(s) * (1.0 + wide(w))).to(s.dtype),
    "weight before the cast": lambda s, w, b: (unit(s) * w).to(s.dtype),
    "weight in FP32": lambda s, w, b: unit(s) * w.float(),
    "t5": lambda s, w, b: w * (s * torch.rsqrt(s.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)).to(w.dtype),
    "no weight": lambda s, w, b: unit(s).to(s.dtype),
    "bias": lambda s, w, b: unit(s) * w + b,
    "square": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).square().mean(-1, keepdim=True) + EPS) * w,
    "product": lambda s, w, b: wide(s) * torch.rsqrt((wide(s) * wide(s)).mean(-1, keepdim=True) + EPS) * w,
    "power 2.0": lambda s, w, b: wide(s) * torch.rsqrt((wide(s) ** 2.0).mean(-1, keepdim=True) + EPS) * w,
    "mean over dim=2": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).pow(2).mean(2, keepdim=True) + EPS) * w,
    "mean over a tuple": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).pow(2).mean((-1,), True) + EPS) * w,
    "power -0.5": lambda s, w, b: wide(s) * torch.pow(mean_square(s) + EPS, -0.5) * w,
    "over sqrt": lambda s, w, b: wide(s) / torch.sqrt(mean_square(s) + EPS) * w,
    "one over sqrt": lambda s, w, b: wide(s) * (1.0 / torch.sqrt(mean_square(s) + EPS)) * w,
    "reciprocal of sqrt": lambda s, w, b: wide(s) * torch.sqrt(mean_square(s) + EPS).reciprocal() * w,
    "sqrt of the reciprocal": lambda s, w, b: wide(s) * (1 / (mean_square(s) + EPS)).sqrt() * w,
    "sum over D": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).pow(2).sum(-1, keepdim=True) / D + EPS) * w,
    "sum times 1/D": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).pow(2).sum(-1, True) * (1 / D) + EPS) * w,
    "sum over shape": lambda s, w, b: wide(s) / torch.sqrt((wide(s) ** 2).sum(-1, True) / s.shape[-1] + EPS) * w,
    "root of D outside": lambda s, w, b: (
        wide(s) * torch.rsqrt(wide(s).pow(2).sum(-1, keepdim=True) + D * EPS) * math.sqrt(D) * w
    ),
    "norm over root of D": lambda s, w, b: wide(s) / (wide(s).norm(dim=-1, keepdim=True) * D**-0.5) * w,
    "vector_norm": lambda s, w, b: (
        wide(s) / (torch.linalg.vector_norm(wide(s), dim=-1, keepdim=True) / math.sqrt(D)) * w
    ),
    "F.normalize times root of D": lambda s, w, b: F.normalize(wide(s), dim=-1) * math.sqrt(D) * w,
    "F.normalize, weight first": lambda s, w, b: w * (math.sqrt(D) * F.normalize(wide(s), dim=-1, eps=1e-6)),
    "weight first": lambda s, w, b: (w * wide(s)) * torch.rsqrt(mean_square(s) + EPS),
    "weight with the root": lambda s, w, b: wide(s) * (torch.rsqrt(mean_square(s) + EPS) * w),
    "weight twice": lambda s, w, b: unit(s) * w * b,
    "eps on the left": lambda s, w, b: wide(s) * torch.rsqrt(EPS + mean_square(s)) * w,
    "eps in a tensor": lambda s, w, b: wide(s) * torch.rsqrt(mean_square(s) + EPS_BUFFER.to(wide(s).dtype)) * w,
    "eps by clamp of nothing": lambda s, w, b: wide(s) * torch.rsqrt(mean_square(s) + 0.0 + EPS) * w,
    "keepdim by unsqueeze": lambda s, w, b: wide(s) * torch.rsqrt(wide(s).pow(2).mean(-1) + EPS).unsqueeze(-1) * w,
    "weight of rank 1, 1, D": lambda s, w, b: unit(s) * w.view(1, 1, D),
    "a number as weight": lambda s, w, b: unit(s) * 1.5,
    "a 0-dimensional weight": lambda s, w, b: unit(s) * w[0],
    "weight of another dtype": lambda s, w, b: unit(s) * w.double().float(),
    "rounded after the root": lambda s, w, b: s * torch.rsqrt(mean_square(s) + EPS).to(s.dtype) * w,
    "flattened": lambda s, w, b: (unit(s.reshape(-1, D)) * w).view(s.shape),
    "pairs of a view": lambda s, w, b: unit(s.view(s.shape[0], 1, s.shape[1], D)).view(s.shape) * w,
}

ALPHA = 2.3

SUMS: dict[str, Sum] = {
    "x + r": lambda x, r, v: x + r,
    "r + x": lambda x, r, v: r + x,
    "torch.add": lambda x, r, v: torch.add(x, r),
    "method": lambda x, r, v: x.add(r),
    "in place": lambda x, r, v: x.clone().add_(r),
    "augmented": lambda x, r, v: _augmented(x, r),
    "alpha=2": lambda x, r, v: torch.add(x, r, alpha=2),
    "alpha=0.5": lambda x, r, v: x.add(r, alpha=0.5),
    "DeepNorm": lambda x, r, v: ALPHA * x + r,
    "DeepNorm, swapped": lambda x, r, v: r + x * ALPHA,
    "DeepNorm, divided": lambda x, r, v: x + r / ALPHA,
    "both scaled": lambda x, r, v: 0.7 * x + 0.3 * r,
    "scaled after": lambda x, r, v: (x + r) * 0.5,
    "divided after": lambda x, r, v: (x + r) / 2**0.5,
    "negated branch": lambda x, r, v: x + (-r),
    "bias in the branch": lambda x, r, v: x + (r + v),
    "bias in the stream": lambda x, r, v: (x + v) + r,
    "bias after": lambda x, r, v: (x + r) + v,
    "layer scale": lambda x, r, v: x + v * r,
    "layer scale and bias": lambda x, r, v: x + v * (r + v),
    "one plus layer scale": lambda x, r, v: x + (1 + v) * r,
    "the same tensor twice": lambda x, r, v: x + x,
    "three-way, left": lambda x, r, v: (x + r) + x.flip(0),
    "three-way, right": lambda x, r, v: x + (r + x.flip(0)),
    "four-way": lambda x, r, v: (x + r) + (x.flip(0) + r.flip(0)),
    "chain": lambda x, r, v: x + r + x.flip(0) + r.flip(0),
    "sum()": lambda x, r, v: sum([x, r, x.flip(0)]),  # type: ignore[arg-type,return-value]
    "to FP32 and back": lambda x, r, v: (x.float() + r.float()).to(x.dtype),
    "one side in FP32": lambda x, r, v: wide(x) + r,
    "both in FP32, kept": lambda x, r, v: wide(x) + wide(r),
    "cast after": lambda x, r, v: wide(x + r),
    "dropout in evaluation": lambda x, r, v: x + F.dropout(r, 0.3, training=False),
    "inverted dropout by hand": lambda x, r, v: x + r * (v > 0) / 0.9,
    "drop path": lambda x, r, v: x + r * v[: x.shape[0]].view(-1, 1, 1),
    "gate per row": lambda x, r, v: x + r * x.new_ones(*x.shape[:-1], 1) * 0.5,
    "gate of a batch": lambda x, r, v: x + v.expand(x.shape[0], D).unsqueeze(1) * r,
    "flattened": lambda x, r, v: (x.reshape(-1, D) + r.reshape(-1, D)).view(x.shape),
    "flattened branch": lambda x, r, v: x + r.reshape(-1, D).view(x.shape),
    "transposed branch": lambda x, r, v: x + r.transpose(0, 1).contiguous().transpose(0, 1),
    "unsqueezed": lambda x, r, v: (x.unsqueeze(0) + r.unsqueeze(0)).squeeze(0),
    "repeats over the batch": lambda x, r, v: x + r[:1],
    "repeats over the tokens": lambda x, r, v: x + r[:, :1],
    "expanded": lambda x, r, v: x + r[:1].expand_as(x),
    "lerp by hand": lambda x, r, v: x * (1 - 0.2) + r * 0.2,
    "add of an embedding": lambda x, r, v: x + F.embedding(torch.arange(x.shape[1]), r[0]),
    "baddbmm's alpha": lambda x, r, v: torch.add(x, other=r, alpha=1),
}


def _augmented(x: Tensor, r: Tensor) -> Tensor:
    s = x * 1
    s += r
    return s


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, r, weight, bias."""
    x, r = torch.randn(3, 5, D), torch.randn(3, 5, D)
    return tuple(t.to(dtype) for t in (x, r, 1 + 0.1 * torch.randn(D), torch.randn(D)))  # type: ignore[return-value]


def check(fn: Callable[..., Tensor], dtype: torch.dtype, kind: str) -> None:
    """One site, fused by one kernel; nothing left of a norm; as near to FP64 as eager."""
    args = inputs(dtype)
    with torch.no_grad():
        captured = fuse(fn, *args)
        eager, exact = fn(*args), fn(*(a.double() for a in args))
    assert captured.reasons == []
    assert [(s.norm, s.residual, s.fused) for s in captured.sites] == [(kind, True, True)]
    assert len(captured.kernels) == 1
    assert sum(captured.ops()[op] for op in STATISTICS) == 0
    got = captured.result
    assert got.dtype == eager.dtype and got.shape == eager.shape
    assert_as_accurate_as_eager(got.to(dtype), eager.to(dtype), exact)
    assert_few_roundings_from_eager(got.to(dtype), eager.to(dtype))


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)


def test_the_tables_are_as_long_as_promised() -> None:
    assert len(LAYER_NORMS) + len(RMS_NORMS) >= 60 and len(SUMS) >= 40


@DTYPES
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norm(name: str, dtype: torch.dtype) -> None:
    check(lambda x, r, w, b: LAYER_NORMS[name](x + r, w, b), dtype, "layer_norm")


@DTYPES
@pytest.mark.parametrize("name", RMS_NORMS)
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    check(lambda x, r, w, b: RMS_NORMS[name](x + r, w, b), dtype, "rms_norm")


@DTYPES
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_residual_sum(name: str, dtype: torch.dtype, kind: str) -> None:
    norm = LAYER_NORMS["functional"] if kind == "layer_norm" else RMS_NORMS["llama"]

    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        s = SUMS[name](x, r, w)
        return norm(s, w.to(s.dtype), b.to(s.dtype))

    check(site, dtype, kind)
