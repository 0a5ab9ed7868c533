"""Generated Triton kernels with column sums, run in Triton's interpreter and compared with the reference evaluator.

Partial sums and kept row values lie in buffers full of NaN: one that is read without having been written shows. Every
case runs twice and must give the same bits.
"""

from __future__ import annotations

import itertools

import pytest

from fusepass.errors import ProgramError
from fusepass.kernels import schedule as schedules
from fusepass.kernels import triton_code
from fusepass.row_program import parse
from tests.kernels.norm_programs import norm_backward_program, norm_program
from tests.kernels.triton_harness import Case, check, run_cases

NORMS = ("layer_norm", "rms_norm")


def forced(cols: int) -> list[tuple[str, int, int]]:
    """Whole rows two at a time, and pieces of which the last is not full, one row and two rows at a time."""
    width = schedules.next_power_of_two(cols)
    piece = max(1, width // 4)
    return [("persistent", width, 2), ("wide", piece, 1), ("wide", piece, 2)]


def backward_cases(
    norm: str, dtype: str, cols: tuple[int, ...], rows: tuple[int, ...], only_chosen: bool = False
) -> list[Case]:
    return [
        Case(f"{norm} {dtype} {r}x{n} {schedule}", norm_backward_program(norm, n, dtype), r, schedule)
        for n, r in itertools.product(cols, rows)
        for schedule in (None, *([] if only_chosen else forced(n)))
    ]


@pytest.mark.parametrize("norm", NORMS)
def test_backward(norm: str) -> None:
    check(
        [
            *backward_cases(norm, "bf16", (1, 48), (3,)),
            *backward_cases(norm, "f32", (48,), (0, 1)),
            *backward_cases(norm, "f16", (1000,), (3,), only_chosen=True),
            *backward_cases(norm, "f64", (48,), (3,), only_chosen=True),
            *backward_cases(norm, "bf16", (48,), (1025,), only_chosen=True),
            *backward_cases(norm, "bf16", (8192, 16384), (3,), only_chosen=True),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16", "f64"])
@pytest.mark.parametrize("norm", NORMS)
def test_backward_at_every_size(norm: str, dtype: str) -> None:
    """The interpreter takes milliseconds for each row of each instance: many rows only where several make a tile."""
    check(backward_cases(norm, dtype, (1, 48, 1000), (0, 1, 3)))
    check(backward_cases(norm, dtype, (1, 48), (1025,), only_chosen=True))
    check(backward_cases(norm, dtype, (8192,), (3,), only_chosen=True))


@pytest.mark.parametrize("layout", ["padded", "transposed", "expanded"])
def test_layouts(layout: str) -> None:
    cases = [
        Case(f"{norm} {dtype} {schedule}", norm_backward_program(norm, 48, dtype), 5, schedule, layout)
        for norm, dtype in (("layer_norm", "bf16"), ("rms_norm", "f32"))
        for schedule in (None, *forced(48))
    ]
    check(cases)


def test_any_number_of_instances() -> None:
    """Fewer than there are multiprocessors, more than there are blocks of rows, and one."""
    text = norm_backward_program("layer_norm", 48, "bf16")
    cases = [
        Case(f"{n} instances, {rows} rows, {schedule}", text, rows, schedule, instances=n)
        for n, rows in itertools.product((1, 3, 40), (0, 7))
        for schedule in forced(48)
    ]
    check(cases)


def test_dropout() -> None:
    cases = [
        Case(f"{norm} {dtype} {schedule}", norm_backward_program(norm, 48, dtype, dropout=0.1), 5, schedule)
        for norm, dtype in itertools.product(NORMS, ("bf16", "f32"))
        for schedule in (None, *forced(48))
    ]
    check(cases)


def forward_with_sums(norm: str, cols: int, dtype: str) -> str:
    """A forward, whose statistics wait for each other, with column sums of its input, its sum and its output."""
    text = norm_program(norm, cols, dtype, bias=True, residual_index="0, row % 3", save_stats=True)
    last = text.split("\nout ")[2].split(" ")[0]
    sums = "".join(f"c{i}: col {dtype} = col_sum({v})\n" for i, v in enumerate(("x", "s", last)))
    return text.replace("\nout ", f"\n{sums}out ", 1) + "".join(f"\nout c{i}" for i in range(3))


SUMS_ALONE = """row_program cols=50
in x: tile bf16 [row]
in b: tile b8 [row]
in m: row b8 [row]
c: col bf16 = col_sum(x)
d: col f32 = col_sum(x)
p: tile f32 = mul(x, m)
e: col f64 = col_sum(p)
f: col f32 = col_sum(b)
out c
out d
out c
out e
out f
"""

SCALARS_AND_COLUMNS = """row_program cols=50
in x: tile f32 [row]
in g: row f32 [row]
in w: col f32
in t: scalar f32
wt: col f32 = mul(w, t)
tt: scalar f32 = mul(t, t)
a: tile f32 = mul(x, wt)
big: row f32 = row_max(a)
twice: row f32 = mul(big, tt)
y: tile f32 = sub(a, twice)
total: row f32 = row_mean(y)
z: tile f32 = add(y, total)
q: tile f32 = mul(z, g)
c: col f32 = col_sum(q)
out z [row]
out big [row]
out g [row]
out x [row]
out c
"""


def test_other_programs() -> None:
    texts = {"sums alone": SUMS_ALONE, "scalars and columns": SCALARS_AND_COLUMNS}
    texts |= {f"forward {dtype}": forward_with_sums("layer_norm", 50, dtype) for dtype in ("bf16", "f64")}
    check(
        [
            Case(f"{name} {schedule}", text, 5, schedule, "padded")
            for name, text in texts.items()
            for schedule in (None, *forced(50))
        ]
    )


WRONG = {
    "persistent": {
        "rows beyond the last are summed": ("tl.where(row_mask, dyw, 0.0)", "(dyw + 1.0)"),
        "a row too many": ("row < rows", "row < rows + 1"),
        "a partial sum is left out": ("program < programs", "program < programs - 1"),
        "a partial sum is not written": ("partial + 48", "partial + 0"),
        "sums change places": ("tl.store(out1_ptr + col", "tl.store(out2_ptr + col"),
        "only some columns are summed": ("mask=col_mask)", "mask=col < 47)"),
        "sums are kept in bfloat16": ("dbeta_sum += ", "dbeta_sum = dbeta_sum.to(tl.bfloat16).to(tl.float32) + "),
        "instances overlap": ("tl.num_programs(0), num", "1, num"),
        "dx is summed before it is rounded": ("(ds + dnar)", "(ds + dxw)"),
    },
    "wide": {
        "a row too many": ("row < end", "row < end + 1"),
        "a row is left out": ("tl.minimum(begin + count, rows)", "tl.minimum(begin + count, rows - 1)"),
        "a partial sum is left out": ("program < programs", "program < programs - 1"),
        "a row value is not kept": ("tl.store(kept_ptr + row * 3, ", "tl.store(kept_ptr + row * 3 + 1, "),
        "another row's value": ("tl.load(kept_ptr + row * 3 + 1", "tl.load(kept_ptr + (row - 1) * 3 + 1"),
        "columns beyond the last in a statistic": ("tl.where(mask, dn, 0.0)", "tl.where(mask, dn, 0.5)"),
        "sums run on from piece to piece": ("dbias_sum = tl.zeros([2, 16], tl.float32)", "dbias_sum = zero + 1.0"),
    },
}


@pytest.mark.parametrize("schedule", [("persistent", 64, 2), ("wide", 16, 2)], ids=["persistent", "wide"])
def test_wrong_kernels_are_found(schedule: tuple[str, int, int]) -> None:
    cols = 45 if schedule[0] == "wide" else 48
    texts = {dtype: norm_backward_program("layer_norm", cols, dtype) for dtype in ("bf16", "f32")}
    cases = [
        Case(name, text, 29, schedule, data="shifted", edits=(edit,), instances=4)
        for name, edit in WRONG[schedule[0]].items()
        for text in [texts["f32" if "bfloat16" in name else "bf16"]]
    ]
    verdicts = run_cases(cases)
    accepted = [name for name, text in verdicts.items() if not text]
    broken = {name: text for name, text in verdicts.items() if "Traceback" in text}
    assert not accepted, f"wrong kernels that the comparison accepts: {accepted}"
    assert not broken, broken


@pytest.mark.parametrize("multiprocessors", [1, 132, 304])
def test_partial_sums_stay_small(multiprocessors: int) -> None:
    """At most one instance per multiprocessor and per block of rows, at least one, and little traffic."""
    for norm, cols, dtype in itertools.product(NORMS, (48, 1024, 8192, 16384), ("bf16", "f32")):
        program = parse(norm_backward_program(norm, cols, dtype))
        schedule = schedules.choose(program)
        for rows in (0, 1, 100, 1025, 2048, 8192, 1 << 20):
            count = schedules.instances(program, schedule, rows, multiprocessors)
            blocks = -(-rows // schedule.rows_per_program)
            assert 1 <= count <= max(1, min(multiprocessors, blocks)), (norm, cols, dtype, rows, count)
            moved = count * 2 * 4 * (3 if norm == "layer_norm" else 2)
            share = moved / max(1, rows * (2 if dtype == "bf16" else 4))
            assert share <= 0.14 or count <= schedules.FEWEST_INSTANCES, (norm, cols, dtype, rows, count, share)


def test_symbolic_rows_give_the_same_number_of_instances() -> None:
    """The formula on whatever stands for a number: here a list of the functions to call."""
    program = parse(norm_backward_program("layer_norm", 1024, "bf16"))
    schedule = schedules.choose(program)
    steps: list[tuple[object, ...]] = []

    def record(function: object, *args: object) -> object:
        steps.append((function, *args))
        return f"step {len(steps) - 1}"

    result = schedules.instances(program, schedule, "rows", 132, record)
    for rows in (0, 1, 7, 300, 1025, 8192, 100_000):
        done: dict[object, object] = {"rows": rows}
        for i, (function, *args) in enumerate(steps):
            done[f"step {i}"] = function(*(done.get(a, a) for a in args))  # type: ignore[operator]
        assert done[result] == schedules.instances(program, schedule, rows, 132)


def test_the_schedule_does_not_depend_on_rows() -> None:
    for cols in (1, 48, 1000, 8192, 16384):
        program = parse(norm_backward_program("layer_norm", cols, "bf16"))
        assert len({schedules.choose(program, rows) for rows in (None, 0, 1, 7, 1 << 20)}) == 1


def test_wide_rows_and_many_sums_take_the_wide_schedule() -> None:
    def kind(cols: int, dtype: str = "bf16") -> str:
        return schedules.choose(parse(norm_backward_program("layer_norm", cols, dtype))).kind

    assert [kind(n) for n in (48, 4096, 8192, 8193, 16384)] == ["persistent"] * 3 + ["wide"] * 2
    assert kind(8192, "f64") == "wide"


def test_schedules_and_sums_must_fit() -> None:
    summing, plain = parse(norm_backward_program("rms_norm", 8, "f32")), parse(norm_program("rms_norm", 8, "f32"))
    with pytest.raises(ProgramError, match="a row schedule is not for 2 column sums"):
        schedules.Schedule("row", 8, 1, 1).verify(summing)
    with pytest.raises(ProgramError, match="a wide schedule is not for 0 column sums"):
        schedules.Schedule("wide", 8, 1, 1).verify(plain)
    with pytest.raises(ProgramError, match="persistent schedule needs block_n >= cols, got block_n=4, cols=8"):
        schedules.Schedule("persistent", 4, 1, 1).verify(summing)
    with pytest.raises(ProgramError, match="statistics_rows <= 4, the elements of a tile, got statistics_rows=8"):
        schedules.Schedule("wide", 4, 1, 1, statistics_rows=8).verify(summing)


def test_the_two_kernels_have_names_and_arguments() -> None:
    program = parse(norm_backward_program("rms_norm", 4096, "bf16"))
    strides = dict.fromkeys(("dy", "s", "ds", "out0"), (4096, 1)) | {"rstd": (1,)}
    wide = schedules.Schedule("wide", 1024, 1, 4, 3, 8)
    operands = [f"{o.name}_ptr" for o in program.operands]
    assert triton_code.arguments(program, schedules.choose(program), strides) == [
        *operands, "out0_ptr", "partial_ptr", "rows"
    ]  # fmt: skip
    assert triton_code.arguments(program, wide, strides)[-3:] == ["partial_ptr", "kept_ptr", "rows"]
    assert triton_code.sum_arguments(program) == ["partial_ptr", "out1_ptr", "out2_ptr", "programs"]
    source = triton_code.generate(program, wide, strides)
    assert source.count("@triton.jit\ndef fusepass_") == 2
    assert f"def {triton_code.sum_name(program)}(partial_ptr, out1_ptr, out2_ptr, programs):" in source
    assert "atomic" not in source
