"""Suite `models`: whole models, inference and training, eager against Inductor, fusepass and peers.

The reference models, small; and stacks of four blocks of 768 columns, shaped like BERT's, GPT-2's and LLaMA's, over 4 x
128 tokens (on a GPU these alone, in BF16, over 16 x 512). A training step is a forward in training mode, without
dropout, and the backward of all parameters for fresh gradients of the output. Times are medians over interleaved
rounds, on the clock; `spread` is the distance of the quartiles of the single rounds' ratio of Inductor over fusepass.
Matmuls take most of the time and hide the rest in their noise, so `glue_ms` is the time in all other kernels (attention
is left out too), from the profiler, in calls of their own. `launches` are kernels of a call (see `launches`), `peak_mb`
the most that it holds at once of what it allocates.

`max_autotune` (`--max-autotune`; on a GPU by default, but with `--quick`) runs Inductor and fusepass with it too; on a
CPU it needs frozen weights, so it applies to inference only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fusepass.backend import fusepass
from fusepass.fuse_pass import GraphReport

from . import launches, memory, models, peers, plots, timing
from .models import Transformer
from .progress import progress
from .suite import Options, Row, Table, first_line

BACKENDS = ("inductor", "fusepass")
MODES = ("inference", "train")
DTYPES = (torch.float32, torch.bfloat16)
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_base_blocks": ("post_norm_encoder", {"layers": 4, "width": 768, "heads": 12}),
    "gpt2_blocks": ("pre_norm_causal", {"layers": 4, "width": 768, "heads": 12}),
    "llama_blocks": ("pre_norm_causal_rms", {"layers": 4, "width": 768, "heads": 12}),
}
INPUTS = {"cpu": (4, 128), "cuda": (16, 512)}
"""Batch and tokens."""
PROFILED_CALLS = 5
TUNED = "_max_autotune"
"""Ends the names of contenders."""
FARTHEST = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest distance of an output from eager's, over its norm: nobody is timed who computes something else."""

_NOT_GLUE = ("mm", "linear", "attention", "conv")
"""Parts of the names of matmuls and attention, in the profiler's events."""
_NOT_GLUE_ON_GPU = ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "triton_tem", "flash", "fmha", "attention")
"""The same in the names of a GPU's kernels, in lower case."""


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
        batch, tokens = INPUTS[torch.device(device).type]
        (ids,) = models.sample_inputs(name, batch, tokens, torch.Generator().manual_seed(0))
        return model, ids.to(device)


def run(options: Options) -> Table:
    """Time every entry, or those that `options.budget` allows to begin; `quick` takes two of the blocks.

    In BF16, but for a CPU that has no instructions for it: a step takes it seconds.
    """
    entries = list(_entries(options))
    rows: list[Row] = []
    failures: list[str] = []
    with timing.thread_count_kept() as threads, progress(len(entries), "models") as step:
        torch.set_num_threads(options.threads[0] if options.threads else threads)
        deadline = timing.Deadline(options.budget)
        for entry in itertools.takewhile(lambda _: not deadline.over, entries):
            step(str(entry))
            row, failed = measure(entry, options)
            rows.append(row)
            failures += failed
    if options.plot:
        plots.speedups(rows, options.plot)
    notes = [*_summary(rows), *deadline.note(len(entries), len(rows)), *peers.absent_note(options.device)]
    return Table("models", rows, [*notes, *failures], failed=any("fusepass: " in f for f in failures))


def _entries(options: Options) -> Iterator[Entry]:
    on_gpu = torch.device(options.device).type == "cuda"
    names = list(BLOCKS)[1:] if options.quick else list(BLOCKS) if on_gpu else [*BLOCKS, *models.REFERENCE]
    fast = torch.bfloat16 if on_gpu or torch.cpu._is_avx512_bf16_supported() else torch.float32
    dtypes = (fast,) if options.quick or on_gpu else DTYPES
    for name, mode, dtype in itertools.product(names, MODES, dtypes):
        yield Entry(name, mode, dtype)


def measure(entry: Entry, options: Options) -> tuple[Row, list[str]]:
    """One row, and a line for each contender that failed."""
    torch.compiler.reset()
    device = options.device
    model, ids = entry.build(device)
    reports: list[GraphReport] = []
    steps = {"eager": _step(entry, model, model, ids)}
    counts: dict[str, int | None] = {}
    failed = []
    with torch.inference_mode():
        expected = model(ids)
    for name, make in _contenders(options, entry, reports).items():
        try:
            with launches.written() as modules:
                call = make(model, ids)
                step = _step(entry, model, call, ids)
                step()
            _check_close(entry, call, ids, expected)
            counts[name] = _launches(step, modules, device)
            steps[name] = step
        except Exception as e:
            failed.append(f"{entry}: {name}: {first_line(e)}")
    measures = {name: timing.call(call) for name, call in steps.items()}
    seconds, least = (2.0, 5) if options.quick else (5.0, 15)
    rounds = timing.rounds_within(seconds, measures.values(), at_least=least, at_most=400)
    taken = timing.interleave(measures, rounds=rounds)
    ms = {name: 1e3 * sample.median for name, sample in taken.items()}
    both = all(b in ms for b in BACKENDS)
    sites = [s for report in reports for s in report.sites if s.norm != "bias_gradient"]
    return {
        "model": entry.model,
        "mode": entry.mode,
        "dtype": _short(entry.dtype),
        **{f"{name}_ms": ms.get(name) for name in ("eager", *BACKENDS, *_others(options))},
        "speedup_eager": ms["eager"] / ms["fusepass"] if "fusepass" in ms else None,
        "speedup_inductor": ms["inductor"] / ms["fusepass"] if both else None,
        "spread": _spread_of_ratio(taken["inductor"], taken["fusepass"]) if both else None,
        **{f"{b}_glue_ms": _glue_ms(steps[b], device) if b in steps else None for b in BACKENDS},
        **{f"{b}_launches": counts.get(b) for b in BACKENDS},
        **{f"{n}_peak_mb": _peak_mb(model, steps[n], device) if n in steps else None for n in ("eager", *BACKENDS)},
        "sites": sum(s.residual for s in sites),
        "fused": sum(s.residual and s.fused for s in sites),
    }, failed


