"""Suite `kernels`: the forward time of one residual-add + norm site, in microseconds.

A compiled function costs tens of microseconds a call before any kernel runs, and one small set of warm buffers flatters
everybody. So what is timed is a chain of sites in one graph, and what is reported is the slope between a chain of 8 and
one of 16, run one after the other in every round. The chain is that of a pre-norm model:

    sublayer(s, y, r_i)        # attention or feed-forward: reads y, writes r_i
    s = s + r_i                # the site: reads s and r_i, writes s and y
    y = norm(s)

Every r_i is a buffer of its own, so that it is as cold as 16 such tiles make it. `sublayer` is an op that declares that
it reads s and y and writes r_i, and does nothing. That is legal for an op that mutates (what it writes is what stood
there), and opaque to Inductor and to fusepass alike: neither may drop the stores of s and y, or fuse one site with the
next. It costs about a microsecond, in every contender's chain. So each contender moves the same four tiles a site.
(Without s among its arguments, Inductor would sum several r_i again in the next sites instead of storing s.)

`copy_us` is one copy of a tile, its source rotating over the r_i and its target over two buffers, as in the chain.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import timing
from .progress import progress
from .suite import Options, Row, Table

SHORT, LONG = 8, 16
NORMS = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((2048, 768), (512, 4096), (4096, 1024))
BACKENDS = ("inductor", "fusepass")

_library = torch.library.Library("fusepass_bench", "DEF")
_library.define("sublayer(Tensor s, Tensor y, Tensor(a!) r) -> ()")
_library.impl("sublayer", lambda s, y, r: None, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Point:
    """One row of the table to be."""

    norm: str
    rows: int
    cols: int
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.norm} {self.rows}x{self.cols} {dtype}, {self.threads} thread(s)"


@dataclass(frozen=True)
class Inputs:
    """Fresh random data for a chain: the stream s, one r per site, and the norm's weight and bias."""

    s: Tensor
    r: list[Tensor]
    weight: Tensor
    bias: Tensor | None


def run(options: Options) -> Table:
    """Time every point of the grid."""
    before = torch.get_num_threads()
    points = list(_grid(options, options.threads or (before,)))
    rows: list[Row] = []
    try:
        with progress(len(points), "kernels") as step, torch.inference_mode():
            for point in points:
                step(str(point))
                torch.set_num_threads(point.threads)
                rows.append(_measure(point, options))
    finally:
        torch.set_num_threads(before)
    return Table("kernels", rows, _summary(rows))


def chain(norm: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`len(inputs.r)` sites, kept apart by the opaque sublayer. Returns the last sum and the last norm."""
    s = y = inputs.s
    for r in inputs.r:
        torch.ops.fusepass_bench.sublayer(s, y, r)
        s = s + r
        if norm == "layer_norm":
            y = F.layer_norm(s, (s.shape[-1],), inputs.weight, inputs.bias)
        else:
            y = F.rms_norm(s, (s.shape[-1],), inputs.weight, 1e-6)
    return s, y


def random_inputs(point: Point, sites: int, device: str) -> Inputs:
    """Seeded normal data."""
    generator = torch.Generator(device).manual_seed(0)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float32)
    tiles = [randn(point.rows, point.cols).to(point.dtype) for _ in range(sites + 1)]
    weight, bias = (randn(point.cols).to(point.dtype) for _ in range(2))
    return Inputs(tiles[0], tiles[1:], weight, bias if point.norm == "layer_norm" else None)


def _grid(options: Options, threads: tuple[int, ...]) -> Iterator[Point]:
    shapes = SHAPES[:2] if options.quick else SHAPES
    for count, norm, dtype, (rows, cols) in itertools.product(threads, NORMS, DTYPES, shapes):
        yield Point(norm, rows, cols, dtype, count)


def _measure(point: Point, options: Options) -> Row:
    torch.compiler.reset()
    inputs = random_inputs(point, LONG, options.device)
    short_inputs = Inputs(inputs.s, inputs.r[:SHORT], inputs.weight, inputs.bias)
    measures: dict[str, Callable[[], float]] = {}
    for name, function in _contenders().items():
        _check_equal(name, function(point.norm, inputs), chain(point.norm, inputs))
        short, long = partial(function, point.norm, short_inputs), partial(function, point.norm, inputs)
        short()
        measures[name] = timing.slope(short, long, LONG - SHORT)
    targets = [torch.empty_like(inputs.s) for _ in range(2)]
    copy_short, copy_long = partial(_copies, short_inputs.r, targets), partial(_copies, inputs.r, targets)
    measures["copy"] = timing.slope(copy_short, copy_long, LONG - SHORT)
    rounds = timing.rounds_within(2.0 if options.quick else 8.0, measures.values(), at_least=15, at_most=400)
    slopes = timing.interleave(measures, rounds=rounds)
    return {
        "norm": point.norm,
        "rows": point.rows,
        "cols": point.cols,
        "dtype": str(point.dtype).removeprefix("torch."),
        "direction": "forward",
        "threads": point.threads,
        **{f"{n}_us": slope.median * 1e6 for n, slope in slopes.items()},
        "speedup": slopes["inductor"].median / slopes["fusepass"].median,
        "spread": max(slopes[n].spread for n in BACKENDS),
        "rounds": rounds,
    }


def _contenders() -> dict[str, Callable[[str, Inputs], tuple[Tensor, Tensor]]]:
    """Eager and each backend. Thread counts are compiled into CPU kernels, hence no cached graphs."""
    options: dict[str, Any] = {"fx_graph_cache": False}
    compiled = {b: torch.compile(chain, backend=b, dynamic=False, options=options) for b in BACKENDS}
    return {"eager": chain, **compiled}


def _copies(sources: list[Tensor], targets: list[Tensor]) -> None:
    for i, source in enumerate(sources):
        targets[i % len(targets)].copy_(source)


def _check_equal(name: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Nobody is timed who computes something else: the sum bit for bit, the norm to a few rounding units."""
    unit = torch.finfo(expected[1].dtype).eps
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, msg=lambda m: f"{name}: the sum differs: {m}")
    torch.testing.assert_close(got[1], expected[1], rtol=8 * unit, atol=8 * unit, msg=lambda m: f"{name}: {m}")


def _summary(rows: list[Row]) -> list[str]:
    speedups = [r["speedup"] for r in rows]
    worst = min(rows, key=lambda r: r["speedup"])
    name = " ".join(str(worst[k]) for k in ("norm", "rows", "cols", "dtype", "threads"))
    return [
        f"speed-up over Inductor: geometric mean {statistics.geometric_mean(speedups):.3f}, "
        f"minimum {min(speedups):.3f} ({name})",
        "us: median over the rounds of the slope between 8 and 16 sites; spread: distance of its quartiles over its "
        "median, the larger of Inductor's and fusepass'",
    ]
