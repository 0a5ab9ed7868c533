"""RMSNorm: `x / sqrt(mean(x^2) + eps)` over the last dimension.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
"""

from __future__ import annotations

from torch import Tensor

from ..verdict import Reason


def rms_norm(x: Tensor, eps: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def eps_outside_the_root(x: Tensor, eps: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def wrong_divisor(x: Tensor, eps: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) / 1000 + eps).rsqrt()


def sum_of_squares(x: Tensor, eps: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def mean_subtracted_once(x: Tensor, eps: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


NEAR_MISSES = (
    (eps_outside_the_root, Reason.EPS_OUTSIDE_ROOT),
    (wrong_divisor, Reason.WRONG_DIVISOR),
    (sum_of_squares, Reason.WRONG_DIVISOR),
    (mean_subtracted_once, Reason.MISMATCHED_MEAN),
)
