"""Kernels and memory of functions for which both are known."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import launches, memory

ROWS, COLS = 64, 256
TILE = ROWS * COLS * 4


def two_sites(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    s = x + r @ w
    y = F.rms_norm(s, (COLS,))
    return F.rms_norm(s + y @ w, (COLS,))


def count(backend: str, options: dict[str, bool]) -> list[tuple[int, int]]:
    torch._dynamo.reset()
    x, r, w = (torch.randn(*shape) for shape in ((ROWS, COLS), (ROWS, COLS), (COLS, COLS)))
    compiled = torch.compile(two_sites, backend=backend, options={"fx_graph_cache": False, **options})
    with torch.no_grad(), launches.written() as modules:
        torch.testing.assert_close(compiled(x, r, w), two_sites(x, r, w))
    return [(launches.calls(text), launches.calls_of_ours(text)) for text in modules]


def test_each_site_is_one_kernel_of_ours() -> None:
    assert count("fusepass", {}) == [(2, 2)]


def test_profiled_kernels_are_found_too() -> None:
    assert count("fusepass", {"cpp.enable_kernel_profile": True}) == [(2, 2)]


def test_inductors_kernels_are_counted() -> None:
    assert count("inductor", {}) == [(2, 0)]


def test_calls_in_a_text() -> None:
    text = """
def cpp_fused_add_0(x): ...
def call(self, args):
    cpp_fused_add_0(arg0_1, buf0)
    extern_kernels.mm(buf0, arg1_1, out=buf1)
    fusepass_0123456789ab(buf1, arg2_1, buf2)
    with torch._C._profiler._RecordFunctionFast('fusepass_0123456789ab'): fusepass_0123456789ab(buf1, buf3)
def benchmark_compiled_module(times=10):
    cpp_fused_add_0(arg0_1, buf0)
"""
    assert (launches.calls(text), launches.calls_of_ours(text)) == (3, 2)


def test_first_call_counts_what_it_compiles() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x + 1).sum(-1), options={"fx_graph_cache": False})
    result, kernels = launches.first_call(lambda: torch.ones(4, 8), compiled, "cpu")
    assert torch.equal(result, torch.full((4,), 16.0)) and kernels == 1
    assert launches.first_call(lambda: torch.ones(4, 8), torch.sin, "cpu")[1] is None


def test_peak_is_the_most_that_is_held_at_once() -> None:
    x = torch.randn(ROWS, COLS)

    def function() -> Tensor:
        a = x + x
        b = a + a  # two
        del a
        c = b + b  # two again
        return c.add_(b)

    function()
    assert memory.peak_bytes(function, "cpu") == 2 * TILE


def test_peak_counts_what_is_kept_but_not_what_stood_before() -> None:
    x = torch.randn(ROWS, COLS)
    held = [torch.randn(ROWS, COLS) for _ in range(3)]
    assert memory.peak_bytes(lambda: held.append(x.expand(5, ROWS, COLS).contiguous()), "cpu") == 5 * TILE
