"""`torch.compile(model, backend="fusepass")`, through Inductor, as a user calls it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import fusepass
from bench import models
from fusepass.kernels import ops
from tests.tolerances import assert_as_accurate_as_eager

D = 64


class Block(nn.Module):
    """Post-Norm: n(x + f(x))."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.linear(x))
        return out


STRICT = {"fusepass.strict": True}


def direct_calls(code: str) -> list[str]:
    """The arguments of each call of a fused kernel."""
    return re.findall(r"^ +fusepass_[0-9a-f]{12}\((.*)\)$", code, re.M)


def _code(fn: Callable[..., Any], *args: Any) -> str:
    return "\n".join(run_and_get_code(fn, *args)[1])


def test_by_name_without_an_import() -> None:
    script = """
        import sys, torch
        norm = torch.nn.RMSNorm(32)
        f = torch.compile(lambda x, r: norm(x + r), backend="fusepass", options={"fusepass.strict": True})
        with torch.no_grad():
            x, r = torch.randn(4, 32), torch.randn(4, 32)
            torch.testing.assert_close(f(x, r), norm(x + r))
        assert "fusepass" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
        print("fused" if "fusepass.kernels.ops" in sys.modules else "not loaded")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "fused"


@pytest.mark.parametrize(
    "name", ["pre_norm_causal", "post_norm_encoder", "deep_norm_causal_rms", "parallel_causal_rms"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_models(name: str, dtype: torch.dtype) -> None:
    model, args = models.example(name)
    with torch.no_grad():
        exact = model.double()(*args)
        model = model.to(dtype)
        compiled = torch.compile(model, backend="fusepass", options=STRICT, fullgraph=True)
        code = _code(compiled, *args)
        assert len(direct_calls(code)) == models.REFERENCE[name].sites
        assert_as_accurate_as_eager(compiled(*args), model(*args), exact)


def test_a_site_is_one_call_without_copies() -> None:
    norm = nn.LayerNorm(D)

    def site(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, norm(s)

    with torch.no_grad():
        code = _code(torch.compile(site, backend="fusepass", options=STRICT), torch.randn(8, D), torch.randn(8, D))
    call = code[code.index("def call(") :]
    assert len(direct_calls(call)) == 1 and "row_program_" not in call
    assert call.count("= empty_strided_cpu(") == 2
    assert "copy_" not in call and "clone" not in call and "cpp_fused" not in call


def test_training_forward_is_fused_and_gradients_are_right() -> None:
    model = nn.Sequential(Block(), Block())
    x, direction = torch.randn(256, D), torch.randn(256, D)
    compiled = torch.compile(model, backend="fusepass", options=STRICT)

    def gradients(run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        model.to(dtype)
        model.zero_grad()
        leaf = x.detach().to(dtype).requires_grad_()
        (run(leaf) * direction.to(dtype)).sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    exact = gradients(model, torch.float64)
    eager, inductor, fused = (gradients(m, torch.float32) for m in (model, torch.compile(model), compiled))
    assert len(fused) == len(exact) == 9
    for got, *others, truth in zip(fused, eager, inductor, exact, strict=True):
        # the bias gradients of Linears that no norm follows are Inductor's own sums
        worse = max(others, key=lambda t: float((t.double() - truth).norm()))
        assert_as_accurate_as_eager(got, worse, truth)
    report = fusepass.explain(model, x.requires_grad_())
    assert [s.graph for s in report.sites if s.fused] == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_are_inductors(mode: str) -> None:
    model = Block()
    x = torch.randn(8, D)
    with torch.no_grad():
        compiled = torch.compile(model, backend="fusepass", mode=mode)
        assert_as_accurate_as_eager(compiled(x), model(x), model.double()(x.double()))


def test_an_unknown_mode_is_inductors_error() -> None:
    with pytest.raises(Exception, match="max-autotune"):
        torch.compile(Block(), backend="fusepass", mode="fastest")(torch.randn(2, D))


def test_options_are_validated_and_the_rest_is_inductors() -> None:
    x = torch.randn(2, D)
    with pytest.raises(Exception, match=r"unknown option 'fusepass.strickt'; did you mean fusepass.strict\?") as e:
        torch.compile(Block(), backend="fusepass", options={"fusepass.strickt": True})(x)
    assert "fusepass.profitability" in str(e.value)
    with pytest.raises(Exception, match="expected 'auto' or 'always', got 'sometimes'"):
        torch.compile(Block(), backend="fusepass", options={"fusepass.profitability": "sometimes"})(x)
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(Block(), backend="fusepass", options={"no_such_option": 1})(x)
    with torch.no_grad():
        torch.compile(Block(), backend="fusepass", options={"epilogue_fusion": False, **STRICT})(x)


def test_disabled_is_plain_inductor() -> None:
    with torch.no_grad():
        code = _code(torch.compile(Block(), backend="fusepass", options={"fusepass.enabled": False}), torch.randn(4, D))
    assert "fusepass" not in code


def test_the_pass_as_an_object_for_plain_inductor() -> None:
    calls: list[str] = []
    options = {"post_grad_custom_pre_pass": fusepass.FusePass(STRICT)}
    with torch.no_grad():
        code = _code(torch.compile(Block(), options=options), torch.randn(4, D))
    assert len(direct_calls(code)) == 1
    torch._dynamo.reset()
    own = {"post_grad_custom_pre_pass": lambda graph: calls.append("own"), "fx_graph_cache": False}
    with torch.no_grad():
        code = _code(torch.compile(Block(), backend="fusepass", options=own), torch.randn(4, D))
    assert calls == ["own"], "a pass that the user has set runs too"
    assert len(direct_calls(code)) == 1


def test_dynamic_rows_compile_once() -> None:
    counts = []
    for backend in ("inductor", "fusepass"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = Block()
        compiled = torch.compile(model, backend=counter, dynamic=True)
        with torch.no_grad():
            for rows in (65, 96, 33):
                x = torch.randn(2, rows, D)
                torch.testing.assert_close(compiled(x), model(x))
        counts.append(counter.frame_count)
    assert counts[1] == counts[0], "the pass adds no guard"


def test_automatic_dynamic_keeps_the_sites() -> None:
    seen: list[int] = []
    listener = lambda report: seen.append(sum(s.fused for s in report.sites))  # noqa: E731
    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(
        model, options={"post_grad_custom_pre_pass": fusepass.FusePass(STRICT, listener), "fx_graph_cache": False}
    )
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, D)
            torch.testing.assert_close(compiled(x), model(x))
    assert seen == [2, 2]


def test_strict_raises_where_a_kernel_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(program: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(ops, "_launchers", {})
    monkeypatch.setattr(ops, "_builds", {})
    monkeypatch.setattr(ops, "_kernels", {})
    monkeypatch.setattr(ops.cpp_build, "start", no_compiler)
    compiled = torch.compile(lambda x: nn.functional.rms_norm(x + x.flip(0), (D,)), backend="fusepass", options=STRICT)
    with pytest.raises(Exception, match="building a kernel of the inference graph failed: RuntimeError: no C"):
        compiled(torch.randn(4, D))


def test_a_model_without_sites_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fusepass"), torch.no_grad():
        torch.compile(nn.Linear(D, D), backend="fusepass", options={"fx_graph_cache": False})(torch.randn(2, D))
    assert "0 sites" in caplog.text


def test_a_graph_from_the_cache_rebuilds_its_kernels(tmp_path: Any) -> None:
    script = """
        import torch
        from torch._dynamo.utils import counters
        torch.manual_seed(0)
        norm = torch.nn.LayerNorm(32)
        f = torch.compile(lambda x, r: norm(x + r), backend="fusepass", options={"fusepass.strict": True})
        x, r = torch.randn(4, 32), torch.randn(4, 32)
        with torch.no_grad():
            torch.testing.assert_close(f(x, r), norm(x + r))
        print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    """
    import os

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, env=env
        ).stdout
        for _ in range(2)
    ]
    assert hits[0].strip() == "0" and int(hits[1]) > 0


def test_the_cache_key_covers_the_options_that_change_code() -> None:
    ids = {fusepass.FusePass(o).uuid() for o in (None, {"fusepass.strict": True}, {"fusepass.profitability": "auto"})}
    assert len(ids) == 3
    assert fusepass.FusePass().uuid() == fusepass.FusePass({"fusepass.dump": ""}).uuid()


def test_autocast() -> None:
    model = Block()
    x = torch.randn(8, D)
    compiled = torch.compile(model, backend="fusepass", options=STRICT)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(x), model(x)
    assert got.dtype == want.dtype
    assert_as_accurate_as_eager(got, want, model.double()(x.double()).detach())


def test_mutation_between_the_reads_of_the_sum() -> None:
    def fn(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        v = s.pow(2).mean(-1, keepdim=True)
        s.mul_(2)
        return s * torch.rsqrt(v + 1e-6)

    x, r = torch.randn(4, D), torch.randn(4, D)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend="fusepass", options=STRICT)(x, r), fn(x, r))


def test_checkpointed_block_with_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(Block(), Block())

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = torch.randn(4, D, requires_grad=True)
    run(x).sum().backward()
    want, x.grad = x.grad, None
    torch.compile(run, backend="fusepass", options=STRICT)(x).sum().backward()
    torch.testing.assert_close(x.grad, want)


def test_vmap_and_functional_gradients() -> None:
    norm = lambda x, r: F.layer_norm(x + r, (D,))  # noqa: E731
    x, r = torch.randn(3, 4, D), torch.randn(3, 4, D)
    for fn in (torch.func.vmap(norm), torch.func.grad(lambda x, r: norm(x, r).pow(3).sum())):
        torch.testing.assert_close(torch.compile(fn, backend="fusepass", options=STRICT)(x, r), fn(x, r))


def test_integer_input_is_eagers_error() -> None:
    norm = nn.LayerNorm(8)
    x = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="dtype"):
        norm(x + x)
    with pytest.raises(RuntimeError, match="dtype") as compiled:
        torch.compile(lambda x: norm(x + x), backend="fusepass", options=STRICT)(x)
    with pytest.raises(RuntimeError, match="dtype") as inductors:
        torch.compile(lambda x: norm(x + x))(x)
    assert type(compiled.value) is type(inductors.value), "what torch says, not an error of ours"


def test_double_backward_is_torchs_own_error() -> None:
    model = Block()
    x = torch.randn(2, D, requires_grad=True)
    y = torch.compile(model, backend="fusepass", options=STRICT)(x)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        g.sum().backward()


def test_dump_writes_the_graphs(tmp_path: Any) -> None:
    with torch.no_grad():
        options = {"fusepass.dump": str(tmp_path), "fx_graph_cache": False}
        torch.compile(Block(), backend="fusepass", options=options)(torch.randn(2, D))
    before, after = (next(tmp_path.glob(f"inference-{w}-*.txt")).read_text() for w in ("before", "after"))
    assert "var_mean" in before and "row_program cols=64" not in before
    assert "var_mean" not in after and "row_program cols=64" in after
    (kernel,) = tmp_path.glob("fusepass_*.cpp")
    assert kernel.with_suffix(".txt").read_text().startswith("row_program cols=64")
    assert 'extern "C" void kernel(' in kernel.read_text()
