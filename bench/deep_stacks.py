"""Very deep stacks of blocks, compiled in pieces: equal pieces share one compilation.

Inductor's time to compile a graph grows with its length, so a stack of 200 blocks is cut into segments. All of them
run the same code on inputs of the same shapes, parameters included, so the first one's compilation serves all.

Xavier-normal weights: those of DeepNorm as DeepNet has them (arXiv 2203.00555, encoder-only and decoder-only models),
gain 1 for queries and keys, beta = (8N)^(-1/4) for the rest, and the residual stream times alpha = (2N)^(1/4); those of
the others with gain 1.2, between Xavier's 1 and He's sqrt(2). With He's, gradients of a 48-layer Post-Norm grow to the
70,000-fold and hang on the last bit of the weights: eager's own in FP32 are 9 % off FP64. Biases and norms start at 0
and 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusepass.backend import fusepass
from fusepass.fuse_pass import GraphReport

from . import models, text

Arrangement = Literal["pre", "post", "deep"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("pre", "post", "deep")
SEGMENT, GAIN = 4, 1.2


def build(arrangement: Arrangement, layers: int, width: int, seed: int = 0) -> models.Transformer:
    """A causal model with LayerNorm, attention and SwiGLU, without dropout."""
    name = {"pre": "pre_norm_causal", "post": "post_norm_causal", "deep": "deep_norm_causal"}[arrangement]
    shape: dict[str, Any] = {"layers": layers, "width": width, "heads": 4, "feed_forward": "swiglu"}
    model = models.build(name, vocabulary=text.VOCABULARY, max_tokens=128, dropout=0.0, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in model.blocks.named_modules():
            if isinstance(module, nn.Linear):
                follows_beta = arrangement == "deep" and not name.endswith(("query", "key"))
                plain = 1.0 if arrangement == "deep" else GAIN
                nn.init.xavier_normal_(module.weight, gain=model.config.beta if follows_beta else plain)
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
    return model


class Segment(nn.Module):
    """Some consecutive blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Compiled:
    """A model whose blocks run in compiled segments; `graphs` are the pass' reports, two for the one compilation."""

    def __init__(self, model: models.Transformer, segment: int = SEGMENT) -> None:
        if model.config.layers % segment:
            raise ValueError(f"expected layers to be a multiple of {segment}, got {model.config.layers}")
        torch._dynamo.reset()
        self.model = model
        self.graphs: list[GraphReport] = []
        options = {"fusepass.strict": True, "fusepass.profitability": "always", "fx_graph_cache": False}
        backend = partial(fusepass, options=options, listener=self.graphs.append)
        blocks = list(model.blocks)
        pieces = [Segment(blocks[i : i + segment]) for i in range(0, len(blocks), segment)]
        self.segments = [torch.compile(piece, backend=backend, dynamic=False, fullgraph=True) for piece in pieces]

    def __call__(self, ids: Tensor) -> Tensor:
        model = self.model
        x: Tensor = model.tokens(ids)
        if model.positions is not None:
            x = x + model.positions(torch.arange(ids.shape[1], device=ids.device))
        for segment in self.segments:
            x = segment(x)
        return model.head(model.final_norm(x))

    def fused(self, graph: str) -> int:
        """Norms that fused kernels compute in one segment's graph of this kind."""
        return sum(s.fused for r in self.graphs if r.graph == graph for s in r.sites)
