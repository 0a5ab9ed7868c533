"""Inputs made to break the reuse of memory and the backward, through Inductor; each states what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

D = 16
OPTIONS = {"fusepass.strict": True, "fx_graph_cache": False}


def _norm(s: Tensor) -> Tensor:
    return F.layer_norm(s, (s.shape[-1],))


def _split(h: Tensor) -> Tensor:
    _, second = h.split(4)
    return _norm(second + h[2:6])


def _split_and_the_sum(h: Tensor) -> tuple[Tensor, Tensor]:
    _, second = h.split(4)
    s = second + h[2:6]
    return s, _norm(s)


def _unbind(h: Tensor) -> Tensor:
    _, second = h.view(2, 4, D).unbind(0)
    return _norm(second + h[2:6])


def _chunk_of_a_view(h: Tensor) -> Tensor:
    second = torch.chunk(h.view(8, 1, D), 2)[1]
    return _norm(second + h.view(4, 2, D).view(8, 1, D)[3:7])


def _both_of_a_split(h: Tensor) -> Tensor:
    first, second = h.split(4)
    return _norm(first + second)


def _split_and_the_whole(h: Tensor) -> tuple[Tensor, Tensor]:
    first, second = h.split(4)
    return _norm(first + second), h


def _clone_of_a_slice(h: Tensor) -> Tensor:
    return _norm(h[2:].clone() + h[:-2])


PARTS: list[Callable[[Tensor], object]] = [
    _split,
    _split_and_the_sum,
    _unbind,
    _chunk_of_a_view,
    _both_of_a_split,
    _split_and_the_whole,
    _clone_of_a_slice,
]


@pytest.mark.parametrize("part", PARTS, ids=lambda f: f.__name__.strip("_"))
def test_operands_that_overlap_in_memory(part: Callable[[Tensor], object]) -> None:
    """No output may be written over an operand that shares memory with another, whose rows are read later."""
    fn = lambda x, w: part(torch.mm(x, w))  # noqa: E731
    x, w = torch.randn(8, D), torch.randn(D, D)
    with torch.no_grad():
        got = torch.compile(fn, backend="fusepass", options=OPTIONS)(x, w)
        torch.testing.assert_close(got, fn(x, w))


def test_operands_that_overlap_in_memory_in_a_recomputed_backward() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return _split(torch.mm(x, w))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, w, use_reentrant=False)
        return out

    x, w = torch.randn(8, D), torch.randn(D, D)
    gradients = []
    for f in (fn, torch.compile(fn, backend="fusepass", options=OPTIONS)):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        f(*leaves).square().sum().backward()
        gradients.append([t.grad for t in leaves])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("layout", ["transposed", "channels last", "columns apart"])
def test_strides_of_the_outputs_are_inductors(layout: str) -> None:
    x = {
        "transposed": torch.randn(3, 5, D).transpose(0, 1),
        "channels last": torch.randn(2, 6, 3, D).to(memory_format=torch.channels_last),
        "columns apart": torch.randn(3, D, 5).transpose(1, 2),
    }[layout]
    fn = lambda x, r: (x + r, _norm(x + r), (x + r).transpose(0, 1))  # noqa: E731
    with torch.no_grad():
        plain = torch.compile(fn)(x, x * 2)
        torch._dynamo.reset()
        fused = torch.compile(fn, backend="fusepass", options=OPTIONS)(x, x * 2)
    torch.testing.assert_close(fused, plain)
    assert [t.stride() for t in fused] == [t.stride() for t in plain]


def test_inputs_that_are_mutated() -> None:
    def fn(x: Tensor, r: Tensor) -> Tensor:
        y = _norm(x + r)
        r.add_(y)
        x.copy_(r)
        return y + x

    args = [torch.randn(3, 5, D) for _ in range(2)]
    wanted_args, got_args = ([a.clone() for a in args] for _ in range(2))
    with torch.no_grad():
        wanted = fn(*wanted_args)
        got = torch.compile(fn, backend="fusepass", options=OPTIONS)(*got_args)
    torch.testing.assert_close([got, *got_args], [wanted, *wanted_args])


def test_a_per_row_factor_where_rows_and_columns_are_equally_many() -> None:
    """Not even without `strict` may a call fail: S == D makes `1 + g` of shape (S, 1) look like a vector."""
    fn = lambda x, r, g: _norm(x + r) * (1 + g)  # noqa: E731
    args = torch.randn(D, D), torch.randn(D, D), torch.randn(D, 1)
    with torch.no_grad():
        got = torch.compile(fn, backend="fusepass", options={"fx_graph_cache": False})(*args)
        torch.testing.assert_close(got, fn(*args))
