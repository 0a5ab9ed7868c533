"""What a graph spells twice is one value, and what it returns twice is two tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.capture import fuse

D = 16
aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("by_reference")


def norm(s: Tensor) -> Tensor:
    return F.rms_norm(s, (D,), None, 1e-6)


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {  # the adds that are left, the tiles that kernels write
    "the sum is returned": (lambda x, r: (x + r, norm(x + r)), 0, 2),
    "the sum is returned last": (lambda x, r: (norm(x + r), x + r), 0, 2),
    "the sum is multiplied": (lambda x, r: ((x + r) @ r.mT, norm(x + r)), 0, 2),
    "the sum is returned, and viewed": (lambda x, r: (x + r, norm((x + r).view(-1, D))), 0, 2),
    "returned twice": (lambda x, r: (x + r, norm(x + r), x + r), 1, 2),
    "a view is returned": (lambda x, r: (x + r, norm(x + r), (x + r).view(-1)), 1, 2),
    "a chain": (lambda x, r: (norm(x * 0.5 + r), (x * 0.5 + r).exp()), 0, 2),
    "other numbers": (lambda x, r: (norm(x * 0.5 + r), x * 0.25 + r), 1, 1),
    "other signs of zero": (lambda x, r: (norm(x + 0.0 * r), x + -0.0 * r), 1, 1),
    "the other order": (lambda x, r: (norm(x + r), r + x), 1, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_merged(name: str) -> None:
    fn, adds, written = CASES[name]
    x, r = torch.randn(3, 5, D), torch.randn(3, 5, D)
    with torch.no_grad():
        captured = fuse(fn, x, r)
        wanted = fn(x, r)
    assert captured.reasons == [] and len(captured.kernels) == 1
    assert captured.ops()[aten.add.Tensor] == adds
    assert captured.programs[0].count("\nout ") == written
    for got, want in zip(captured.result, wanted, strict=True):
        torch.testing.assert_close(got, want)
    pointers = [t.untyped_storage().data_ptr() for t in captured.result]
    assert len(set(pointers)) == len(pointers)


def test_random_numbers_are_drawn_twice() -> None:
    x = torch.randn(64, D)
    torch._dynamo.reset()
    fn = torch.compile(lambda: (F.dropout(x, 0.5), F.dropout(x, 0.5)), backend="fusepass")
    first, second = fn()
    assert not torch.equal(first, second)


def test_a_sum_after_a_write_is_another_sum() -> None:
    def fn(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        first = x + r
        x.add_(1)
        return first, norm(x + r)

    x, r = torch.randn(3, D), torch.randn(3, D)
    wanted = fn(x.clone(), r)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(fn, backend="fusepass")(x.clone(), r), wanted, strict=True):
        torch.testing.assert_close(got, want)
