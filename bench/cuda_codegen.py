"""Inductor's CUDA code for a graph, on a machine without a GPU.

Nothing runs on a device. A graph that was captured on the CPU is given fake CUDA inputs, the pass rewrites it, and
Inductor lowers it with the properties of an H200 (sm_90, 132 multiprocessors). This patches private parts of torch, for
good: use a process of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class H200:
    """The device properties that Inductor asks for."""

    name, major, minor = "NVIDIA H200", 9, 0
    multi_processor_count, warp_size = 132, 32
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    regs_per_multiprocessor, total_memory, L2_cache_size = 65536, 141 << 30, 60 << 20
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    gcnArchName, uuid, is_integrated = "", "none", 0


class _Driver:
    """What Triton asks of the active driver when it only compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@functools.cache
def pretend_h200() -> None:
    """Make torch and triton in this process believe in an H200. There is no way back."""
    from torch._dynamo import device_interface
    from triton.runtime import driver

    properties = H200()
    torch.version.cuda = "13.0"
    replacements = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "synchronize": None,
        "_lazy_init": None,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, lambda *a, _value=value, **k: _value)
    interface = device_interface.CudaInterface
    answers = {
        "is_available": True,
        "get_compute_capability": 90,
        "is_triton_capable": True,
        "is_bf16_supported": True,
        "raise_if_triton_unavailable": None,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
    }
    for name, value in answers.items():
        setattr(interface, name, staticmethod(lambda *a, _value=value, **k: _value))
    for name, value in {"get_device_properties": properties, "current_device": 0}.items():
        setattr(interface.Worker, name, staticmethod(lambda *a, _value=value, **k: _value))
    for key in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(key, interface)
    _replace_everywhere({"has_triton": True, "triton_hash_with_backend": "no-gpu"})
    driver.set_active(_Driver())


def _replace_everywhere(answers: dict[str, Any]) -> None:
    import torch.utils._triton as triton_utils

    for name, value in answers.items():
        original = getattr(triton_utils, name)
        for module in [m for m in sys.modules.values() if getattr(m, name, None) is original]:
            setattr(module, name, lambda *a, _value=value, **k: _value)


def to_cuda(gm: fx.GraphModule, layouts: list[Any]) -> tuple[Any, list[Any]]:
    """Give a captured graph fake CUDA inputs of these (shape, strides, dtype); returns (the fake mode, the inputs)."""
    from torch._inductor.compile_fx import record_original_output_strides
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils._pytree import tree_map

    pretend_h200()
    cuda = torch.device("cuda", 0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class Propagation(FakeTensorProp):
        def run_node(self, n: fx.Node) -> Any:
            if n.target is not torch.ops.prims.inductor_lookup_seed.default:
                return super().run_node(n)
            with mode:  # its fake implementation indexes in a way that asks for a real device
                n.meta["val"] = torch.empty((), dtype=torch.int64, device=cuda)
            return n.meta["val"]

    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = tree_map(
                lambda a: cuda if isinstance(a, torch.device) else a, (node.args, node.kwargs)
            )
        node.meta.pop("val", None)
    with mode:
        inputs = [torch.empty_strided(shape, strides, dtype=dtype, device=cuda) for shape, strides, dtype in layouts]
    Propagation(gm, mode).propagate_dont_convert_inputs(*inputs)
    record_original_output_strides(gm)
    return mode, inputs


def lower(
    gm: fx.GraphModule, mode: Any, inputs: list[Any], custom_pass: Callable[[fx.Graph], None] | None = None
) -> tuple[str, list[tuple[str, int]]]:
    """Lower a graph on fake CUDA inputs: (the wrapper's source, [(scheduler node type, bytes moved), ...]).

    Inductor's own post-grad passes run first, with `custom_pass` in the place where the backend puts the pass. The
    graph is used up. Bytes are those of the distinct buffers that a scheduler node reads and writes, each once;
    matmuls and kernels of the user's are `ExternKernelSchedulerNode`s, whose outputs are counted as read and as
    written, and `NopKernelSchedulerNode`s are no kernels.
    """
    import torch._inductor.config as config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    patches = {"compile_threads": 1, "fx_graph_cache": False, "post_grad_custom_pre_pass": custom_pass}
    with config.patch(patches), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        view_to_reshape(gm)
        post_grad_passes(gm, is_inference=False)
        lowering = GraphLowering(gm, shape_env=None)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            source = lowering.codegen()[0]
            moved = [(type(n).__name__, n.get_read_write_buffers_sizes()) for n in lowering.scheduler.nodes]
    return str(getattr(source, "value", source)), moved
