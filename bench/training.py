"""Suite `training`: the loss curve of each reference model over 200 steps, fused against eager and Inductor.

One layer of each model learns a character-level text, in FP32 and in BF16, from the same weights and batches.
`inductor_rms` and `fusepass_rms` are the root mean square distances of a curve from eager's; `twin_rms` is that of an
eager run whose weights start one rounding away: two correct computations drift apart like that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import models, text
from .models import Transformer
from .progress import progress
from .suite import Options, Row, Table

log = logging.getLogger(__name__)
Run = Callable[[Tensor], Tensor]
"""A model as it is to run: itself, or compiled."""

_HIDDEN_EVERY = 4
STEPS, BATCH, TOKENS = 200, 8, 33


def loss(model: Transformer, run: Run, ids: Tensor) -> Tensor:
    """Mean cross-entropy in FP32.

    A causal model predicts each next character. An encoder sees every fourth character hidden and predicts those, by
    the product with the embeddings, scaled by the root of the width.
    """
    if model.config.causal:
        logits, expected = run(ids[:, :-1]), ids[:, 1:]
    else:
        hidden = torch.arange(ids.shape[1]) % _HIDDEN_EVERY == _HIDDEN_EVERY - 1
        states = run(ids.masked_fill(hidden.to(ids.device), 0))[:, hidden]
        logits, expected = F.linear(states, model.tokens.weight) * model.config.width**-0.5, ids[:, hidden]
    return F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten())


def gradients(model: Transformer, run: Run, ids: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter for one batch; the model's own are left clear."""
    model.zero_grad(set_to_none=True)
    loss(model, run, ids).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def train(model: Transformer, run: Run, batches: Iterable[Tensor], learning_rate: float = 1e-3) -> list[float]:
    """Adam with a constant rate, one step a batch; returns the loss before each step. `model` is changed."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-6)
    losses = []
    for ids in batches:
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, run, ids)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square over the steps."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(curve, other, strict=True)) / len(curve))


def build(name: str, dtype: torch.dtype, dropout: float = 0.0, layers: int = 1) -> Transformer:
    """A reference model small enough to be trained by four contenders."""
    shape = {"layers": layers, "width": 32, "heads": 2, "vocabulary": text.VOCABULARY, "max_tokens": 64}
    return models.build(name, dropout=dropout, **shape).to(dtype).train()


def compile_with(backend: str, model: Transformer) -> Run:
    """`model` compiled in full and, with fusepass, at every site, small as it is; a fault is an error."""
    ours: dict[str, Any] = {}
    if backend == "fusepass":
        ours = {"fusepass.strict": True, "fusepass.profitability": "always"}
    compiled: Run = torch.compile(model, backend=backend, fullgraph=True, options={"fx_graph_cache": False, **ours})
    return compiled


def contenders(model: Transformer) -> dict[str, Run]:
    """How `model` may run: eagerly, with fusepass, and with Inductor where that compiles it.

    Inductor 2.13 writes C++ with a variable declared twice where a 16-bit graph holds the same column sum twice, as the
    gradients of the two biases of a parallel block are.
    """
    runs: dict[str, Run] = {"eager": model, "fusepass": compile_with("fusepass", model)}
    inductor = compile_with("inductor", model)
    try:
        gradients(model, inductor, next(iter(text.batches(1, BATCH, TOKENS))))
    except RuntimeError as e:
        log.warning("Inductor does not compile this model: %s", str(e).split("\n", 1)[0])
        return runs
    return runs | {"inductor": inductor}


def one_rounding_away(model: Transformer) -> None:
    """Move every weight by one rounding, up or down or not at all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            direction = torch.randint(-1, 2, p.shape, generator=generator)
            p.mul_(1 + torch.finfo(p.dtype).eps * direction.to(p.dtype))


def curves(model: Transformer, runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """The loss curve of each run from the same weights and batches, and of a "twin": eager one rounding away."""
    start = {n: t.clone() for n, t in model.state_dict().items()}
    found = {}
    for contender, call in runs.items():
        model.load_state_dict(start)
        found[contender] = train(model, call, text.batches(STEPS, BATCH, TOKENS))
    model.load_state_dict(start)
    one_rounding_away(model)
    found["twin"] = train(model, model, text.batches(STEPS, BATCH, TOKENS))
    return found


def run(options: Options) -> Table:
    """Train every reference model with each contender; `quick` takes every fourth."""
    points = [(name, dtype) for name in models.REFERENCE for dtype in (torch.float32, torch.bfloat16)]
    points = points[::4] if options.quick else points
    rows: list[Row] = []
    with progress(len(points), "training") as step:
        for name, dtype in points:
            step(f"{name} {dtype}")
            rows.append(_row(name, dtype))
    worst = max(rows, key=lambda r: r["fusepass_rms"] / max(r["inductor_rms"] or 0, r["twin_rms"], 1e-9))
    return Table("training", rows, [f"farthest from eager, beside the others: {worst['model']} {worst['dtype']}"])


def _row(name: str, dtype: torch.dtype) -> Row:
    torch._dynamo.reset()
    model = build(name, dtype)
    found = curves(model, contenders(model))
    last = {f"{n}_last": sum(found[n][-20:]) / 20 if n in found else None for n in ("eager", "inductor", "fusepass")}
    rms = {
        f"{n}_rms": distance(found[n], found["eager"]) if n in found else None for n in ("inductor", "fusepass", "twin")
    }
    return {"model": name, "dtype": str(dtype).removeprefix("torch."), "first": found["eager"][0], **last, **rms}
