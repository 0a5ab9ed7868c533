"""Suite `traffic`: the tiles that a site, and a layer of a whole model, move on an H200. Static: no GPU is needed.

A tile is one read or write of a whole rows x cols tensor. Each case is captured as a training graph, and its forward
and its backward graph are lowered by Inductor alone and with fusepass; `traffic_count` says what is counted, and
`traffic_floor` what `floor_tiles` is. Figures of a model are per layer.

torch is made to believe in an H200 in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

from . import traffic_cases
from .progress import progress
from .suite import Options, Row, Table


def run(options: Options) -> Table:
    """Count every case."""
    cases = traffic_cases.chosen(options.quick)
    command = [sys.executable, "-m", "bench.traffic_count", *(["--quick"] if options.quick else [])]
    rows: list[Row] = []
    with (
        progress(2 * len(cases), "traffic") as step,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker,
    ):
        for line in worker.stdout or ():
            rows.append(json.loads(line))
            step(" ".join(str(rows[-1][k]) for k in ("model", "norm", "rows", "cols", "direction")))
    if worker.returncode:
        raise subprocess.CalledProcessError(worker.returncode, command)
    return Table("traffic", rows, _summary(rows))


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for scope in ("site", "model"):
        for direction in ("forward", "backward"):
            found = [r for r in rows if r["scope"] == scope and r["direction"] == direction]
            ratios = [r["fusepass_tiles"] / r["inductor_tiles"] for r in found]
            lines.append(
                f"{scope}, {direction}: fusepass moves {min(ratios):.2f} to {max(ratios):.2f} of Inductor's tiles, "
                f"at most {max(r['fusepass_tiles'] - r['floor_tiles'] for r in found):.2f} tiles above the floor, "
                f"in at most {max(r['fusepass_kernels'] for r in found):.3g} kernels"
            )
    return [*lines, "tiles: reads and writes of whole rows x cols tensors outside matmuls; models: per layer"]
