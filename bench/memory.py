"""The most memory that a call holds at once, of what it allocates, as PyTorch's allocators account for it.

A call should free nothing that stood before it: a GPU's allocator takes that off, a CPU's profiler does not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Bytes of tensors; what a library allocates by itself (a runtime of its own, a matmul's scratch) is not seen."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))
