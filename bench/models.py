"""Reference models: the Transformers that fusepass is for, in plain PyTorch, with no trace of fusepass.

With x the residual stream of shape (batch, tokens, width), f a sublayer (attention or feed-forward), n a norm over the
last dimension and d dropout, a block of N layers is arranged in one of four ways:

    pre        x + d(f(n(x)))             a final norm after the last block    (Xiong et al., arXiv 2002.04745)
    post       n(x + d(f(x)))                                                  (Vaswani et al., arXiv 1706.03762)
    deep       n(alpha x + d(f(x)))       alpha = (2N)^(1/4); the weights of feed-forward, values and attention output
                                          start scaled by beta = (8N)^(-1/4)   (DeepNet, arXiv 2203.00555, table of
                                          constants: the same pair for encoder-only and for decoder-only models)
    parallel   x + d(attention(y) + ff(y)), y = n(x); a final norm             (PaLM, arXiv 2204.02311)

`build("pre_norm_causal")` returns a model in evaluation mode, `sample_inputs` its arguments, and
`bench.models.pre_norm_causal()` both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arrangement = Literal["pre", "post", "deep", "parallel"]
Norm = Literal["layer_norm", "rms_norm"]


@dataclass(frozen=True)
class Config:
    """One reference model. See the module's docstring for the arrangements.

    Attributes:
        spelling: "torch" takes norms from torch.nn, "tutorial" the hand-written ones below.
        causal: a decoder with a language-model head, or an encoder that returns the last hidden states.
        positions: learned embeddings added to the token embeddings, or rotations of queries and keys.
        feed_forward: GELU between two linears, or a SiLU gate (SwiGLU).
        bias: whether linears and LayerNorm have one.
        embedding_norm: a norm on the embeddings (BERT).
    """

    arrangement: Arrangement
    norm: Norm = "layer_norm"
    spelling: Literal["torch", "tutorial"] = "torch"
    causal: bool = True
    positions: Literal["learned", "rotary"] = "learned"
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    embedding_norm: bool = False
    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 256
    max_tokens: int = 512
    dropout: float = 0.1

    @property
    def final_norm(self) -> bool:
        """Only arrangements that leave the stream itself without a norm end in one."""
        return self.arrangement in ("pre", "parallel")

    @property
    def norms(self) -> int:
        """Norms that one forward runs: one or two a block, and those at either end."""
        per_layer = 1 if self.arrangement == "parallel" else 2
        return per_layer * self.layers + self.final_norm + self.embedding_norm

    @property
    def sites(self) -> int:
        """Norms whose input is a sum of two activations or of embeddings: what fusepass should fuse in inference.

        Every norm reads a residual sum but for those that come before the first sublayer: a norm on the embeddings, and
        the first norm of pre and parallel models. Of these the first reads the embeddings, which are a sum where
        positions are learned and none where they are rotary; a second would read the first's output.
        """
        leading = self.embedding_norm + (self.arrangement in ("pre", "parallel"))
        first_is_sum = leading > 0 and self.positions == "learned"
        return self.norms - leading + first_is_sum

    @property
    def alpha(self) -> float:
        """Factor of the residual stream in DeepNorm."""
        return float((2 * self.layers) ** 0.25)

    @property
    def beta(self) -> float:
        """Gain of the sublayers' weights at initialisation in DeepNorm."""
        return float((8 * self.layers) ** -0.25)


LLAMA = Config("pre", "rms_norm", positions="rotary", feed_forward="swiglu", bias=False)

REFERENCE: dict[str, Config] = {
    "pre_norm_encoder": Config("pre", causal=False),
    "pre_norm_causal": Config("pre"),
    "pre_norm_encoder_rms": Config("pre", "rms_norm", causal=False),
    "pre_norm_causal_rms": LLAMA,
    "post_norm_encoder": Config("post", causal=False, embedding_norm=True),
    "post_norm_causal": Config("post"),
    "post_norm_causal_rms": Config("post", "rms_norm", bias=False),
    "deep_norm_encoder": Config("deep", causal=False),
    "deep_norm_causal": Config("deep"),
    "deep_norm_encoder_rms": Config("deep", "rms_norm", causal=False),
    "deep_norm_causal_rms": Config("deep", "rms_norm", bias=False),
    "tutorial_pre_norm": Config("pre", spelling="tutorial"),
    "tutorial_pre_norm_rms": Config("pre", "rms_norm", spelling="tutorial", feed_forward="swiglu", bias=False),
    "tutorial_post_norm": Config("post", spelling="tutorial", causal=False),
    "tutorial_deep_norm_rms": Config("deep", "rms_norm", spelling="tutorial"),
    "parallel_causal": Config("parallel", positions="rotary", feed_forward="swiglu", bias=False),
    "parallel_causal_rms": Config("parallel", "rms_norm"),
}


class HandWrittenLayerNorm(nn.Module):
    """gamma (x - mean) / sqrt(var + eps) + beta over the last dimension, with the biased variance."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - mean) / torch.sqrt(variance + self.eps) + self.beta


class HandWrittenRMSNorm(nn.Module):
    """weight x / sqrt(mean(x^2) + eps) over the last dimension, the statistics in FP32 as LLaMA writes it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def make_norm(c: Config) -> nn.Module:
    """One norm over `c.width` columns, in the model's spelling."""
    if c.spelling == "tutorial":
        return HandWrittenLayerNorm(c.width) if c.norm == "layer_norm" else HandWrittenRMSNorm(c.width)
    return nn.LayerNorm(c.width, bias=c.bias) if c.norm == "layer_norm" else nn.RMSNorm(c.width, eps=1e-6)


