"""The one door to private parts of torch. Each name says which torch versions it was tried on.

Tried on torch 2.13.0. pyproject.toml allows 2.11 to 2.15; where a name moved between those, both places are tried.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode, tracing
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

__all__ = [
    "MUST_BE_IN_BACKWARD",
    "BatchNorm",
    "CustomGraphPass",
    "PlacedTensor",
    "auto_functionalized_v2",
    "call_directly",
    "chain_passes",
    "cpp_compiler_version",
    "detect_fake_mode",
    "fresh_compile",
    "has_fp8",
    "in_the_pool",
    "inductor",
    "inductor_cache_dir",
    "inductor_config",
    "is_called",
    "isolated_trace",
    "kernel_side_table",
    "mode_options",
    "multiprocessors",
    "no_dispatch_modes",
    "pdl",
    "reset_cudagraphs",
    "same_size",
    "size_hint",
    "size_text",
    "stable_topological_sort",
    "start_cpp_build",
    "tree_leaves",
    "triton_kernel_wrapper_functional",
]


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes (ints or SymInts) are known to be equal, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def size_hint(size: Any) -> int | None:
    """A size as it is in the call that is being compiled; None where that is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def size_text(size: Any) -> str:
    """A size's symbolic expression, as text: equal text means an equal size."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (compute units) a GPU has (tried on torch 2.13)."""
    from torch._inductor.runtime.hints import DeviceProperties

    return int(DeviceProperties.create(device).multi_processor_count)


def has_fp8(device: torch.device) -> bool:
    """Whether a device converts to FP8 as torch does: an NVIDIA GPU from compute capability 8.9, or a CPU."""
    from torch._inductor.runtime.hints import DeviceProperties

    if device.type == "cpu":
        return True
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return int(DeviceProperties.create(device).cc) >= 89


def pdl(device: torch.device) -> bool:
    """Whether Inductor launches its kernels for a GPU programmatically dependent (tried on torch 2.13).

    Those of the user's it launches as ever, in 2.13 and 2.14.
    """
    if device.type != "cuda" or torch.version.hip is not None or not inductor_config.triton.enable_pdl:
        return False
    from torch._inductor.runtime.hints import DeviceProperties

    return int(DeviceProperties.create(device).cc) >= 90


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's config patches for one of its modes. Raises RuntimeError, naming the modes, for an unknown one."""
    if not mode or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


