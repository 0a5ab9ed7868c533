"""Other libraries that do the same: what each needs, where it runs, and what of the suites it can do.

None of them is a dependency. One that is not installed is left out of the table, and the summary names it; one that
fails, or computes something else, has an empty cell, and the summary has the reason.

On GPUs the kernels of Liger, quack and flash-attention stand in the place of a site's add and norm, called as their
authors mean them to be, without torch.compile; behind a Linear's bias, adding it and summing its gradient is PyTorch's.
Liger's LayerNorm takes no residual: PyTorch adds in front of it. quack's has no LayerNorm with a backward of its own.
On CPUs ONNX Runtime runs sites and models that torch.onnx has exported, and OpenVINO compiles whole models: the sites
of a chain it would run one by one, in calls that cost more than a site. Neither trains, neither has BF16 on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import onnx_runtime, openvino_backend
from .chains import EPS, Point, Site

Chain = Callable[..., Any]
"""With the signature of a direction's chain."""
Model = Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]
"""A model and its input to what computes the same."""


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        name: as in the table's columns.
        device: "cpu" or "cuda".
        modules: what must be installed.
        norms, directions, dtypes: the points that it can do.
        site: makes what stands in the place of a site; the chain around it runs eagerly.
        chain: makes a function that computes a whole chain.
        model: makes a function that computes a whole model.
    """

    name: str
    device: str
    modules: tuple[str, ...]
    norms: tuple[str, ...] = ("layer_norm", "rms_norm")
    directions: tuple[str, ...] = ("forward", "backward")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    site: Callable[[], Site] | None = None
    chain: Callable[[], Chain] | None = None
    model: Model | None = None

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(m) for m in self.modules)

    @property
    def in_kernels(self) -> bool:
        return self.site is not None or self.chain is not None

    def enters(self, point: Point) -> bool:
        """Whether it can do a point of the suite `kernels`."""
        able = point.norm in self.norms and point.direction in self.directions and point.dtype in self.dtypes
        return able and self.in_kernels

    def in_place_of(self, chain: Chain) -> Chain:
        """What computes the same as `chain`."""
        if self.site is not None:
            return partial(chain, site=self.site())
        if self.chain is None:
            raise ValueError(f"{self.name} does whole models only")
        return self.chain()


def _liger() -> Site:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def site(kind: str, s: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if kind == "layer_norm":
            s = s + r
            return s, LigerLayerNormFunction.apply(s, weight, bias, EPS[kind])
        # (X, R, W, eps, offset, casting_mode, in_place); "gemma" multiplies by the weight in FP32, as PyTorch does
        y, s = LigerFusedAddRMSNormFunction.apply(r, s, weight, EPS[kind], 0.0, "gemma", False)
        return s, y

    return site


def _quack() -> Site:
    from quack import rmsnorm

    def site(kind: str, s: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y, s = rmsnorm(r, weight, residual=s, eps=EPS[kind], prenorm=True)
        return s, y

    return site


def _flash_attention() -> Site:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    functions = {"layer_norm": layer_norm_fn, "rms_norm": rms_norm_fn}

    def site(kind: str, s: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y, s = functions[kind](r, weight, bias, residual=s, eps=EPS[kind], prenorm=True)
        return s, y

    return site


_FP32 = (torch.float32,)

PEERS = (
    Peer("liger", "cuda", ("liger_kernel",), site=_liger),
    Peer("quack", "cuda", ("quack", "cutlass"), norms=("rms_norm",), site=_quack),
    Peer("flash_attention", "cuda", ("flash_attn",), site=_flash_attention),
    Peer(
        "onnxruntime",
        "cpu",
        ("onnxruntime", "onnx", "onnxscript"),
        directions=("forward",),
        dtypes=_FP32,
        chain=onnx_runtime.chain,
        model=onnx_runtime.model,
    ),
    Peer("openvino", "cpu", ("openvino",), directions=(), dtypes=_FP32, model=openvino_backend.model),
)


def of_kernels(device: str) -> list[Peer]:
    """The installed peers that enter the suite `kernels` on a device."""
    return [p for p in _on(device) if p.installed and p.in_kernels]


def of_models(device: str) -> list[Peer]:
    """The installed peers that enter the suite `models` on a device."""
    return [p for p in _on(device) if p.installed and p.model is not None]


def absent_note(device: str) -> list[str]:
    """A line of summary that names the peers which are not installed, or none."""
    absent = [p.name for p in _on(device) if not p.installed]
    return [f"peers that are not installed: {', '.join(absent)}"] if absent else []


def _on(device: str) -> list[Peer]:
    return [p for p in PEERS if p.device == torch.device(device).type]