class Attention(nn.Module):
    """Multi-head self-attention, (batch, tokens, width) to the same."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.causal = c.heads, c.causal
        self.query, self.key, self.value, self.output = (nn.Linear(c.width, c.width, bias=c.bias) for _ in range(4))
        if c.positions == "rotary":
            self.register_buffer("rotation", rotary_table(c.max_tokens, c.width // c.heads), persistent=False)
        else:
            self.rotation = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        if self.rotation is not None:
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(-2))


def rotary_table(tokens: int, size: int) -> Tensor:
    """Cosines and sines of rotary positions (RoFormer, arXiv 2104.09864), of shape (2, tokens, size)."""
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, size) by position: x cos + (-x_2, x_1) sin for the halves x_1, x_2 of x."""
    cos, sin = table[:, : x.shape[-2]]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) up(x)); the inner width is 4 (8/3 with a gate) times `width`."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        gated = c.feed_forward == "swiglu"
        inner = 8 * c.width // 3 // 8 * 8 if gated else 4 * c.width
        self.up = nn.Linear(c.width, inner, bias=c.bias)
        self.gate = nn.Linear(c.width, inner, bias=c.bias) if gated else None
        self.down = nn.Linear(inner, c.width, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class SublayerConnection(nn.Module):
    """One residual connection around any sublayer, the norm before it or after it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = make_norm(c)
        self.dropout = nn.Dropout(c.dropout)
        self.arrangement = c.arrangement
        self.alpha = c.alpha

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.arrangement == "pre":
            return x + self.dropout(sublayer(self.norm(x)))
        residual = x * self.alpha if self.arrangement == "deep" else x
        return self.norm(residual + self.dropout(sublayer(x)))


class WrappedBlock(nn.Module):
    """A block as tutorials write it: sublayers inside a wrapper that holds norm, dropout and the residual add."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.connections = nn.ModuleList(SublayerConnection(c) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.connections[0](x, self.attention)
        return self.connections[1](x, self.feed_forward)


class PreNormBlock(nn.Module):
    """x + d(attention(n(x))), then x + d(ff(n(x)))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.feed_forward_norm = make_norm(c), make_norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class PostNormBlock(nn.Module):
    """n(x + d(attention(x))), then n(x + d(ff(x)))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.feed_forward_norm = make_norm(c), make_norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class DeepNormBlock(nn.Module):
    """n(alpha x + d(attention(x))), then n(alpha x + d(ff(x)))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.feed_forward_norm = make_norm(c), make_norm(c)
        self.dropout = nn.Dropout(c.dropout)
        self.alpha = c.alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(self.alpha * x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(self.alpha * x + self.dropout(self.feed_forward(x)))


class ParallelBlock(nn.Module):
    """x + d(attention(y) + ff(y)), y = n(x)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.norm = make_norm(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.attention(y) + self.feed_forward(y))


BLOCKS: dict[Arrangement, type[nn.Module]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
    "deep": DeepNormBlock,
    "parallel": ParallelBlock,
}


class Transformer(nn.Module):
    """Token ids of shape (batch, tokens) to logits (batch, tokens, vocabulary), or to hidden states for an encoder."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        block = WrappedBlock if c.spelling == "tutorial" else BLOCKS[c.arrangement]
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.max_tokens, c.width) if c.positions == "learned" else None
        self.embedding_norm = make_norm(c) if c.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(block(c) for _ in range(c.layers))
        self.final_norm = make_norm(c) if c.final_norm else nn.Identity()
        self.head = nn.Linear(c.width, c.vocabulary, bias=False) if c.causal else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def build(name: str, *, seed: int = 0, **overrides: Any) -> Transformer:
    """The reference model `name` in evaluation mode, its weights drawn from `seed`.

    Norm weights and biases are drawn near 1 and 0 rather than left at them, so that a norm that forgets one is seen.

    Args:
        name: a key of `REFERENCE`.
        seed: of the weights. The global random number generator is left as it was.
        **overrides: fields of `Config` (`layers=12, width=768`).
    """
    config = replace(REFERENCE[name], **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config)
        if config.arrangement == "deep":
            _initialise_deep_norm(model)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def _initialise_deep_norm(model: Transformer) -> None:
    """Xavier initialisation, with gain beta for feed-forward, values and attention output, 1 for queries and keys."""
    beta = model.config.beta
    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight, gain=1.0 if name.endswith(("query", "key")) else beta)


def sample_inputs(
    name: str, batch: int = 2, tokens: int = 32, generator: torch.Generator | None = None, **overrides: Any
) -> tuple[Tensor]:
    """Random token ids of shape (batch, tokens) for `build(name, **overrides)`."""
    config = replace(REFERENCE[name], **overrides)
    return (torch.randint(config.vocabulary, (batch, tokens), generator=generator),)


def example(name: str, **overrides: Any) -> tuple[Transformer, tuple[Tensor]]:
    """A reference model and arguments for it."""
    return build(name, **overrides), sample_inputs(name, generator=torch.Generator().manual_seed(0), **overrides)


def __getattr__(name: str) -> Callable[..., tuple[Transformer, tuple[Tensor]]]:
    """`bench.models.<name>` for each reference model: `example` of that name."""
    if name in REFERENCE:
        return partial(example, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
