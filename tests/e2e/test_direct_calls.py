"""The module that Inductor writes calls a C++ kernel directly, wherever the kernel's arguments are known by then."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fusepass.kernels import ops

D = 32
STRICT = {"fusepass.strict": True, "fusepass.expect": 1, "fx_graph_cache": False}


def site(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, F.layer_norm(s, (D,), w)


def code_of(*args: Tensor, **options: Any) -> str:
    """The module's code; the results are eager's to a few roundings."""
    compiled = torch.compile(site, backend="fusepass", options={**STRICT, **options})
    got, code = run_and_get_code(compiled, *args)
    for a, b in zip(got, site(*args), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    return "\n".join(code)


def arguments(code: str) -> list[str]:
    (found,) = re.findall(r"^ +fusepass_[0-9a-f]{12}\((.*)\)$", code, re.M)
    assert code.count("= fusepass_kernel('''row_program") == 1 and "row_program_.default" not in code
    return [a.strip() for a in re.split(r",\s*(?![^()]*\))", found)]


def test_contiguous() -> None:
    given = arguments(code_of(torch.randn(3, 5, D), torch.randn(3, 5, D), torch.randn(D)))
    assert given[:3] == ["torch.get_num_threads()", "15", str(D)]
    names = [a for a in given if re.fullmatch(r"(arg|buf)\w+", a)]
    assert len(names) == 5, "tensors are handed over as they are, without objects for views of them"
    assert [a for a in given[3:] if a not in names] == [str(D), "1"] * 2 + ["1"] + [str(D), "1"] * 2


def test_strided() -> None:
    x, r = torch.randn(5, 3, D).transpose(0, 1), torch.randn(3, 5, 2 * D)[..., ::2]
    given = arguments(code_of(x, r, torch.randn(2 * D)[::2]))
    text = ", ".join(given)
    assert f"{D}, {3 * D}, 1" in text, "x by batch and token"
    assert f"{2 * D}, 2" in text, "every second column of r"


def test_a_view_that_begins_inside_its_memory() -> None:
    pool = torch.randn(7, D)

    def shifted(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(torch.mm(x, x.t())[2:, :] + pool[2:, 0:7], (7,))

    compiled = torch.compile(shifted, backend="fusepass", options=STRICT)
    x = torch.randn(7, 3)
    got, _ = run_and_get_code(compiled, x, pool)
    torch.testing.assert_close(got, shifted(x, pool))


def test_symbolic_rows() -> None:
    torch._dynamo.config.automatic_dynamic_shapes = True
    compiled = torch.compile(site, backend="fusepass", options=STRICT, dynamic=True)
    w = torch.randn(D)
    for rows in (4, 9, 1):
        x, r = torch.randn(rows, 3, D), torch.randn(rows, 3, D)
        for a, b in zip(compiled(x, r, w), site(x, r, w), strict=True):
            torch.testing.assert_close(a, b)


def test_a_cpp_wrapper_calls_the_op() -> None:
    code = code_of(torch.randn(4, D), torch.randn(4, D), torch.randn(D), cpp_wrapper=True)
    assert "fusepass_kernel" not in code and "row_program_" in code


def test_the_profiler_sees_the_kernel() -> None:
    options = {**STRICT, "cpp.enable_kernel_profile": True}
    compiled = torch.compile(site, backend="fusepass", options=options)
    x, r, w = torch.randn(4, D), torch.randn(4, D), torch.randn(D)
    compiled(x, r, w)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        compiled(x, r, w)
    assert [len(e.name) for e in recorded.events() if e.name.startswith("fusepass_")] == [len("fusepass_") + 12]


def test_a_kernel_that_cannot_be_built_runs_as_torch_operations(
    monkeypatch: pytest.MonkeyPatch, fallbacks: list[str]
) -> None:
    def no_compiler(program: Any) -> None:
        raise RuntimeError("no C++ compiler")

    for cache in ("_launchers", "_builds", "_kernels"):
        monkeypatch.setattr(ops, cache, {})
    monkeypatch.setattr(ops.cpp_build, "start", no_compiler)
    lenient = {"fusepass.strict": False}
    code_of(torch.randn(4, D), torch.randn(4, D), torch.randn(D), **lenient)
    torch._dynamo.reset()
    x, r = torch.randn(5, 3, D).transpose(0, 1), torch.randn(3, 5, 2 * D)[..., ::2]
    code_of(x, r, torch.randn(2 * D)[::2], **lenient)
    assert len(fallbacks) == 2 and all("no C++ compiler" in f for f in fallbacks)
    fallbacks.clear()
