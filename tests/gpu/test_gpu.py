"""On a GPU: the same graphs, fused into Triton launches, against eager and FP64."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import fusepass
from bench import models
from tests.tolerances import assert_as_accurate_as_eager, assert_close_to_fp64

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
