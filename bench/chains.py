"""What the two directions of the suite `kernels` share: a point of its grid, its data, and the chains' lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import timing

SHORT, LONG = 8, 16
BACKENDS = ("inductor", "fusepass")


@dataclass(frozen=True)
class Point:
    """One row of the table to be."""

    direction: str
    norm: str
    rows: int
    cols: int
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.direction} {self.norm} {self.rows}x{self.cols} {dtype}, {self.threads} thread(s)"


def normals(point: Point, device: str) -> Callable[..., Tensor]:
    """A function of sizes that returns seeded normal data in the point's dtype."""
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float32)
    return lambda *sizes: randn(*sizes).to(point.dtype)


def norm(kind: str, s: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of a site over the last dimension."""
    if kind == "layer_norm":
        return F.layer_norm(s, (s.shape[-1],), weight, bias)
    return F.rms_norm(s, (s.shape[-1],), weight, 1e-6)


def contenders(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Eager and each backend. Thread counts are compiled into CPU kernels, hence no cached graphs."""
    options: dict[str, Any] = {"fx_graph_cache": False}
    compiled = {b: torch.compile(function, backend=b, dynamic=False, options=options) for b in BACKENDS}
    return {"eager": function, **compiled}


def copies(sources: Sequence[Tensor]) -> timing.Measure:
    """Seconds of one copy of a tile: its source rotates over `sources`, its target over two buffers."""
    targets = [torch.empty_like(sources[0]) for _ in range(2)]

    def copy(tiles: Sequence[Tensor]) -> None:
        for i, source in enumerate(tiles):
            targets[i % len(targets)].copy_(source)

    short, long = (timing.call(partial(copy, sources[:n])) for n in (SHORT, LONG))
    return timing.slope(short, long, LONG - SHORT)
