"""Suite `compile-time`: the first call of a compiled model, cold and warm, with depth; and the pass' share of it.

Every measurement runs in a process of its own with an empty cache folder, so that no kernel and no graph is found
ready-made: that is cold. Warm is the first call again after `torch.compiler.reset()`, with what the caches then hold.
A small function is compiled first: imports, the probing of the C++ compiler and the start of the compile workers are
paid once per process by anybody and say nothing about a model. `pass_s` is the pass' own wall time when cold,
`pass_share` its part of `fusepass_s`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from . import models
from .progress import progress
from .suite import Options, Row, Table

MODELS = ("pre_norm_causal", "pre_norm_causal_rms")
DEPTHS = (12, 24, 48)
WIDTH = 64
BACKENDS = ("inductor", "fusepass")


def run(options: Options) -> Table:
    """Compile each model at each depth with each backend."""
    names = MODELS[:1] if options.quick else MODELS
    depths = DEPTHS[:2] if options.quick else DEPTHS
    rows: list[Row] = []
    with progress(len(names) * len(depths) * len(BACKENDS), "compile-time") as step:
        for name in names:
            for layers in depths:
                taken = {}
                for backend in BACKENDS:
                    step(f"{name}, {layers} layers, {backend}")
                    taken[backend] = _in_fresh_process(name, layers, backend, options.device)
                rows.append(_row(name, layers, taken["inductor"], taken["fusepass"]))
    return Table("compile-time", rows, _summary(rows))


def _row(name: str, layers: int, inductor: dict[str, float], fusepass: dict[str, float]) -> Row:
    return {
        "model": name,
        "layers": layers,
        "inductor_s": inductor["seconds"],
        "fusepass_s": fusepass["seconds"],
        "inductor_warm_s": inductor["warm"],
        "fusepass_warm_s": fusepass["warm"],
        "pass_s": fusepass["pass"],
        "pass_share": fusepass["pass"] / fusepass["seconds"],
        "pass_ms_per_layer": 1e3 * fusepass["pass"] / layers,
    }


def _summary(rows: list[Row]) -> list[str]:
    deepest = [r for r in rows if r["layers"] == max(r["layers"] for r in rows)]
    return [
        f"at {deepest[0]['layers']} layers the pass takes at most {max(r['pass_share'] for r in deepest):.1%} of the "
        "compile time",
        "compile time over Inductor's: geometric mean "
        f"{statistics.geometric_mean(r['fusepass_s'] / r['inductor_s'] for r in rows):.3f} cold, "
        f"{statistics.geometric_mean(r['fusepass_warm_s'] / r['inductor_warm_s'] for r in rows):.3f} warm",
    ]


def _in_fresh_process(name: str, layers: int, backend: str, device: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "FUSEPASS_PROFITABILITY": "always",  # the models are narrow
        }
        command = [sys.executable, "-m", "bench.compile_time", name, str(layers), backend, device]
        done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, layers: int, backend: str, device: str) -> dict[str, float]:
    """Seconds of the first call in this process, of the pass within it, and of the first call after a reset."""
    with torch.no_grad():
        torch.compile(lambda x: x.sin().sum(-1), backend=backend)(torch.ones(64, 64, device=device))
        model = models.build(name, layers=layers, width=WIDTH).to(device)
        ids = models.sample_inputs(name)[0].to(device)
        before = _pass_seconds()
        cold = _first_call(model, backend, ids)
        in_pass = _pass_seconds() - before
        torch.compiler.reset()
        return {"seconds": cold, "pass": in_pass, "warm": _first_call(model, backend, ids)}


def _first_call(model: models.Transformer, backend: str, ids: torch.Tensor) -> float:
    compiled = torch.compile(model, backend=backend)
    started = time.perf_counter()
    compiled(ids)
    return time.perf_counter() - started


def _pass_seconds() -> float:
    from fusepass.fuse_pass import FusePass

    return FusePass.seconds


if __name__ == "__main__":
    name, layers, backend, device = sys.argv[1:]
    print(json.dumps(measure(name, int(layers), backend, device)))
