"""LayerNorm: `(x - mean(x)) / sqrt(var(x) + eps)` over the last dimension.

Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.
"""

from __future__ import annotations

from torch import Tensor

from ..verdict import Reason


def layer_norm(x: Tensor, eps: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def unbiased(x: Tensor, eps: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=1, keepdim=True) + eps).rsqrt()


def eps_outside_the_root(x: Tensor, eps: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + eps)


def wrong_divisor(x: Tensor, eps: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().sum(-1, keepdim=True) / 1000 + eps).rsqrt()


def mean_not_subtracted(x: Tensor, eps: Tensor) -> Tensor:
    return x * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()


NEAR_MISSES = (
    (unbiased, Reason.UNBIASED_VARIANCE),
    (eps_outside_the_root, Reason.EPS_OUTSIDE_ROOT),
    (wrong_divisor, Reason.WRONG_DIVISOR),
    (mean_not_subtracted, Reason.MISMATCHED_MEAN),
)
