"""Tiles and kernels of each case by Inductor, by fusepass and at least: run as a process of its own, which prints JSON.

Each case is captured and lowered for an H200 twice: as Inductor alone has it, and with the passes in their places.
What is counted is all that a GPU runs outside matmuls and attention:

- Inductor's own kernels: the distinct buffers that each reads and writes, each once, as its scheduler counts them. A
  loop that reads its row a second time is not charged for it. Where one kernel sums rows and columns, the scheduler
  does not see the workspace that holds its partial sums, only a fraction of it, nor the ATen kernels that sum those
  up: these are counted apart (`inductor_workspace_tiles`, written once and read once; `inductor_workspace_kernels`).
- fusepass' kernels: what the kernel moves by its own account, which includes partial sums and second reads from memory.
- A whole tile that a matmul adds to its product (Inductor folds a residual add into `addmm` where it can): one read.
  ATen, on CUDA, first copies such a tile into the product's memory (up to torch 2.13; pull request 191706 of
  pytorch/pytorch says so): a read, a write and a kernel more for each, which are not counted.
"""

from __future__ import annotations

import copy
import json
import operator
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

import fusepass
from fusepass import row_program
from fusepass.joint_pass import JointPass
from fusepass.kernels import schedule, traffic
from fusepass.options import resolve

from . import cuda_codegen, traffic_cases, traffic_floor, training_graphs
from .suite import Row

STRICT = {"fusepass.strict": True, "fusepass.profitability": "always"}
_NOT_OURS_TO_COUNT = ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")


@dataclass(frozen=True)
class Count:
    """Bytes moved outside matmuls, and the kernels that do it; what the scheduler does not see, apart."""

    bytes: int
    kernels: int
    workspace_bytes: int
    workspace_kernels: int


@dataclass
class Launches:
    """The fused kernels of a graph: `recorder` is a post-grad pass that runs the pass and notes what it launches."""

    bytes: int = 0
    kernels: int = 0

    def recorder(self, graph: fx.Graph) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fusepass.FusePass({**STRICT, "fusepass.dump": folder})(graph)
            for node in graph.nodes:
                if "fusepass" in node.meta:
                    text = (pathlib.Path(folder) / f"fusepass_{node.meta['fusepass']}.txt").read_text()
                    self.bytes += _moved(row_program.parse(text), node)
        launches = [n for n in graph.nodes if _is_launch(n)]
        self.kernels += len(launches)
        least = sum(_operands(n) for n in launches)
        if self.bytes < least:
            raise AssertionError(f"kernels that are given {least} bytes are said to move {self.bytes}")


@dataclass(frozen=True)
class Captured:
    """The graphs of one case: those that Inductor gets by itself, and those that it gets from fusepass' backend."""

    case: traffic_cases.Case
    inductor: Sequence[training_graphs.Graph]
    fusepass: Sequence[training_graphs.Graph]


def capture(case: traffic_cases.Case) -> Captured:
    """Only before torch believes in a GPU: see `cuda_codegen`."""
    options, _ = resolve(STRICT)
    joint = JointPass(options)
    return Captured(case, training_graphs.capture(case.build), training_graphs.capture(case.build, joint))


def rows_of(captured: Captured) -> Iterator[Row]:
    """One row per direction."""
    case = captured.case
    tile = case.rows * case.cols
    unit = tile * getattr(torch, case.dtype).itemsize * case.layers
    for plain, with_ours in zip(captured.inductor, captured.fusepass, strict=True):
        floor = traffic_floor.least_bytes(plain.module.graph, tile)
        inductor = count(plain, tile, None)
        ours = count(with_ours, tile, Launches())
        yield {
            **case.columns(),
            "direction": plain.kind,
            "fusepass_tiles": ours.bytes / unit,
            "inductor_tiles": inductor.bytes / unit,
            "floor_tiles": floor / unit,
            "fusepass_kernels": ours.kernels / case.layers,
            "inductor_kernels": inductor.kernels / case.layers,
            "inductor_workspace_tiles": inductor.workspace_bytes / unit,
            "inductor_workspace_kernels": inductor.workspace_kernels / case.layers,
        }


def count(graph: training_graphs.Graph, tile: int, launches: Launches | None) -> Count:
    """Lower a captured graph, with the pass if `launches` are to be noted, and count."""
    layouts = [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in graph.inputs]
    gm = fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    mode, inputs = cuda_codegen.to_cuda(gm, layouts)
    source, moved = cuda_codegen.lower(gm, mode, inputs, launches.recorder if launches else None)
    own = [size for kind, size in moved if kind not in _NOT_OURS_TO_COUNT]
    kernels = len(own) + (launches.kernels if launches else 0)
    call = source[source.index("def call(") :]
    launched, sums = len(re.findall(r"^\s+\w+\.run\(", call, re.MULTILINE)), call.count(".sum(dim=0)")
    if not launched <= kernels <= launched + sums:
        raise AssertionError(f"the wrapper launches {launched} kernels and {sums} sums, {kernels} kernels were counted")
    addends = sum(_addend(n, tile) for n in gm.graph.nodes)
    workspaces = sum(
        4 * int(n) for n in re.findall(r"workspace_\d+ = \w+\(\((\d+), \), \(1, \), torch.float32\)", call)
    )
    return Count(sum(own) + addends + (launches.bytes if launches else 0), kernels, 2 * workspaces, sums)


def _moved(program: row_program.RowProgram, launch: fx.Node) -> int:
    rows = _rows(launch)
    chosen = schedule.choose(program, rows)
    return traffic.moved_bytes(program, chosen, rows, cuda_codegen.H200.multi_processor_count)


def _is_launch(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.triton_kernel_wrapper_functional


def _rows(launch: fx.Node) -> int:
    """The number of rows that a launch is given, or that before it whose partial sums it adds up."""
    arguments = launch.kwargs.get("kwargs", {})
    if isinstance(arguments, dict) and isinstance(rows := arguments.get("rows"), int):
        return rows
    before = [n.args[0] for n in launch.all_input_nodes if n.target is operator.getitem]
    for node in before:
        if isinstance(node, fx.Node) and _is_launch(node):
            return _rows(node)
    raise AssertionError(f"{launch.name}: neither it nor a launch before it is given a number of rows")


def _operands(launch: fx.Node) -> int:
    """Bytes of what a launch is given, each tensor once: the least that it can move."""
    tensors = {n: n.meta["val"] for n in launch.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)}
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors.values())


def _addend(node: fx.Node, tile: int) -> int:
    """Bytes of a whole tile that a matmul adds to its product."""
    if node.target is not torch.ops.aten.addmm.default:
        return 0
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return value.numel() * value.itemsize if value.numel() >= tile else 0


def main() -> None:
    cases = traffic_cases.chosen(quick="--quick" in sys.argv[1:])
    for captured in [capture(case) for case in cases]:
        for row in rows_of(captured):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
