"""What the suite `traffic` looks at: single sites, and stacks of whole blocks.

A site is the residual add and the norm of a Transformer in training, with the sum and the norm both used later on, as
in a Pre-Norm model: `s = x + dropout(u + bias)`, `y = norm(s)`. `u` is the product of the Linear in front, which is not
part of the site; its bias is, because the bias' gradient is a column sum over what the site's backward has written.

The two stacks stand for GPT and LLaMA. Of attention only the value path is kept: what is counted is what lies outside
matmuls and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["layer_norm", "rms_norm"]


@dataclass(frozen=True)
class Site:
    """One site of `rows` x `cols`, `bias` if behind a Linear that has one."""

    norm: Norm
    rows: int
    cols: int
    dtype: str = "bfloat16"
    bias: bool = True
    dropout: float = 0.0

    layers = 1

    def columns(self) -> dict[str, Any]:
        return {"scope": "site", "model": "", "layers": 1, **asdict(self)}

    def build(self) -> tuple[Callable[..., Any], Sequence[Tensor]]:
        """The site and arguments for it, all of which require a gradient."""

        def tensor(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=getattr(torch, self.dtype), requires_grad=True)

        vectors = [tensor(self.cols) for _ in range((self.norm == "layer_norm") + 1 + self.bias)]
        return self._run, [tensor(self.rows, self.cols), tensor(self.rows, self.cols), *vectors]

    def _run(self, x: Tensor, u: Tensor, weight: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self.bias:
            u = u + vectors[-1]
        s = x + (F.dropout(u, self.dropout) if self.dropout else u)
        if self.norm == "layer_norm":
            return s, F.layer_norm(s, (self.cols,), weight, vectors[0])
        return s, F.rms_norm(s, (self.cols,), weight, 1e-6)


@dataclass(frozen=True)
class Model:
    """A stack of `layers` blocks of one kind; figures are per layer."""

    model: Literal["gpt", "llama"]
    rows: int
    cols: int
    layers: int = 3
    dropout: float = 0.0

    dtype = "bfloat16"

    def columns(self) -> dict[str, Any]:
        norm = {"gpt": "layer_norm", "llama": "rms_norm"}[self.model]
        facts = {"norm": norm, "dtype": self.dtype, "bias": self.model == "gpt"}
        return {"scope": "model", **asdict(self), **facts}

    def build(self) -> tuple[nn.Module, Sequence[Tensor]]:
        """The stack, in training mode, and its argument."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            block = {"gpt": GptBlock, "llama": LlamaBlock}[self.model]
            stack = nn.Sequential(*(block(self.cols, self.dropout) for _ in range(self.layers)))
        finally:
            torch.set_default_dtype(before)
        return stack, [torch.empty(self.rows, self.cols, dtype=getattr(torch, self.dtype), requires_grad=True)]


Case = Site | Model


class GptBlock(nn.Module):
    """Pre-Norm with LayerNorm, biases and GELU."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.qkv(self.norm1(x)).chunk(3, -1)[2]))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class LlamaBlock(nn.Module):
    """Pre-Norm with RMSNorm and SwiGLU, no biases; the inner width is 43/16 of the outer one, as in LLaMA 7B."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        inner = width * 43 // 16
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.value(self.norm1(x))))
        y = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


SHAPES = ((8192, 1024), (8192, 4096), (4096, 4096), (2048, 4096), (8192, 8192), (8192, 16384))
NORMS: tuple[Norm, ...] = ("layer_norm", "rms_norm")

SITES = (
    *(Site(norm, rows, cols) for norm in NORMS for rows, cols in SHAPES),
    *(Site(norm, 4096, 4096, bias=False) for norm in NORMS),
    *(Site(norm, 4096, 4096, dropout=0.1) for norm in NORMS),
    *(Site(norm, 8192, 1024, dropout=0.1) for norm in NORMS),
    *(Site(norm, 4096, 4096, dtype="float32") for norm in NORMS),
)
MODELS = tuple(Model(model, rows, 1024) for model in ("gpt", "llama") for rows in (1024, 8192))
QUICK = (Site("layer_norm", 8192, 4096), Site("rms_norm", 4096, 4096), Model("gpt", 1024, 1024))


def chosen(quick: bool) -> Sequence[Case]:
    """The cases of a run."""
    return QUICK if quick else (*SITES, *MODELS)