def _others(options: Options) -> list[str]:
    """The contenders that are not in every table."""
    tuned = [f"{b}{TUNED}" for b in BACKENDS] if _tunes(options) else []
    return [*tuned, *(p.name for p in peers.of_models(options.device))]


def _contenders(options: Options, entry: Entry, reports: list[GraphReport]) -> dict[str, peers.Model]:
    """Those that can do an entry, by name. fusepass' reports go to `reports`.

    The kernels tell the profiler their names: `glue_ms` needs that, and without a profiler it costs nothing.
    """
    plain: dict[str, Any] = {"fx_graph_cache": False, "cpp.enable_kernel_profile": True}
    listening = partial(fusepass, options=plain, listener=reports.append)
    found = {"inductor": partial(_compiled, "inductor", plain), "fusepass": partial(_compiled, listening, None)}
    on_gpu = torch.device(options.device).type == "cuda"
    if _tunes(options) and (on_gpu or entry.mode == "inference"):
        tuned = {**plain, **torch._inductor.list_mode_options("max-autotune-no-cudagraphs"), "freezing": not on_gpu}
        found |= {f"{b}{TUNED}": partial(_compiled, b, tuned) for b in BACKENDS}
    able = [p for p in peers.of_models(options.device) if entry.mode == "inference" and entry.dtype in p.dtypes]
    return found | {p.name: p.model for p in able if p.model is not None}


def _tunes(options: Options) -> bool:
    if options.max_autotune is not None:
        return options.max_autotune
    return torch.device(options.device).type == "cuda" and not options.quick


def _compiled(backend: Any, options: dict[str, Any] | None, model: nn.Module, _: Tensor) -> Any:
    return torch.compile(model, backend=backend, dynamic=False, options=options)


def _check_close(entry: Entry, call: Callable[[Tensor], Tensor], ids: Tensor, expected: Tensor) -> None:
    with torch.inference_mode(entry.mode == "inference"):
        got = call(ids).detach()
    distance = float((got.double() - expected.double()).norm() / expected.double().norm())
    if not distance <= FARTHEST[expected.dtype]:
        raise AssertionError(f"its output is off eager's by {distance:.1e}")


def _launches(step: Callable[[], object], modules: list[str], device: str) -> int | None:
    if torch.device(device).type == "cuda":
        return len(launches.on_gpu(step))
    return sum(map(launches.calls, modules)) if modules else None


def _peak_mb(model: Transformer, step: Callable[[], object], device: str) -> float:
    model.zero_grad(set_to_none=True)
    return memory.peak_bytes(step, device) / 1e6


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


def _spread_of_ratio(inductor: timing.Sample, fused: timing.Sample) -> float:
    ratios = [a / b for a, b in zip(inductor.seconds, fused.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return high - low


def _glue_ms(step: Callable[[], object], device: str) -> float:
    """Milliseconds of one call in kernels that are neither matmul nor attention: the median over several calls."""
    taken = []
    for _ in range(PROFILED_CALLS):
        if torch.device(device).type == "cuda":
            taken.append(sum(us for name, us in launches.on_gpu(step) if _is_glue_on_gpu(name)) / 1e3)
            continue
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            step()
        taken.append(sum(e.self_cpu_time_total for e in recorded.events() if _is_glue(e.name)) / 1e3)
    return statistics.median(taken)


def _is_glue_on_gpu(name: str) -> bool:
    return not any(part in name.lower() for part in _NOT_GLUE_ON_GPU)


def _is_glue(name: str) -> bool:
    """Whether an event of the profiler is a kernel that Inductor or fusepass wrote, or an operator but for matmuls."""
    is_kernel = "cpp_fused" in name or name.startswith(("fusepass", "aten::"))
    return is_kernel and not any(part in name.removeprefix("aten::") for part in _NOT_GLUE if "fused" not in name)


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for mode, dtype in dict.fromkeys((r["mode"], r["dtype"]) for r in rows):
        found = [r for r in rows if (r["mode"], r["dtype"]) == (mode, dtype) and r["speedup_inductor"]]
        if not found:
            continue
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
