"""Embeddings in front of a first site: the kernel looks the rows up itself, as Inductor's own kernels do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import fuse
from tests.tolerances import assert_close_to_fp64, assert_same_sums

aten = torch.ops.aten
D, V = 48, 31

PROGRAM = """\
row_program cols=48
in p0: row i64 [row]
in x0: tile bf16 [p0 < 31]
in x1: tile bf16 [row % 6]
v0: tile bf16 = add(x0, x1)
v1: tile f32 = cast(v0)
v2: tile f32 = square(v1)
v3: row f32 = row_mean(v2)
v4: row f32 = add(v3, EPS)
v5: row f32 = rsqrt(v4)
v6: tile f32 = mul(v1, v5)
v7: tile bf16 = cast(v6)
out v0 [row]
out v7 [row]"""


def tables(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(V, D, dtype=dtype), torch.randn(8, D, dtype=dtype)


def first_site(ids: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, Tensor]:
    h = F.embedding(ids, wte) + F.embedding(torch.arange(ids.shape[1]), wpe)
    return h, F.rms_norm(h, (D,), eps=1e-6)


@torch.no_grad()
def test_the_program_of_a_first_site_has_positions_for_tokens_and_none_for_counted_ones() -> None:
    captured = fuse(first_site, torch.randint(V, (2, 6)), *tables())
    assert [re.sub(r"9.99\d+e-07|1e-06", "EPS", p) for p in captured.programs] == [PROGRAM]
    (gm,) = captured.after
    assert not [n for n in gm.graph.nodes if n.target in (aten.embedding.default, torch.ops.prims.iota.default)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values(dtype: torch.dtype, ids_dtype: torch.dtype, dynamic: bool) -> None:
    ids, (wte, wpe) = torch.randint(V, (3, 6), dtype=ids_dtype), tables(dtype)
    ids[1] = ids[0]
    captured = fuse(first_site, ids, wte, wpe, dynamic=dynamic)
    assert sum(s.fused for s in captured.sites) == 1
    assert ("[p0 < n0]" if dynamic else "[p0 < 31]") in captured.programs[0]
    eager, exact = first_site(ids, wte, wpe), first_site(ids, wte.double(), wpe.double())
    assert torch.equal(captured.result[0], eager[0])
    assert_close_to_fp64(captured.result[1], eager[1], exact[1], dtype)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one row of ids for all": (lambda ids: ids[:1].expand(4, 6), "in p0: row i64 [row // 6, row % 6]"),
    "every other id": (lambda ids: ids.repeat_interleave(2, 1)[:, ::2], "in p0: row i64 [row]"),
    "ids by columns": (lambda ids: ids.t().contiguous().t(), "in p0: row i64 [row // 6, row % 6]"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_of_other_layouts(name: str) -> None:
    layout, line = LAYOUTS[name]
    ids, (wte, wpe) = layout(torch.randint(V, (4, 6))), tables(torch.float32)
    captured = fuse(first_site, ids, wte, wpe)
    assert torch.equal(captured.result[0], first_site(ids, wte, wpe)[0])
    assert line in captured.programs[0]


@torch.no_grad()
def test_positions_that_the_graph_repeats_are_read_before_they_are_repeated() -> None:
    ids, (wte, wpe) = torch.randint(V, (1, 6)), tables(torch.float32)

    def repeated(ids: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, Tensor]:
        return first_site(ids.expand(4, 6), wte, wpe)

    captured = fuse(repeated, ids, wte, wpe)
    assert "in p0: row i64 [0, row % 6]" in captured.programs[0]
    assert torch.equal(captured.result[0], repeated(ids, wte, wpe)[0])


def kept(ids: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    e = F.embedding(ids, wte)
    return e, *first_site_of(e, wpe)


def first_site_of(e: Tensor, wpe: Tensor) -> tuple[Tensor, Tensor]:
    h = e + wpe[:6]
    return h, F.rms_norm(h, (D,))


def multiplied(ids: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, ...]:
    e = F.embedding(ids, wte)
    return e @ wpe.t(), *first_site_of(e, wpe)


def columns_apart(ids: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, Tensor]:
    return first_site_of(F.embedding(ids, wte.t().contiguous().t()), wpe)


@torch.no_grad()
@pytest.mark.parametrize("fn", [kept, multiplied, columns_apart])
def test_what_is_in_memory_anyway_or_lies_otherwise_is_read_from_there(fn: Callable[..., tuple[Tensor, ...]]) -> None:
    ids, (wte, wpe) = torch.randint(V, (2, 6)), tables(torch.float32)
    captured = fuse(fn, ids, wte, wpe)
    (program,) = captured.programs
    assert "in p0" not in program
    eager, exact = fn(ids, wte, wpe), fn(ids, wte.double(), wpe.double())
    for got, e, x in zip(captured.result, eager, exact, strict=True):
        assert_close_to_fp64(got, e, x, torch.float32)


@torch.no_grad()
def test_counted_positions_beyond_the_table_are_left_to_raise() -> None:
    with pytest.raises(IndexError):
        fuse(first_site, torch.randint(V, (2, 9)), *tables())


def test_gradients_are_those_of_eager() -> None:
    ids = torch.randint(V, (4, 6))
    leaves = [t.requires_grad_() for t in tables(torch.float64)]
    expected = torch.autograd.grad([t.square().sum() for t in first_site(ids, *leaves)], leaves)
    result = fuse(first_site, ids, *leaves).result
    got = torch.autograd.grad([t.square().sum() for t in result], leaves)
    for g, e in zip(got, expected, strict=True):
        assert_same_sums(g, e, summed=ids.numel())
