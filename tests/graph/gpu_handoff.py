"""What Inductor makes of rewritten graphs for an H200, as JSON: run by `test_gpu_handoff.py` in its own process."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
from torch._inductor.utils import get_first_incompatible_cudagraph_node, is_cudagraph_unsafe_op

import fusepass
from bench import cuda_codegen, models
from fusepass.kernels import autotune
from tests.graph.capture import fuse

BF16 = torch.bfloat16
Lowering = inductor_graph.GraphLowering


def residual(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    return s, F.rms_norm(s, (s.shape[-1],), w, 1e-6)


def with_position(x: Any, p: Any, w: Any) -> Any:
    return F.layer_norm(x + p, (x.shape[-1],), w)


def embedded(ids: Any, table: Any, positions: Any, w: Any) -> Any:
    s = F.embedding(ids, table) + F.embedding(torch.arange(ids.shape[1], device=ids.device), positions)
    return s, F.rms_norm(s, (s.shape[-1],), w, 1e-6)


def moved(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    return s, F.rms_norm(s.transpose(0, 1), (s.shape[-1],), w, 1e-6)


def two_sites(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    s2 = s + torch.mm(F.rms_norm(s, (s.shape[-1],), w, 1e-6), w.expand(w.shape[0], -1))
    return s2, F.rms_norm(s2, (s.shape[-1],), w, 1e-6)


def between_others(x: Any, r: Any, w: Any) -> Any:
    s = torch.cumsum(x, 0) + r
    y = F.rms_norm(s, (s.shape[-1],), w, 1e-6)
    return s, torch.cumsum(y, 0)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "residual 8192x4096": (residual, (zeros(8192, 4096), zeros(8192, 4096), zeros(4096))),
    "residual 4x512x1000": (residual, (zeros(4, 512, 1000), zeros(4, 512, 1000), zeros(1000))),
    "position": (with_position, (zeros(2, 512, 1024), zeros(1, 512, 1024), zeros(1024))),
    "strided": (residual, (zeros(2048, 64).t()[:, ::2], zeros(64, 1024), zeros(1024))),
    "moved": (moved, (zeros(512, 8, 1024), zeros(512, 8, 1024), zeros(1024))),
    "embeddings": (embedded, (torch.zeros(4, 512, dtype=torch.int64), zeros(999, 1024), zeros(600, 1024), zeros(1024))),
    "two sites": (two_sites, (zeros(256, 512), zeros(256, 512), zeros(512))),
}


def captured(fn: Callable[..., Any], args: tuple[Any, ...]) -> fx.GraphModule:
    with torch.no_grad():
        (gm,) = fuse(fn, *args, options={"fusepass.enabled": False}).after
    return gm


def lowered(gm: fx.GraphModule, tune: bool = False, **config: Any) -> dict[str, Any]:
    tensors = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode, inputs = cuda_codegen.to_cuda(gm, [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors])
    lowerings: list[Any] = []

    def lowering(*args: Any, **kwargs: Any) -> Any:
        lowerings.append(Lowering(*args, **kwargs))
        return lowerings[-1]

    asked: list[str] = []  # for a tuner; that there is none must not show
    with (
        inductor_config.patch(config),
        mock.patch.object(inductor_graph, "GraphLowering", lowering),
        mock.patch.object(autotune, "tuner", lambda device: asked.append(str(device))),
    ):
        fusepass.FusePass({"fusepass.strict": True, "fusepass.autotune": tune})(gm.graph)
        source, moved = cuda_codegen.lower(gm, mode, inputs)
    # With CUDA graphs, what is captured is a function of its own in front.
    call = re.sub(r"#.*", "", re.split(r"^ *def (?:partition_0|call)\(", source, maxsplit=1, flags=re.M)[1])
    return {
        "launches": re.findall(r"(fusepass_\w+)\.run\(", call),
        "other_kernels": re.findall(r"(triton_\w+)\.run\(", call),
        "opaque_calls": re.findall(r"torch\.ops\.\w+\.\w+", call),
        "clones": call.count("clone(") + call.count("copy_("),
        "kernels_defined": len(set(re.findall(r"^(fusepass_\w+) = async_compile", source, re.M))),
        "buffers": len(re.findall(r"= empty_strided_cuda\(", call)),
        "asked_for_a_tuner": asked,
        "no_cudagraph": cudagraph_obstacles(gm, lowerings[-1]),
        "host_waits": re.findall(r"\.item\(|\.cpu\(|synchronize|\.tolist\(", call),
        "configurations": [
            len(re.findall("num_warps", c)) for c in re.findall(r"user_autotune\(\s*configs=(.*)", source)
        ],
        "ours": [text for text in kernels(source) if text.startswith("fusepass_")],
        "others": [text for text in kernels(source) if not text.startswith("fusepass_")],
        "scheduler_nodes": [kind for kind, _ in moved if kind != "NopKernelSchedulerNode"],
    }


def kernels(source: str) -> list[str]:
    """The text of each Triton kernel that the module defines, from its name on."""
    return re.findall(r"@triton\.jit\ndef ((?:fusepass|triton)_.*?)(?=\n@triton|\n''')", source, re.DOTALL)


def cudagraph_obstacles(gm: fx.GraphModule, lowering: Any) -> list[str]:
    """Why Inductor would not capture this graph, by the tests that it makes itself."""
    unsafe = get_first_incompatible_cudagraph_node(gm)
    reasons = [
        lowering.disable_cudagraphs_reason,
        check_multiple_devices_or_any_cpu_nodes(lowering.device_node_mapping),
    ]
    reasons += [f"unsafe node {unsafe}"] * (unsafe is not None)
    reasons += [f"unsafe operation {op}" for op in lowering.operations if is_cudagraph_unsafe_op(op)]
    return [*filter(None, reasons), *(f"written input {name}" for name in lowering.mutated_inputs)]


def main() -> None:
    model, ids = models.example("post_norm_causal_rms", layers=3)
    cases = {**CASES, "model": (model, ids)}
    configs: dict[str, dict[str, Any]] = {name: {} for name in cases}
    for pdl in (False, True):
        name = f"between others, pdl={pdl}"
        cases[name] = (between_others, (zeros(512, 1024), zeros(512, 1024), zeros(1024)))
        configs[name] = {"triton.enable_pdl": pdl}
    graphs = {name: captured(fn, args) for name, (fn, args) in cases.items()}  # before the machine seems to have a GPU
    captured_again = fx.GraphModule(graphs["two sites"], copy.deepcopy(graphs["two sites"].graph))
    results = {name: lowered(gm, **{"triton.cudagraphs": True}, **configs[name]) for name, gm in graphs.items()}
    results["two sites, tuned"] = lowered(captured_again, tune=True)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
