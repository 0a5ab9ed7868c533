"""Suite `models`: whole models, inference and training, eager against Inductor and fusepass.

The reference models, small; and stacks of four blocks of 768 columns, shaped like BERT's, GPT-2's and LLaMA's, over 4 x
128 tokens. A training step is a forward in training mode, without dropout, and the backward of all parameters for fresh
gradients of the output. Times are medians over interleaved rounds; `spread` is the distance of the quartiles of the
single rounds' ratio of Inductor over fusepass. Matmuls take most of the time and hide the rest in their noise, so
`glue_ms` is the time in all other kernels (attention is left out too), from the profiler, in a run of its own.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusepass

from . import models, plots, timing
from .models import Transformer
from .progress import progress
from .suite import Options, Row, Table

BACKENDS = ("inductor", "fusepass")
MODES = ("inference", "train")
DTYPES = (torch.float32, torch.bfloat16)
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_base_blocks": ("post_norm_encoder", {"layers": 4, "width": 768, "heads": 12}),
    "gpt2_blocks": ("pre_norm_causal", {"layers": 4, "width": 768, "heads": 12}),
    "llama_blocks": ("pre_norm_causal_rms", {"layers": 4, "width": 768, "heads": 12}),
}
BATCH, TOKENS = 4, 128
PROFILED_CALLS = 5

_NOT_GLUE = ("mm", "linear", "attention", "conv")
"""Parts of the names of matmuls and attention, in the profiler's events."""


@dataclass(frozen=True)
class Entry:
    """One row of the table to be."""

    model: str
    mode: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.model}, {self.mode}, {_short(self.dtype)}"

    def build(self, device: str) -> tuple[Transformer, Tensor]:
        """The model, in the mode and the dtype, and its input."""
        name, shape = BLOCKS.get(self.model, (self.model, {}))
        model = models.build(name, dropout=0.0, **shape).to(device, self.dtype).train(self.mode == "train")
        (ids,) = models.sample_inputs(name, BATCH, TOKENS, torch.Generator().manual_seed(0))
        return model, ids.to(device)


def run(options: Options) -> Table:
    """Time every entry; `quick` takes two of the blocks in BF16."""
    entries = list(_entries(options.quick))
    rows: list[Row] = []
    with timing.thread_count_kept() as threads, progress(len(entries), "models") as step:
        torch.set_num_threads(options.threads[0] if options.threads else threads)
        for entry in entries:
            step(str(entry))
            rows.append(measure(entry, options))
    if options.plot:
        plots.speedups(rows, options.plot)
    return Table("models", rows, _summary(rows))


def _entries(quick: bool) -> Iterator[Entry]:
    names = list(BLOCKS)[1:] if quick else [*BLOCKS, *models.REFERENCE]
    for name, mode, dtype in itertools.product(names, MODES, DTYPES[1:] if quick else DTYPES):
        yield Entry(name, mode, dtype)


def measure(entry: Entry, options: Options) -> Row:
    """One row: times, glue and sites."""
    model, ids = entry.build(options.device)
    sites = _sites(model, ids)
    runs = {"eager": _step(entry, model, model, ids)}
    failed = []
    for backend in BACKENDS:
        torch.compiler.reset()
        runs[backend] = _step(entry, model, torch.compile(model, backend=backend, options=_UNCACHED), ids)
        try:
            runs[backend]()
        except RuntimeError:
            if backend != "inductor":
                raise
            failed.append(backend)  # see `training.contenders`: parallel blocks in 16 bits
    measures = {name: timing.call(call) for name, call in runs.items() if name not in failed}
    seconds = 2.0 if options.quick else 5.0
    rounds = timing.rounds_within(seconds, measures.values(), at_least=15, at_most=400)
    taken = timing.interleave(measures, rounds=rounds)
    ms = {name: 1e3 * sample.median for name, sample in taken.items()}
    glue = {b: _glue_ms(entry, model, ids, b) if b not in failed else None for b in BACKENDS}
    return {
        "model": entry.model,
        "mode": entry.mode,
        "dtype": _short(entry.dtype),
        **{f"{name}_ms": ms.get(name) for name in runs},
        "speedup_eager": ms["eager"] / ms["fusepass"],
        "speedup_inductor": None if failed else ms["inductor"] / ms["fusepass"],
        "spread": None if failed else _spread_of_ratio(taken["inductor"], taken["fusepass"]),
        **{f"{name}_glue_ms": value for name, value in glue.items()},
        "sites": sum(s.residual for s in sites),
        "fused": sum(s.residual and s.fused for s in sites),
    }


