"""The generated C++ kernels, through the op that the rewritten graph calls, against the reference and FP64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fusepass.errors import KernelError
from fusepass.kernels import cpp_code, ops, reference
from fusepass.row_ops import ROW_REDUCTIONS
from fusepass.row_program import FLOATS, Kind, RowProgram, parse
from tests.kernels.cpp_harness import (
    LAYOUTS,
    assert_canaries,
    check,
    operands,
    poisoned,
    random_tensor,
    run,
    same_bits,
)
from tests.kernels.norm_programs import POINTWISE_PROGRAM, norm_program
from tests.tolerances import assert_close_to_fp64, assert_same_within_roundings

COLS = (1, 2, 3, 17, 127, 128, 255, 768, 1000, 1024, 4096, 5120, 8192, 16384, 65536)
ROWS = (0, 1, 2, 7, 64)
NORMS = ("layer_norm", "rms_norm")
pytestmark = pytest.mark.usefixtures("two_threads")

SANDWICH = """row_program cols={cols}
in x: tile bf16 [row]
in r: tile bf16 [row]
in w: col bf16
in u: col bf16
q: tile f32 = square(x)
m: row f32 = row_mean(q)
e: row f32 = add(m, 1e-06)
i: row f32 = rsqrt(e)
n: tile f32 = mul(x, i)
w1: col f32 = add(w, 1.0)
nw: tile bf16 = mul(n, w1)
s: tile bf16 = add(r, nw)
q2: tile f32 = square(s)
m2: row f32 = row_mean(q2)
e2: row f32 = add(m2, 1e-06)
i2: row f32 = rsqrt(e2)
n2: tile f32 = mul(s, i2)
u1: col f32 = add(u, 1.0)
y: tile bf16 = mul(n2, u1)
out s [row]
out y [row]"""

THREE_WAY = """row_program cols={cols} sizes=n0,n1
in x0: tile bf16 [row]
in x1: tile bf16 [0, row % n0]
in x2: tile f32 [row // n0 % n1, 0]
in g: row f32 [row // n0]
in w: col f32
v0: tile bf16 = add(x0, x1)
v1: tile f32 = add(v0, x2)
v2: row f32 = row_sum(v1)
v3: row f32 = div(v2, {cols}.0)
v4: tile f32 = sub(v1, v3)
v5: tile f32 = mul(v4, g)
v6: tile f32 = mul(v5, w)
v7: col f32 = col_sum(v6)
v8: col bf16 = col_sum(v0)
out v1 [row // n0, row % n0]
out v6 [row]
out v3 [row]
out v7
out v8"""

STRUCTURE = """row_program cols={cols}
in x: tile f64 [row]
in c: col f16
in t: scalar f32
in g: row bf16 [row]
cc: col f32 = mul(c, t)
tt: scalar f32 = add(t, 1.0)
o: tile f64 = mul(g, c)
a: tile f64 = add(x, o)
z: col f64 = col_sum(a)
out x [row]
out a [row]
out a [row]
out cc
out c
out tt
out g [row]
out z"""

VARIANTS: dict[str, str] = {
    **{f"{n}-{d}": norm_program(n, 768, d) for n in NORMS for d in FLOATS},
    "alpha": norm_program("layer_norm", 768, "bf16", alpha=1.7782794),
    "bias": norm_program("rms_norm", 768, "bf16", bias=True),
    "bias-alpha": norm_program("layer_norm", 768, "f32", alpha=0.5, bias=True, save_stats=True),
    "weightless": norm_program("layer_norm", 768, "f16", weight=None),
    "mixed": norm_program("layer_norm", 768, "bf16", weight="f32", save_stats=True),
    "sandwich": SANDWICH.format(cols=768),
}


def at_cols(text: str, cols: int) -> str:
    return text.replace("cols=768", f"cols={cols}")


@pytest.fixture(scope="module", autouse=True)
def compile_in_parallel() -> None:
    for text in (*VARIANTS.values(), POINTWISE_PROGRAM.format(cols=768, dtype="bf16"), *INDEXED, KEPT.format(cols=768)):
        ops.prefetch(text)


def check_norm(name: str, cols: int, rows: Sequence[int]) -> None:
    """Accuracy over 64 rows (one row may happen to be exact in either result), then the same rows in smaller calls."""
    text = at_cols(VARIANTS[name], cols)
    ins = operands(parse(text), 64)
    outs = check(text, 64, ins)
    if name.endswith(tuple(FLOATS)):
        assert torch.equal(outs[0], ins[0] + ins[1]), "the residual sum is not eager's, bit for bit"
    for n in rows:
        fewer = run(text, n, [ins[0][:n], ins[1][:n], *ins[2:]])
        assert all(torch.equal(f, o[:n]) for f, o in zip(fewer, outs, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cols", [1, 3, 17, 128, 768, 1000, 4096])
def test_norm_agrees_with_the_reference(name: str, cols: int) -> None:
    check_norm(name, cols, rows=(0, 1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cols", COLS)
def test_norm_over_the_whole_grid(name: str, cols: int) -> None:
    check_norm(name, cols, ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cols", [768, 4096, 65536])
@pytest.mark.parametrize("norm", NORMS)
def test_error_is_at_most_that_of_eager_torch(norm: str, cols: int, dtype: torch.dtype) -> None:
    """Against torch's own kernels (not the reference), also for rows long enough for summation errors to grow."""
    name = {v: k for k, v in FLOATS.items()}[dtype]
    text = at_cols(VARIANTS[f"{norm}-{name}"], cols)
    ins = operands(parse(text), 16)
    residual, weights = ins[0] + ins[1], ins[2:]
    function = torch.nn.functional.layer_norm if norm == "layer_norm" else torch.nn.functional.rms_norm
    eager = function(residual, (cols,), *weights, eps=1e-5)
    exact = function(residual.double(), (cols,), *(w.double() for w in weights), eps=1e-5)
    fused = run(text, 16, ins)
    assert torch.equal(fused[0], residual)
    assert_close_to_fp64(fused[1], eager, exact, dtype)


@pytest.mark.parametrize("mean", [1.0, 100.0, 1e4, -1e5])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_far_from_zero(norm: str, mean: float) -> None:
    text = VARIANTS[f"{norm}-f32"]
    ins = operands(parse(text), 64)
    check(text, 64, [ins[0] + mean, *ins[1:]])


@pytest.mark.parametrize("value", [200.0, 3e4])
@pytest.mark.parametrize("norm", NORMS)
def test_large_fp16_values_do_not_overflow(norm: str, value: float) -> None:
    text = VARIANTS[f"{norm}-f16"]
    ins = operands(parse(text), 4)
    ins[0] = (ins[0].sign() * value).half()
    ins[1] = (ins[1] * 10).half()
    assert all(bool(out.isfinite().all()) for out in check(text, 4, ins))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_value_spoils_its_row_alone(bad: float, dtype: str) -> None:
    text = at_cols(VARIANTS[f"layer_norm-{dtype}"], 1000)
    ins = operands(parse(text), 3)
    clean = run(text, 3, ins)
    ins[0][1, 997] = bad
    spoilt = run(text, 3, ins)
    expected = reference.evaluate(parse(text), 3, ins)
    for before, after, e in zip(clean, spoilt, expected, strict=True):
        assert torch.equal(before[::2], after[::2])
        assert torch.equal(after[1].isfinite(), e[1].isfinite())
        assert torch.equal(after[1].isnan(), e[1].isnan())


def test_bf16_and_fp16_round_like_torch() -> None:
    """Every 16-bit pattern (denormals, infinities and NaNs too) plus a half, a quarter and three quarters of a step."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        value = bits.view(dtype).float()
        step = value.abs().nextafter(torch.tensor(torch.inf)) * 2.0 ** (-9 if name == "bf16" else -12)
        x = torch.stack([value, value + step, value + step / 2, value + step * 1.5])
        text = f"row_program cols=65536\nin x: tile f32 [row]\nv: tile {name} = cast(x)\nw: tile f32 = cast(v)"
        text += "\nout v [row]\nout w [row]"
        v, w = run(text, 4, [x])
        assert same_bits(v, x.to(dtype))
        assert same_bits(w, x.to(dtype).float())


# ---- layouts ----


@pytest.mark.parametrize("name", ["layer_norm-bf16", "rms_norm-f32", "layer_norm-f64", "bias-alpha"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_outputs(name: str, layout: str) -> None:
    text = at_cols(VARIANTS[name], 255)
    program = parse(text)
    ins = operands(program, 7)
    ins[:2] = [LAYOUTS[layout](ins[0]), ins[1]]
    check(text, 7, ins)
    expected = run(text, 7, [t.contiguous() for t in ins])
    if layout == "expanded":
        return
    outs = [LAYOUTS[layout](torch.full_like(t, torch.nan)) if t.dim() == 2 else torch.empty_like(t) for t in expected]
    torch.ops.fusepass.row_program_(text, 7, ins, [], outs=outs)
    for out, e in zip(outs, expected, strict=True):
        assert torch.equal(out, e)
    if layout == "padded":
        assert bool(torch.as_strided(outs[0], (6, 5), (260, 1), 255).isnan().all()), "written between the rows"


INDEXED = [THREE_WAY.format(cols=768), STRUCTURE.format(cols=768)]


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (1, 1), (3, 5), (40, 13)])
@pytest.mark.parametrize("cols", [17, 768])
def test_row_indices_and_column_sums(batch: int, tokens: int, cols: int) -> None:
    text, rows = THREE_WAY.format(cols=cols), batch * tokens
    shapes = [(rows, cols), (1, tokens, cols), (max(batch, 1), 1, cols), (batch,), (cols,)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32]
    ins = [random_tensor(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    sizes = [tokens, max(batch, 1)]
    eager = reference.evaluate(parse(text), rows, ins, sizes)
    exact = reference.evaluate(parse(text), rows, ins, sizes, fp64=True)
    outs = [poisoned(eager[0].view(batch, tokens, cols)), *(poisoned(e) for e in eager[1:])]
    torch.ops.fusepass.row_program_(text, rows, ins, sizes, outs=outs)
    for out, e, x in zip(outs, eager, exact, strict=True):
        assert_canaries(out)
        assert_close_to_fp64(out.view(e.shape), e, x, e.dtype)


@pytest.mark.parametrize(("rows", "cols"), [(0, 17), (1, 1), (5, 255), (3, 1024)])
def test_every_kind_of_output(rows: int, cols: int) -> None:
    text = STRUCTURE.format(cols=cols)
    check(text, rows, operands(parse(text), rows))


KEPT = """row_program cols={cols}
in x: tile f32 [row]
in r: tile f32 [row]
dear: tile f32 = tanh(x)
square: tile f32 = square(r)
m: row f32 = row_mean(square)
more: tile bf16 = mul(dear, r)
scaled: tile f32 = mul(r, m)
m2: row f32 = row_sum(scaled)
last: tile f32 = fma(more, m2, dear)
out last [row]"""


def test_values_that_only_a_later_loop_reads() -> None:
    for cols in (5, 768):
        text = KEPT.format(cols=cols)
        check(text, 64, operands(parse(text), 64))


def test_every_operation() -> None:
    for rows, cols in ((64, 37), (64, 768)):
        text = POINTWISE_PROGRAM.format(cols=cols, dtype="bf16")
        ins = operands(parse(text), rows)
        check(text, rows, ins)


def test_column_sums_of_many_rows() -> None:
    text = "row_program cols=33\nin x: tile f32 [row]\nv: col f32 = col_sum(x)\nout v"
    x = random_tensor((20_000, 33), torch.float32) + 3
    (out,) = run(text, len(x), [x])
    assert_close_to_fp64(out, x.sum(0), x.double().sum(0), torch.float32)


def test_leading_dimensions_collapse_or_are_copied() -> None:
    text = at_cols(VARIANTS["rms_norm-f32"], 17)
    ins = operands(parse(text), 12)
    expected = run(text, 12, ins)
    four_d = [
        ins[0].view(2, 2, 3, 17),
        ins[1].view(2, 2, 3, 17).permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
        ins[2],
    ]
    outs = [torch.empty(2, 2, 3, 17).permute(1, 0, 2, 3), torch.empty(12, 17)]
    torch.ops.fusepass.row_program_(text, 12, four_d, [], outs=outs)
    assert torch.equal(outs[0].reshape(12, 17), expected[0])
    assert torch.equal(outs[1], expected[1])


# ---- determinism ----


def test_the_same_bits_every_time() -> None:
    text = THREE_WAY.format(cols=768)
    ins = [
        random_tensor((600, 768), torch.bfloat16),
        random_tensor((1, 20, 768), torch.bfloat16),
        random_tensor((30, 1, 768), torch.float32),
        random_tensor((30,), torch.float32),
        random_tensor((768,), torch.float32),
    ]
    like = reference.evaluate(parse(text), 600, ins, [20, 30])
    runs = []
    for _ in range(5):
        outs = [poisoned(like[0].view(30, 20, 768)), *(poisoned(t) for t in like[1:])]
        torch.ops.fusepass.row_program_(text, 600, ins, [20, 30], outs=outs)
        runs.append(outs)
    assert all(torch.equal(a, b) for outs in runs[1:] for a, b in zip(outs, runs[0], strict=True))


# ---- the op ----


def test_wrong_tensors_are_named() -> None:
    text = at_cols(VARIANTS["rms_norm-f32"], 17)
    good = operands(parse(text), 3)
    outs = [torch.empty(3, 17), torch.empty(3, 17)]
    op = torch.ops.fusepass.row_program_
    op(text, 3, good, [], outs=outs)
    wrong = [
        ([good[0].half(), *good[1:]], outs, "operand x: expected dtype torch.float32, given torch.float16"),
        ([good[0][:, :16], *good[1:]], outs, r"operand x: expected a last dimension of cols=17, given shape \(3, 16\)"),
        ([good[0], good[1][:2], good[2]], outs, "operand r: expected a dimension of 3 for 'row' with rows=3"),
        ([good[0], good[1].t().contiguous(), good[2]], outs, "operand r: expected a last dimension of cols=17"),
        ([good[0], good[1], good[2][:4]], outs, r"operand w: expected 17 elements, given shape \(4,\)"),
        (good[:2], outs, "expected 3 operands, given 2"),
        (good, outs[:1], "expected 2 outputs, given 1"),
        (good, [outs[0], outs[1].bfloat16()], r"output 1 \(nw\): expected dtype torch.float32"),
    ]
    for ins, results, message in wrong:
        with pytest.raises(KernelError, match=message):
            op(text, 3, ins, [], outs=results)


def test_a_tensor_without_dimensions_is_no_tile() -> None:
    text = at_cols(VARIANTS["rms_norm-f32"], 1)
    with pytest.raises(KernelError, match=r"operand x: expected a last dimension of cols=1, given shape \(\)"):
        torch.ops.fusepass.row_program_(text, 1, [torch.tensor(1.0)] * 3, [], outs=[torch.empty(1, 1)] * 2)


def test_fake_tensors_and_meta_tensors_run_nothing() -> None:
    text = VARIANTS["rms_norm-f32"]
    with torch._subclasses.FakeTensorMode():
        ins = [torch.empty(3, 768), torch.empty(3, 768), torch.empty(768)]
        torch.ops.fusepass.row_program_(text, 3, ins, [], outs=[torch.empty(3, 768), torch.empty(3, 768)])
    ins = [torch.empty(3, 768, device="meta"), torch.empty(3, 768, device="meta"), torch.empty(768, device="meta")]
    torch.ops.fusepass.row_program_(text, 3, ins, [], outs=[torch.empty_like(ins[0]), torch.empty_like(ins[0])])


def test_opcheck() -> None:
    text = at_cols(VARIANTS["rms_norm-f32"], 17)
    args = (text, 3, operands(parse(text), 3), [])
    outs = [torch.empty(3, 17), torch.empty(3, 17)]
    torch.library.opcheck(torch.ops.fusepass.row_program_.default, args, {"outs": outs})


def test_a_kernel_that_cannot_be_built_runs_eagerly(monkeypatch: pytest.MonkeyPatch, fallbacks: list[str]) -> None:
    monkeypatch.setattr(ops, "_launchers", {})
    monkeypatch.setattr(ops, "_builds", {})
    monkeypatch.setattr(ops, "_kernels", {})

    def no_compiler(program: RowProgram) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(ops.cpp_build, "start", no_compiler)
    ops.prefetch(VARIANTS["alpha"])
    check(VARIANTS["alpha"], 3, operands(parse(VARIANTS["alpha"]), 3))
    assert len(fallbacks) == 1 and "no C++ compiler" in fallbacks.pop()
    with pytest.raises(RuntimeError, match="no C"):
        ops.built(VARIANTS["alpha"])


# ---- the text ----


def test_a_row_index_that_divides_is_no_comment() -> None:
    """`//` divides in a row program, and begins a comment in C++: such kernels once fell back to torch, unnoticed."""
    text = "row_program cols=8\nin x: tile f32 [row // 5, row % 5]\ns: tile f32 = add(x, 1.0)\nout s [row]"
    assert "(row / 5) * a." in cpp_code.generate(parse(text))
    x = torch.randn(5, 3, 8).transpose(0, 1)
    assert torch.equal(run(text, 15, [x])[0], x.reshape(15, 8) + 1)


def test_programs_that_differ_in_columns_share_their_source() -> None:
    text = VARIANTS["layer_norm-bf16"]
    assert cpp_code.generate(parse(text)) == cpp_code.generate(parse(at_cols(text, 1024)))


def test_each_tile_is_read_once() -> None:
    """The sum is taken in the loop that adds; later loops read the stored sum, never x and r again."""
    source = cpp_code.generate(parse(VARIANTS["layer_norm-bf16"]))
    assert source.count("load(x_in") == source.count("load(r_in") == 1 or source.count("load(x__in") == 1
    assert "scratch.take<float>(cols)" in source  # the bf16 weights, once per thread


# ---- random programs ----

_UNARY = ["cast", "neg", "abs", "square", "tanh", "sigmoid", "relu", "erf"]
_BINARY = ["add", "sub", "mul", "maximum", "minimum"]
_COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


@st.composite
def random_programs(draw: st.DrawFn) -> str:
    """A program of pointwise operations and reductions over operands of every kind."""
    floats = draw(st.sampled_from([["f64"], ["f64"], ["f32"], ["f32", "f64"], ["bf16", "f32"], ["f16", "f32"]]))
    dtype = st.sampled_from(floats)
    lines = [f"in x{i}: tile {draw(dtype)} [row]" for i in range(draw(st.integers(1, 3)))]
    lines += [f"in c0: col {draw(dtype)}", f"in r0: row {draw(dtype)} [row]", f"in t0: scalar {draw(dtype)}"]
    kinds = {line.split()[1][:-1]: Kind(line.split()[2]) for line in lines}
    lines += [f"b0: tile b8 = {draw(st.sampled_from(_COMPARISONS))}(x0, 0.25)"]  # of exact values: no rounding flips it
    kinds["b0"] = Kind.TILE
    for i in range(draw(st.integers(3, 14))):
        op = draw(st.sampled_from([*_UNARY, *_BINARY, "fma", "where", *sorted(ROW_REDUCTIONS)]))
        tiles = [n for n, k in kinds.items() if k is Kind.TILE]
        if op.startswith("row_"):
            args = [draw(st.sampled_from(tiles[-3:]))]
            kind = Kind.ROW
        else:
            arity = 3 if op in ("fma", "where") else 2 if op in _BINARY else 1
            args = [draw(st.sampled_from(list(kinds))) for _ in range(arity)]
            args[0] = "b0" if op == "where" else args[0]
        for j in range(1, len(args)):
            if draw(st.integers(0, 3)) == 0:
                args[j] = draw(st.sampled_from(["0.5", "-1.25", "2.0"]))
        if not op.startswith("row_"):
            kind = Kind.join([kinds[a] for a in args if a in kinds])
        lines.append(f"v{i}: {kind.value} {draw(dtype)} = {op}({', '.join(args)})")
        kinds[f"v{i}"] = kind
    wide = [n for n, k in kinds.items() if k is Kind.TILE]
    lines.append(f"z0: col {'f64' if 'f64' in floats else 'f32'} = col_sum({wide[-1]})")
    kinds["z0"] = Kind.COL
    called = {a for line in lines if "(" in line for a in line.partition("(")[2].rstrip(")").split(", ")}
    index = {Kind.TILE: " [row]", Kind.ROW: " [row]"}
    lines += [f"out {n}{index.get(kinds[n], '')}" for n in kinds if n not in called or draw(st.integers(0, 5)) == 0]
    return "\n".join(["row_program cols=768", *lines])


def check_random(texts: list[str], rows: int, cols: int) -> None:
    texts = [at_cols(t, cols) for t in texts]
    for text in texts:
        ops.prefetch(text)
    for text in texts:
        program = parse(text)
        ins = [t.clamp(-2, 2) * 0.5 for t in operands(program, rows)]
        expected = reference.evaluate(program, rows, ins)
        values = (*program.operands, *program.statements)
        coarsest = min(
            (v.dtype for v in values if v.dtype is not torch.bool),
            key=lambda d: torch.finfo(d).bits * 100 + (d == torch.float16),
        )
        scale = scale_of(program, rows, ins)
        for out, e in zip(run(text, rows, ins), expected, strict=True):
            assert_same_within_roundings(out, e, coarsest, len(program.statements), cols, scale)


def scale_of(program: RowProgram, rows: int, ins: list[torch.Tensor]) -> float:
    """The largest magnitude of any value of the program."""
    lines = [line for line in str(program).splitlines() if not line.startswith("out ")]
    for v in (*program.operands, *program.statements):
        lines.append(f"out {v.name}" + (" [row]" if v.kind in (Kind.TILE, Kind.ROW) else ""))
    text = "\n".join(lines)
    values = reference.evaluate(parse(text), rows, ins, fp64=True)
    return max(float(v.abs().max()) for v in values)


FUZZ = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],  # a smaller example would cost a compilation at every step
}


@settings(max_examples=2, **FUZZ)
@given(st.lists(random_programs(), min_size=4, max_size=4), st.integers(1, 4), st.integers(1, 70))
def test_random_programs(texts: list[str], rows: int, cols: int) -> None:
    check_random(texts, rows, cols)


@pytest.mark.slow
@settings(max_examples=6, **{**FUZZ, "derandomize": False})
@given(st.lists(random_programs(), min_size=4, max_size=4), st.integers(1, 9), st.integers(1, 300))
def test_many_random_programs(texts: list[str], rows: int, cols: int) -> None:
    check_random(texts, rows, cols)


# ---- the yardstick itself ----


def wrong_results(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """RMSNorm with eps 1e-5, wrong in the ways that a kernel might be."""
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True)
    shorter = wide[:, :-1].square().sum(-1, keepdim=True) / x.shape[-1]
    in_bf16 = torch.zeros(len(x), 1, dtype=torch.bfloat16)
    for column in wide.square().bfloat16().unbind(-1):
        in_bf16 += column.unsqueeze(-1)
    return {
        "last column dropped": wide * torch.rsqrt(shorter + 1e-5) * weight,
        "eps omitted": wide * torch.rsqrt(mean) * weight,
        "bf16 accumulation": wide * torch.rsqrt(in_bf16.float() / x.shape[-1] + 1e-5) * weight,
        "weight omitted": wide * torch.rsqrt(mean + 1e-5),
        "rows swapped": (wide * torch.rsqrt(mean + 1e-5) * weight).flip(0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tolerances_refuse_wrong_kernels(dtype: torch.dtype) -> None:
    x = random_tensor((8, 256), dtype) * 0.01
    x[:, -1] = 0.1
    weight = random_tensor((256,), dtype, 1)
    eager = torch.nn.functional.rms_norm(x, (256,), weight, 1e-5)
    exact = torch.nn.functional.rms_norm(x.double(), (256,), weight.double(), 1e-5)
    assert_close_to_fp64(eager, eager, exact, dtype)
    for name, wrong in wrong_results(x, weight.float()).items():
        try:
            assert_close_to_fp64(wrong.to(dtype), eager, exact, dtype)
        except AssertionError:
            continue
        pytest.fail(f"the tolerance lets a kernel pass with: {name}")


def test_pairs_of_layouts_are_all_distinct() -> None:
    t = random_tensor((3, 4), torch.float32)
    strides = {name: layout(t).stride() for name, layout in LAYOUTS.items()}
    assert all(strides[a] != strides[b] for a, b in itertools.combinations(strides, 2))