class _PassChain(CustomGraphPass):
    """Several custom passes, run one after the other."""

    def __init__(self, passes: Sequence[Callable[[fx.Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> Any | None:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if any(i is None for i in ids) else tuple(ids)


def chain_passes(existing: Any, ours: CustomGraphPass) -> CustomGraphPass:
    """`ours` after whatever custom pass (or list of passes) the user's own config already has."""
    if existing is None:
        return ours
    earlier = list(existing) if isinstance(existing, (list, tuple)) else [existing]
    return _PassChain([*earlier, ours])


@contextlib.contextmanager
def fresh_compile() -> Iterator[None]:
    """Within this context every compilation runs in full: no cache of compiled graphs is read or written."""
    from torch._functorch import config as functorch_config

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def isolated_trace(fn: Callable[..., Any], *args: torch.Tensor) -> fx.Graph:
    """The ATen graph of a function of tensors, traced apart from any compilation that is in progress."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(None), no_dispatch_modes():
        return make_fx(fn, tracing_mode="fake")(*args).graph


def start_cpp_build(argument_types: Sequence[str], source: str) -> Callable[[], Callable[..., None]]:
    """Build a C++ function called `kernel` as Inductor builds its own (tried on torch 2.13).

    The work goes to Inductor's compile pool; the returned function waits for it and gives the callable, which takes
    tensors for pointers. Floating-point arithmetic keeps its IEEE meaning whatever Inductor's options say.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    ieee = {"cpp.enable_floating_point_contract_flag": "off", "cpp.enable_unsafe_math_opt_flag": False}
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    with inductor_config.patch(ieee):
        load = CppPythonBindingsCodeCache.load_pybinding_async
        wait: Callable[[], Callable[..., None]] = load(list(argument_types), source, submit_fn=submit)
    return wait


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor in a module that Inductor writes: the text that refers to it, its dtype, sizes and strides."""

    text: str
    dtype: torch.dtype
    size: Sequence[Any]
    stride: Sequence[Any]


def call_directly(op: str, import_line: str, describe: Callable[..., tuple[str, str, list[Any]] | None]) -> None:
    """Let Inductor's Python modules call something else in place of a custom op (tried on torch 2.13).

    `describe` gets the op's arguments, tensors as `PlacedTensor`; it returns a name, the expression that defines it
    (written once), and the arguments of the call. Where it returns None the op is called. C++ wrappers and versions
    of torch without this registry call the op too. Inductor's profiling of CPU kernels records the call by that name.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
        from torch._inductor.virtualized import V
    except ImportError:
        return

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        args, kwargs = node.unflatten_args(node.inputs, node.constant_args)
        as_placed = [[_placed(t) for t in a] if _holds_tensors(a) else a for a in (*args, *kwargs.values())]
        call = None if getattr(V.graph, "fx_wrapper", False) else describe(*as_placed)
        if call is None:
            writeline(ExternKernelAllocLine(wrapper, node))
            return
        name, definition, arguments = call
        wrapper.add_import_once(import_line)
        defined = wrapper.__dict__.setdefault("_fusepass_defined", set())
        if name not in defined:
            defined.add(name)
            wrapper.define_kernel(name, definition, gpu=False)
        texts = (a if isinstance(a, str) else wrapper.val_to_arg_str(a) for a in arguments)
        line = f"{name}({', '.join(texts)})"
        if inductor_config.cpp.enable_kernel_profile:
            line = f"with torch._C._profiler._RecordFunctionFast({name!r}): {line}"
        writeline(line)

    CUSTOM_EXTERN_KERNEL_CODEGEN[op] = CustomCodegen(python=write)


def _holds_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and any(hasattr(a, "codegen_reference") for a in argument)


def _placed(tensor: Any) -> PlacedTensor:
    from torch._inductor.ir import ReinterpretView

    base = tensor
    while isinstance(base, ReinterpretView) and base.get_layout().offset == 0:  # a view of the same memory: no object
        base = base.data
    text = base.codegen_reference()
    return PlacedTensor(text, tensor.get_dtype(), tensor.get_size(), tensor.get_stride())


def in_the_pool(wait: Callable[[], Any]) -> Any:
    """What a module that Inductor writes may hold in place of a kernel that is being built (tried on torch 2.13)."""
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import LambdaFuture

    return LambdaFuture(wait) if get_compile_threads() > 1 else wait()


_MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._int_mm.default,
        aten._scaled_mm.default,
        aten.convolution.default,
    }
)


def is_called(target: Any) -> bool:
    """Whether Inductor calls a kernel for this op, which fills memory of its own (tried on torch 2.13)."""
    from torch._inductor.lowering import fallbacks

    if target in (auto_functionalized_v2, aten.empty.memory_format) or target in _MATMULS:
        return True
    return target in fallbacks or getattr(target, "namespace", "") in ("mkldnn", "onednn")


def inductor_cache_dir() -> str | None:
    """Where Inductor keeps what it may find again (tried on torch 2.13); None where it is to keep nothing."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return None if inductor_config.force_disable_caches else cache_dir()


def cpp_compiler_version() -> str:
    """The name and version of the C++ compiler that Inductor uses (tried on torch 2.13)."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return str(get_compiler_version_info(get_cpp_compiler()))


MUST_BE_IN_BACKWARD = "must_be_in_backward"
"""The `partitioner_tag` of a node of a joint graph that the backward is to compute (tried on torch 2.13)."""


def inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any], passes: Mapping[str, CustomGraphPass]
) -> Any:
    """Compile with Inductor, its config patched and checked as `torch.compile(..., options=patches)` does.

    `passes` are ours, by the name of the config entry that they go to; each runs after what the user has put there.
    """
    earlier = {name: patches.pop(name, None) or getattr(inductor_config, name) for name in passes}
    wrapper = torch._TorchCompileInductorWrapper(None, patches, None)
    wrapper.config.update({name: chain_passes(earlier[name], ours) for name, ours in passes.items()})
    return wrapper(gm, example_inputs)


def reset_cudagraphs() -> None:
    """Drop Inductor's CUDA graph trees, where there are any."""
    if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
        trees.reset_cudagraph_trees()
