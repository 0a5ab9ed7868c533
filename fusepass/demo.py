"""`python -m fusepass demo`: the reference models, compiled and compared with eager and with plain Inductor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fusepass
from bench import models, timing
from bench.progress import progress

from . import environment

WIDTH, LAYERS, BATCH, TOKENS = 256, 2, 4, 128
SECONDS_OF_TIMING = 2.0
EXAMPLE = "pre_norm_causal"

CASES: tuple[tuple[str, torch.dtype], ...] = (
    ("pre_norm_causal", torch.float32),
    ("pre_norm_causal_rms", torch.bfloat16),
    ("post_norm_encoder", torch.float32),
    ("deep_norm_encoder", torch.float32),
    ("deep_norm_causal_rms", torch.bfloat16),
    ("tutorial_pre_norm", torch.float32),
    ("tutorial_pre_norm_rms", torch.bfloat16),
    ("parallel_causal", torch.float32),
)


@dataclass(frozen=True)
class Error:
    """Distance from FP64: the largest, which is shown, and the root mean square, which luck has no part in."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Outcome:
    """One model. Errors are distances from the same weights run in FP64; times are medians in ms."""

    name: str
    dtype: torch.dtype
    sites: int
    found: int
    fused: int
    error: Error
    eager_error: Error
    magnitude: float
    eager_ms: float
    inductor_ms: float
    fusepass_ms: float
    report: fusepass.Report

    @property
    def allowed_error(self) -> float:
        """1.1 times eager's own root mean square error, and one rounding of outputs of this magnitude."""
        return 1.1 * self.eager_error.mean + torch.finfo(self.dtype).eps / 2 * self.magnitude

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        faults = []
        if (self.found, self.fused) != (self.sites, self.sites):
            faults.append(f"{self.fused} sites fused of {self.found} found, the model has {self.sites}")
        if not self.error.mean <= self.allowed_error:
            own = f"eager's own {self.eager_error.mean:.3g}"
            faults.append(f"root mean square error {self.error.mean:.3g}: over {self.allowed_error:.3g} ({own})")
        return faults


def run() -> int:
    """Print environment, table and an example report. Returns 1 if a model is not fused as it should be, or wrong."""
    print(tabulate(environment.describe().items(), tablefmt="plain"), end="\n\n")
    outcomes = []
    with progress(len(CASES), "compiling") as step, torch.no_grad():
        for name, dtype in CASES:
            step(f"{name} {_short(dtype)}")
            outcomes.append(measure(name, dtype))
    print(f"{LAYERS} layers, {WIDTH} wide, {BATCH} x {TOKENS} tokens; inference\n")
    columns = ("left", "left", *("right",) * 8)
    print(tabulate([_row(o) for o in outcomes], headers="keys", disable_numparse=True, colalign=columns), end="\n\n")
    print("error: largest distance from FP64; times: interleaved medians, ms\n")
    example = next(o for o in outcomes if o.name == EXAMPLE)
    print(f"fusepass.explain of {EXAMPLE}:\n\n{example.report}\n")
    faults = [f"{o.name} {_short(o.dtype)}: {fault}" for o in outcomes for fault in o.faults]
    print("\n".join(faults) or f"All {len(outcomes)} models are fused at every site, with errors as eager's own.")
    return 1 if faults else 0


def measure(name: str, dtype: torch.dtype) -> Outcome:
    """Compile one reference model, count its sites, and compare it."""
    torch.compiler.reset()
    model = models.build(name, layers=LAYERS, width=WIDTH).to(dtype)
    (ids,) = models.sample_inputs(name, BATCH, TOKENS, torch.Generator().manual_seed(0))
    report = fusepass.explain(model, ids)
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": model,
        "inductor": torch.compile(model),
        "fusepass": torch.compile(model, backend="fusepass"),
    }
    exact = _in_double(name, model)(ids)
    error = {n: _error(m(ids), exact) for n, m in contenders.items()}
    measures = {n: timing.call(partial(m, ids)) for n, m in contenders.items()}
    rounds = timing.rounds_within(SECONDS_OF_TIMING, measures.values(), at_least=11, at_most=301)
    ms = {n: s.median * 1e3 for n, s in timing.interleave(measures, rounds=rounds).items()}
    return Outcome(
        name=name,
        dtype=dtype,
        sites=model.config.sites,
        found=report.fused + report.declined,
        fused=report.fused,
        error=error["fusepass"],
        eager_error=error["eager"],
        magnitude=float(exact.square().mean().sqrt()),
        eager_ms=ms["eager"],
        inductor_ms=ms["inductor"],
        fusepass_ms=ms["fusepass"],
        report=report,
    )


def _in_double(name: str, model: nn.Module) -> nn.Module:
    """The same model, with the very weights that `model` has after its own rounding, in FP64."""
    double = models.build(name, layers=LAYERS, width=WIDTH).double()
    double.load_state_dict(model.state_dict())
    return double


def _error(got: Tensor, exact: Tensor) -> Error:
    distance = got.double() - exact
    return Error(float(distance.abs().max()), float(distance.square().mean().sqrt()))


def _row(o: Outcome) -> dict[str, Any]:
    return {
        "model": o.name,
        "dtype": _short(o.dtype),
        "fused": f"{o.fused} of {o.sites}",
        "error": f"{o.error.largest:.2e}",
        "eager's": f"{o.eager_error.largest:.2e}",
        "eager ms": f"{o.eager_ms:.2f}",
        "Inductor ms": f"{o.inductor_ms:.2f}",
        "fusepass ms": f"{o.fusepass_ms:.2f}",
        "vs eager": f"{o.eager_ms / o.fusepass_ms:.2f}x",
        "vs Inductor": f"{o.inductor_ms / o.fusepass_ms:.2f}x",
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
