"""The graphs that Inductor is given for training, of a function that is never run: captured on fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Graph:
    """One graph as Inductor's post-grad stage would get it. `kind` is "forward", "backward" or "inference"."""

    kind: str
    module: fx.GraphModule
    inputs: Sequence[Any]


_CAST = torch.ops.prims.convert_element_type.default


class _Captured(Exception):
    """Raised instead of running a graph."""


def capture(build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], joint_pass: Any = None) -> list[Graph]:
    """The graphs of `fn(*args)` for `fn, args = build()`, which is called where every new tensor is a fake one.

    They have gone through Dynamo, AOTAutograd, Inductor's decompositions and joint-graph passes (which put random
    numbers into Inductor's form), `joint_pass`, and its partitioner, on fake CPU tensors: nothing is computed, so any
    size will do. What PyTorch does on CPUs only, to round the statistics of a LayerNorm to 16 bits, is undone.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: list[Graph] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Any:
        kind = "backward" if facts.get("is_backward") else "inference" if facts.get("is_inference") else "forward"
        graphs.append(Graph(kind, gm, inputs))
        return _refuse

    def joint_passes(graph: fx.Graph) -> None:
        _keep_statistics_wide(graph)
        if joint_pass is not None:
            joint_pass(graph)

    backend = partial(compile_fx, inner_compile=record)
    torch._dynamo.reset()
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(joint_custom_post_pass=joint_passes),
        FakeTensorMode(),
    ):
        fn, args = build()
        with suppress(_Captured):
            torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)(*args)
    return graphs


def _keep_statistics_wide(graph: fx.Graph) -> None:
    """Save the mean and rstd of each LayerNorm in FP32, as on a GPU, where PyTorch's CPU decomposition rounds them."""
    halves = (torch.bfloat16, torch.float16)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.var_mean.correction):
        results = [u for u in node.users if u.target is operator.getitem]
        roots = [r for v in results for a in v.users for r in a.users if r.target is torch.ops.aten.rsqrt.default]
        for statistic in (*results, *roots):
            for cast in list(statistic.users):
                if cast.target is _CAST and cast.meta["val"].dtype in halves:
                    readers = list(cast.users)
                    cast.replace_all_uses_with(statistic)
                    graph.erase_node(cast)
                    for reader in readers:
                        if reader.op != "output" and reader.meta["val"].dtype in halves:
                            reader.meta["val"] = reader.meta["val"].float()


def _refuse(arguments: Any) -> Any:
    raise _Captured


_refuse._boxed_call = True  # type: ignore[attr-defined]
