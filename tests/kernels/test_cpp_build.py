"""Building kernels: every instruction set, several processes at once, and caches that another machine has filled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from fusepass.kernels import cpp_build, cpp_code, ops
from fusepass.row_program import parse
from tests.kernels.cpp_harness import check, operands
from tests.kernels.norm_programs import POINTWISE_PROGRAM, norm_backward_program, norm_program

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = 1  # Inductor's `cpp.simdlen` for no vector instructions: at::vec's own portable loops
RANDOM = """row_program cols=45
in a: scalar i64
in x: tile bf16 [row]
u: tile f32 = rand_cpu(a)
k: tile b8 = gt(u, 0.1)
m: tile bf16 = where(k, x, 0.0)
out u [row]
out k [row]
out m [row]"""
WIDTHS = [PORTABLE, *sorted({isa.bit_width() for isa in valid_vec_isa_list()})]


@pytest.mark.parametrize("simdlen", WIDTHS)
def test_every_instruction_set(simdlen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_launchers", {})
    monkeypatch.setattr(ops, "_builds", {})
    monkeypatch.setattr(ops, "_kernels", {})
    texts = [
        norm_program("layer_norm", 1000, "bf16", save_stats=True),
        norm_program("rms_norm", 37, "f16"),
        norm_program("layer_norm", 100, "f64"),
        POINTWISE_PROGRAM.format(cols=45, dtype="f32"),
        norm_backward_program("layer_norm", 1000, "bf16", dropout=0.1),
        norm_backward_program("rms_norm", 37, "f16"),
        norm_backward_program("layer_norm", 100, "f64", dropout=0.1),
        norm_backward_program("rms_norm", 45, "f32"),
        RANDOM,
    ]
    with inductor_config.patch({"cpp.simdlen": simdlen}):
        for text in texts:
            ops.prefetch(text)
        for text in texts:
            check(text, 64, operands(parse(text), 64))
    assert all(not isinstance(launcher, ops.partial) for launcher in ops._launchers.values()), "a kernel was not built"


def test_arithmetic_keeps_its_meaning_under_fast_inductor_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha * x + r is two roundings, even where the user has allowed Inductor to contract and reassociate."""
    monkeypatch.setattr(ops, "_launchers", {})
    monkeypatch.setattr(ops, "_builds", {})
    monkeypatch.setattr(ops, "_kernels", {})
    text = norm_program("rms_norm", 768, "f32", alpha=1.1)
    x, r, w = torch.randn(8, 768), torch.randn(8, 768), torch.randn(768)
    outs = [torch.empty(8, 768), torch.empty(8, 768)]
    fast = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.enable_unsafe_math_opt_flag": True}
    with inductor_config.patch(fast):
        ops.run(text, 8, [x, r, w], [], outs)
    assert torch.equal(outs[0], 1.1 * x + r)


CHILD = """
import sys, torch
from fusepass.kernels import ops
text = sys.stdin.read()
x, r, w = torch.ones(4, 64), torch.full((4, 64), 2.0), torch.ones(64)
outs = [torch.empty(4, 64), torch.empty(4, 64)]
ops.run(text, 4, [x, r, w], [], outs)
assert not isinstance(ops._launchers[text], ops.partial), "the kernel was not built"
assert bool((outs[0] == 3).all()) and bool((outs[1] - 1).abs().max() < 1e-5), outs
"""


def child(cache: Path, text: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.slow
def test_two_processes_build_the_same_kernel_at_once(tmp_path: Path) -> None:
    text = norm_program("rms_norm", 64, "f32")
    children = [child(tmp_path, text) for _ in range(2)]
    for process in children:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    kernels = list(tmp_path.rglob("*.main.so"))
    assert len(kernels) == 1, kernels


def test_the_source_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the library is a hash of its source, so another CPU or compiler builds its own."""
    sources: list[str] = []
    monkeypatch.setattr("fusepass._torch_compat.start_cpp_build", lambda types, source: sources.append(source))
    program = parse(norm_program("rms_norm", 64, "f32"))
    for flags, compiler in (("avx2", "gcc 12"), ("avx2 avx512f", "gcc 12"), ("avx2", "gcc 13")):
        cpp_build.machine.cache_clear()
        monkeypatch.setattr(cpp_build, "_cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr("fusepass._torch_compat.cpp_compiler_version", lambda compiler=compiler: compiler)
        cpp_build.start(program)
    cpp_build.machine.cache_clear()
    assert len(set(sources)) == 3
    assert len({source.partition("\n")[2] for source in sources}) == 1, "only the first line may differ"


def test_this_machine_has_facts() -> None:
    assert re.fullmatch(r"\S+ CPU [0-9a-f]{16}, compiler [0-9a-f]{16}", cpp_build.machine())
    assert len(cpp_build._cpu_flags()) > 20


def test_sources_are_the_same_in_every_process() -> None:
    text = norm_program("layer_norm", 768, "bf16", weight="f32", bias=True, alpha=0.5)
    code = "from fusepass.kernels import cpp_code; from fusepass.row_program import parse\n"
    code += f"print(cpp_code.generate(parse({text!r})))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert other == cpp_code.generate(parse(text)) + "\n"
