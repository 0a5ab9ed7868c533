"""Column sums of programs that reduce no row: the columns are shared out, so that few partial sums are left of each."""

from __future__ import annotations

import pytest
import torch

from fusepass.errors import ProgramError
from fusepass.kernels.audit import compile_for, contiguous_strides
from fusepass.kernels.schedule import Schedule, choose, instances
from fusepass.kernels.traffic import moved_bytes, partial_bytes
from fusepass.row_program import parse
from tests.kernels.triton_harness import Case, check, run_cases

H200 = 132

ACTIVATION = """row_program cols={cols}
in x: tile {dtype} [row]
in g: tile {dtype} [row]
s: tile f32 = sigmoid(x)
m: tile f32 = mul(x, s)
d: tile {dtype} = mul(m, g)
c: col {dtype} = col_sum(d)
out d [row]
out c"""


def test_numbers() -> None:
    check(
        [
            Case(f"{dtype} {rows}x{cols} {layout}", ACTIVATION.format(cols=cols, dtype=dtype), rows, layout=layout)
            for dtype in ("bf16", "f32")
            for rows, cols in ((0, 3000), (1, 3000), (37, 3000), (5, 2048), (37, 1000))
            for layout in ("contiguous", "transposed")
        ]
    )


def test_a_kernel_that_sums_another_piece_is_caught() -> None:
    text = ACTIVATION.format(cols=3000, dtype="f32")
    edit = ("tl.program_id(2) * 512", "(tl.program_id(2) | 1) * 512")
    assert run_cases([Case("wrong piece", text, 37, edits=(edit,))])["wrong piece"] != ""


@pytest.mark.parametrize(("cols", "pieces"), [(512, 1), (1000, 2), (3000, 6), (4096, 8), (65536, 128)])
def test_instances_leave_few_partial_sums(cols: int, pieces: int) -> None:
    program = parse(ACTIVATION.format(cols=cols, dtype="bf16"))
    schedule = choose(program)
    assert (schedule.kind, schedule.pieces) == ("persistent", pieces)
    groups = instances(program, schedule, 8192, H200)
    assert groups * pieces <= H200 and groups >= 1
    assert partial_bytes(program, schedule, 8192, H200) == 2 * groups * cols * 4
    tile = 8192 * cols * 2
    assert moved_bytes(program, schedule, 8192, H200) == 3 * tile + cols * 2 + 2 * groups * cols * 4


def test_whole_rows_have_no_pieces() -> None:
    text = ACTIVATION.format(cols=4096, dtype="f32") + "\nout r [row]"
    program = parse(text.replace("out d", "r: row f32 = row_sum(d)\nout d"))
    with pytest.raises(ProgramError, match="computes whole rows"):
        Schedule("persistent", 1024, 1, 4, pieces=4).verify(program)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiled_ahead_of_time(target: str) -> None:
    program = parse(ACTIVATION.format(cols=4096, dtype="bf16"))
    audit = compile_for(program, choose(program), contiguous_strides(program), target)
    assert (audit.spills, audit.load_bits, audit.store_bits) == (0, 128, 128)
    assert (audit.tile_loads, audit.tile_stores) == (2, 1)
    assert torch.finfo(torch.bfloat16).bits * 8 == audit.load_bits
