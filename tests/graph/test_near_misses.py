"""What looks like a residual-add + norm and is none stays as it is, with its reason."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass import FusePass, fuse_pass, rewrite
from fusepass._torch_compat import isolated_trace
from fusepass.fuse_pass import GraphReport
from fusepass.lift import Lifted
from fusepass.patterns import PATTERNS
from fusepass.rewrite import UnknownSize
from fusepass.verdict import Reason
from tests.graph.capture import fuse

D = 8


def _inputs(*shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=g), torch.randn(*shape, generator=g)


NEAR_MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Reason]] = {
    "layer norm over the wrong dimension": (
        lambda x, r: (
            (x + r - (x + r).mean(1, keepdim=True)) * torch.rsqrt((x + r).var(1, correction=0, keepdim=True) + 1e-5)
        ),
        Reason.NOT_LAST_DIM,
    ),
    "rms norm over the wrong dimension": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(1, keepdim=True) + 1e-6),
        Reason.NOT_LAST_DIM,
    ),
    "layer norm over two dimensions": (lambda x, r: F.layer_norm(x + r, (x.shape[1], D)), Reason.NOT_LAST_DIM),
    "rms norm with a wrong divisor": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).sum(-1, keepdim=True) / (D - 1) + 1e-6),
        Reason.WRONG_DIVISOR,
    ),
    "layer norm with a wrong divisor": (
        lambda x, r: _centred(x + r) * torch.rsqrt(_centred(x + r).pow(2).sum(-1, keepdim=True) / 100 + 1e-6),
        Reason.WRONG_DIVISOR,
    ),
    "unbiased variance": (
        lambda x, r: _centred(x + r) * torch.rsqrt((x + r).var(-1, keepdim=True) + 1e-5),
        Reason.UNBIASED_VARIANCE,
    ),
    "unbiased std, eps outside the root": (
        lambda x, r: _centred(x + r) / ((x + r).std(-1, keepdim=True) + 1e-5),
        Reason.UNBIASED_VARIANCE,
    ),
    "eps outside the root": (
        lambda x, r: _centred(x + r) / ((x + r).std(-1, correction=0, keepdim=True) + 1e-5),
        Reason.EPS_OUTSIDE_ROOT,
    ),
    "rms norm with eps outside the root": (
        lambda x, r: (x + r) / ((x + r).pow(2).mean(-1, keepdim=True).sqrt() + 1e-6),
        Reason.EPS_OUTSIDE_ROOT,
    ),
    "the mean is not subtracted": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).var(-1, correction=0, keepdim=True) + 1e-5),
        Reason.MISMATCHED_MEAN,
    ),
    "the mean is subtracted once": (
        lambda x, r: _centred(x + r) * torch.rsqrt((x + r).pow(2).mean(-1, keepdim=True) + 1e-5),
        Reason.MISMATCHED_MEAN,
    ),
    "no residual": (lambda x, r: F.layer_norm(x, (D,)), Reason.NO_RESIDUAL),
    "a bias is no residual": (lambda x, r: F.layer_norm(x + r[0, 0], (D,)), Reason.NO_RESIDUAL),
    "a gate is no residual": (lambda x, r: F.rms_norm(x * r, (D,)), Reason.NO_RESIDUAL),
    "a difference is no residual": (lambda x, r: F.rms_norm(x - r, (D,)), Reason.NO_RESIDUAL),
    "the sum is sorted before the norm": (lambda x, r: F.rms_norm((x + r).sort(-1).values, (D,)), Reason.NO_RESIDUAL),
    "a sum whose columns become rows": (
        lambda x, r: F.rms_norm((x + r).transpose(1, 2).contiguous(), (x.shape[1],)),
        Reason.SUM_OUTSIDE_REGION,
    ),
    "rms norm over the first dimension": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(0, keepdim=True) + 1e-6),
        Reason.NOT_LAST_DIM,
    ),
    "rms norm over all dimensions": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean((0, 1, 2), keepdim=True) + 1e-6),
        Reason.NOT_LAST_DIM,
    ),
    "rms norm over two dimensions": (lambda x, r: F.rms_norm(x + r, (x.shape[1], D)), Reason.NOT_LAST_DIM),
    "layer norm without keepdim, on a square": (
        lambda x, r: (x + r - (x + r).mean(-1)) * torch.rsqrt((x + r).var(-1, correction=0) + 1e-5),
        Reason.NOT_A_NORM,
    ),
    "rms norm without keepdim, on a square": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(-1) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "rms norm without keepdim, unsqueezed in front": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(-1) + 1e-6).unsqueeze(0),
        Reason.NOT_A_NORM,
    ),
    "rms norm of a transpose": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).mT.pow(2).mean(-1, keepdim=True) + 1e-6).mT,
        Reason.NOT_A_NORM,
    ),
    "the wrong divisor by a factor": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).sum(-1, keepdim=True) * (1 / (D + 1)) + 1e-6),
        Reason.WRONG_DIVISOR,
    ),
    "no divisor": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).sum(-1, keepdim=True) + 1e-6),
        Reason.WRONG_DIVISOR,
    ),
    "the divisor of a longer row": (
        lambda x, r: _centred(x + r) * torch.rsqrt(_centred(x + r).pow(2).sum(-1, keepdim=True) / (2 * D) + 1e-6),
        Reason.WRONG_DIVISOR,
    ),
    "unbiased variance of centred squares": (
        lambda x, r: _centred(x + r) * torch.rsqrt(_centred(x + r).pow(2).sum(-1, keepdim=True) / (D - 1) + 1e-6),
        Reason.UNBIASED_VARIANCE,
    ),
    "a correction of 2": (
        lambda x, r: _centred(x + r) * torch.rsqrt((x + r).var(-1, correction=2, keepdim=True) + 1e-5),
        Reason.WRONG_DIVISOR,
    ),
    "unbiased, by var_mean": (
        lambda x, r: (
            (x + r - torch.var_mean(x + r, -1, keepdim=True)[1])
            * torch.rsqrt(torch.var_mean(x + r, -1, keepdim=True)[0] + 1e-5)
        ),
        Reason.UNBIASED_VARIANCE,
    ),
    "the annotated transformer's": (
        lambda x, r: 2 * _centred(x + r) / ((x + r).std(-1, keepdim=True) + 1e-6) + 1,
        Reason.UNBIASED_VARIANCE,
    ),
    "eps beside the norm": (
        lambda x, r: _centred(x + r) / (_centred(x + r).pow(2).mean(-1, keepdim=True).sqrt() + 1e-6),
        Reason.EPS_OUTSIDE_ROOT,
    ),
    "eps outside the power": (
        lambda x, r: (x + r) * ((x + r).pow(2).mean(-1, keepdim=True).pow(0.5) + 1e-6).reciprocal(),
        Reason.EPS_OUTSIDE_ROOT,
    ),
    "the mean of another tensor": (
        lambda x, r: (x + r - x.mean(-1, keepdim=True)) * torch.rsqrt((x + r).var(-1, correction=0, keepdim=True) + 1),
        Reason.NOT_A_NORM,
    ),
    "half of the mean": (
        lambda x, r: (
            (x + r - 0.5 * (x + r).mean(-1, keepdim=True))
            * torch.rsqrt((x + r).var(-1, correction=0, keepdim=True) + 1e-5)
        ),
        Reason.NOT_A_NORM,
    ),
    "the mean is added": (
        lambda x, r: (
            (x + r + (x + r).mean(-1, keepdim=True)) * torch.rsqrt((x + r).var(-1, correction=0, keepdim=True) + 1e-5)
        ),
        Reason.NOT_A_NORM,
    ),
    "the variance is not centred": (
        lambda x, r: _centred(x + r) * torch.rsqrt((x + r).square().mean(-1, keepdim=True) + 1e-5),
        Reason.MISMATCHED_MEAN,
    ),
    "the statistic of one summand": (
        lambda x, r: (x + r) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "the statistic of a scaled sum": (
        lambda x, r: (x + r) * torch.rsqrt((2 * x + r).pow(2).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "a mean of fourth powers": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).pow(2).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "the mean's square is added": (
        lambda x, r: (
            (x + r)
            * torch.rsqrt((x + r).pow(2).mean(-1, keepdim=True) + (x + r).mean(-1, keepdim=True).square() + 1e-6)
        ),
        Reason.NOT_A_NORM,
    ),
    "a mean of cubes": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(3).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "a mean of absolute values": (
        lambda x, r: (x + r) / ((x + r).abs().mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "the largest absolute value": (
        lambda x, r: (x + r) / ((x + r).abs().amax(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "a root too few": (lambda x, r: (x + r) / ((x + r).pow(2).mean(-1, keepdim=True) + 1e-6), Reason.NOT_A_NORM),
    "a root too many": (
        lambda x, r: (x + r) * ((x + r).pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.25),
        Reason.NOT_A_NORM,
    ),
    "a root of the root": (
        lambda x, r: (x + r) / ((x + r).pow(2).mean(-1, keepdim=True) + 1e-6).sqrt().sqrt(),
        Reason.NOT_A_NORM,
    ),
    "times the root": (
        lambda x, r: (x + r) * torch.sqrt((x + r).pow(2).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "relu of the statistic": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(-1, keepdim=True).relu() + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "tanh of the root": (
        lambda x, r: (x + r) * torch.rsqrt((x + r).pow(2).mean(-1, keepdim=True) + 1e-6).tanh(),
        Reason.NOT_A_NORM,
    ),
    "relu between sum and product": (
        lambda x, r: (x + r).relu() * torch.rsqrt((x + r).pow(2).mean(-1, keepdim=True) + 1e-6),
        Reason.NOT_A_NORM,
    ),
    "a softmax of the sum in the norm": (
        lambda x, r: F.rms_norm(torch.softmax(x + r, -1), (D,)),
        Reason.NO_RESIDUAL,
    ),
    "a matrix product between sum and norm": (lambda x, r: F.rms_norm((x + r) @ r, (D,)), Reason.NO_RESIDUAL),
    "a relu between sum and norm": (lambda x, r: F.rms_norm((x + r).relu(), (D,)), Reason.NO_RESIDUAL),
    "a slice of the rows of a sum": (lambda x, r: F.rms_norm((x + r)[:, 1:], (D,)), Reason.NO_RESIDUAL),
    "a rolled sum": (lambda x, r: F.rms_norm((x + r).roll(1, -1), (D,)), Reason.NO_RESIDUAL),
    "halves of a concatenation": (lambda x, r: F.rms_norm(torch.cat([x, r], -1), (2 * D,)), Reason.NO_RESIDUAL),
    "rows regrouped between sum and norm": (
        lambda x, r: F.rms_norm((x + r).reshape(x.shape[0], -1, D // 2), (D // 2,)),
        Reason.SUM_OUTSIDE_REGION,
    ),
    "a product is no residual": (lambda x, r: F.layer_norm(x * r, (D,)), Reason.NO_RESIDUAL),
    "a scaled stream alone": (lambda x, r: F.layer_norm(x * 2.0 + 1.0, (D,)), Reason.NO_RESIDUAL),
    "a difference, by alpha": (lambda x, r: F.rms_norm(torch.sub(x, r, alpha=0.5), (D,)), Reason.NO_RESIDUAL),
    "a maximum is no residual": (lambda x, r: F.rms_norm(torch.maximum(x, r), (D,)), Reason.NO_RESIDUAL),
    "norm, then add": (lambda x, r: r + F.rms_norm(x, (D,)), Reason.NO_RESIDUAL),
    "a norm of heads": (lambda x, r: F.rms_norm(x.view(*x.shape[:-1], 2, D // 2), (D // 2,)), Reason.NO_RESIDUAL),
    "l2 distance of attention scores": (
        lambda x, r: 2 * x @ r.mT - x.square().sum(-1, keepdim=True) - r.square().sum(-1, keepdim=True).mT,
        Reason.NOT_A_NORM,
    ),
}


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_left_alone_with_its_reason(name: str) -> None:
    fn, reason = NEAR_MISSES[name]
    args = _inputs(D, D, D)
    with torch.no_grad():
        captured = fuse(fn, *args)
        assert captured.kernels == []
        assert captured.ops("before") == captured.ops("after")
        others = {str(u.reason) for report in captured.reports for u in report.untouched}
        assert set(captured.reasons) == {str(reason)} or (captured.sites == [] and str(reason) in others)
        assert all(s.detail for s in captured.sites)
        torch.testing.assert_close(captured.result, fn(*args), equal_nan=True)


@pytest.mark.parametrize(
    "fn", [torch.softmax, torch.log_softmax, torch.nn.functional.normalize], ids=lambda f: f.__name__
)
def test_other_reductions_are_no_norms(fn: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r: fn(x + r, dim=-1), *_inputs(2, 3, D))
    assert captured.kernels == [] and captured.sites == []
    assert str(Reason.NOT_A_NORM) in {str(u.reason) for r in captured.reports for u in r.untouched}


def test_a_sum_without_a_norm() -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r: (x + r).relu(), *_inputs(2, 3, D))
    assert captured.kernels == [] and captured.sites == []
    assert [str(u.reason) for r in captured.reports for u in r.untouched] == [str(Reason.NO_NORM)]


def test_a_column_count_that_is_symbolic() -> None:
    def site(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)

    with torch.no_grad():
        captured = fuse(site, *_inputs(3, 5), dynamic=True)
    assert captured.kernels == [] and captured.reasons == [str(Reason.SYMBOLIC_COLUMNS)]


def test_more_columns_than_a_kernel_takes() -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r: F.rms_norm(x + r, (131_073,)), *_inputs(1, 131_073))
    assert captured.kernels == [] and captured.reasons == [str(Reason.TOO_MANY_COLUMNS)]


def test_a_dtype_that_no_kernel_has() -> None:
    def site(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6)

    with torch.no_grad():
        captured = fuse(site, *(t.to(torch.complex64) for t in _inputs(3, D)))
    assert captured.kernels == [] and captured.reasons == [str(Reason.UNSUPPORTED_DTYPE)]
    assert "complex64" in captured.sites[0].detail


def test_a_device_that_no_kernel_runs_on() -> None:
    x = torch.empty(2, 3, D, device="meta")
    graph = isolated_trace(lambda x, r: (x + r) * ((x + r).square().mean(-1, keepdim=True) + 1e-6).rsqrt(), x, x)
    reports: list[GraphReport] = []
    FusePass({"fusepass.strict": True}, reports.append)(graph)
    (site,) = reports[0].sites
    assert (site.fused, site.reason) == (False, Reason.UNSUPPORTED_DEVICE) and "meta" in site.detail


def test_a_row_statistic_that_is_normalised_again() -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r: F.rms_norm(x.mean(-1) + r.mean(-1), (D,)), *_inputs(2, D, D))
    assert captured.kernels == [] and captured.reasons == [str(Reason.UNSUPPORTED_OP)]


def test_a_size_that_no_node_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(self: object, size: object) -> object:
        raise UnknownSize("no node of the graph holds the size s0")

    monkeypatch.setattr(rewrite._Edit, "size", unknown)
    with torch.no_grad():
        captured = fuse(lambda x, r: F.rms_norm(x + r, (D,)), *_inputs(2, 3, D))
    assert captured.kernels == [] and captured.reasons == [str(Reason.SYMBOLIC_SHAPE)]
    assert captured.ops("before") == captured.ops("after")


def test_a_region_that_a_path_leaves_and_enters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth never makes one; were it to, the region would be refused and the graph would stay as it is."""

    def site(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        return F.rms_norm(s + torch.cumsum(s, 0), (D,))

    def all_in_one(lifted: dict[torch.fx.Node, Lifted]) -> list[list[torch.fx.Node]]:
        return [list(lifted)]

    args = _inputs(3, D)
    with torch.no_grad():
        assert len(fuse(site, *args).kernels) == 1
        monkeypatch.setattr(fuse_pass, "find_regions", all_in_one)
        captured = fuse(site, *args)
        torch.testing.assert_close(captured.result, site(*args))
    assert captured.kernels == [] and captured.reasons == [str(Reason.NOT_CONVEX)]


def test_a_graph_with_a_mutation_in_the_middle() -> None:
    def site(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        x.zero_()
        return s * (s.square().mean(-1, keepdim=True) + 1e-6).rsqrt() + (x + r)

    graph = isolated_trace(site, *_inputs(3, D))
    reports: list[GraphReport] = []
    FusePass({"fusepass.strict": True}, reports.append)(graph)
    assert [s.reason for s in reports[0].sites] == [Reason.NOT_FUNCTIONAL]
    args = _inputs(3, D)
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(*args), site(*_inputs(3, D)))


def test_every_reason_is_produced_by_some_test() -> None:
    tests = "".join(p.read_text() for p in pathlib.Path(__file__).parents[1].rglob("test_*.py"))
    missing = [r.name for r in Reason if f"Reason.{r.name}" not in tests and f'"{r.name}"' not in tests]
    assert missing == []


@pytest.mark.parametrize("make", [torch.nn.BatchNorm1d, lambda d: torch.nn.GroupNorm(2, d), torch.nn.InstanceNorm1d])
def test_norms_over_channels(make: Callable[[int], torch.nn.Module]) -> None:
    norm = make(D).train()
    with torch.no_grad():
        captured = fuse(lambda x, r: norm(x + r), *_inputs(2, D, D))
    assert captured.kernels == []
    assert set(captured.reasons) <= {str(Reason.NOT_LAST_DIM), str(Reason.NO_RESIDUAL)}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [case for p in PATTERNS for case in p.near_misses],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_near_misses_that_stand_beside_the_patterns(fn: Callable[[Tensor, Tensor], Tensor], reason: Reason) -> None:
    with torch.no_grad():
        captured = fuse(lambda x, r: fn(x + r, torch.tensor(1e-5)), *_inputs(2, 3, D))
    assert captured.kernels == [] and captured.reasons == [str(reason)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pattern_matches_its_own_function(pattern: object, dtype: torch.dtype) -> None:
    eps = torch.tensor(1e-5, dtype=dtype)
    with torch.no_grad():
        captured = fuse(lambda x, r: pattern.fn(x + r, eps), *(t.to(dtype) for t in _inputs(2, 3, D)))  # type: ignore[attr-defined]
    assert [s.norm for s in captured.sites if s.fused] == [pattern.name]  # type: ignore[attr-defined]
    assert len(captured.kernels) == 1
