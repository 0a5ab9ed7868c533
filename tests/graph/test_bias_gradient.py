"""A bias gradient behind an activation: the sum over the columns of a tile joins the kernel that computes the tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass.verdict import Reason
from tests.graph.capture import Captured, fuse
from tests.graph.test_backward import backward, kernels_of, sums
from tests.tolerances import assert_same_sums

D = 24


pytestmark = pytest.mark.usefixtures("by_reference")


def check(fn: Callable[..., Tensor], args: list[Tensor], kernels: int, forward_kernels: int = 0) -> Captured:
    with torch.no_grad():
        given = (torch.randn_like(fn(*args)),)
    expected = backward(fn, args, given)
    captured = Captured()
    got = backward(lambda *a: fuse(fn, *a, into=captured).result, args, given)
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            assert_same_sums(g, e, summed=args[0].numel())
    assert [len(kernels_of(g)) for g in captured.after] == [forward_kernels, kernels]
    return captured


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared relu": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(9,), (2, 5)], ids=str)
def test_an_activation_behind_a_biased_linear(name: str, lead: tuple[int, ...]) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.linear(x, w, b)) @ w2

    captured = check(fn, leaves((*lead, D), (4 * D, D), (4 * D,), (4 * D, D)), kernels=1)
    (site,) = captured.sites
    assert (site.norm, site.residual, site.graph, site.fused) == ("bias_gradient", False, "backward", True)
    assert captured.programs[0].count("col_sum") == 1 and "row_" not in captured.programs[0].split("\n", 1)[1]
    before = len(list(sums(captured.before[1].graph)))
    assert len(list(sums(captured.after[1].graph))) == before - 1


def test_without_a_bias_there_is_nothing_to_sum() -> None:
    check(lambda x, w, w2: F.gelu(x @ w) @ w2, leaves((9, D), (D, 4 * D), (4 * D, D)), kernels=0)


def test_the_bias_gradient_of_what_something_else_made_is_left_alone() -> None:
    check(lambda x, w, b, w2: F.linear(x, w, b) @ w2, leaves((9, D), (4 * D, D), (4 * D,), (4 * D, D)), kernels=0)


def test_a_sum_of_what_is_not_stored_is_left_alone() -> None:
    """The gradient of a scale is a product that nothing else reads: Inductor reads its tiles once, as we would."""
    check(lambda x, w, s: (x @ w) * s, leaves((9, D), (D, D), (D,)), kernels=0)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_bias_gradient_of_the_last_linear_joins_the_norm_that_its_gradient_passes(norm: str) -> None:
    """`x + linear(norm(x))`: what comes in is summed over the columns, and is the residual stream's own gradient."""

    def fn(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        s = x + r
        n = F.layer_norm(s, (D,)) if norm == "layer_norm" else F.rms_norm(s, (D,))
        return s + F.linear(n, w, b)

    captured = check(fn, leaves((9, D), (9, D), (D, D), (D,)), forward_kernels=1, kernels=1)
    (kernel,) = kernels_of(captured.after[1])
    assert str(kernel.kwargs["program"]).count("col_sum") == 1
    assert list(sums(captured.after[1].graph)) == []
    assert [(s.norm, s.graph) for s in captured.sites] == [(norm, "forward"), (norm, "backward")]


def scores(x: Tensor, r: Tensor, g: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The scores of an attention on a norm's result."""
    n = F.layer_norm(x + r, (D,), g)
    return F.linear(n, w, b) @ F.linear(n, w2, b2).T


def test_one_bias_gradient_behind_the_norm_joins_its_backward() -> None:
    """Of queries and keys, that of the matmul which comes last before the norm's backward: Inductor joins it, too."""
    args = leaves((9, D), (9, D), (D,), (D, D), (D,), (D, D), (D,))
    captured = check(scores, args, forward_kernels=1, kernels=1)
    (kernel,) = kernels_of(captured.after[1])
    assert str(kernel.kwargs["program"]).count("col_sum") == 2
    (left,) = sums(captured.after[1].graph)
    order = list(captured.after[1].graph.nodes)
    assert order.index(left) < order.index(kernel)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo itself does
def test_a_bias_gradient_that_the_norm_waits_for_stays_outside() -> None:
    """What reads the sum is read by the norm's backward: one kernel of both would wait for itself."""

    def fn(x: Tensor, r: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out: Tensor = Waits.apply(F.layer_norm(x + r, (D,), g), w, b)
        return out

    captured = check(fn, leaves((9, D), (9, D), (D,), (D, D), (D,)), forward_kernels=1, kernels=1)
    (kernel,) = kernels_of(captured.after[1])
    assert str(kernel.kwargs["program"]).count("col_sum") == 1
    assert len(list(sums(captured.after[1].graph))) == 1


class Waits(torch.autograd.Function):
    """A linear whose input's gradient has the bias gradient added to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        db = dy.sum(0)
        return dy @ w + db, dy.T @ x, db


def _stream(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The first sublayer of a Pre-Norm model: no sum in front of its norm, but the stream goes around it."""
    return x + F.rms_norm(x, (D,), g) @ w


def test_the_backward_of_a_norm_without_a_sum_in_front_is_fused_where_the_streams_own_gradient_is_added() -> None:
    captured = check(_stream, leaves((9, D), (D,), (D, D)), kernels=1)
    forward, after = captured.sites
    assert (forward.graph, forward.fused, forward.reason) == ("forward", False, Reason.NO_RESIDUAL)
    assert (after.graph, after.norm, after.residual, after.fused) == ("backward", "rms_norm", False, True)
    (kernel,) = kernels_of(captured.after[1])
    assert str(kernel.kwargs["program"]).count("col_sum") == 1
    assert list(sums(captured.after[1].graph)) == []


ALONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing goes around it": lambda x, w: F.rms_norm(x, (D,), w[0]) @ w,
    "its backward sums no columns": lambda x, w: x + F.rms_norm(x, (D,)) @ w,
}


@pytest.mark.parametrize("name", ALONE)
def test_the_backward_of_another_norm_without_a_sum_in_front_is_left_alone(name: str) -> None:
    captured = check(ALONE[name], leaves((9, D), (D, D)), kernels=0)
    assert [(s.graph, s.reason) for s in captured.sites] == [(g, Reason.NO_RESIDUAL) for g in ("forward", "backward")]
