"""What the two directions of the suite `kernels` share: a point of its grid, its data, its contenders, and the lengths.

On a CPU a call is timed on the clock. On a GPU all launches of a call are queued before the GPU begins, and the time
is the GPU's own (see `timing.queued`): what the host takes to launch a kernel is not in it, the gap between two is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import launches, timing

SHORT, LONG = 8, 16
BACKENDS = ("inductor", "fusepass")
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}

Site = Callable[[str, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(norm, s, r, weight, bias) to s + r and its norm."""


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


@dataclass(frozen=True)
class Run:
    """One chain of one contender: `call` is timed and gets what `prepare` returns, which is called before each call."""

    prepare: Callable[[], Any]
    call: Callable[[Any], Any]

    def measure(self, device: str) -> timing.Measure:
        return (timing.queued if on_gpu(device) else timing.call_with)(self.prepare, self.call)


@dataclass(frozen=True)
class Setting:
    """A direction at one point.

    Attributes:
        runs: a contender's function to its short and its long chain.
        check: raises if what the short chain of the contender so called returned is wrong.
        tiles: tensors of the point's size, as many as the long chain has sites.
    """

    runs: Callable[[Callable[..., Any]], tuple[Run, Run]]
    check: Callable[[str, Any], None]
    tiles: Sequence[Tensor]


@dataclass(frozen=True)
class Entry:
    """A contender at one point, found to be right: seconds of one site, and the kernels of one where they are known."""

    measure: timing.Measure
    launches: float | None


def enter(name: str, short: Run, long: Run, check: Callable[[str, Any], None], device: str) -> Entry:
    """Run both chains once, and check the short one."""
    result, few = launches.first_call(short.prepare, short.call, device)
    check(name, result)
    _, many = launches.first_call(long.prepare, long.call, device)
    per_site = None if few is None or many is None else (many - few) / (LONG - SHORT)
    return Entry(timing.slope(short.measure(device), long.measure(device), LONG - SHORT), per_site)


def normals(point: Point, device: str) -> Callable[..., Tensor]:
    """A function of sizes that returns seeded normal data in the point's dtype."""
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float32)
    return lambda *sizes: randn(*sizes).to(point.dtype)


def site(kind: str, s: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual add and the norm, in plain PyTorch."""
    s = s + r
    return s, norm(kind, s, weight, bias)


def norm(kind: str, s: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of a site over the last dimension."""
    if kind == "layer_norm":
        return F.layer_norm(s, (s.shape[-1],), weight, bias, EPS[kind])
    return F.rms_norm(s, (s.shape[-1],), weight, EPS[kind])


def contenders(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Eager and each backend. Thread counts are compiled into CPU kernels, hence no cached graphs."""
    options: dict[str, Any] = {"fx_graph_cache": False}
    compiled = {b: torch.compile(function, backend=b, dynamic=False, options=options) for b in BACKENDS}
    return {"eager": function, **compiled}


def copies(sources: Sequence[Tensor], device: str) -> timing.Measure:
    """Seconds of one copy of a tile: its source rotates over `sources`, its target over two buffers."""
    targets = [torch.empty_like(sources[0]) for _ in range(2)]

    def copy(count: int, _: None) -> None:
        for i, source in enumerate(sources[:count]):
            targets[i % len(targets)].copy_(source)

    short, long = (Run(lambda: None, partial(copy, n)).measure(device) for n in (SHORT, LONG))
    return timing.slope(short, long, LONG - SHORT)


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"
