"""Tiny random versions of real models, with the number of norms and of residual-add + norm sites that each has.

Two layers, 64 wide, 2 samples of 8 tokens; no weights are downloaded. The packages are those of the extra `models`, and
timm and torchscale, which `make` installs without torchvision: they import it for what is not built here.

The counts were read off the models' graphs, not off this package's result: a site is a norm whose input, seen through
casts, dropout, views, and factors that are numbers or vectors, is a sum of two activations or embeddings.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH, TOKENS, HIDDEN, VOCABULARY = 2, 8, 64, 128
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[float], Call]
"""From a dropout probability to a model and the arguments of its call."""

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
GQA = BASE | {"num_key_value_heads": 2}
MOE = GQA | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MLA = BASE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ: dict[str, Any] = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Model:
    """One model. `norms` and `sites` are its true counts; `other` those of a mode where they are different."""

    build: Build
    norms: int
    sites: int
    other: dict[str, tuple[int, int]] = field(default_factory=dict)

    def counts(self, mode: str) -> tuple[int, int]:
        return self.other.get(mode, (self.norms, self.sites))


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 3, (BATCH, TOKENS))


def _image() -> torch.Tensor:
    return torch.randn(BATCH, 3, 32, 32)


def _sequence() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN)


def _causal() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": False}


def _masked() -> dict[str, Any]:
    return {"input_ids": _tokens(), "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long)}


def _seq2seq() -> dict[str, Any]:
    return _causal() | {"decoder_input_ids": _tokens()}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 8, 32), "decoder_input_ids": _tokens(), "use_cache": False}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": _image()}


def _text_and_pixels() -> dict[str, Any]:
    return {"input_ids": _tokens(), "pixel_values": _image()}


def _set_dropout(config: Any, p: float) -> None:
    """Every dropout probability of a config and the configs in it. Dropping whole layers is control flow: none."""
    for key, value in list(vars(config).items()):
        if key.endswith("layerdrop"):
            setattr(config, key, 0.0)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, p)
        elif key.endswith("_config") and hasattr(value, "to_dict"):
            _set_dropout(value, p)


def _hf(
    model_type: str,
    auto: str = "AutoModelForCausalLM",
    inputs: Callable[[], dict[str, Any]] = _causal,
    wrap: Callable[[Any], nn.Module] = lambda m: m,
    **config: Any,
) -> Build:
    def build(p: float) -> Call:
        import transformers

        settings = transformers.AutoConfig.for_model(model_type, **config)
        _set_dropout(settings, p)
        return wrap(getattr(transformers, auto).from_config(settings)), (), inputs()

    return build


class _Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(**kwargs)


def _checkpointing(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def _layer(kind: str, norm_first: bool, p: float) -> nn.Module:
    make = getattr(nn, f"Transformer{kind}Layer")
    return make(HIDDEN, 4, 128, dropout=p, batch_first=True, norm_first=norm_first)  # type: ignore[no-any-return]


def _torch_layer(kind: str, norm_first: bool) -> Build:
    inputs = 1 if kind == "Encoder" else 2
    return lambda p: (_layer(kind, norm_first, p), tuple(_sequence() for _ in range(inputs)), {})


def _torch_encoder(norm_first: bool) -> Build:
    def build(p: float) -> Call:
        return nn.TransformerEncoder(_layer("Encoder", norm_first, p), 2, norm=nn.LayerNorm(HIDDEN)), (_sequence(),), {}

    return build


def _x_transformers(**kwargs: Any) -> Build:
    def build(p: float) -> Call:
        import x_transformers

        layers = x_transformers.Decoder(
            dim=HIDDEN, depth=2, heads=4, attn_dim_head=16, attn_dropout=p, ff_dropout=p, **kwargs
        )
        model = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)
        return model, (_tokens(),), {}

    return build


def _torchscale(side: str) -> Build:
    def build(p: float) -> Call:
        with _without_torchvision():
            from torchscale.architecture import config as configs

            module = importlib.import_module(f"torchscale.architecture.{side}")
        config = getattr(configs, f"{side.title()}Config")(
            **{
                f"{side}_embed_dim": HIDDEN,
                f"{side}_attention_heads": 4,
                f"{side}_ffn_embed_dim": 128,
                f"{side}_layers": 2,
                f"{side}_normalize_before": False,
                "deepnorm": True,
                "subln": False,
                "dropout": p,
                "attention_dropout": p,
                "activation_dropout": p,
                "vocab_size": VOCABULARY,
            }
        )
        model = getattr(module, side.title())(config, embed_tokens=nn.Embedding(VOCABULARY, HIDDEN))
        return (model, (), {"src_tokens": _tokens()}) if side == "encoder" else (model, (_tokens(),), {})

    return build


def _timm_vit(**kwargs: Any) -> Build:
    def build(p: float) -> Call:
        with _without_torchvision():
            from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(
            img_size=32,
            patch_size=8,
            embed_dim=HIDDEN,
            depth=2,
            num_heads=4,
            num_classes=10,
            drop_path_rate=p,
            proj_drop_rate=p,
            **kwargs,
        )
        return model, (_image(),), {}

    return build


def _dit(p: float) -> Call:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        dropout=p,
    )
    steps = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}
    return model, (), {"hidden_states": torch.randn(BATCH, 4, 8, 8), **steps}


_MLM, _S2S = "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
_WIDTHS: dict[str, Any] = {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
_HIDDEN_BY_FAST_PATH = {"eval": (1, 0), "bf16": (1, 0), "dynamic": (1, 0)}
_HIDDEN_LAYER = {"eval": (0, 0), "bf16": (0, 0), "dynamic": (0, 0)}

MODELS: dict[str, Model] = {
    "torch/encoder layer, pre": Model(_torch_layer("Encoder", True), 2, 1, _HIDDEN_LAYER),
    "torch/encoder layer, post": Model(_torch_layer("Encoder", False), 2, 2, _HIDDEN_LAYER),
    "torch/encoder, pre": Model(_torch_encoder(True), 5, 4, _HIDDEN_BY_FAST_PATH),
    "torch/encoder, post": Model(_torch_encoder(False), 5, 4, _HIDDEN_BY_FAST_PATH),
    "torch/decoder layer, pre": Model(_torch_layer("Decoder", True), 3, 2),
    "torch/decoder layer, post": Model(_torch_layer("Decoder", False), 3, 3),
    "hf/bert": Model(_hf("bert", _MLM, _masked, **BASE), 6, 5),
    "hf/roberta": Model(_hf("roberta", _MLM, _masked, **BASE), 6, 5),
    "hf/distilbert": Model(
        _hf("distilbert", _MLM, _masked, vocab_size=VOCABULARY, max_position_embeddings=64, **_WIDTHS), 6, 5
    ),
    "hf/modernbert": Model(_hf("modernbert", _MLM, _masked, **BASE | SPECIAL, cls_token_id=1, sep_token_id=2), 6, 4),
    "hf/gpt2": Model(_hf("gpt2", **GPT), 5, 5),
    "hf/gptj": Model(_hf("gptj", rotary_dim=8, **GPT), 3, 2),
    "hf/gpt_neox, parallel": Model(_hf("gpt_neox", use_parallel_residual=True, **BASE), 5, 3),
    "hf/gpt_neox, serial": Model(_hf("gpt_neox", use_parallel_residual=False, **BASE), 5, 4),
    "hf/opt": Model(
        _hf(
            "opt",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            ffn_dim=128,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=HIDDEN,
        ),
        5,
        5,
    ),
    "hf/falcon-7b": Model(_hf("falcon", parallel_attn=True, new_decoder_architecture=False, **BASE), 3, 2),
    "hf/falcon-40b": Model(_hf("falcon", new_decoder_architecture=True, num_kv_heads=2, **BASE), 5, 3),
    "hf/mpt": Model(
        _hf("mpt", vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2),
        5,
        4,
    ),
    "hf/phi": Model(_hf("phi", **BASE), 3, 2),
    "hf/llama": Model(_hf("llama", **GQA), 5, 4),
    "hf/llama, autocast": Model(_hf("llama", wrap=_Autocast, **GQA), 5, 4),
    "hf/llama, checkpointing": Model(_hf("llama", wrap=_checkpointing, **GQA), 5, 4),
    "hf/mistral": Model(_hf("mistral", **GQA), 5, 4),
    "hf/mixtral": Model(_hf("mixtral", **MOE), 5, 4),
    "hf/qwen2": Model(_hf("qwen2", **GQA), 5, 4),
    "hf/qwen3": Model(_hf("qwen3", head_dim=16, **GQA), 9, 4),
    "hf/gemma": Model(_hf("gemma", head_dim=16, **GQA), 5, 4),
    "hf/gemma2": Model(_hf("gemma2", head_dim=16, **GQA), 9, 4),
    "hf/gemma3": Model(_hf("gemma3_text", head_dim=16, **GQA), 13, 4),
    "hf/deepseek_v2": Model(_hf("deepseek_v2", topk_method="greedy", **MLA), 9, 4),
    "hf/deepseek_v3": Model(_hf("deepseek_v3", **MLA), 9, 4),
    "hf/olmo2": Model(_hf("olmo2", **GQA), 9, 1),
    "hf/cohere": Model(_hf("cohere", use_qk_norm=False, **GQA), 3, 2),
    "hf/stablelm": Model(_hf("stablelm", **GQA), 5, 4),
    "hf/granite": Model(_hf("granite", residual_multiplier=0.22, embedding_multiplier=12.0, **GQA), 5, 4),
    "hf/gpt_oss": Model(_hf("gpt_oss", head_dim=16, **MOE), 5, 4),
    "hf/t5": Model(
        _hf(
            "t5",
            _S2S,
            _seq2seq,
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        12,
        10,
    ),
    "hf/bart": Model(
        _hf("bart", _S2S, _seq2seq, vocab_size=VOCABULARY, d_model=HIDDEN, max_position_embeddings=64, **SEQ2SEQ),
        12,
        12,
    ),
    "hf/whisper": Model(
        _hf(
            "whisper",
            "AutoModelForSpeechSeq2Seq",
            _speech,
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=HIDDEN,
            max_source_positions=16,
            max_target_positions=32,
            decoder_start_token_id=1,
            **SEQ2SEQ,
            **SPECIAL,
        ),
        12,
        12,
    ),
    "hf/vit": Model(_hf("vit", "AutoModel", _pixels, **VISION, **BASE), 5, 5),
    "hf/dinov2": Model(_hf("dinov2", "AutoModel", _pixels, mlp_ratio=2, **VISION, **BASE), 5, 5),
    "hf/clip": Model(
        _hf(
            "clip",
            "AutoModel",
            _text_and_pixels,
            projection_dim=32,
            text_config=BASE | SPECIAL,
            vision_config={
                "hidden_size": HIDDEN,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                **VISION,
            },
        ),
        11,
        9,
    ),
    "hf/mamba": Model(
        _hf(
            "mamba",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            state_size=8,
            residual_in_fp32=True,
        ),
        3,
        2,
    ),
    "x-transformers, pre": Model(_x_transformers(), 5, 5),
    "x-transformers, post": Model(_x_transformers(pre_norm=False), 4, 4),
    "x-transformers, sandwich": Model(_x_transformers(sandwich_norm=True), 9, 5),
    "torchscale/deepnorm encoder": Model(_torchscale("encoder"), 4, 4),
    "torchscale/deepnorm decoder": Model(_torchscale("decoder"), 4, 4),
    "timm/vit": Model(_timm_vit(), 5, 5),
    "timm/vit, layer scale": Model(_timm_vit(init_values=1e-6), 5, 5),
    "diffusers/DiT": Model(_dit, 5, 5),
}


class _AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _StubFinder:
    """Stands in for torchvision: whatever is imported from it exists, and does nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    """Within this context torchvision can be imported; after it, whoever asks whether it is there is told the truth."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _StubFinder()
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
