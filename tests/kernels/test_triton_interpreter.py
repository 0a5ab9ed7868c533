"""Generated Triton kernels, run in Triton's interpreter and compared with the reference evaluator.

Tensors lie in larger blocks: a read beyond one poisons the result, a write beyond one shows, and an element that is
never written stays NaN.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from fusepass.errors import ProgramError
from fusepass.kernels import schedule as schedules
from fusepass.kernels import triton_code
from fusepass.row_program import parse
from tests.kernels.norm_programs import POINTWISE_PROGRAM, moved, norm_program
from tests.kernels.triton_harness import ROOT, Case, check, run_cases

COLS = (1, 2, 3, 17, 127, 128, 255, 768, 1000, 1024, 4096, 5120, 8192, 16384, 65536)
DTYPES = ("bf16", "f32", "f16", "f64")
NORMS = ("layer_norm", "rms_norm")


def schedules_of(cols: int) -> list[tuple[str, int, int] | None]:
    """The chosen schedule; a loop of several blocks, of which the last is not full; whole rows however wide."""
    width = schedules.next_power_of_two(cols)
    chosen = schedules.choose(parse(norm_program("layer_norm", cols, "f32")))
    forced = [("loop", max(1, width // 4), 2 if cols < 256 else 1)]
    forced += [("row", width, 1)] if chosen.kind == "loop" else [("row", width, 2)] if cols < 1024 else []
    return [None, *forced]


def grid_cases(norm: str, dtype: str, cols: Sequence[int], rows: Sequence[int]) -> list[Case]:
    return [
        Case(
            f"{norm} {dtype} {r}x{n} {schedule}", norm_program(norm, n, dtype, alpha=1.7, save_stats=True), r, schedule
        )
        for n, r in itertools.product(cols, rows)
        for schedule in schedules_of(n)
    ]


@pytest.mark.parametrize("norm", NORMS)
def test_columns(norm: str) -> None:
    check(
        [
            *grid_cases(norm, "bf16", COLS, (2,)),
            *grid_cases(norm, "f32", (1, 17, 1000), (0, 7)),
            *grid_cases(norm, "f16", (255,), (1,)),
            *grid_cases(norm, "f64", (255,), (1,)),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_columns_by_rows(norm: str, dtype: str) -> None:
    """The interpreter takes milliseconds for each row: many rows only where several make a tile."""
    check(grid_cases(norm, dtype, COLS, (0, 1, 2)))
    check(grid_cases(norm, dtype, [n for n in COLS if n <= 768], (7, 64)))


def variant_cases(cols: tuple[int, ...], dtypes: tuple[str, ...]) -> list[Case]:
    cases = []
    for norm, n, dtype in itertools.product(NORMS, cols, dtypes):
        loop = ("loop", max(1, schedules.next_power_of_two(n) // 2), 4)
        variants = {
            "plain": norm_program(norm, n, dtype),
            "bias and alpha": norm_program(norm, n, dtype, bias=True, alpha=2.3),
            "fp32 weights": norm_program(norm, n, dtype, weight="f32"),
            "no weights": norm_program(norm, n, dtype, weight=None),
            "repeated residual": norm_program(norm, n, dtype, residual_index="0, row % 3", alpha=2.3),
            "residual by batch": norm_program(norm, n, dtype, residual_index="row // s0, 0", sizes="s0"),
            "moved": moved(norm_program(norm, n, dtype), "row % 3, row // 3"),
            "residual by both": norm_program(norm, n, dtype, residual_index="row // s0 % 3, row % s0", sizes="s0"),
        }
        for (variant, text), schedule, layout in itertools.product(
            variants.items(), (None, loop), ("contiguous", "padded", "transposed")
        ):
            sizes = (2,) if "s0" in text else ()
            cases.append(
                Case(f"{norm} {n} {dtype} {variant} {layout} {schedule}", text, 5, schedule, layout, sizes=sizes)
            )
    return cases


def test_variants() -> None:
    check(variant_cases((127,), ("bf16", "f32")))


@pytest.mark.slow
def test_more_variants() -> None:
    check(variant_cases((1, 127, 1024), DTYPES))


def test_every_operation() -> None:
    check(
        [
            Case(f"{dtype} {schedule} {layout}", POINTWISE_PROGRAM.format(cols=50, dtype=dtype), 3, schedule, layout)
            for dtype in ("bf16", "f32")
            for schedule, layout in ((None, "padded"), (("loop", 32, 2), "contiguous"))
        ]
    )


def test_rows_with_a_large_mean() -> None:
    """A lane beyond the row that entered the variance would bring in the square of the mean."""
    cases = [
        Case(f"{norm} {dtype} {n} {data} {schedule}", norm_program(norm, n, dtype), 3, schedule, "padded", data)
        for norm, dtype, n, data in itertools.product(NORMS, ("bf16", "f32"), (1000,), ("shifted", "ramp", "tiny"))
        for schedule in schedules_of(n)
    ]
    check(cases)


def test_a_product_of_sizes_divides_and_wraps() -> None:
    text = norm_program("rms_norm", 17, "f32", residual_index="row // s0*s1, row % s0*s1", sizes="s0,s1")
    source = triton_code.generate(
        parse(text), schedules.choose(parse(text)), {"x": (17, 1), "r": (102, 17, 1), "out0": (17, 1), "out1": (17, 1)}
    )
    assert "(row // s0 // s1) * 102 + (row % (tl.full([], 1, tl.int64) * s0 * s1)) * 17" in source


WRONG = {
    "mask before the mean removed": ("tl.where(col_mask, s, 0.0)", "tl.where(col_mask, s, s + 1.0)"),
    "mask before the variance removed": ("tl.where(col_mask, q, 0.0)", "q"),
    "eps dropped": ("var + 1e-05", "var + 0.0"),
    "eps moved": ("1e-05", "1e-06"),
    "last column dropped": ("col < 255", "col < 254"),
    "a column too many": ("col < 255", "col < 256"),
    "mean over the padded width": ("255.0", "256.0"),
    "sum not rounded before the norm": ("s = (xa + r).to(tl.bfloat16).to(tl.float32)", "s = xa + r"),
    "product not rounded": ("(x * 1.7).to(tl.bfloat16).to(tl.float32)", "x * 1.7"),
    "row statistic kept in bfloat16": ("d = s - mean", "d = s - mean.to(tl.bfloat16).to(tl.float32)"),
    "beta forgotten": ("nw + beta", "nw"),
    "row index off by one": ("out1_ptr + row * 255", "out1_ptr + (row + 1) * 255"),
    "a row too many": ("row < rows", "row < rows + 1"),
    "strides of another tensor": ("r_ptr + row * 255", "r_ptr + row * 254"),
}


@pytest.mark.parametrize("schedule", [None, ("loop", 128, 4)], ids=["row", "loop"])
def test_wrong_kernels_are_found(schedule: tuple[str, int, int] | None) -> None:
    cases = []
    for name, (old, new) in WRONG.items():
        old, new = ((t.replace("col_mask", "mask")) for t in (old, new))
        needs_fp32 = "eps" in name or "the mean" in name or "width" in name
        dtype, data = ("f32", "tiny") if needs_fp32 else ("bf16", "shifted")
        text = norm_program("layer_norm", 255, dtype, alpha=1.7)
        cases.append(Case(name, text, 7, schedule, "contiguous", data, edits=((old, new),)))
    verdicts = run_cases(cases)
    accepted = [name for name, text in verdicts.items() if not text]
    broken = {name: text for name, text in verdicts.items() if "Traceback" in text or "edit does not apply" in text}
    assert not accepted, f"wrong kernels that the comparison accepts: {accepted}"
    assert not broken, broken


CANARY = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr).to(tl.bfloat16))

x, y = torch.tensor([1.0 + 2**-8 + 2**-9]), torch.zeros(1, dtype=torch.bfloat16)
kernel[(1,)](x, y)
print("truncates" if y.item() == 1.0 else "rounds" if y.item() == 1.0 + 2**-7 else y.item())
"""


