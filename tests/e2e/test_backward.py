"""Backward through Inductor and the compiled kernels, and what PyTorch offers around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusepass
from bench import models
from tests.graph.test_forms import SUMS, by_hand_layer_norm, divided_rms_norm, layer_norm, llama_rms_norm
from tests.tolerances import EAGER_FACTOR, assert_as_accurate_as_eager, assert_same_sums

STRICT = {"fusepass.strict": True}
D = 48
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compile(fn, backend="fusepass", options={**STRICT, **options})
    return result


def gradients(fn: Callable[..., Any], args: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    for a in args:
        a.grad = None
    torch.autograd.backward(fn(*args), given)
    return [a.grad for a in args if a.grad is not None]


def leaves(*lead: int, dtype: torch.dtype, cols: int = D) -> list[Tensor]:
    """x, r, weight and bias."""
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((*lead, cols), (*lead, cols), (cols,), (cols,))]
    tensors[2] = 1 + 0.1 * tensors[2]
    return [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "dtype"),
    [(n, torch.float64) for n in (layer_norm, by_hand_layer_norm, llama_rms_norm, divided_rms_norm)]
    + [(n, d) for n in (layer_norm, llama_rms_norm) for d in (torch.float32, torch.bfloat16)],
    ids=lambda v: v.__name__ if callable(v) else str(v),
)
def test_every_spelling_of_the_sum_in_one_graph(norm: Norm, dtype: torch.dtype) -> None:
    """Each way to write the sum has tensors of its own; together they are one graph, and one compilation."""
    sums = list(SUMS.values())

    def fn(*args: Tensor) -> list[Tensor]:
        outputs = []
        for i, how in enumerate(sums):
            x, r, w, b = args[4 * i : 4 * i + 4]
            s: Tensor = how(x, r, w)  # type: ignore[assignment]
            outputs += [s, norm(s, w, b)]
        return outputs

    args = [t for _ in sums for t in leaves(3, 7, dtype=dtype)]
    given = [torch.randn(3, 7, D, dtype=torch.float64).to(dtype) for _ in range(2 * len(sums))]
    got = gradients(compiled(fn), args, given)
    eager = gradients(fn, args, given)
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = gradients(fn, wide, [g.double() for g in given])
    assert len(got) == len(eager)
    for g, e, t in zip(got, eager, exact, strict=True):
        if dtype is torch.float64:
            assert_same_sums(g, e, summed=21 * D)
        else:
            assert_as_accurate_as_eager(g, e, t)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_in_one_graph(dtype: torch.dtype) -> None:
    """Ranks 1 to 5; 0, 1 and 1025 rows; 1, 48 and 1000 columns; gradients of any strides."""
    shapes = [(), (1,), (0,), (1025,), (2, 3), (2, 1, 3), (2, 1, 2, 3)]
    points = [(lead, cols) for lead in shapes for cols in (1, 48, 1000)]

    def fn(*args: Tensor) -> list[Tensor]:
        outputs = []
        for i, (_, cols) in enumerate(points):
            x, r, w, b = args[4 * i : 4 * i + 4]
            s = x + r
            outputs += [s, F.layer_norm(s, (cols,), w, b), F.rms_norm(s, (cols,), w, 1e-6)]
        return outputs

    args = [t for lead, cols in points for t in leaves(*lead, dtype=dtype, cols=cols)]
    given = []
    for lead, cols in points:
        slices = torch.randn(*lead, 2 * cols).to(dtype)[..., ::2]
        given += [torch.ones((), dtype=dtype).expand(*lead, cols), slices, torch.randn(*lead, cols).to(dtype)]
    got = gradients(compiled(fn), args, given)
    eager = gradients(fn, args, given)
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = gradients(fn, wide, [g.double() for g in given])
    for i, (g, e, t) in enumerate(zip(got, eager, exact, strict=True)):
        lead, cols = points[i // 4]
        assert g.shape == e.shape and g.dtype == e.dtype
        if 0 in lead:
            assert torch.equal(g, torch.zeros_like(g))
        elif cols > 1:  # the norm of one column is a constant: its gradient is rounding noise
            assert_as_accurate_as_eager(g, e, t)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["pre_norm_causal", "post_norm_encoder", "deep_norm_causal_rms"])
def test_reference_models_report_their_backward(name: str) -> None:
    model, args = models.example(name)
    report = fusepass.explain(model.train(), *args, options=STRICT)
    sites = models.REFERENCE[name].sites
    assert (report.fused, report.declined, report.fused_backward) == (sites, 0, sites), str(report)


def test_a_step_of_training_moves_the_parameters_as_eager_does() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.linear(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    eager, fused = Block(), Block()
    fused.load_state_dict(eager.state_dict())
    run = compiled(fused)
    x, target = torch.randn(64, D), torch.randn(64, D)
    for model, call in ((eager, eager), (fused, run)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(call(x), target).backward()
            optimizer.step()
    for p, q in zip(eager.parameters(), fused.parameters(), strict=True):
        assert_same_sums(q.detach(), p.detach(), summed=64 * D)


def test_gradients_accumulate() -> None:
    args = leaves(16, dtype=torch.float32)
    fn = compiled(lambda x, r, w, b: (x + r, F.layer_norm(x + r, (D,), w, b)))
    given = [torch.randn(16, D) for _ in range(2)]
    once = [g.clone() for g in gradients(fn, args, given)]
    torch.autograd.backward(fn(*args), given)
    for a, g in zip(args, once, strict=True):
        assert a.grad is not None and torch.equal(a.grad, 2 * g)


@pytest.mark.usefixtures("two_threads")
def test_the_same_bits_on_every_run() -> None:
    args = leaves(1025, dtype=torch.float32, cols=1000)
    fn = compiled(lambda x, r, w, b: (x + r, F.layer_norm(x + r, (1000,), w, b)))
    given = [torch.randn(1025, 1000) for _ in range(2)]
    first = [g.clone() for g in gradients(fn, args, given)]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(fn, args, given), strict=True))


def test_double_backward_is_right_or_pytorchs_own_error() -> None:
    x, r, w, b = leaves(4, dtype=torch.float64)
    fn = compiled(lambda x, r, w, b: F.layer_norm(x + r, (D,), w, b))
    (grad,) = torch.autograd.grad(fn(x, r, w, b).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|higher order|once differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_blocks(inside: bool) -> None:
    torch.manual_seed(0)
    linear, norm = nn.Linear(D, D), nn.LayerNorm(D)
    x, target = torch.randn(32, D), torch.randn(32, D)

    def block(x: Tensor) -> Tensor:
        return norm(x + linear(x))  # type: ignore[no-any-return]

    def plain(x: Tensor, block: Callable[[Tensor], Tensor] = block) -> Tensor:
        return block(block(x))

    def recomputed(x: Tensor, block: Callable[[Tensor], Tensor] = block) -> Tensor:
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    fn = compiled(recomputed) if inside else lambda x: recomputed(x, compiled(block))
    results = []
    for f in (plain, fn):
        for p in (*linear.parameters(), *norm.parameters()):
            p.grad = None
        leaf = x.clone().requires_grad_()
        (f(leaf) * target).sum().backward()
        results.append([leaf.grad, *(p.grad.clone() for p in (*linear.parameters(), *norm.parameters()))])
    for e, g in zip(*results, strict=True):
        assert_same_sums(g, e, summed=32 * D)


def test_autocast_in_the_forward_only() -> None:
    torch.manual_seed(0)
    linear, norm = nn.Linear(D, D), nn.RMSNorm(D)
    x, target = torch.randn(32, D), torch.randn(32, D)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return norm(x + linear(x))  # type: ignore[no-any-return]

    parameters = (*linear.parameters(), *norm.parameters())
    results = []
    for f in (fn, compiled(fn)):
        for p in parameters:
            p.grad = None
        (f(x).float() * target).sum().backward()
        results.append([p.grad for p in parameters])
    doubles = [p.detach().double().requires_grad_() for p in parameters]
    z = x.double() + F.linear(x.double(), *doubles[:2])
    exact = torch.autograd.grad((F.rms_norm(z, (D,), doubles[2]) * target.double()).sum(), doubles)
    for e, g, t in zip(*results, exact, strict=True):
        assert g is not None and e is not None and g.dtype is e.dtype is torch.float32
        error, eagers = (float((v.double() - t).norm()) for v in (g, e))
        assert error <= EAGER_FACTOR * eagers, f"error {error:.3e}, eager's {eagers:.3e}"


def test_rows_may_change_without_a_new_kernel() -> None:
    fn = compiled(lambda x, r, w, b: (x + r, F.layer_norm(x + r, (D,), w, b)))
    for rows in (8, 24, 7):
        args = leaves(2, rows, dtype=torch.float32)
        for a in args[:2]:
            torch._dynamo.mark_dynamic(a, 1)
        given = [torch.randn(2, rows, D) for _ in range(2)]
        got = gradients(fn, args, given)
        eager = gradients(lambda x, r, w, b: (x + r, F.layer_norm(x + r, (D,), w, b)), args, given)
        for g, e in zip(got, eager, strict=True):
            assert_same_sums(g, e, summed=2 * rows * D)


def test_zeros_in_the_weight_give_finite_gradients() -> None:
    x, r, w, _ = leaves(8, dtype=torch.float32)
    with torch.no_grad():
        w.zero_()
    got = gradients(compiled(lambda *a: (F.rms_norm(a[0] + a[1], (D,), a[2], 1e-6),)), [x, r, w], [torch.randn(8, D)])
    assert all(g.isfinite().all() for g in got) and float(got[2].abs().max()) > 0
