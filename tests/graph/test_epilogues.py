"""What follows a norm joins its kernel: casts, adaLN's modulation, a second norm, an activation, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import Captured, fuse
from tests.tolerances import assert_few_roundings_from_eager

B, S, D = 2, 5, 32
Fn = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("by_reference")


def layer_norm(s: Tensor) -> Tensor:
    return F.layer_norm(s, (D,))


def rms_norm(s: Tensor, w: Tensor | None = None) -> Tensor:
    return F.rms_norm(s, (D,), w, 1e-6)


def int8(y: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by its largest magnitude."""
    scale = y.abs().amax(-1, keepdim=True) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


def fp8(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def modulated(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return layer_norm(x + r) * (1 + m[0].unsqueeze(1)) + m[1].unsqueeze(1)


def gated_and_modulated(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    s = x + m[2].unsqueeze(1) * r
    return s, layer_norm(s) * (1 + m[0].unsqueeze(1)) + m[1].unsqueeze(1)


def modulated_by_chunks(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> Tensor:
    shift, scale, gate = torch.cat([m[0], m[1], m[2]], -1).chunk(3, -1)
    return layer_norm(x + gate[:, None] * r) * (1 + scale[:, None]) + shift[:, None]


def two_norms(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = x + r
    return s, layer_norm(s) * w + m[0, 0], layer_norm(s) * m[1, 0] + w


def sandwich(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Gemma 2: the branch is normalised, added, and the sum normalised."""
    s = x + rms_norm(r, w)
    return s, rms_norm(s, m[0, 0])


def norm_then_add(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """The second half of a sandwich, behind a sum of its own."""
    return x + rms_norm(x * 0.5 + r, w)


EPILOGUES: dict[str, tuple[Fn, int]] = {
    "cast to FP64": (lambda x, r, w, m: rms_norm(x + r, w).double(), 1),
    "cast to BF16": (lambda x, r, w, m: rms_norm(x + r, w).bfloat16(), 1),
    "adaLN": (modulated, 1),
    "adaLN behind a gate": (gated_and_modulated, 1),
    "adaLN, one tensor in three": (modulated_by_chunks, 1),
    "two norms of one sum": (two_norms, 2),
    "sandwich": (sandwich, 1),
    "norm, then add": (norm_then_add, 1),
    "gelu": (lambda x, r, w, m: F.gelu(layer_norm(x + r)), 1),
    "silu": (lambda x, r, w, m: F.silu(rms_norm(x + r, w)), 1),
    "squared relu": (lambda x, r, w, m: F.relu(rms_norm(x + r)).square(), 1),
    "int8": (lambda x, r, w, m: int8(rms_norm(x + r, w)), 1),
    "int8 of a layer norm": (lambda x, r, w, m: int8(layer_norm(x + r) * w), 1),
    "int8, a fixed scale": (lambda x, r, w, m: (rms_norm(x + r, w) / 0.05).round().clamp(-128, 127).to(torch.int8), 1),
    "fp8": (lambda x, r, w, m: fp8(rms_norm(x + r, w)), 1),
    "fp8 of BF16": (lambda x, r, w, m: fp8(rms_norm((x + r).bfloat16(), w.bfloat16())), 1),
    "fp8, a fixed scale": (lambda x, r, w, m: (rms_norm(x + r, w) * 3.0).to(torch.float8_e4m3fn), 1),
    "fp8, five exponent bits": (lambda x, r, w, m: rms_norm(x + r, w).to(torch.float8_e5m2), 1),
}
KEPT = ("unsqueeze", "split", "cat", "select", "slice", "view", "permute", "reshape")
"""What may stay outside: views, and what makes one tensor of the modulation's three."""


def inputs() -> tuple[Tensor, ...]:
    """x, r, a weight, and four modulation vectors of each sample."""
    return torch.randn(B, S, D), torch.randn(B, S, D), 1 + 0.1 * torch.randn(D), torch.randn(4, B, D)


def tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def left_over(captured: Captured) -> list[str]:
    """The arithmetic that is left outside the kernels."""
    names = [str(t).removeprefix("aten.").split(".")[0] for t in captured.ops() if isinstance(t, torch._ops.OpOverload)]
    return [n for n in names if n not in (*KEPT, "empty") and not n.startswith("fusepass")]


@pytest.mark.parametrize("name", EPILOGUES)
def test_one_kernel_holds_it_all(name: str) -> None:
    fn, sites = EPILOGUES[name]
    args = inputs()
    with torch.no_grad():
        captured = fuse(fn, *args)
        eager = fn(*args)
    assert len(captured.kernels) == 1
    assert sum(s.fused and s.residual for s in captured.sites) == sites
    assert captured.reasons == []
    assert left_over(captured) == []
    for got, want in zip(tensors(captured.result), tensors(eager), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if want.dtype.itemsize > 1:
            assert_few_roundings_from_eager(got, want)
        else:  # a rounding of the norm may tip a value over to the next step of the scale
            step = 1 if want.dtype is torch.int8 else 32
            assert float((got.float() - want.float()).abs().max()) <= step
            assert float((got.float() != want.float()).float().mean()) < 0.02


def test_two_norms_share_their_statistics() -> None:
    captured = fuse(two_norms, *inputs())
    (program,) = captured.programs
    assert program.count("row_mean") == 2, "one mean and one variance"


def test_a_sandwich_has_two_statistics_and_keeps_its_inner_norm() -> None:
    captured = fuse(sandwich, *inputs())
    (program,) = captured.programs
    assert program.count("row_mean") == 2 and program.count("rsqrt") == 2


def test_a_norm_and_an_add_behind_it_have_no_residual_in_front() -> None:
    captured = fuse(lambda x, r, w, m: x + rms_norm(r, w), *inputs())
    assert captured.kernels == [] and captured.reasons == ["NO_RESIDUAL"]


@pytest.mark.parametrize("name", ["adaLN behind a gate", "two norms of one sum", "sandwich", "norm, then add", "gelu"])
def test_gradients(name: str) -> None:
    """The backward of an epilogue is in the norm's kernel too, with eager's gradients in FP64."""
    fn, sites = EPILOGUES[name]
    args = tuple(a.double().requires_grad_() for a in inputs())
    with torch.no_grad():
        given = [torch.randn_like(o) for o in tensors(fn(*args))]
    expected = torch.autograd.grad(tensors(fn(*args)), args, given, allow_unused=True)
    captured = Captured()
    got = torch.autograd.grad(tensors(fuse(fn, *args, into=captured).result), args, given, allow_unused=True)
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            torch.testing.assert_close(g, e)
    assert sum(s.fused and s.residual for s in captured.sites if s.graph == "backward") == sites
    assert len([n for n in captured.after[1].graph.nodes if "fusepass" in n.meta]) == 1