def test_the_interpreter_truncates_to_bfloat16(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Why the harness replaces the interpreter's cast: the day this fails, `make_the_interpreter_round` can go."""
    path = tmp_path / "canary.py"
    path.write_text(CANARY)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "truncates"


def strides_for(text: str) -> dict[str, tuple[int, ...]]:
    cols = parse(text).cols
    return dict.fromkeys(("x", "r", "out0", "out1"), (cols, 1))


def test_text_is_deterministic_and_names_are_arguments() -> None:
    text = norm_program("layer_norm", 768, "bf16", residual_index="row % s0", sizes="s0")
    program = parse(text)
    strides = {"x": (None, 1), "r": (768, 1), "out0": (768, 1), "out1": (768, None)}
    sources = {triton_code.generate(program, schedules.choose(program), strides) for _ in range(3)}
    assert len(sources) == 1
    names = ["x_ptr", "r_ptr", "w_ptr", "beta_ptr", "out0_ptr", "out1_ptr", "rows", "s0", "x_stride0", "out1_stride1"]
    assert triton_code.arguments(program, schedules.choose(program), strides) == names
    assert f"def {triton_code.kernel_name(program)}({', '.join(names)}):" in sources.pop()


def test_the_schedule_does_not_depend_on_rows() -> None:
    for cols in COLS:
        program = parse(norm_program("layer_norm", cols, "bf16"))
        assert len({schedules.choose(program, rows) for rows in (None, 0, 1, 7, 1 << 20)}) == 1


def test_equal_texts_share_a_kernel_and_grid_takes_symbols() -> None:
    import sympy

    text = norm_program("rms_norm", 64, "f32")
    program = parse(text)
    schedule = schedules.choose(program)
    source = triton_code.generate(program, schedule, strides_for(text))
    name = triton_code.kernel_name(program)
    assert triton_code.load(source, name) is triton_code.load(source, name)
    rows = sympy.Symbol("s7", integer=True, positive=True)
    blocks = schedules.instances(program, schedule, rows, 132)
    for n in (1, 31, 32, 33, 1000):
        expected = -(-n // schedule.rows_per_program)
        assert blocks.subs(rows, n) == schedules.instances(program, schedule, n, 132) == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("in x: tile f32 [row]\nc: col f32 = col_sum(x)\nout c", "a row schedule is not for 1 column sums"),
        ("in x: tile f32 [row]\nin w: col f32\ny: tile f32 = mul(x, w)\nout y [row]\nout w", "but w is none"),
        ("in x: tile f32 [0, row]\ny: tile f32 = neg(x)\nout y [row]", "x: expected 3 strides"),
    ],
)
def test_what_no_schedule_computes(lines: str, message: str) -> None:
    program = parse(f"row_program cols=8\n{lines}")
    with pytest.raises(ProgramError, match=message):
        triton_code.generate(program, schedules.Schedule("row", 8, 1, 1), {"x": (8, 1), "out0": (8, 1)})


def test_a_row_schedule_must_hold_the_row() -> None:
    text = norm_program("rms_norm", 100, "f32")
    with pytest.raises(ProgramError, match="block_n=64, cols=100"):
        triton_code.generate(parse(text), schedules.Schedule("row", 64, 1, 1), strides_for(text))
    with pytest.raises(ProgramError, match="power of two, got block_n=100"):
        triton_code.generate(parse(text), schedules.Schedule("row", 100, 1, 1), strides_for(text))
