"""On a GPU: the same graphs, fused into Triton launches, against eager and FP64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import fusepass
from bench import models
from fusepass._torch_compat import fresh_compile
from fusepass.kernels import autotune
from tests.tolerances import (
    assert_as_accurate_as_eager,
    assert_close_to_fp64,
    assert_few_roundings_from_eager,
    assert_same_sums,
)

pytestmark = pytest.mark.gpu
STRICT = {"fusepass.strict": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = x + r
    return s, F.layer_norm(s, (s.shape[-1],), w, b), F.rms_norm(s, (s.shape[-1],), w, 1e-6)


@pytest.mark.parametrize("cols", [1, 17, 768, 1000, 4096, 16384, 65536])
@pytest.mark.parametrize("rows", [1, 7, 513])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sites(rows: int, cols: int, dtype: torch.dtype) -> None:
    x, r = (torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(2))
    w, b = (torch.randn(cols, device="cuda", dtype=dtype) for _ in range(2))
    with torch.no_grad():
        got, code = run_and_get_code(torch.compile(_site, backend="fusepass", options=STRICT), x, r, w, b)
        want, exact = _site(x, r, w, b), _site(*(t.double() for t in (x, r, w, b)))
    call = code[0][code[0].index("def call(") :]
    assert len(re.findall(r"fusepass_\w+\.run\(", call)) == 1 and "triton_" not in call
    assert torch.equal(got[0], want[0]), "the sum must be eager's, bit for bit"
    for a, e, t in zip(got, want, exact, strict=True):
        assert_close_to_fp64(a.cpu(), e.cpu(), t.cpu(), dtype)


@pytest.mark.parametrize(
    "name", ["pre_norm_causal", "post_norm_causal_rms", "deep_norm_encoder", "tutorial_pre_norm_rms"]
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_reference_models(name: str, dtype: torch.dtype, mode: str) -> None:
    model, (ids,) = models.example(name)
    model, ids = model.cuda(), ids.cuda()
    with torch.no_grad():
        exact = model.double()(ids)
        model = model.to(dtype)
        assert fusepass.explain(model, ids).fused == models.REFERENCE[name].sites
        compiled = torch.compile(model, backend="fusepass", mode=mode, options=None)
        for _ in range(3):
            got = compiled(ids).clone()
        assert_as_accurate_as_eager(got.cpu(), model(ids).cpu(), exact.cpu())


def test_scaled_sums_are_not_contracted() -> None:
    x, r = (torch.randn(64, 4096, device="cuda") for _ in range(2))

    def fn(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x * 1.7 + r
        return s, F.rms_norm(s, (4096,))

    with torch.no_grad():
        assert torch.equal(torch.compile(fn, backend="fusepass", options=STRICT)(x, r)[0], fn(x, r)[0])


def test_no_rows_and_rows_that_change() -> None:
    compiled = torch.compile(_site, backend="fusepass", options=STRICT, dynamic=True)
    w, b = (torch.randn(256, device="cuda") for _ in range(2))
    with torch.no_grad():
        for rows in (5, 64, 1, 0):
            x, r = (torch.randn(rows, 256, device="cuda") for _ in range(2))
            torch.testing.assert_close(compiled(x, r, w, b), _site(x, r, w, b))


def test_a_row_does_not_depend_on_the_others() -> None:
    w, b = (torch.randn(1000, device="cuda") for _ in range(2))
    x, r = (torch.randn(4096, 1000, device="cuda", dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        many = torch.compile(_site, backend="fusepass", options=STRICT)(x, r, w, b)
        torch._dynamo.reset()
        one = torch.compile(_site, backend="fusepass", options=STRICT)(x[:1], r[:1], w, b)
    for a, e in zip(many, one, strict=True):
        assert torch.equal(a[:1], e)


def _inputs(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    tiles = [torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(2)]
    return [t.requires_grad_() for t in (*tiles, *(torch.randn(cols, device="cuda", dtype=dtype) for _ in range(2)))]


def _gradients(outs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    return [g.clone() for g in torch.autograd.grad([o.float().square().sum() for o in outs], inputs)]


def test_training_in_cuda_graphs() -> None:
    """Warm-up, capture and replays, forward and backward, with other numbers each time; no graph is refused."""
    counters.clear()
    compiled = torch.compile(_site, backend="fusepass", mode="reduce-overhead", options=None)
    plain = torch.compile(_site, backend="fusepass")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = _inputs(1024, 768)
        captured, launched = compiled(*inputs), plain(*inputs)
        for a, e in zip(captured, launched, strict=True):
            assert torch.equal(a, e)
        for a, e in zip(_gradients(captured, inputs), _gradients(launched, inputs), strict=True):
            assert torch.equal(a, e)
        for a, e in zip(captured, _site(*inputs), strict=True):
            assert_few_roundings_from_eager(a, e)
    assert counters["inductor"]["cudagraph_skips"] == 0


def _between_others(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    s, y, z = _site(torch.cumsum(x, 0), r, w, b)
    return s, torch.cumsum(y, 0), torch.softmax(z, 0)


@pytest.mark.skipif(
    torch.cuda.get_device_capability() < (9, 0),
    reason="needs compute capability 9.0 or later: earlier GPUs have no programmatic dependent launch",
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_programmatic_dependent_launch(mode: str) -> None:
    """Kernels that overlap with those before and after give the same bits as kernels that do not, many times over."""
    graphs = {"triton.cudagraphs": mode == "reduce-overhead"}
    overlapping = torch.compile(_between_others, backend="fusepass", options={**graphs, "triton.enable_pdl": True})
    separate = torch.compile(_between_others, backend="fusepass", options=graphs)
    for step in range(30):
        inputs = _inputs(256, 1024, torch.float32)
        torch.compiler.cudagraph_mark_step_begin()
        if step == 0:
            got, code = run_and_get_code(overlapping, *inputs)
            assert "griddepcontrol.wait" in code[0] and "gdc_wait" in code[0]
        else:
            got = overlapping(*inputs)
        want = separate(*inputs)
        for a, e in zip(got, want, strict=True):
            assert torch.equal(a, e)
        for a, e in zip(_gradients(got, inputs), _gradients(want, inputs), strict=True):
            assert torch.equal(a, e)


def test_autotune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for each kernel; another process, or another batch size in the same bucket, finds the choice."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {**STRICT, "fusepass.autotune": True}

    def train(rows: int) -> None:
        inputs = _inputs(rows, 1024, torch.float32)
        with fresh_compile():
            got = torch.compile(_site, backend="fusepass", options=options, dynamic=False)(*inputs)
            for a, e in zip(got, _site(*inputs), strict=True):
                assert_few_roundings_from_eager(a, e)
            want = _gradients(_site(*inputs), inputs)
            for a, e in zip(_gradients(got, inputs), want, strict=True):
                assert_same_sums(a, e, summed=rows)

    train(1024)
    files = sorted((tmp_path / "fusepass").rglob("*.json"))
    assert len(files) >= 2, "forward and backward"
    again: list[autotune.Job] = []
    monkeypatch.setattr(autotune, "_stopwatch", lambda job, device: again.append(job))
    autotune._tuner.cache_clear()
    train(1024)
    train(1000)
    assert not again and sorted((tmp_path / "fusepass").rglob("*.json")) == files


@pytest.mark.parametrize("rows", [4, 1024])
def test_every_candidate_runs_on_this_gpu(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[dict[autotune.Schedule, float]] = []
    fastest = autotune._fastest

    def note(times: dict[autotune.Schedule, float], default: autotune.Schedule) -> autotune.Schedule:
        measured.append(times)
        return fastest(times, default)

    monkeypatch.setattr(autotune, "_fastest", note)
    monkeypatch.setattr(autotune, "inductor_cache_dir", lambda: None)
    autotune._tuner.cache_clear()
    inputs = _inputs(rows, 4096)
    with fresh_compile():
        compiled = torch.compile(_site, backend="fusepass", options={**STRICT, "fusepass.autotune": True})
        _gradients(compiled(*inputs), inputs)
    assert len(measured) >= 2 and all(len(times) > 1 and min(times.values()) > 0 for times in measured)
