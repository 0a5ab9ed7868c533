"""Truth values, comparisons, selection and random numbers in generated Triton kernels, run in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest

from fusepass.errors import ProgramError
from fusepass.kernels import schedule as schedules
from fusepass.kernels import triton_code
from fusepass.row_program import parse
from tests.kernels.triton_harness import Case, check, run_cases

COMPARISONS = """row_program cols=50
in x: tile {dtype} [row]
in y: tile {dtype} [row]
in m: tile b8 [row]
in g: row {dtype} [row]
in h: row b8 [row]
in c: col {dtype}
a: tile b8 = lt(x, y)
b: tile b8 = le(x, 0.25)
d: tile b8 = gt(x, g)
e: tile b8 = ge(x, c)
f: tile b8 = eq(m, a)
i: tile b8 = ne(m, h)
j: row b8 = gt(g, 0.0)
k: tile {dtype} = where(f, x, y)
l: tile {dtype} = where(m, k, 0.5)
n: tile {dtype} = where(x, l, -1.5)
o: tile {dtype} = mul(m, n)
p: tile {dtype} = where(j, o, n)
total: row {wide} = row_max(p)
q: tile {dtype} = sub(p, total)
{sums}out a [row]
out b [row]
out d [row]
out e [row]
out f [row]
out i [row]
out j [row]
out m [row]
out h [row]
out q [row]
"""
SUMS = "r: col f32 = col_sum(q)\ns: col f32 = col_sum(a)\n"

DROPOUT = """row_program cols={cols}
in seed: scalar i64
in x: tile bf16 [row]
u: tile f32 = rand(seed)
k: tile b8 = gt(u, 0.1)
m: tile bf16 = mul(k, x)
d: tile bf16 = mul(m, 1.1111111111111112)
big: row f32 = row_max(d)
y: tile bf16 = sub(d, big)
out u [row]
out k [row]
out y [row]
"""
SEEDS = (0, 1, -1, 2**31, 2**40 + 12345, -(2**62), 2**63 - 1)
SUMMING = (("persistent", 64, 2), ("wide", 16, 1), ("wide", 16, 2))


def test_comparisons_and_selection() -> None:
    cases = []
    for dtype, wide, layout in (("bf16", "f32", "contiguous"), ("f32", "f32", "transposed"), ("f64", "f64", "padded")):
        plain = COMPARISONS.format(dtype=dtype, wide=wide, sums="")
        summed = COMPARISONS.format(dtype=dtype, wide=wide, sums=SUMS) + "out r\nout s\n"
        cases += [Case(f"{dtype} {s}", plain, 5, s, layout) for s in (None, ("loop", 16, 2))]
        cases += [Case(f"{dtype} sums {s}", summed, 5, s, layout) for s in (None, *SUMMING)]
    check(cases)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_numbers_are_those_of_the_reference(seed: int) -> None:
    """Bit for bit: nothing in the program is approximate, so the harness compares for equality."""
    cases = [
        Case(f"{cols} {schedule}", DROPOUT.format(cols=cols), 5, schedule, seed=seed)
        for cols, schedule in ((50, None), (50, ("loop", 16, 2)), (64, None), (1, None))
    ]
    check(cases)


def test_random_numbers_in_programs_with_column_sums() -> None:
    text = DROPOUT.format(cols=50).replace("out u", "c: col f32 = col_sum(y)\nout u") + "out c\n"
    check([Case(f"{s} {seed}", text, 7, s, seed=seed) for s, seed in itertools.product((None, *SUMMING), (7, -7))])


def test_random_numbers_differ_from_seed_to_seed_and_row_to_row() -> None:
    """The comparison sees a number that is drawn from another counter or another seed."""
    wrong = {
        "another element": ("(row * 50 + col)", "(row * 51 + col)"),
        "another seed": ("tl.rand(seed,", "tl.rand(seed + 1,"),
        "half of the seed": ("tl.rand(seed,", "tl.rand(seed & 0xFFFFFFFF,"),
        "another threshold": ("0.1,", "0.2,"),
    }
    cases = [Case(name, DROPOUT.format(cols=50), 5, edits=(edit,), seed=2**40 + 5) for name, edit in wrong.items()]
    verdicts = run_cases(cases)
    assert not [name for name, text in verdicts.items() if not text or "Traceback" in text], verdicts


def test_the_offset_is_an_unsigned_word() -> None:
    """As Inductor writes it: element 2^32 has the number of element 0."""
    program = parse(DROPOUT.format(cols=50))
    strides = dict.fromkeys(("x", "out0", "out1", "out2"), (50, 1))
    text = triton_code.generate(program, schedules.choose(program), strides)
    assert "u = tl.rand(seed, (row * 50 + col).to(tl.uint32))" in text


def test_the_numbers_of_a_cpu_are_not_drawn_on_a_gpu() -> None:
    program = parse(DROPOUT.format(cols=50).replace("rand(", "rand_cpu("))
    with pytest.raises(ProgramError, match="rand_cpu draws the random numbers of a CPU, not of a GPU: u"):
        triton_code.generate(program, schedules.choose(program), dict.fromkeys(("x", "out0", "out1", "out2"), (50, 1)))
