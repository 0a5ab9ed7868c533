"""Sites inside a branch of torch.cond, or inside a region that is compiled once, are fused like any other."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

D = 64
OPTIONS = {"fusepass.strict": True, "fx_graph_cache": False}


def site(x: Tensor, r: Tensor) -> Tensor:
    return F.rms_norm(x + r, (D,))


def calls(code: list[str]) -> int:
    return len(re.findall(r"^ +fusepass_[0-9a-f]{12}\(", "\n".join(code), re.M))


@pytest.mark.parametrize("which", [True, False])
def test_branches(which: bool) -> None:
    def fn(p: Tensor, x: Tensor, r: Tensor) -> Tensor:
        out: Tensor = torch.cond(p, lambda x, r: site(x, r) * 2, lambda x, r: site(x, r) + site(x * 2, r), (x, r))
        return out

    x, r = torch.randn(8, D), torch.randn(8, D)
    got, code = run_and_get_code(torch.compile(fn, backend="fusepass", options=OPTIONS), torch.tensor(which), x, r)
    torch.testing.assert_close(got, fn(torch.tensor(which), x, r))
    assert calls(code) == 2, "one for each branch: the sum of two norms is one kernel"


def test_a_region_that_is_compiled_once() -> None:
    block = torch.compiler.nested_compile_region(site)
    x, r = torch.randn(8, D), torch.randn(8, D)
    compiled = torch.compile(lambda x, r: block(block(x, r), r), backend="fusepass", options=OPTIONS)
    got, code = run_and_get_code(compiled, x, r)
    torch.testing.assert_close(got, site(site(x, r), r))
    assert calls(code) == 1
