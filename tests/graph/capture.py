"""The graphs that Inductor would lower, before and after the pass, without lowering them.

`fuse(fn, *args)` runs `fn` through Dynamo and AOTAutograd with Inductor's decompositions and partitioner, applies the
passes to the joint graph and to each graph after it, and runs the rewritten graphs node by node: quick, and independent
of Inductor's code generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import fusepass
from fusepass.fuse_pass import GraphReport
from fusepass.joint_pass import JointPass
from fusepass.report import Site

aten = torch.ops.aten
prims = torch.ops.prims

STATISTICS = (aten.var_mean.correction, aten.var.correction, aten.mean.dim, aten.rsqrt.default)
"""What a norm leaves in a graph when it is not fused."""


@dataclass
class Captured:
    """What came of one run."""

    result: Any = None
    before: list[fx.GraphModule] = field(default_factory=list)
    after: list[fx.GraphModule] = field(default_factory=list)
    reports: list[GraphReport] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        return [s for r in self.reports for s in r.sites]

    @property
    def reasons(self) -> list[str]:
        """The reasons of the norms that were not fused, in order."""
        return [str(s.reason) for s in self.sites if s.reason is not None]

    @property
    def kernels(self) -> list[fx.Node]:
        """The nodes that run a fused kernel."""
        return [n for gm in self.after for n in gm.graph.nodes if "fusepass" in n.meta]

    @property
    def programs(self) -> list[str]:
        """The row programs of the fused kernels, as text."""
        return [str(n.kwargs["program"]) for n in self.kernels]

    def ops(self, which: str = "after") -> Counter[Any]:
        """How often each target occurs in the graphs."""
        return Counter(n.target for gm in getattr(self, which) for n in gm.graph.nodes if n.op == "call_function")


def fuse(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    into: Captured | None = None,
) -> Captured:
    """Run `fn(*args)` through the pass; `strict` unless `options` say otherwise.

    A backward graph is captured when the caller runs the backward, then or later.
    """
    captured = into or Captured()
    fuse_pass = fusepass.FusePass({"fusepass.strict": True, **(options or {})}, captured.reports.append)
    joint_pass = JointPass(fuse_pass.options)

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        captured.before.append(fx.GraphModule(gm, _copy(gm.graph)))
        fuse_pass(gm.graph)
        gm.graph.lint()
        gm.recompile()
        captured.after.append(gm)
        return make_boxed_func(gm.forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint_pass(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    captured.result = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return captured


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, val_map={}))
    return copy
