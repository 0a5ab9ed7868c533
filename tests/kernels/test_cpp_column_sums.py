"""Backward programs in C++: sums over the rows, in the same pass as the gradients of the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusepass.kernels import cpp_code, cpp_placement, ops, reference
from fusepass.row_program import FLOATS, Kind, parse
from tests.kernels.cpp_harness import LAYOUTS, check, operands, poisoned, random_tensor, run
from tests.kernels.norm_programs import norm_backward_program
from tests.tolerances import assert_close_to_fp64

NORMS = ("layer_norm", "rms_norm")
ROWS = (0, 1, 3, 1025)
DROPOUT = 0.1

# Sums in phases of their own, of a kept value, and of a value that no row output needs.
SUMS_EVERYWHERE = """row_program cols={cols}
in x: tile f32 [row]
in y: tile bf16 [row]
in w: col f32
t: tile f32 = tanh(x)
a: row f32 = row_mean(t)
u: tile f32 = mul(t, a)
b: row f32 = row_max(u)
v: tile bf16 = mul(u, b)
z: tile f32 = mul(v, w)
s0: col f32 = col_sum(x)
s1: col bf16 = col_sum(t)
s2: col f16 = col_sum(u)
s3: col bf16 = col_sum(v)
s4: col f32 = col_sum(y)
s5: col f32 = col_sum(z)
out v [row]
out s0
out s1
out s2
out s3
out s4
out s5"""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def compile_in_parallel() -> None:
    """Row programs name the number of columns, as the graphs do: one kernel for each."""
    for norm in NORMS:
        for dtype in FLOATS:
            for cols in (1, 48, 1000, 4096):
                ops.prefetch(norm_backward_program(norm, cols, dtype))
        for dtype in ("bf16", "f32"):
            ops.prefetch(norm_backward_program(norm, 255, dtype, dropout=DROPOUT))


@pytest.mark.parametrize("cols", [1, 48, 1000, 4096])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm", NORMS)
def test_backward_agrees_with_the_reference(norm: str, dtype: str, cols: int, threads: int) -> None:
    text = norm_backward_program(norm, cols, dtype)
    ins = operands(parse(text), ROWS[-1])
    outs = check(text, ROWS[-1], ins)
    for rows in ROWS[:-1]:
        fewer = [
            t[:rows] if o.kind in (Kind.TILE, Kind.ROW) else t for o, t in zip(parse(text).operands, ins, strict=True)
        ]
        dx, *sums = check(text, rows, fewer)
        assert torch.equal(dx, outs[0][:rows]), "a row's gradient depends on how many rows there are"
        if rows == 0:
            assert not any(bool(s.any()) for s in sums), "sums over no rows are not 0"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [1, 37, 4096])
def test_sums_of_every_phase(rows: int, cols: int, threads: int) -> None:
    text = SUMS_EVERYWHERE.format(cols=cols)
    check(text, rows, operands(parse(text), rows))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("norm", NORMS)
def test_dropout_in_front(norm: str, dtype: str, threads: int) -> None:
    text = norm_backward_program(norm, 255, dtype, dropout=DROPOUT)
    ins = operands(parse(text), 70)
    dx, dropped, *_ = check(text, 70, ins)
    assert torch.equal(dropped != 0, ins[-1] & (dx != 0))


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_bits_every_time(norm: str, threads: int) -> None:
    text = norm_backward_program(norm, 1000, "bf16")
    ins = operands(parse(text), 1025)
    first = run(text, 1025, ins)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(text, 1025, ins), first, strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_gradients(layout: str, dtype: str) -> None:
    """Incoming gradients are slices, transposes, or one number repeated, as those of a sum are."""
    text = norm_backward_program("layer_norm", 255, dtype, dropout=DROPOUT)
    ins = operands(parse(text), 70)
    names = [o.name for o in parse(text).operands]
    for name in ("dy", "s", "ds", "mask"):
        i = names.index(name)
        ins[i] = LAYOUTS[layout](ins[i])
    outs = check(text, 70, ins)
    expected = run(text, 70, [t.contiguous() for t in ins])
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_a_gradient_of_one_number() -> None:
    text = norm_backward_program("rms_norm", 255, "f32", dropout=DROPOUT)
    ins = operands(parse(text), 70)
    ins[0] = torch.ones(()).expand(70, 255)
    check(text, 70, ins)


def test_sums_written_with_a_stride() -> None:
    text = norm_backward_program("layer_norm", 48, "bf16")
    ins = operands(parse(text), 7)
    expected = run(text, 7, ins)
    outs = [torch.empty(7, 48, dtype=torch.bfloat16)]
    outs += [torch.full((48, 3), torch.nan, dtype=torch.bfloat16)[:, 1] for _ in expected[1:]]
    torch.ops.fusepass.row_program_(text, 7, ins, [], outs=outs)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    for out in outs[1:]:
        around = torch.as_strided(out, (48, 3), (3, 1), 0)
        assert bool(around[:, ::2].isnan().all()), "written beside the columns"


def test_sums_in_fp64_of_other_dtypes() -> None:
    text = "row_program cols=48\nin x: tile f32 [row]\nv: col f64 = col_sum(x)\nm: row f64 = row_mean(x)"
    text += "\nout v\nout m [row]"
    ins = operands(parse(text), 1025)
    check(text, 1025, ins)


def test_rows_of_a_program_may_be_sums_of_many() -> None:
    """The error must not grow with the number of rows: values far from zero, so that it would show."""
    text = "row_program cols=48\nin x: tile bf16 [row]\nv: col f32 = col_sum(x)\nout v"
    x = (random_tensor((40_000, 48), torch.float32) + 3).bfloat16()
    (out,) = run(text, len(x), [x])
    assert_close_to_fp64(out, x.float().sum(0), x.double().sum(0), torch.float32)


# ---- writing over operands that die ----


@pytest.mark.parametrize("dropout", [None, DROPOUT])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_written_over_operands(norm: str, dtype: str, dropout: float | None) -> None:
    text = norm_backward_program(norm, 255, dtype, dropout=dropout)
    program = parse(text)
    ins = operands(program, 70)
    expected = run(text, 70, ins)
    pairs = [(k, i) for k, candidates in enumerate(cpp_placement.overwritable(program)) for i in candidates]
    assert {program.operands[i].name for k, i in pairs if k == 0} == {"dy", "s", "ds"}, "not all that die are offered"
    for k, i in pairs:
        fresh = [t.clone() for t in ins]
        outs = [poisoned(e) for e in expected]
        outs[k] = fresh[i]
        torch.ops.fusepass.row_program_(text, 70, fresh, [], outs=outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True)), f"output {k} over operand {i}"


def test_what_a_later_loop_reads_is_not_written_over() -> None:
    text = "row_program cols=48\nin x: tile f32 [row]\nv: tile f32 = mul(x, 2.0)\nm: row f32 = row_sum(v)"
    text += "\nw: tile f32 = mul(x, m)\ns: col f32 = col_sum(w)\nout v [row]\nout s"
    assert cpp_placement.overwritable(parse(text)) == ((), ())


# ---- the call ----


def test_backward_programs_take_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous tensors, bools and column sums among them, are not resolved one by one."""
    text = norm_backward_program("layer_norm", 255, "bf16", dropout=DROPOUT)
    ins = operands(parse(text), 70)
    expected = run(text, 70, ins)
    outs = [poisoned(e) for e in expected]

    def resolve(slot: ops._Slot, *_: object) -> torch.Tensor:
        raise AssertionError(f"{slot.label} was resolved")

    monkeypatch.setattr(ops._Slot, "resolve", resolve)
    ops.run(text, 70, ins, [], outs)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    with pytest.raises(AssertionError, match="operand dy was resolved"):
        ops.run(text, 70, [ins[0].float(), *ins[1:]], [], outs)


