"""What Inductor makes of kernels with column sums for an H200, as JSON: run by `test_triton_handoff.py` in a process.

The graphs are built by hand: the operands of a backward program are inputs, and its lowering follows.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph

from bench import cuda_codegen
from fusepass.kernels import autotune
from fusepass.kernels.schedule import Schedule
from fusepass.lower import KernelCall, lower
from fusepass.row_program import Kind, RowProgram, parse
from tests.kernels.norm_programs import norm_backward_program, norm_program

DEVICE = torch.device("cuda", 0)
Lowering = inductor_graph.GraphLowering

# Rows (None: symbolic) and programs, one after the other in the same graph.
CASES: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "layer_norm 2048x4096": (2048, (norm_backward_program("layer_norm", 4096, "bf16"),)),
    "rms_norm dropout": (512, (norm_backward_program("rms_norm", 1000, "bf16", dropout=0.1),)),
    "wide": (256, (norm_backward_program("layer_norm", 16384, "bf16"),)),
    "no rows": (0, (norm_backward_program("rms_norm", 256, "f32"),)),
    "one row": (1, (norm_backward_program("rms_norm", 256, "f32"),)),
    "symbolic": (None, (norm_backward_program("layer_norm", 1024, "bf16"),)),
    "symbolic wide": (None, (norm_backward_program("rms_norm", 16384, "bf16"),)),
    "two equal": (512, (norm_backward_program("layer_norm", 768, "bf16"),) * 2),
    "forward": (512, (norm_program("layer_norm", 768, "bf16"),)),
    "random": (
        512,
        (
            "row_program cols=768\nin seed: scalar i64\nin x: tile bf16 [row]\nu: tile f32 = rand(seed)\n"
            "k: tile b8 = gt(u, 0.1)\nm: tile bf16 = mul(k, x)\nc: col bf16 = col_sum(m)\n"
            "out k [row]\nout m [row]\nout c",
        ),
    ),
}


class GraphOfKernels:
    """A graph whose nodes hold fake CUDA tensors."""

    def __init__(self, rows: int | None) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.graph = fx.Graph()
        self.inputs: list[Any] = []
        self.rows: Any = rows
        if rows is None:
            symbol = self.shapes.create_symbol(2048, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
            self.rows = self._input("rows", self.shapes.create_symintnode(symbol, hint=2048, source=None))

    def _input(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.inputs.append(value)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def append(self, program: RowProgram, number: int) -> list[fx.Node]:
        rows = self.rows.meta["val"] if isinstance(self.rows, fx.Node) else self.rows
        shapes = {Kind.TILE: (rows, program.cols), Kind.ROW: (rows,), Kind.COL: (program.cols,), Kind.SCALAR: ()}
        ins = []
        for o in program.operands:
            with self.mode:
                value = torch.empty(shapes[o.kind], dtype=o.dtype, device=DEVICE)
            ins.append(self._input(f"{o.name}_{number}", value))
        leads = [[self.rows]] * len(program.outputs)
        return lower(self.call, KernelCall(program, self.rows, ins, [], DEVICE, leads, autotune=True))


class LastCandidate:
    """A tuner that finds the last candidate fastest, and notes what it was asked."""

    def __init__(self) -> None:
        self.jobs: list[autotune.Job] = []
        self.times = (1 / n for n in itertools.count(1))
        self.tuner = autotune.Tuner("H200", 132, None, self.stopwatch)

    def stopwatch(self, job: autotune.Job) -> Any:
        self.jobs.append(job)
        return lambda schedule: next(self.times)

    def chosen(self) -> list[Schedule]:
        return [self.tuner.schedule(job) for job in self.jobs]


def tuned(rows: int | None, texts: tuple[str, ...]) -> dict[str, Any]:
    last = LastCandidate()
    with mock.patch.object(autotune, "tuner", lambda device: last.tuner):
        found = lowered(rows, texts)
    layouts = [{n: [t.size, t.stride, str(t.dtype)] for n, t in job.layouts.items()} for job in last.jobs]
    return found | {
        "buckets": [job.bucket for job in last.jobs],
        "layouts": layouts,
        "chosen": [asdict(s) for s in last.chosen()],
    }


def lowered(rows: int | None, texts: tuple[str, ...]) -> dict[str, Any]:
    cuda_codegen.pretend_h200()
    graph = GraphOfKernels(rows)
    outs: list[fx.Node] = []
    for number, text in enumerate(texts):
        outs += graph.append(parse(text), number)
    graph.graph.output(tuple(outs))
    _inputs_first(graph.graph)
    gm = fx.GraphModule(torch.nn.Module(), graph.graph)
    with mock.patch.object(inductor_graph, "GraphLowering", lambda gm, shape_env: Lowering(gm, shape_env=graph.shapes)):
        source, moved = cuda_codegen.lower(gm, graph.mode, graph.inputs)
    call = re.sub(r"#.*", "", source[source.index("def call(") :])
    return {
        "launches": re.findall(r"(fusepass_\w+)\.run\(", call),
        "awaits": source.count("    ready = _ready()"),
        "warps": [int(n) for n in re.findall(r"'num_warps': (\d+)", source)],
        "launch_arguments": re.findall(r"fusepass_\w+\.run\((.*?)stream=", call),
        "other_kernels": re.findall(r"(triton_\w+)\.run\(", call),
        "opaque_calls": re.findall(r"torch\.ops\.\w+\.\w+", call),
        "clones": call.count("clone(") + call.count("copy_("),
        "kernels_defined": len(set(re.findall(r"^(fusepass_\w+) = async_compile", source, re.M))),
        "buffers": re.findall(r"= empty_strided_cuda\((.*)\)\n", call),
        "scheduler_nodes": [kind for kind, *_ in moved if kind != "NopKernelSchedulerNode"],
    }


def _inputs_first(graph: fx.Graph) -> None:
    """Placeholders before everything else, in their order."""
    first = next(iter(graph.nodes))
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node is not first:
            first.append(node)
            first = node


def main() -> None:
    results = {name: lowered(*case) for name, case in CASES.items()}
    results |= {f"{name}, tuned": tuned(*CASES[name]) for name in ("layer_norm 2048x4096", "symbolic", "forward")}
    with inductor_config.patch({"triton.enable_pdl": True}):
        results |= {f"{name}, pdl": lowered(*CASES[name]) for name in ("wide", "symbolic", "random")}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
