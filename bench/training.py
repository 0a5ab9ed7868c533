"""Training of a small model on the text: the loss of one batch, and the losses of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import Transformer

Run = Callable[[Tensor], Tensor]
"""A model as it is to run: itself, or compiled."""

_HIDDEN_EVERY = 4


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
