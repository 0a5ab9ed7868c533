"""Suite `kernels`: the time of one residual-add + norm site, forward and backward, in microseconds.

A compiled function costs tens of microseconds a call before any kernel runs, and one small set of warm buffers flatters
everybody. So what is timed is a chain of sites in one graph, and what is reported is the slope between a chain of 8 and
one of 16, run one after the other in every round. `forward_chain` and `backward_chain` say what the chains are; each
contender moves the same tiles. `copy_us` is one copy of a tile; two copies move as much as a site must: `pct_of_copy`
is a contender's bandwidth in percent of theirs, and `over_floor` the fused kernel's time beside theirs. `gb_s` counts
the four tiles of a site, whatever is moved. `launches` are kernels per site (see `launches`).

On a GPU the points are others. Wide: tiles of 2^26 elements, twice as large as an H200's L2 cache, so that even what
the site before has written comes from memory. Square, backward: fewer rows than twice the columns, where few programs
share the column sums; the smaller of these tiles stay in L2, as they do in a model. Decode, forward: 1 to 64 rows, all
of which stay in L2; what is compared is the time from one kernel's start to the next one's, not bandwidth.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import backward_chain, chains, forward_chain, peers, plots, timing
from .chains import BACKENDS, Entry, Point
from .peers import Peer
from .progress import progress
from .suite import Options, Row, Table, first_line

DIRECTIONS: dict[str, Any] = {"forward": forward_chain, "backward": backward_chain}
NORMS = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((2048, 768), (512, 4096), (4096, 1024), (512, 768), (8192, 512), (64, 4096))

WIDE = tuple((2**26 // cols, cols) for cols in (4096, 16384, 1024, 8192, 2048))
SQUARE = ((4096, 4096), (1024, 1024), (2048, 4096))
DECODE = ((1, 4096), (64, 4096), (8, 8192), (1, 16384), (64, 1024))
ON_GPU = (
    ("forward", torch.bfloat16, WIDE),
    ("backward", torch.bfloat16, WIDE),
    ("forward", torch.bfloat16, DECODE),
    ("backward", torch.bfloat16, SQUARE),
    ("forward", torch.float32, WIDE[:2]),
    ("backward", torch.float32, WIDE[:2]),
)
"""In the order in which they are to be had if time is short."""


def run(options: Options) -> Table:
    """Time every point of the grid, or those that `options.budget` allows to begin."""
    rows: list[Row] = []
    failures: list[str] = []
    contenders = peers.of_kernels(options.device)
    with timing.thread_count_kept() as threads:
        points = list(_grid(options, options.threads or (threads,)))
        deadline = timing.Deadline(options.budget)
        with progress(len(points), "kernels") as step:
            for point in itertools.takewhile(lambda _: not deadline.over, points):
                step(str(point))
                torch.set_num_threads(point.threads)
                row, failed = measure(point, contenders, options)
                rows.append(row)
                failures += failed
    if options.plot:
        plots.bandwidth(rows, options.plot)
    notes = [*_summary(rows), *deadline.note(len(points), len(rows)), *peers.absent_note(options.device)]
    return Table("kernels", rows, [*notes, *failures], failed=any("fusepass: " in f for f in failures))


def _grid(options: Options, threads: tuple[int, ...]) -> Iterator[Point]:
    directions = [options.direction] if options.direction else list(DIRECTIONS)
    if chains.on_gpu(options.device):
        for direction, dtype, shapes in ON_GPU:
            some = shapes[:1] if options.quick else shapes
            for (rows, cols), norm in itertools.product(some, NORMS if direction in directions else ()):
                yield Point(direction, norm, rows, cols, dtype, threads[0])
        return
    shapes = SHAPES[:1] if options.quick else SHAPES
    for direction, count, norm, dtype, (rows, cols) in itertools.product(directions, threads, NORMS, DTYPES, shapes):
        yield Point(direction, norm, rows, cols, dtype, count)


def measure(point: Point, contenders: list[Peer], options: Options) -> tuple[Row, list[str]]:
    """One row, and a line for each contender that failed."""
    torch.compiler.reset()
    direction = DIRECTIONS[point.direction]
    setting = direction.setting(point, options.device)
    entries: dict[str, Entry] = {}
    failed = []

    def enter(name: str, make: Callable[[], peers.Chain]) -> None:
        try:
            short, long = setting.runs(make())
            entries[name] = chains.enter(name, short, long, setting.check, options.device)
        except Exception as e:
            failed.append(f"{point}: {name}: {first_line(e)}")

    for name, function in chains.contenders(direction.chain).items():
        enter(name, partial(_same, function))
    for peer in contenders:
        if peer.enters(point):
            enter(peer.name, partial(peer.in_place_of, direction.chain))
    measures = {name: entry.measure for name, entry in entries.items()}
    measures["copy"] = chains.copies(setting.tiles, options.device)
    rounds = timing.rounds_within(1.5 if options.quick else 4.0, measures.values(), at_least=15, at_most=400)
    slopes = timing.interleave(measures, rounds=rounds)
    return _row(point, slopes, entries, [p.name for p in contenders], rounds), failed


def _same(function: peers.Chain) -> peers.Chain:
    return function


def _row(
    point: Point, slopes: dict[str, timing.Sample], entries: dict[str, Entry], contenders: list[str], rounds: int
) -> Row:
    seconds = {name: sample.median for name, sample in slopes.items()}
    copy = seconds["copy"]
    tile = point.rows * point.cols * point.dtype.itemsize

    def of(name: str, value: Any) -> Any:
        return value(seconds[name]) if name in seconds else None

    names = ("eager", *BACKENDS, *contenders)
    both = all(b in seconds for b in BACKENDS)
    return {
        "norm": point.norm,
        "rows": point.rows,
        "cols": point.cols,
        "dtype": str(point.dtype).removeprefix("torch."),
        "direction": point.direction,
        "threads": point.threads,
        **{f"{n}_us": of(n, lambda s: s * 1e6) for n in (*names, "copy")},
        **{f"{n}_gb_s": of(n, lambda s: 4 * tile / s / 1e9) for n in BACKENDS},
        "copy_gb_s": 2 * tile / copy / 1e9,
        **{f"{n}_pct_of_copy": of(n, lambda s: 100 * 2 * copy / s) for n in (*BACKENDS, *contenders)},
        **{f"{n}_launches": entries[n].launches if n in entries else None for n in BACKENDS},
        "over_floor": of("fusepass", lambda s: s / (2 * copy)),
        "speedup": seconds["inductor"] / seconds["fusepass"] if both else None,
        "spread": max((slopes[n].spread for n in BACKENDS if n in slopes), default=None),
        "rounds": rounds,
    }


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for direction, threads in dict.fromkeys((r["direction"], r["threads"]) for r in rows):
        found = [r for r in rows if (r["direction"], r["threads"]) == (direction, threads) and r["speedup"]]
        if not found:
            continue
        worst = min(found, key=lambda r: r["speedup"])
        least = min(found, key=lambda r: r["fusepass_pct_of_copy"])
        lines += [
            f"{direction}, {threads} thread(s): speed-up over Inductor: geometric mean "
            f"{statistics.geometric_mean(r['speedup'] for r in found):.3f}, minimum {worst['speedup']:.3f} "
            f"({_name(worst)})",
            f"{direction}, {threads} thread(s): percent of the copy's bandwidth: median "
            f"{statistics.median(r['fusepass_pct_of_copy'] for r in found):.0f}, minimum "
            f"{least['fusepass_pct_of_copy']:.0f} ({_name(least)})",
        ]
    return [
        *lines,
        "us: median over the rounds of the slope between 8 and 16 sites; spread: distance of its quartiles over its "
        "median, the larger of Inductor's and fusepass'",
    ]


def _name(row: Row) -> str:
    return " ".join(str(row[k]) for k in ("norm", "rows", "cols", "dtype"))
