"""What a user is told of norms that are not fused, and `fusepass.expect`, which makes a lost site an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fusepass
from fusepass.errors import ExpectationError
from fusepass.verdict import Reason
from tests.graph.capture import fuse

D = 8


def two_sites(x: Tensor, r: Tensor) -> Tensor:
    s = x + F.layer_norm(x + r, (D,))
    return F.rms_norm(s, (D,))


def one_lost(x: Tensor, r: Tensor) -> Tensor:
    """The second one's variance is unbiased."""
    s = x + F.layer_norm(x + r, (D,))
    return s * torch.rsqrt(s.var(-1, keepdim=True) + 1e-6) - s.mean(-1, keepdim=True)


def no_residual(x: Tensor, r: Tensor) -> Tensor:
    return F.layer_norm(x, (D,)) * r


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, D), torch.randn(3, D)


@pytest.mark.parametrize(
    ("fn", "expect"), [(two_sites, 2), (two_sites, "all"), (two_sites, ""), (no_residual, 0), (no_residual, "all")]
)
def test_an_expectation_that_is_met(fn: Callable[..., Tensor], expect: int | str) -> None:
    args = inputs()
    with torch.no_grad():
        got = fuse(fn, *args, options={"fusepass.expect": expect}).result
    torch.testing.assert_close(got, fn(*args))


@pytest.mark.parametrize(
    ("fn", "expect", "says"),
    [
        (two_sites, 3, r"2 of 2 .* sites of the inference graph are fused. Norms that are not: none"),
        (two_sites, 0, r"2 of 2"),
        (one_lost, "all", r"1 of 2 .*fused. Norms that are not:\n.*test_verdicts.py:\d+: UNBIASED_VARIANCE: "),
        (one_lost, 2, r"1 of 2 .*\n.*UNBIASED_VARIANCE: "),
        (no_residual, 1, r"0 of 0 .*\n.*NO_RESIDUAL: "),
    ],
)
def test_an_expectation_that_is_not_met(fn: Callable[..., Tensor], expect: int | str, says: str) -> None:
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=says) as raised:
        fuse(fn, *inputs(), options={"fusepass.expect": expect})
    assert isinstance(raised.value.inner_exception, ExpectationError)


def test_a_fault_meets_no_expectation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ArithmeticError("broken on purpose")

    monkeypatch.setattr("fusepass.fuse_pass.find_regions", broken)
    options = {"fusepass.strict": False, "fusepass.expect": "all"}
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"ArithmeticError: broken on purpose"):
        fuse(two_sites, *inputs(), options=options)


def test_a_backward_graph_has_no_expectation_of_its_own() -> None:
    args = tuple(a.requires_grad_() for a in inputs())
    fuse(two_sites, *args, options={"fusepass.expect": 2}).result.sum().backward()
    assert args[0].grad is not None


def test_the_fast_path_hides_its_norms_and_the_report_says_so() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        report = fusepass.explain(layer, x)
        assert [(s.reason, s.fused, s.residual) for s in report.sites] == [(Reason.FAST_PATH, False, False)]
        assert "set_fastpath_enabled(False)" in str(report)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert fusepass.explain(layer, x).fused == 2
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Broken(nn.Module):
    """A graph break stands between the sum and the norm, or in front of both."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between, self.norm = between, nn.LayerNorm(D)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        if not self.between:
            torch._dynamo.graph_break()
        s = x + r
        if self.between:
            torch._dynamo.graph_break()
        return self.norm(s)  # type: ignore[no-any-return]


def test_a_graph_break_between_sum_and_norm() -> None:
    with torch.no_grad():
        report = fusepass.explain(Broken(True), *inputs())
        (site,) = report.sites
        assert (site.reason, site.fused, site.module) == (Reason.GRAPH_BREAK, False, "norm")
        assert "was computed before a graph break" in site.detail
        report = fusepass.explain(Broken(False), *inputs())
        assert report.fused == 1 and report.declined == 0


def test_a_norm_of_an_argument_is_no_graph_break() -> None:
    with torch.no_grad():
        (site,) = fuse(no_residual, *inputs()).sites
    assert site.reason == Reason.NO_RESIDUAL
