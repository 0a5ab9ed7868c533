"""A permute or transpose of the rows between the sum and the norm, in either direction, costs no kernel and no copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusepass
from tests.graph.capture import Captured, fuse
from tests.tolerances import assert_close_to_fp64

T, B, D = 6, 4, 16
aten = torch.ops.aten
Fn = Callable[..., Any]


def norm(s: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(s, (D,), w)


def transposed(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.rms_norm(s.transpose(0, 1), (D,), w)


def made_contiguous(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r.view(T, B, D) * 0.5 + w
    return s.view(-1, D), norm(s.transpose(0, 1).contiguous(), w)


def gated(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + g * r
    return s, norm(s.transpose(0, 1), w).reshape(-1, D)


def rolled(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.rms_norm(s.permute(2, 0, 1, 3), (D,), w)


def behind_a_linear(x: Tensor, weight: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + F.linear(x, weight, b)
    return s, norm(s.transpose(0, 1), w)


def batch_first(x: Tensor, r: Tensor, weight: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What is moved is the residual stream from there on."""
    h = (x + r).transpose(0, 1)
    y = norm(h, w)
    return y, h + F.linear(y, weight)


def added_after(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A sandwich whose norms run over the batch first: the second sum lies in the order of the first."""
    s = x + norm((x + r).transpose(0, 1), w).transpose(0, 1)
    return s, s * 2


def _cases() -> dict[str, tuple[Fn, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    x, r, w = torch.randn(T, B, D), torch.randn(T, B, D), 1 + torch.randn(D) / 8
    return {
        "transpose": (transposed, (x, r, w)),
        "contiguous, with a bias and a view": (made_contiguous, (x, r.view(-1, D), w)),
        "a gate per column of each row": (gated, (x, r, torch.randn(T, 1, D), w)),
        "a gate per row": (gated, (x, r, torch.randn(T, B, 1), w)),
        "a gate per row, without the first dimension": (gated, (x, r, torch.randn(B, 1), w)),
        "three dimensions of rows": (rolled, (torch.randn(2, 3, 4, D), torch.randn(2, 3, 4, D), w)),
        "a dimension of one": (rolled, (torch.randn(8, 1, 16, D), torch.randn(8, 1, 16, D), w)),
        "behind a linear": (behind_a_linear, (x, torch.randn(D, D) / 4, torch.randn(D), w)),
        "added after": (added_after, (x, r, w)),
        "batch first from there on": (batch_first, (x, r, torch.randn(D, D) / 4, w)),
    }


CASES = _cases()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn, args = CASES[name]
    args = tuple(a.to(dtype) for a in args)
    captured = fuse(fn, *args, dynamic=dynamic)
    assert captured.reasons == [] and len(captured.kernels) == 1
    assert captured.ops()[aten.add.Tensor] == (fn is batch_first)
    for got, want, exact in zip(captured.result, fn(*args), fn(*(a.double() for a in args)), strict=True):
        assert_close_to_fp64(got, want, exact, dtype)
    if fn not in (added_after, batch_first):
        assert torch.equal(captured.result[0], fn(*args)[0])  # the residual stream is eager's, bit for bit


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_backward(name: str, dynamic: bool) -> None:
    fn, args = CASES[name]
    captured = Captured()
    grads = _gradients(lambda *a: fuse(fn, *a, dynamic=dynamic, into=captured).result, args, torch.float32)
    assert captured.reasons == [] and len(captured.kernels) == 2
    eager, exact = _gradients(fn, args, torch.float32), _gradients(fn, args, torch.float64)
    for got, want, true in zip(grads, eager, exact, strict=True):
        assert_close_to_fp64(got, want, true, torch.float32)


def _gradients(fn: Fn, args: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    leaves = [a.detach().to(dtype, copy=True).requires_grad_() for a in args]
    outs = fn(*leaves)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(list(outs), [torch.randn(o.shape, generator=generator).to(dtype) for o in outs])
    return [a.grad for a in leaves]  # type: ignore[misc]


def test_rows_are_read_and_written_where_they_lie() -> None:
    (program,) = fuse(transposed, *CASES["transpose"][1]).programs
    lines = [line for line in program.splitlines() if line.startswith(("in", "out"))]
    assert lines == [
        f"in x0: tile f32 [row % {T}, row // {T}]",
        f"in x1: tile f32 [row % {T}, row // {T}]",
        "in w0: col f32",
        f"out v0 [row % {T}, row // {T}]",
        "out v6 [row]",
    ]


def test_a_dropout_mask_is_drawn_in_the_order_of_the_branch() -> None:
    """Its numbers belong to the elements of the branch: they stay outside, and the kernel reads the mask."""
    x, r, w = CASES["transpose"][1]

    def run(**how: Any) -> tuple[Tensor, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return torch.compile(lambda: transposed(x, F.dropout(r, 0.5), w), **how)()

    s, y = run(backend="fusepass", options={"fusepass.strict": True, "fusepass.expect": 1})
    assert torch.equal(s, run(backend="inductor")[0])
    assert 0.3 < float((s == x).float().mean()) < 0.7
    torch.testing.assert_close(y, F.rms_norm(s.transpose(0, 1), (D,), w))


def both_orders(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    s = x + r
    return F.rms_norm(s.transpose(0, 1) + s, (D,), w)


def two_moves(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    s = (x + r).view(2, 2, 4, D)
    return F.rms_norm(s.permute(1, 0, 2, 3) + s.permute(2, 0, 1, 3).reshape(2, 2, 4, D), (D,), w)


@pytest.mark.parametrize("fn", [both_orders, two_moves])
def test_two_orders_of_one_sum_are_two_tiles(fn: Fn) -> None:
    """The norm's own sum is fused; the one that it reads in two orders is read as tiles from memory."""
    torch.manual_seed(0)
    x, r, w = torch.randn(4, 4, D), torch.randn(4, 4, D), torch.randn(D)
    captured = fuse(fn, x, r, w)
    assert captured.reasons == [] and len(captured.kernels) == 1
    assert captured.ops()[aten.add.Tensor] == 1
    torch.testing.assert_close(captured.result, fn(x, r, w))


@pytest.mark.parametrize("lead", [(4, 4), (4, 6)])
def test_one_operand_in_two_orders(lead: tuple[int, ...]) -> None:
    """Written twice, the sum is two values, each with one order."""

    def site(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm((x + r).transpose(0, 1).reshape(*lead, D) + (x + r), (D,), w)

    x, r, w = torch.randn(*lead, D), torch.randn(*lead, D), torch.randn(D)
    captured = fuse(site, x, r, w)
    assert captured.reasons == [] and len(captured.kernels) == 1
    torch.testing.assert_close(captured.result, site(x, r, w))


def test_a_path_that_comes_back_keeps_the_sum_outside() -> None:
    def site(x: Tensor, r: Tensor, m: Tensor) -> Tensor:
        s = x + r
        return F.rms_norm(s.transpose(0, 1) + (s.reshape(-1, D) @ m).view(4, 4, D), (D,))

    x, r, m = torch.randn(4, 4, D), torch.randn(4, 4, D), torch.randn(D, D)
    captured = fuse(site, x, r, m)
    assert captured.reasons == [] and len(captured.kernels) == 1
    assert captured.ops()[aten.add.Tensor] == 1
    torch.testing.assert_close(captured.result, site(x, r, m))


@pytest.mark.parametrize("name", ["transpose", "three dimensions of rows", "behind a linear"])
def test_compiled(name: str) -> None:
    fn, args = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fusepass", options={"fusepass.strict": True, "fusepass.expect": 1})
    for got, want, exact in zip(compiled(*args), fn(*args), fn(*(a.double() for a in args)), strict=True):
        assert got.stride() == want.stride()
        assert_close_to_fp64(got, want, exact, torch.float32)
    report = fusepass.explain(fn, *(a.requires_grad_() for a in map(torch.clone, args)))
    assert [s.fused for s in report.sites] == [True, True]
