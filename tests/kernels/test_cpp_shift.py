"""The backward of a 16-bit LayerNorm that computes its mean again, in one loop less."""

from __future__ import annotations

import pytest
import torch

from fusepass.kernels import cpp_code, reference
from fusepass.kernels.cpp_shift import ROW_FIRST, without_waiting
from fusepass.row_program import parse
from tests.kernels.cpp_harness import check, operands, run

BACKWARD = """row_program cols={cols}
in dy: tile {dtype} [row]
in x: tile {dtype} [row]
in rstd: row f32 [row]
in w: col f32
g: tile f32 = cast(dy)
z: tile f32 = cast(x)
m: row f32 = row_mean(z)
d: tile f32 = sub(z, m)
n: tile f32 = mul(rstd, d)
s0: col {dtype} = col_sum(g)
gn: tile f32 = mul(g, n)
s1: col {dtype} = col_sum(gn)
gw: tile f32 = mul(g, w)
a: row f32 = row_mean(gw)
gwn: tile f32 = mul(gw, n)
b: row f32 = row_mean(gwn)
nb: tile f32 = mul(n, b)
p: tile f32 = sub(gw, a)
q: tile f32 = sub(p, nb)
dx: tile f32 = mul(rstd, q)
out0: tile {dtype} = cast(dx)
out out0 [row]
out s0
out s1"""


def backward(cols: int, dtype: str = "bf16", sums: bool = True) -> str:
    """The norm's backward as written in textbooks, or, with `sums`, with sums in place of means, as Inductor has it."""
    text = BACKWARD.format(cols=cols, dtype=dtype)
    for name, tile in (("a", "gw"), ("b", "gwn")) if sums else ():
        mean = f"{name}: row f32 = row_mean({tile})"
        text = text.replace(mean, f"{name}0: row f32 = row_sum({tile})\n{name}: row f32 = div({name}0, {cols}.0)")
    return text


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_one_loop_less(dtype: str, sums: bool) -> None:
    program = parse(backward(64, dtype, sums))
    assert program.n_phases == 3
    shifted = without_waiting(program)
    assert shifted.n_phases == 2
    assert [s.args for s in shifted.statements if s.op == ROW_FIRST] == [("x",)]
    assert cpp_code.generate(program).count("for (int64_t block = 0;") == 1


@pytest.mark.parametrize("cols", [1, 31, 64, 1000])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_against_fp64(cols: int, dtype: str) -> None:
    text = backward(cols, dtype)
    check(text, 37, operands(parse(text), 37))


@pytest.mark.parametrize("kind", ["far from zero", "the first is an outlier", "another is an outlier"])
def test_where_the_first_element_is_far_from_the_mean(kind: str) -> None:
    """rstd is the row's own, so that what is summed has a standard deviation of one. The outlier's distance from the
    mean is the largest that there can be: sqrt(cols) standard deviations."""
    cols, rows = 4096, 40
    text = backward(cols)
    dy, x, rstd, w = operands(parse(text), rows)
    if kind == "far from zero":
        x += 64
    else:
        x[:, 0 if "first" in kind else 99] = 30_000
    rstd = x.double().var(1, correction=0).rsqrt().float()
    check(text, rows, [dy, x, rstd, w])


def test_infinite_and_missing_numbers_stay_in_their_rows() -> None:
    text = backward(64)
    program = parse(text)
    dy, x, rstd, w = operands(program, 4)
    x[0, 0], x[1, 5], x[2, 0] = torch.inf, -torch.inf, torch.nan
    rstd = x.float().var(1, correction=0).rsqrt()
    out = run(text, 4, [dy, x, rstd, w])[0]
    expected = reference.evaluate(program, 4, [dy, x, rstd, w])[0]
    assert out[:3].isnan().all() and expected[:3].isnan().all()
    assert not out[3].isnan().any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in x: tile bf16", "in x: tile f32"),  # FP32 statistics are saved, and FP32 results show what cancels
        ("gwn: tile f32 = mul(gw, n)", "gwn: tile f32 = mul(n, n)"),
        ("gwn: tile f32 = mul(gw, n)", "gwd: tile f32 = add(gw, n)\ngwn: tile f32 = mul(gwd, n)"),
        ("n: tile f32 = mul(rstd, d)", "n: tile bf16 = mul(rstd, d)"),
        ("n: tile f32 = mul(rstd, d)", "n: tile f32 = add(rstd, d)"),
        ("m: row f32 = row_mean(z)", "m: row f32 = row_max(z)"),
        ("d: tile f32 = sub(z, m)", "d: tile f32 = sub(m, z)"),
        ("d: tile f32 = sub(z, m)", "d: tile f32 = sub(g, m)"),
    ],
)
def test_left_alone(old: str, new: str) -> None:
    text = backward(64)
    assert old in text
    program = parse(text.replace(old, new))
    assert program.n_phases > 1
    assert without_waiting(program) is program


def test_a_mean_that_is_a_result_is_computed_as_always() -> None:
    program = parse(backward(96) + "\nout m [row]")
    assert without_waiting(program) is program
