"""A site stays with Inductor where its own code is expected to be as fast, and the report gives both estimates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusepass
from fusepass import cost
from fusepass.errors import ExpectationError
from fusepass.region_program import Region
from fusepass.verdict import Reason
from tests.graph.capture import Captured, fuse

AUTO = {"fusepass.profitability": "auto"}
pytestmark = pytest.mark.usefixtures("by_reference")


def layer_norm(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.layer_norm(s, (s.shape[-1],))


def rms_norm(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.rms_norm(s, (s.shape[-1],), None, 1e-6)


def sum_dropped(x: Tensor, r: Tensor) -> Tensor:
    return F.layer_norm(x + r, (x.shape[-1],))


def captured(fn: Callable[..., object], cols: int, dtype: torch.dtype = torch.float32, **options: str) -> Captured:
    x, r = (torch.randn(6, cols).to(dtype) for _ in range(2))
    with torch.no_grad():
        return fuse(fn, x, r, options={**AUTO, **options})


@pytest.mark.parametrize(
    ("fn", "dtype", "narrow", "wide"),
    [
        (layer_norm, torch.float32, 96, 97),
        (layer_norm, torch.bfloat16, 192, 193),
        (rms_norm, torch.float32, 48, 49),
        (rms_norm, torch.bfloat16, 96, 97),
        (sum_dropped, torch.float32, 48, 49),
    ],
)
def test_narrow_rows_stay_with_inductor(fn: Callable[..., object], dtype: torch.dtype, narrow: int, wide: int) -> None:
    declined, fused = captured(fn, narrow, dtype), captured(fn, wide, dtype)
    assert declined.reasons == ["NOT_PROFITABLE"] and not declined.kernels
    assert declined.ops() == declined.ops("before")
    assert fused.reasons == [] and len(fused.kernels) == 1


def test_the_report_gives_both_estimates() -> None:
    (site,) = captured(layer_norm, 64).sites
    assert site.residual and site.inductor_tiles == 5 and site.tiles is None
    ours = "the fused kernel moves 4 tiles and the time of 1.5 at the ends of rows"
    assert site.detail == f"{ours}, Inductor's own code 5"


def test_always_overrides() -> None:
    forced = captured(layer_norm, 8, **{"fusepass.profitability": "always"})
    assert forced.reasons == [] and len(forced.kernels) == 1


def test_an_expectation_counts_what_is_left_alone_as_lost() -> None:
    x, r = torch.randn(6, 8), torch.randn(6, 8)
    compiled = torch.compile(layer_norm, backend="fusepass", dynamic=False, options={**AUTO, "fusepass.expect": "all"})
    with pytest.raises(Exception, match=r"NOT_PROFITABLE: the fused kernel moves 4 tiles") as raised:
        compiled(x, r)
    assert ExpectationError.__name__ in str(raised.value) or isinstance(raised.value, ExpectationError)


def test_a_backward_of_narrow_rows_pays_sooner() -> None:
    """Inductor reads the tiles again for each sum over columns."""

    def site(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, F.layer_norm(s, (64,), w)

    args = [torch.randn(6, 64, requires_grad=True), torch.randn(6, 64, requires_grad=True)]
    report = fusepass.explain(site, *args, torch.ones(64, requires_grad=True), options=AUTO)
    assert [(s.graph, s.fused) for s in report.sites] == [("forward", False), ("backward", True)]
    assert report.sites[0].reason is Reason.NOT_PROFITABLE


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[cost.Traffic]:
    """Has sites judged as on a GPU; the estimates, in order."""
    found: list[cost.Traffic] = []
    original = cost.traffic

    def as_on_a_gpu(region: Region, device_type: str) -> cost.Traffic:
        found.append(original(region, "cuda"))
        return found[-1]

    monkeypatch.setattr(cost, "traffic", as_on_a_gpu)
    return found


@pytest.mark.parametrize(("cols", "gains"), [(1024, False), (1025, True)])
def test_on_a_gpu_inductor_reads_again_where_it_loops(cols: int, gains: bool, on_a_gpu: list[cost.Traffic]) -> None:
    result = captured(layer_norm, cols)
    assert on_a_gpu == [cost.Traffic(4, 5 if gains else 4)]
    assert (result.reasons == []) is gains


@pytest.mark.parametrize(("kept", "tiles"), [(False, 4), (True, 5)])
def test_on_a_gpu_embeddings_that_are_stored_are_looked_up_by_inductor(
    kept: bool, tiles: int, on_a_gpu: list[cost.Traffic]
) -> None:
    """Our kernel looks up those that nothing else needs; storing others is more than Inductor reads again."""

    def site(ids: Tensor, table: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        e = F.embedding(ids, table)
        s = e + w
        return (s, F.layer_norm(s, (2048,)), *([e] if kept else []))

    args = torch.tensor([[1, 0, 2]]), torch.randn(3, 2048), torch.randn(1, 3, 2048)
    with torch.no_grad():
        result = fuse(site, *args, options=AUTO)
    assert on_a_gpu == [cost.Traffic(tiles, 5)]
    assert result.reasons == (["NOT_PROFITABLE"] if kept else [])