_UNCACHED: dict[str, Any] = {"fx_graph_cache": False}


def _step(entry: Entry, model: Transformer, call: Callable[[Tensor], Tensor], ids: Tensor) -> Callable[[], object]:
    """What is timed: a forward, or a forward and its backward."""
    if entry.mode == "inference":
        return partial(_infer, call, ids)
    with torch.no_grad():
        gradient = torch.randn(model(ids).shape, generator=torch.Generator().manual_seed(1))
    return partial(_train, model, call, ids, gradient.to(ids.device, entry.dtype))


@torch.inference_mode()
def _infer(call: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    return call(ids)


def _train(model: Transformer, call: Callable[[Tensor], Tensor], ids: Tensor, gradient: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    call(ids).backward(gradient)


def _sites(model: Transformer, ids: Tensor) -> list[Any]:
    """The norms of the forward and backward graphs that are no bias gradients."""
    with torch.inference_mode(not model.training):
        report = fusepass.explain(model, ids)
    return [s for s in report.sites if s.norm != "bias_gradient"]


def _spread_of_ratio(inductor: timing.Sample, fused: timing.Sample) -> float:
    ratios = [a / b for a, b in zip(inductor.seconds, fused.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return high - low


def _glue_ms(entry: Entry, model: Transformer, ids: Tensor, backend: str) -> float:
    """Milliseconds of one call in kernels that are neither matmul nor attention: the median over several calls."""
    torch.compiler.reset()
    options: dict[str, Any] = {**_UNCACHED, "cpp.enable_kernel_profile": True}
    step = _step(entry, model, torch.compile(model, backend=backend, options=options), ids)
    step()
    step()
    taken = []
    for _ in range(PROFILED_CALLS):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        taken.append(sum(e.self_cpu_time_total for e in recorded.events() if _is_glue(e.name)) / 1e3)
    return statistics.median(taken)


def _is_glue(name: str) -> bool:
    """Whether an event of the profiler is a kernel that Inductor or fusepass wrote, or an operator but for matmuls."""
    is_kernel = "cpp_fused" in name or name.startswith(("fusepass", "aten::"))
    return is_kernel and not any(part in name.removeprefix("aten::") for part in _NOT_GLUE if "fused" not in name)


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for mode, dtype in dict.fromkeys((r["mode"], r["dtype"]) for r in rows):
        found = [r for r in rows if (r["mode"], r["dtype"]) == (mode, dtype) and r["speedup_inductor"]]
        over = statistics.geometric_mean(r["speedup_inductor"] for r in found)
        eager = statistics.geometric_mean(r["speedup_eager"] for r in found)
        glue = statistics.geometric_mean(r["fusepass_glue_ms"] / r["inductor_glue_ms"] for r in found)
        least = min(found, key=lambda r: r["speedup_inductor"])
        lines.append(
            f"{mode}, {dtype}: over Inductor {over:.3f} (least {least['speedup_inductor']:.3f}, {least['model']}, "
            f"spread {least['spread']:.3f}), over eager {eager:.3f}, glue beside Inductor's {glue:.3f}"
        )
    return [*lines, "geometric means; spread: distance of the quartiles of the single rounds' ratios"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
