"""How many bytes the GPU kernels move, from their programs and schedules alone."""

from __future__ import annotations

import pytest

from fusepass.kernels import traffic
from fusepass.kernels.schedule import Schedule, choose, instances
from fusepass.kernels.source import source
from fusepass.row_program import parse
from tests.kernels.norm_programs import norm_backward_program, norm_program

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("rows", "cols", "most"),
    [
        (2048, 4096, 4.15),
        (4096, 4096, 4.15),
        (8192, 1024, 4.15),
        (8192, 4096, 4.15),
        (8192, 8192, 4.15),
        (8192, 16384, 6.2),
    ],
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_tiles_of_a_backward_behind_a_biased_linear(norm: str, rows: int, cols: int, most: float) -> None:
    program = parse(norm_backward_program(norm, cols, "bf16"))
    moved = traffic.moved_bytes(program, choose(program), rows, H200) / (rows * cols * 2)
    assert int(most) < moved <= most


def test_every_byte_is_counted() -> None:
    program = parse(norm_backward_program("layer_norm", 1000, "bf16"))
    persistent, wide = Schedule("persistent", 1024, 4, 8, 4), Schedule("wide", 256, 1, 8, 3, 8)
    rows, tile = 4096, 4096 * 1000 * 2
    count = instances(program, persistent, rows, H200)
    assert count == 47
    partial = 2 * count * 3 * 1000 * 4
    once = 2 * rows * 4 + 1000 * 2 + 3 * 1000 * 2  # mean and rstd; gamma; three column sums
    assert traffic.partial_bytes(program, persistent, rows, H200) == partial
    assert traffic.moved_bytes(program, persistent, rows, H200) == 4 * tile + partial + once
    # Two tiles again for the statistics; four pieces read mean and rstd, and three row values that were written.
    kept = rows * 3 * 4 * (1 + 4)
    assert traffic.moved_bytes(program, wide, rows, H200) == 6 * tile + partial + once + 4 * 2 * rows * 4 + kept
    assert traffic.tile_traffic(program, wide) == (5, 1)


def test_forward_and_repeated_operands() -> None:
    program = parse(norm_program("rms_norm", 768, "bf16", residual_index="0, row % 128"))
    tile = 1024 * 768 * 2
    assert traffic.moved_bytes(program, choose(program), 1024, H200) == 3 * tile + tile // 8 + 768 * 2
    assert traffic.partial_bytes(program, choose(program), 1024, H200) == 0
    sized = parse(norm_program("rms_norm", 768, "bf16", residual_index="row // s0, 0", sizes="s0"))
    assert traffic.moved_bytes(sized, choose(sized), 1024, H200) == 4 * tile + 768 * 2, "the size is not known here"


def test_the_source_to_read_holds_both_kernels() -> None:
    suffix, text = source(parse(norm_backward_program("rms_norm", 768, "bf16")), "cuda")
    assert suffix == ".py"
    assert text.count("\ndef fusepass_") == 2
    compile(text, "kernel.py", "exec")
