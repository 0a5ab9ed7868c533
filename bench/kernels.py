"""Suite `kernels`: the time of one residual-add + norm site, forward and backward, in microseconds.

A compiled function costs tens of microseconds a call before any kernel runs, and one small set of warm buffers flatters
everybody. So what is timed is a chain of sites in one graph, and what is reported is the slope between a chain of 8 and
one of 16, run one after the other in every round. `forward_chain` and `backward_chain` say what the chains are; each
contender moves the same tiles. `copy_us` is one copy of a tile; two copies move as much as a site must, and
`over_floor` is the fused kernel's time beside theirs. `gb_s` counts the four tiles of a site, whatever is moved.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import torch

from . import backward_chain, forward_chain, plots, timing
from .chains import BACKENDS, Point
from .progress import progress
from .suite import Options, Row, Table

DIRECTIONS = {"forward": forward_chain.measures, "backward": backward_chain.measures}
NORMS = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((2048, 768), (512, 4096), (4096, 1024), (512, 768), (8192, 512), (64, 4096))


def run(options: Options) -> Table:
    """Time every point of the grid."""
    rows: list[Row] = []
    with timing.thread_count_kept() as threads:
        points = list(_grid(options, options.threads or (threads,)))
        with progress(len(points), "kernels") as step:
            for point in points:
                step(str(point))
                torch.set_num_threads(point.threads)
                rows.append(_measure(point, options))
    if options.plot:
        plots.bandwidth(rows, options.plot)
    return Table("kernels", rows, _summary(rows))


def _grid(options: Options, threads: tuple[int, ...]) -> Iterator[Point]:
    shapes = SHAPES[:2] if options.quick else SHAPES
    directions = [options.direction] if options.direction else list(DIRECTIONS)
    for direction, count, norm, dtype, (rows, cols) in itertools.product(directions, threads, NORMS, DTYPES, shapes):
        yield Point(direction, norm, rows, cols, dtype, count)


def _measure(point: Point, options: Options) -> Row:
    torch.compiler.reset()
    measures = DIRECTIONS[point.direction](point, options.device)
    rounds = timing.rounds_within(1.5 if options.quick else 4.0, measures.values(), at_least=15, at_most=400)
    slopes = timing.interleave(measures, rounds=rounds)
    return {
        "norm": point.norm,
        "rows": point.rows,
        "cols": point.cols,
        "dtype": str(point.dtype).removeprefix("torch."),
        "direction": point.direction,
        "threads": point.threads,
        **{f"{n}_us": slope.median * 1e6 for n, slope in slopes.items()},
        **{f"{n}_gb_s": 4 * _tile_bytes(point) / slopes[n].median / 1e9 for n in BACKENDS},
        "over_floor": slopes["fusepass"].median / (2 * slopes["copy"].median),
        "speedup": slopes["inductor"].median / slopes["fusepass"].median,
        "spread": max(slopes[n].spread for n in BACKENDS),
        "rounds": rounds,
    }


def _tile_bytes(point: Point) -> int:
    return point.rows * point.cols * point.dtype.itemsize


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for direction, threads in dict.fromkeys((r["direction"], r["threads"]) for r in rows):
        found = [r for r in rows if (r["direction"], r["threads"]) == (direction, threads)]
        worst = min(found, key=lambda r: r["speedup"])
        name = " ".join(str(worst[k]) for k in ("norm", "rows", "cols", "dtype"))
        lines.append(
            f"{direction}, {threads} thread(s): speed-up over Inductor: geometric mean "
            f"{statistics.geometric_mean(r['speedup'] for r in found):.3f}, minimum {worst['speedup']:.3f} ({name})"
        )
    return [
        *lines,
        "us: median over the rounds of the slope between 8 and 16 sites; spread: distance of its quartiles over its "
        "median, the larger of Inductor's and fusepass'",
    ]
