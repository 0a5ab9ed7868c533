"""Truth values, selection and random numbers in C++ kernels: what dropout needs."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusepass.errors import ProgramError
from fusepass.kernels import cpp_code, ops, reference
from fusepass.row_program import FLOATS, parse
from tests.kernels.cpp_harness import LAYOUTS, check, operands, random_tensor, run, same_bits

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-40, 3.0, torch.inf, -torch.inf, torch.nan)
SEEDS = (0, -5, 2**63 - 1, 7 << 33, -(2**63))

DROPOUT_AND_NORM = """row_program cols={cols}
in seed: scalar i64
in x: tile {dtype} [row]
in r: tile {dtype} [row]
in w: col {dtype}
u: tile f32 = rand_cpu(seed)
keep: tile b8 = gt(u, 0.1)
m: tile {dtype} = mul(keep, x)
d: tile {dtype} = mul(m, 1.1111111111111112)
s: tile {dtype} = add(d, r)
q: tile {wide} = mul(s, s)
v: row {wide} = row_mean(q)
e: row {wide} = add(v, 1e-06)
i: row {wide} = rsqrt(e)
n: tile {wide} = mul(s, i)
y: tile {dtype} = mul(n, w)
out keep [row]
out s [row]
out y [row]"""

# Truth values of every kind: operands, arguments of arithmetic, kept for a later loop, outputs.
KINDS = """row_program cols={cols}
in x: tile f32 [row]
in k: tile b8 [row]
in c: col f16
in kc: col b8
in g: row f32 [row]
in kg: row b8 [row]
in t: scalar f32
in kt: scalar b8
lt: tile b8 = lt(x, c)
wide: tile f32 = where(k, x, c)
both: tile f32 = mul(lt, k)
low: row b8 = lt(g, t)
col: col b8 = ge(c, t)
one: scalar b8 = ne(t, kt)
chosen: row f32 = where(kg, g, t)
cchosen: col f32 = where(kc, c, t)
tchosen: scalar f32 = where(one, t, 2.0)
most: row f32 = row_max(wide)
above: tile b8 = ge(wide, most)
late: tile f32 = where(above, both, cchosen)
later: tile f32 = add(late, chosen)
latest: tile f32 = mul(later, tchosen)
count: row f32 = row_sum(above)
kept: tile f32 = mul(count, lt)
sum: col f32 = col_sum(k)
out lt [row]
out above [row]
out k [row]
out latest [row]
out kept [row]
out low [row]
out col
out one
out sum"""


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of special values, as two tiles of one row."""
    a, b = zip(*itertools.product(SPECIAL, SPECIAL), strict=True)
    return torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_comparisons_and_where_follow_torch(dtype: str) -> None:
    """NaNs, infinities, denormals and both zeros against each other, as tiles and as numbers."""
    a, b = pairs(FLOATS[dtype])
    lines = [f"row_program cols={a.shape[1]}", f"in a: tile {dtype} [row]", f"in b: tile {dtype} [row]"]
    lines += [f"in c: row {dtype} [row]", f"in d: row {dtype} [row]"]
    for op in COMPARISONS:
        lines += [f"k{op}: tile b8 = {op}(a, b)", f"w{op}: tile {dtype} = where(k{op}, a, b)"]
        lines += [f"r{op}: row b8 = {op}(c, d)", f"v{op}: row {dtype} = where(r{op}, c, d)"]
    lines += [f"z: tile {dtype} = where(a, b, 0.5)"]  # of a number: true where it is not 0, so a NaN is
    lines += [f"out {k}{op} [row]" for op in COMPARISONS for k in "kwrv"] + ["out z [row]"]
    text = "\n".join(lines)
    for i in range(0, a.shape[1], 7):
        c, d = a[:, i], b[:, i]
        *outs, z = run(text, 1, [a, b, c, d])
        for op, (k, w, r, v) in zip(COMPARISONS, zip(*[iter(outs)] * 4, strict=True), strict=True):
            function = getattr(torch, op)
            assert torch.equal(k, function(a, b)), op
            assert torch.equal(r, function(c, d)), op
            assert same_bits(w, torch.where(function(a, b), a, b)), op
            assert same_bits(v, torch.where(function(c, d), c, d)), op
        assert same_bits(z, torch.where(a != 0, b, torch.tensor(0.5, dtype=a.dtype)))


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("cols", [1, 17, 32, 255])
def test_truth_values_of_every_kind(rows: int, cols: int) -> None:
    text = KINDS.format(cols=cols)
    check(text, rows, operands(parse(text), rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_truth_values(layout: str) -> None:
    text = "row_program cols=255\nin k: tile b8 [row]\nin x: tile f32 [row]\nv: tile f32 = mul(k, x)"
    text += "\nn: tile b8 = eq(v, 0.0)"
    text += "\nout v [row]\nout n [row]"
    k, x = operands(parse(text), 7)
    k = LAYOUTS[layout](k)
    outs = [LAYOUTS[layout](torch.zeros(7, 255)), LAYOUTS[layout](torch.zeros(7, 255, dtype=torch.bool))]
    if layout == "expanded":
        outs = [t.contiguous() for t in outs]
    torch.ops.fusepass.row_program_(text, 7, [k, x], [], outs=outs)
    assert torch.equal(outs[0], k * x)
    assert torch.equal(outs[1], k * x == 0)


def test_any_byte_but_zero_is_true() -> None:
    text = "row_program cols=41\nin k: tile b8 [row]\nv: tile f32 = cast(k)\nout v [row]\nout k [row]"
    k = torch.arange(41, dtype=torch.uint8).view(torch.bool).view(1, 41)
    v, again = run(text, 1, [k])
    assert v.tolist() == [[0.0] + [1.0] * 40]
    assert again.view(torch.uint8).tolist() == [[0] + [1] * 40]


# ---- random numbers ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 37), (64, 1000)])
def test_random_numbers_are_the_references(seed: int, rows: int, cols: int) -> None:
    text = f"row_program cols={cols}\nin a: scalar i64\nu: tile f32 = rand_cpu(a)\nout u [row]"
    (u,) = run(text, rows, [torch.tensor(seed)])
    assert torch.equal(u, reference.uniform("rand_cpu", torch.tensor(seed), rows, cols))


def test_random_numbers_are_inductors() -> None:
    """Inductor draws one seed for each graph, from torch's own generator."""
    torch.manual_seed(3)
    expected = torch.compile(lambda: torch.rand(5, 1000), options={"fx_graph_cache": False})()
    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, [1])
    text = "row_program cols=1000\nin a: scalar i64\nu: tile f32 = rand_cpu(a)\nout u [row]"
    (u,) = run(text, 5, [seed])
    assert torch.equal(u, expected)


def test_rows_are_numbered_alike_by_every_thread() -> None:
    text = "row_program cols=512\nin a: scalar i64\nu: tile f32 = rand_cpu(a)\nout u [row]"
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            (u,) = run(text, 200, [torch.tensor(11)])
            assert torch.equal(u, reference.uniform("rand_cpu", torch.tensor(11), 200, 512)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_and_norm(dtype: str) -> None:
    text = DROPOUT_AND_NORM.format(cols=255, dtype=dtype, wide="f64" if dtype == "f64" else "f32")
    ins = operands(parse(text), 70)
    keep, s, _ = check(text, 70, ins)
    assert 0.85 < float(keep.double().mean()) < 0.95
    factor = torch.tensor(1.1111111111111112, dtype=torch.float64 if dtype == "f64" else torch.float32)
    scaled = ((keep * ins[1]).to(factor.dtype) * factor).to(ins[1].dtype)
    assert torch.equal(s, scaled + ins[2]), "the residual sum is not eager's, bit for bit"


def test_several_seeds_and_a_row_read_twice() -> None:
    """Random numbers that a later loop needs too are kept, not drawn again."""
    text = """row_program cols=100
in a: scalar i64
in b: scalar i64
in x: tile f32 [row]
u: tile f32 = rand_cpu(a)
w: tile f32 = rand_cpu(b)
k: tile b8 = gt(u, 0.3)
l: tile b8 = gt(w, 0.6)
kx: tile f32 = where(k, x, 0.0)
m: row f32 = row_sum(kx)
v: tile f32 = mul(u, m)
y: tile f32 = where(l, v, kx)
out y [row]"""
    check(text, 9, operands(parse(text), 9))
    source = cpp_code.generate(parse(text))
    assert source.count("rand_cpu(a_") + source.count("rand_cpu(b_") == 2


def test_tritons_numbers_are_refused(fallbacks: list[str]) -> None:
    text = "row_program cols=8\nin a: scalar i64\nu: tile f32 = rand(a)\nout u [row]"
    with pytest.raises(ProgramError, match=r"u = rand\(...\): runs on cuda, expected rand_cpu in a C\+\+ kernel"):
        cpp_code.generate(parse(text))
    out = torch.empty(2, 8)
    ops.run(text, 2, [torch.tensor(1)], [], [out])
    assert torch.equal(out, reference.uniform("rand", torch.tensor(1), 2, 8))
    assert "expected rand_cpu" in fallbacks.pop()


def test_sources_without_random_numbers_do_not_carry_them() -> None:
    assert "Philox" in cpp_code.generate(parse(DROPOUT_AND_NORM.format(cols=8, dtype="bf16", wide="f32")))
    assert "Philox" not in cpp_code.generate(parse(KINDS.format(cols=8)))


def test_a_seed_must_be_an_int64() -> None:
    text = "row_program cols=8\nin a: scalar i64\nu: tile f32 = rand_cpu(a)\nout u [row]"
    with pytest.raises(ops.KernelError, match=r"operand a: expected dtype torch\.int64, given torch\.float32"):
        ops.run(text, 2, [random_tensor((), torch.float32)], [], [torch.empty(2, 8)])
