"""What the tests of the C++ kernels share: random operands, poisoned outputs, and the op checked against FP64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusepass.kernels import reference
from fusepass.row_program import Kind, RowProgram, parse
from tests.tolerances import assert_close_to_fp64, assert_same_sums

CANARY = 0xA5  # no truth value; fills whatever has no NaN
FEW = 8  # of fewer numbers than this, how near to FP64 each comes is luck


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers; of bools three in four are true, and an int64 is any."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.75
    if dtype is torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, tuple(shape), generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(program: RowProgram, rows: int) -> list[torch.Tensor]:
    """Random tensors for a program whose row indices are all `row`."""
    shapes = {Kind.TILE: (rows, program.cols), Kind.ROW: (rows,), Kind.COL: (program.cols,), Kind.SCALAR: ()}
    return [random_tensor(shapes[o.kind], o.dtype, seed) for seed, o in enumerate(program.operands)]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output full of NaN inside a larger buffer full of NaN, which must stay so: see `assert_canaries`."""
    pad = 64
    count = like.numel() + 2 * pad
    if like.dtype.itemsize == 1:
        buffer = torch.full((count,), CANARY, dtype=torch.uint8).view(like.dtype)
    else:
        buffer = torch.full((count,), torch.nan, dtype=like.dtype)
    return buffer[pad : pad + like.numel()].view(like.shape)


def assert_canaries(out: torch.Tensor) -> None:
    """Fails where something was written outside a poisoned output, or something that is no truth value into it."""
    start, stop = out.storage_offset(), out.storage_offset() + out.numel()
    buffer = torch.tensor([], dtype=out.dtype).set_(out.untyped_storage())
    around = torch.cat([buffer[:start].view(torch.uint8), buffer[stop:].view(torch.uint8)])
    if out.dtype.itemsize == 1:
        intact = bool((around == CANARY).all())
        is_true_or_false = out.dtype is not torch.bool or bool((buffer[start:stop].view(torch.uint8) <= 1).all())
        assert is_true_or_false, "neither 0 nor 1 in a bool"
    else:
        intact = bool(around.view(out.dtype).isnan().all())
    assert intact, "written outside the output"


def run(text: str, rows: int, ins: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """The op's outputs, as contiguous tensors that were NaN before."""
    like = reference.evaluate(parse(text), rows, ins, sizes)
    outs = [poisoned(t) for t in like]
    torch.ops.fusepass.row_program_(text, rows, ins, sizes, outs=outs)
    for out in outs:
        assert_canaries(out)
    return outs


def check(text: str, rows: int, ins: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """Runs the op and compares it with the reference in the program's dtypes and in FP64."""
    program = parse(text)
    outs = run(text, rows, ins, sizes)
    eager = reference.evaluate(program, rows, ins, sizes)
    exact = reference.evaluate(program, rows, ins, sizes, fp64=True)
    for out, e, x in zip(outs, eager, exact, strict=True):
        if e.dtype is torch.bool:
            assert torch.equal(out, e)
        elif e.dim() < 2 and e.numel() < FEW and e.dtype in (torch.float32, torch.float64):
            assert_same_sums(out, e, rows)
        else:
            assert_close_to_fp64(out, e, x, e.dtype)
    return outs


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def padded(t: torch.Tensor) -> torch.Tensor:
    """The same values, rows further apart than they are long."""
    return torch.full((t.shape[0], t.shape[1] + 5), torch.nan, dtype=t.dtype)[:, : t.shape[1]].copy_(t)


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, columns apart and rows adjacent."""
    return t.t().contiguous().t()


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The first row, repeated with stride 0."""
    return t[:1].expand(t.shape)


def every_other_column(t: torch.Tensor) -> torch.Tensor:
    return torch.full((t.shape[0], 2 * t.shape[1]), torch.nan, dtype=t.dtype)[:, ::2].copy_(t)


LAYOUTS = {f.__name__: f for f in (padded, transposed, expanded, every_other_column)}
