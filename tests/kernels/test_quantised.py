"""Quantised outputs of generated kernels: int8 towards zero, FP8 to nearest, bit for bit as torch converts."""

from __future__ import annotations

import pytest
import torch

from fusepass.errors import ProgramError
from fusepass.kernels import audit, reference
from fusepass.kernels.schedule import choose
from fusepass.row_program import parse
from tests.kernels.cpp_harness import operands, run
from tests.kernels.norm_programs import QUANTISED_PROGRAM
from tests.kernels.triton_harness import Case
from tests.kernels.triton_harness import check as check_triton


def by_torch(x: torch.Tensor, fp8: torch.dtype) -> list[torch.Tensor]:
    x = x.float()
    largest = x.abs().amax(-1).clamp_min(1e-12)
    s8, s4 = largest / 127, largest / 448
    int8 = (x / s8[:, None]).round().clamp(-128, 127).to(torch.int8)
    return [int8, s8, (x / s4[:, None]).clamp(-448, 448).to(fp8), s4]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), [(0, 48), (1, 1), (7, 48), (33, 1000), (3, 4096)])
def test_cpp(rows: int, cols: int, dtype: str, fp8: str) -> None:
    text = QUANTISED_PROGRAM.format(cols=cols, dtype=dtype, fp8=fp8)
    program = parse(text)
    (x,) = operands(program, rows)
    expected = by_torch(x, program.values["w"].dtype)
    for got, want, again in zip(run(text, rows, [x]), expected, reference.evaluate(program, rows, [x]), strict=True):
        assert got.dtype == want.dtype and torch.equal(bits(got), bits(want))
        assert torch.equal(bits(again), bits(want))


def test_rounding_is_half_to_even() -> None:
    head = "row_program cols=20\nin x: tile f32 [row]\n"
    text = f"{head}r: tile f32 = round(x)\ni: tile i8 = cast(r)\nout r [row]\nout i [row]"
    x = torch.cat([torch.arange(-9, 9) / 2.0, torch.tensor([1e9, -0.3])]).view(1, 20)
    rounded, small = run(text, 1, [x])
    assert torch.equal(rounded, x.round()) and torch.equal(rounded.signbit(), x.round().signbit())
    assert torch.equal(small[:, :18], x.round().to(torch.int8)[:, :18])
    whole = f"{head}i: tile i8 = cast(x)\nout i [row]"
    assert torch.equal(run(whole, 1, [x])[0][:, :18], x.to(torch.int8)[:, :18]), "a cast alone goes towards zero"


def test_triton_in_the_interpreter() -> None:
    cases = [
        Case(
            f"{dtype} {fp8} {rows}x{cols} {schedule}",
            QUANTISED_PROGRAM.format(cols=cols, dtype=dtype, fp8=fp8),
            rows,
            schedule,
        )
        for dtype, fp8 in (("f32", "e4m3"), ("bf16", "e5m2"))
        for rows, cols, schedule in ((5, 48, None), (3, 50, ("loop", 16, 2)), (1, 1000, None))
    ]
    check_triton(cases)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_triton_ahead_of_time(target: str) -> None:
    program = parse(QUANTISED_PROGRAM.format(cols=4096, dtype="bf16", fp8="e4m3"))
    result = audit.compile_for(program, choose(program), audit.contiguous_strides(program), target)
    assert result.spills == 0 and (result.load_bits, result.store_bits) == (128, 128)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("i: tile i8 = cast(x)\nj: tile f32 = add(i, 1.0)", "i is i8, which is only stored"),
        ("i: tile i8 = add(x, 1.0)", "a comparison gives b8 and everything else a float"),
        ("i: tile e4m3 = row_max(x)", "a comparison gives b8 and everything else a float"),
    ],
)
def test_a_quantised_value_is_what_a_cast_stores(line: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        parse(f"row_program cols=8\nin x: tile f32 [row]\n{line}\nout {line.split(':')[0]} [row]")
    with pytest.raises(ProgramError, match="i8 is no operand"):
        parse("row_program cols=8\nin x: tile i8 [row]\nout x [row]")
