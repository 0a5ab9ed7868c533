"""What Inductor makes of rewritten graphs for an H200, as JSON: run by `test_gpu_handoff.py` in its own process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import fusepass
from bench import cuda_codegen, models
from tests.graph.capture import fuse

BF16 = torch.bfloat16


def residual(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    return s, F.rms_norm(s, (s.shape[-1],), w, 1e-6)


def with_position(x: Any, p: Any, w: Any) -> Any:
    return F.layer_norm(x + p, (x.shape[-1],), w)


def moved(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    return s, F.rms_norm(s.transpose(0, 1), (s.shape[-1],), w, 1e-6)


def two_sites(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    s2 = s + torch.mm(F.rms_norm(s, (s.shape[-1],), w, 1e-6), w.expand(w.shape[0], -1))
    return s2, F.rms_norm(s2, (s.shape[-1],), w, 1e-6)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "residual 8192x4096": (residual, (zeros(8192, 4096), zeros(8192, 4096), zeros(4096))),
    "residual 4x512x1000": (residual, (zeros(4, 512, 1000), zeros(4, 512, 1000), zeros(1000))),
    "position": (with_position, (zeros(2, 512, 1024), zeros(1, 512, 1024), zeros(1024))),
    "strided": (residual, (zeros(2048, 64).t()[:, ::2], zeros(64, 1024), zeros(1024))),
    "moved": (moved, (zeros(512, 8, 1024), zeros(512, 8, 1024), zeros(1024))),
    "two sites": (two_sites, (zeros(256, 512), zeros(256, 512), zeros(512))),
}


def captured(fn: Callable[..., Any], args: tuple[Any, ...]) -> fx.GraphModule:
    with torch.no_grad():
        (gm,) = fuse(fn, *args, options={"fusepass.enabled": False}).after
    return gm


def lowered(gm: fx.GraphModule) -> dict[str, Any]:
    tensors = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode, inputs = cuda_codegen.to_cuda(gm, [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors])
    fusepass.FusePass({"fusepass.strict": True})(gm.graph)
    source, moved = cuda_codegen.lower(gm, mode, inputs)
    call = re.sub(r"#.*", "", source[source.index("def call(") :])
    return {
        "launches": re.findall(r"(fusepass_\w+)\.run\(", call),
        "other_kernels": re.findall(r"(triton_\w+)\.run\(", call),
        "opaque_calls": re.findall(r"torch\.ops\.\w+\.\w+", call),
        "clones": call.count("clone(") + call.count("copy_("),
        "kernels_defined": len(set(re.findall(r"^(fusepass_\w+) = async_compile", source, re.M))),
        "buffers": len(re.findall(r"= empty_strided_cuda\(", call)),
        "scheduler_nodes": [kind for kind, _ in moved if kind != "NopKernelSchedulerNode"],
    }


def main() -> None:
    model, ids = models.example("post_norm_causal_rms", layers=3)
    graphs = {name: captured(fn, args) for name, (fn, args) in {**CASES, "model": (model, ids)}.items()}
    sys.stdout.write(json.dumps({name: lowered(gm) for name, gm in graphs.items()}))


if __name__ == "__main__":
    main()
