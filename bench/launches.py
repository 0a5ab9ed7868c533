"""How many kernels run: calls in the code that Inductor writes for a CPU, kernels that the profiler sees on a GPU.

On a CPU matmuls, attention and other calls of ATen are left out, which are the same calls whoever compiled the rest:
the kernels that Inductor wrote are counted, and fusepass'. On a GPU all kernels count, but neither copies nor fills.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

_PROFILED = r"(?:with torch\._C\._profiler\._RecordFunctionFast\('\w+'\): )?"
_OURS = r"fusepass_[0-9a-f]{12}\("
_CALL = re.compile(rf"^ +{_PROFILED}(?:\w*cpp_fused\w*\(|{_OURS})", re.MULTILINE)
_CALL_OF_OURS = re.compile(rf"^ +{_PROFILED}{_OURS}", re.MULTILINE)


def calls(module: str) -> int:
    """Kernels that a module of Inductor's for a CPU calls, fusepass' included."""
    return len(_CALL.findall(_body(module)))


def calls_of_ours(module: str) -> int:
    """Those of them that are fusepass'."""
    return len(_CALL_OF_OURS.findall(_body(module)))


def _body(module: str) -> str:
    return module[module.index("def call(") :].partition("def benchmark_compiled_module(")[0]


@contextmanager
def written() -> Iterator[list[str]]:
    """The text of each module that Inductor compiles inside, in order."""
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", texts.append):
        yield texts


def first_call(prepare: Callable[[], T], call: Callable[[T], Any], device: str) -> tuple[Any, int | None]:
    """What the first call returns, and the number of kernels of `call`; None on a CPU if Inductor compiled nothing.

    Nothing may have been compiled yet. If several graphs are, `call` runs the last one.
    """
    with written() as modules:
        result = call(prepare())
    if torch.device(device).type == "cuda":
        prepared = prepare()
        return result, len(on_gpu(lambda: call(prepared)))
    return result, calls(modules[-1]) if modules else None


def on_gpu(function: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel that `function` runs on a GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    return [(e.name, e.time_range.elapsed_us()) for e in recorded.events() if _is_kernel(e)]


def _is_kernel(event: Any) -> bool:
    on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return on_device and not event.name.startswith(("Memcpy", "Memset"))
