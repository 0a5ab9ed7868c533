"""The row program: its text form, and every rule of its verifier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusepass.errors import ProgramError
from fusepass.kernels import reference
from fusepass.row_ops import COL_REDUCTIONS, POINTWISE, ROW_REDUCTIONS
from fusepass.row_program import (
    FLOATS,
    MAX_COLS,
    QUANTISED,
    Kind,
    Operand,
    Output,
    RowProgram,
    Statement,
    compute_dtype,
    parse,
)
from tests.kernels.norm_programs import POINTWISE_PROGRAM, norm_program

GOOD = """row_program cols=4 sizes=n0
in x: tile bf16 [row]
in y: tile f32 [row // n0, row % 2*n0]
in w: col f32
in t: scalar f64
in g: row f16 [row // 3]
s: tile bf16 = add(x, y)
m: row f32 = row_mean(s)
e: row f32 = add(m, 1e-06)
d: tile f32 = sub(s, e)
f: tile f64 = fma(d, w, t)
h: tile f32 = mul(f, g)
c: col f32 = col_sum(h)
k: col f32 = mul(w, -inf)
out s [0, row]
out h [row]
out m [row]
out c
out k"""


def test_the_text_reads_back() -> None:
    program = parse(GOOD)
    assert str(program) == GOOD
    assert parse(str(program)) == program == parse(program.one_line)
    assert "\n" not in program.one_line
    assert program.values["s"].dtype == torch.bfloat16
    assert program.statements[0] == Statement("s", "add", ("x", "y"), Kind.TILE, torch.bfloat16)


def test_phases_count_reductions_in_a_row() -> None:
    program = parse(GOOD)
    assert [program.phases[n] for n in ("x", "s", "m", "e", "d", "h", "w", "k")] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert program.n_phases == 2
    assert parse(norm_program("layer_norm", 8, "f32")).n_phases == 3


def test_the_digest_names_the_text() -> None:
    assert parse(GOOD).digest == parse(str(parse(GOOD))).digest
    assert parse(GOOD).digest != parse(GOOD.replace("cols=4", "cols=5")).digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("row_program cols=4", "program cols=4", "expected 'row_program cols=N"),
        ("cols=4", "cols=0", "expected 1 <= cols"),
        ("cols=4", f"cols={MAX_COLS + 1}", "expected 1 <= cols"),
        ("in x: tile", "in x: cube", "not a line of a row program: 'in x: cube"),
        ("in x: tile bf16", "in x: tile int8", "dtype 'int8' is not one of f64, f32, bf16, f16"),
        ("in w: col", "in x: col", "'x' is defined twice"),
        ("in w: col f32", "in row: col f32", "'row' is defined twice or is not a name"),
        ("in w: col f32", "in W: col f32", "'W' is defined twice or is not a name"),
        ("in x: tile bf16 [row]", "in x: tile bf16", "x: a tile or row needs a row index"),
        ("in w: col f32", "in w: col f32 [row]", "w: a tile or row needs a row index and a col or scalar has none"),
        ("in x: tile bf16 [row]", "in x: tile bf16 [row + 1]", "'row \\+ 1' is not a row index"),
        ("row // n0", "row // n7", "uses n7, which is not one of sizes"),
        ("row // 3", "row // 0", "divides by zero"),
        ("s: tile bf16 = add(x, y)", "s: tile bf16 = add(x, z)", "'z' is not defined before it is used"),
        ("s: tile bf16 = add(x, y)", "s: tile bf16 = add(x, m)", "'m' is not defined before it is used"),
        ("s: tile bf16 = add(x, y)", "s: tile bf16 = add(x)", "expected 2 arguments, got 1"),
        ("s: tile bf16 = add(x, y)", "s: tile bf16 = append(x, y)", "no such operation; known: cast, add"),
        ("s: tile bf16 = add(x, y)", "s: row bf16 = add(x, y)", "is declared row, but its arguments make it tile"),
        ("m: row f32 = row_mean(s)", "m: tile f32 = row_mean(s)", "is declared tile, but its arguments make it row"),
        ("m: row f32 = row_mean(s)", "m: row f32 = row_mean(w)", "a reduction takes one tile"),
        ("m: row f32 = row_mean(s)", "m: row f32 = row_mean(s, s)", "a reduction takes one tile"),
        ("add(m, 1e-06)", "add(m, nan)", "a literal is NaN"),
        ("k: col f32 = mul(w, -inf)", "k: col f32 = mul(c, 2.0)", "'c' is a column sum, which is only known"),
        ("out h [row]", "out h", "h: a tile or row needs a row index"),
        ("out h [row]", "out q [row]", "out q: no such value"),
        ("out m [row]\nout c\n", "out m [row]\n", "values that nothing uses: c"),
    ],
)
def test_every_rule_has_an_error(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ProgramError, match=message):
        parse(GOOD.replace(old, new))


def test_a_program_without_outputs_is_refused() -> None:
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith("out "))
    with pytest.raises(ProgramError, match="needs at least one output"):
        parse(text)


def test_a_dtype_that_has_no_name_is_refused() -> None:
    operand = Operand("x", Kind.TILE, torch.int16, ("row",))
    with pytest.raises(ProgramError, match=r"x: dtype torch\.int16 is not one of"):
        RowProgram(4, (operand,), (), (Output("x", ("row",)),)).verify()


def test_arithmetic_is_wide_where_a_value_is() -> None:
    assert compute_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert compute_dtype(torch.bfloat16, torch.float64) == torch.float64


@pytest.mark.parametrize("kinds", [(a, b) for a in Kind for b in Kind])
def test_kinds_join_like_broadcasting(kinds: tuple[Kind, Kind]) -> None:
    shapes = {Kind.TILE: (3, 5), Kind.ROW: (3, 1), Kind.COL: (1, 5), Kind.SCALAR: (1, 1)}
    assert shapes[Kind.join(list(kinds))] == torch.broadcast_shapes(*(shapes[k] for k in kinds))


def test_every_operation_has_a_meaning_and_two_spellings() -> None:
    for name, op in POINTWISE.items():
        places = [f"{{{i}}}" for i in range(op.arity)]
        assert all(place in op.cpp and place in op.triton for place in places), name
        args = [torch.tensor(0.25 * (i + 1)) for i in range(op.arity)]
        assert op.torch(*args).shape == (), name
    assert not set(POINTWISE) & (ROW_REDUCTIONS | COL_REDUCTIONS)


def test_the_reference_reads_rows_by_their_index() -> None:
    text = "row_program cols=2 sizes=n0\nin x: tile f32 [0, row % n0]\nin g: row f32 [row // n0]\n"
    text += "v: tile f32 = mul(x, g)\nout v [row]"
    x, g = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([1.0, 10.0])
    (v,) = reference.evaluate(parse(text), 4, [x, g], [2])
    assert v.tolist() == [[1, 2], [3, 4], [10, 20], [30, 40]]


@st.composite
def programs(draw: st.DrawFn) -> RowProgram:
    number_dtype = st.sampled_from(list(FLOATS.values()))
    dtype = st.sampled_from([*FLOATS.values(), torch.bool])
    index = st.sampled_from([("row",), ("0", "row % 7"), ("row // n0", "row % n0"), ("row // 2*n0 % n1",)])
    kinds = [Kind.TILE, *draw(st.lists(st.sampled_from(list(Kind)), max_size=4))]
    operands = [
        Operand(f"x{i}", k, draw(dtype), draw(index) if k in (Kind.TILE, Kind.ROW) else ()) for i, k in enumerate(kinds)
    ]
    known: dict[str, Kind] = {o.name: o.kind for o in operands}
    statements: list[Statement] = []
    for i in range(draw(st.integers(0, 8))):
        op = draw(st.sampled_from([*POINTWISE, *sorted(ROW_REDUCTIONS)]))
        if op in ROW_REDUCTIONS:
            args: tuple[str | float, ...] = (draw(st.sampled_from([n for n, k in known.items() if k is Kind.TILE])),)
            kind = Kind.ROW
        else:
            number = st.floats(allow_nan=False)
            args = tuple(draw(st.one_of(st.sampled_from(list(known)), number)) for _ in range(POINTWISE[op].arity))
            kind = Kind.join([known[a] for a in args if isinstance(a, str)])
        boolean = op in POINTWISE and POINTWISE[op].boolean
        statements.append(Statement(f"v{i}", op, args, kind, torch.bool if boolean else draw(number_dtype)))
        known[f"v{i}"] = kind
    for i, quantised in enumerate(draw(st.lists(st.sampled_from(list(QUANTISED.values())), max_size=2))):
        source = draw(st.sampled_from([n for n in known if not n.startswith("q")]))
        statements.append(Statement(f"q{i}", "cast", (source,), known[source], quantised))
        known[f"q{i}"] = known[source]
    outputs = tuple(Output(n, draw(index) if k in (Kind.TILE, Kind.ROW) else ()) for n, k in known.items())
    return RowProgram(draw(st.integers(1, MAX_COLS)), tuple(operands), tuple(statements), outputs, ("n0", "n1"))


@given(programs())
def test_any_program_reads_back_from_its_text(program: RowProgram) -> None:
    assert parse(str(program.verify())) == program


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("v: tile f32 = gt(x, 0.0)", "a comparison gives b8"),
        ("v: tile b8 = add(x, 1.0)", "a comparison gives b8"),
        ("v: tile b8 = cast(x)", "a comparison gives b8"),
        ("v: tile bf16 = rand(seed)", "random numbers are f32"),
        ("v: tile f32 = rand(x)", "expected one i64 scalar"),
        ("v: row f32 = rand(seed)", "is declared row"),
        ("v: tile f32 = add(x, seed)", "an i64 seeds random numbers"),
    ],
)
def test_truth_values_and_seeds_are_used_as_such(line: str, message: str) -> None:
    head = "row_program cols=4\nin x: tile f32 [row]\nin seed: scalar i64\nu: tile f32 = rand(seed)"
    text = f"{head}\n{line}\nout v [row]\nout u [row]"
    with pytest.raises(ProgramError, match=message):
        parse(text)


def test_the_random_numbers_are_those_of_philox() -> None:
    # Random123's known answer for Philox-4x32-10, key 0 and counter 0: the first word is 6627e8d5.
    expected = torch.tensor(float(0x6627E8D5)).mul(4.6566127342e-10)
    for op in ("rand", "rand_cpu"):
        numbers = reference.uniform(op, torch.tensor(0), 64, 32)
        assert numbers[0, 0] == expected
        assert numbers.min() >= 0 and numbers.max() < 1 and abs(float(numbers.mean()) - 0.5) < 0.02


def test_the_shared_test_programs_are_programs() -> None:
    for dtype in FLOATS:
        assert parse(POINTWISE_PROGRAM.format(cols=5, dtype=dtype)).n_phases == 2
