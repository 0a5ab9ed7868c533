"""Kernels that look rows up in a table at positions, as an embedding does: C++, and Triton in its interpreter."""

from __future__ import annotations

import pytest
import torch

from fusepass.errors import PositionError, ProgramError
from fusepass.kernels import ops
from fusepass.kernels.audit import TARGETS, compile_for, contiguous_strides
from fusepass.kernels.schedule import choose
from fusepass.kernels.triton_code import generate
from fusepass.row_program import parse
from tests.kernels.cpp_harness import check as check_cpp
from tests.kernels.triton_harness import Case, check, run_cases

FORWARD = """
row_program cols={cols}
in p0: row {ids} [row]
in x0: tile {dtype} [p0 < 41]
in p1: row i64 [row % 7]
in x1: tile {dtype} [p1 < 9]
in w0: col {dtype}
v0: tile {dtype} = add(x0, x1)
v1: tile f32 = square(v0)
v2: row f32 = row_mean(v1)
v3: row f32 = add(v2, 1e-06)
v4: row f32 = rsqrt(v3)
v5: tile f32 = mul(v0, v4)
v6: tile {dtype} = mul(v5, w0)
out v0 [row]
out v6 [row]
"""

BACKWARD = """
row_program cols={cols} sizes=n0
in p0: row {ids} [row]
in x0: tile {dtype} [p0 < n0]
in r0: row f32 [row]
in x1: tile {dtype} [row]
v0: tile f32 = mul(x0, r0)
v1: tile f32 = mul(v0, x1)
v2: row f32 = row_mean(v1)
v3: tile f32 = mul(v0, v2)
v4: tile f32 = sub(x1, v3)
v5: tile {dtype} = mul(v4, r0)
v6: col f32 = col_sum(v1)
out v5 [row]
out v6
"""

COLUMNS = (24, 300, 1024, 9000)


@pytest.mark.parametrize("ids", ["i64", "i32"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_triton_schedule_looks_rows_up(dtype: str, ids: str) -> None:
    cases = []
    for cols in COLUMNS:
        forward, backward = (text.format(cols=cols, dtype=dtype, ids=ids) for text in (FORWARD, BACKWARD))
        layouts = ("contiguous", "padded") if cols < 9000 else ("contiguous",)
        for layout in layouts:
            cases.append(Case(f"forward {cols} {layout}", forward, 19, layout=layout))
            cases.append(Case(f"backward {cols} {layout}", backward, 19, sizes=(13,), layout=layout))
    kinds = {choose(parse(case.program)).kind for case in cases}
    assert kinds >= {"row", "persistent", "wide"}
    cases.append(Case("loop", FORWARD.format(cols=300, dtype=dtype, ids=ids), 5, schedule=("loop", 128, 1)))
    check(cases)


def test_a_triton_kernel_that_looks_another_row_up_is_caught() -> None:
    text = FORWARD.format(cols=300, dtype="f32", ids="i64")
    edit = ("tl.load(p0_ptr + row", "tl.load(p0_ptr + 0 * row")
    assert run_cases([Case("first position", text, 19, edits=(edit,))])["first position"] != ""


def test_triton_asserts_that_positions_are_in_the_table() -> None:
    program = parse(BACKWARD.format(cols=300, dtype="bf16", ids="i32"))
    text = generate(program, choose(program), contiguous_strides(program))
    assert text.count("tl.device_assert(") == 1
    assert '"index out of bounds: 0 <= p0 < n0"' in text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("text", "cols"), [(FORWARD, 768), (FORWARD, 4096), (BACKWARD, 768), (BACKWARD, 4096)])
def test_compiled_ahead_of_time(text: str, cols: int, target: str) -> None:
    program = parse(text.format(cols=cols, dtype="bf16", ids="i64"))
    audit = compile_for(program, choose(program), contiguous_strides(program), target)
    assert (audit.spills, audit.load_bits, audit.store_bits) == (0, 128, 128)


def tensors(text: str, rows: int, **size: int) -> list[torch.Tensor]:
    program = parse(text)
    bounds = {"p0": size.get("n0", 41), "p1": 9}
    made: list[torch.Tensor] = []
    for o in program.operands:
        if o.name in bounds:
            made.append(torch.randint(bounds[o.name], (7 if o.name == "p1" else rows,)).to(o.dtype))
        elif o.name == "r0":
            made.append(torch.rand(rows) + 0.5)
        else:
            lead = {"x0": (bounds["p0"],), "x1": (9,) if "p1" in text else (rows,), "w0": ()}[o.name]
            made.append(torch.randn(*lead, program.cols).to(o.dtype))
    return made


@pytest.mark.parametrize("ids", ["i64", "i32"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("cols", [24, 300])
def test_the_cpp_kernel_looks_rows_up(cols: int, dtype: str, ids: str) -> None:
    forward, backward = (text.format(cols=cols, dtype=dtype, ids=ids) for text in (FORWARD, BACKWARD))
    check_cpp(forward, 19, tensors(forward, 19))
    check_cpp(backward, 19, tensors(backward, 19, n0=13), (13,))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("position", [-1, 41, 2**40])
def test_a_position_outside_the_table_is_an_error_and_nothing_is_written(position: int) -> None:
    text = FORWARD.format(cols=300, dtype="f32", ids="i64")
    ins = tensors(text, 4096)
    ins[0][4000] = position
    outs = [torch.full((4096, 300), 7.0) for _ in range(2)]
    with pytest.raises(PositionError, match=f"operand x0: position {position} is not in the range from 0 to 40"):
        ops.run(text, 4096, ins, (), outs)
    assert issubclass(PositionError, IndexError)
    assert all(bool((o == 7).all()) for o in outs)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("in p0: row i64 [row]", "in p0: row f32 [row]", "p0"),
        ("[p0 < 41]", "[p9 < 41]", "p9"),
        ("[p0 < 41]", "[p0 < n7]", "n7"),
        ("v1: tile f32 = square(v0)", "v1: tile f32 = mul(v0, p0)", "is a position, and nothing else"),
        ("out v0 [row]", "out p0 [row]", "p0"),
    ],
)
def test_what_positions_may_not_be(line: str, instead: str, message: str) -> None:
    text = FORWARD.format(cols=24, dtype="f32", ids="i64")
    parse(text)
    with pytest.raises(ProgramError, match=message):
        parse(text.replace(line, instead))