# ---- the text, and the yardstick ----


def test_a_value_that_one_loop_needs_is_computed_there() -> None:
    """The mask and its factor are no business of the loop that sums the rows."""
    source = cpp_code.generate(parse(norm_backward_program("layer_norm", 255, "bf16", dropout=DROPOUT)))
    assert source.count("load(mask__in + c, n)") == source.count("load(ds__in + c, n)") == 1
    assert source.index("along__reduction.value()") < source.index("load(mask__in + c, n)")
    assert "scaled__row" not in source, "kept in a scratch row"


def test_tolerances_refuse_wrong_sums() -> None:
    text = norm_backward_program("layer_norm", 48, "bf16")
    ins = operands(parse(text), 1025)
    eager = reference.evaluate(parse(text), 1025, ins)
    exact = reference.evaluate(parse(text), 1025, ins, fp64=True)
    dy, _, s, mean, rstd, *_ = (t.double() for t in ins)
    normed = (s - mean[:, None]) * rstd[:, None]
    in_bf16 = torch.zeros(48, dtype=torch.bfloat16)
    for row in ins[0]:
        in_bf16 += row
    wrong = {
        "d gamma without the last row": (1, (dy * normed)[:-1].sum(0)),
        "d gamma of the rows as they are": (1, (dy * s).sum(0)),
        "d beta in bf16": (2, in_bf16),
        "d beta without the last row": (2, dy[:-1].sum(0)),
        "bias gradient without the sum's own": (3, exact[3] - ins[-1].double().sum(0)),
    }
    for k in range(4):
        assert_close_to_fp64(eager[k], eager[k], exact[k], torch.bfloat16)
    for name, (k, value) in wrong.items():
        with pytest.raises(AssertionError):
            assert_close_to_fp64(value.bfloat16(), eager[k], exact[k], torch.bfloat16)
            pytest.fail(f"the tolerance lets a kernel pass with: {name}")
