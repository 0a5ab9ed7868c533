"""What a region means: one file per pattern, one line each in `PATTERNS`.

A pattern is a plain PyTorch function of a tile and an epsilon. It is traced through the same lift as a user's graph,
and its normal form is what a site is compared with, so every algebraically equal spelling is the same pattern. The
near-misses beside it look alike and mean something else; each says which reason the recogniser must give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..verdict import Reason
from . import layer_norm, rms_norm

Fn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Pattern:
    """`name` as the report shows it, the function, and its near-misses with their reasons."""

    name: str
    fn: Fn
    near_misses: tuple[tuple[Fn, Reason], ...]


PATTERNS: tuple[Pattern, ...] = (
    Pattern("layer_norm", layer_norm.layer_norm, layer_norm.NEAR_MISSES),
    Pattern("rms_norm", rms_norm.rms_norm, rms_norm.NEAR_MISSES),
)
