"""An output is written over an operand that nothing needs any more, and only then."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fusepass.kernels.cpp_placement import overwritable
from fusepass.row_program import parse

D = 64
STRICT = {"fusepass.strict": True, "fx_graph_cache": False}


def _call(fn: Callable[..., object], *args: Tensor) -> tuple[str, list[str], list[str]]:
    """The wrapper's code, and the operands and outputs of its last fused call; the result is compared with eager's."""
    before = [a.clone() for a in args]
    with torch.no_grad():
        got, code = run_and_get_code(torch.compile(fn, backend="fusepass", options=STRICT), *args)
        torch.testing.assert_close(got, fn(*args))
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b), "an input of the user's must not change"
    call = code[0][code[0].index("def call(") :]
    *_, found = re.finditer(r"^ +(fusepass_\w+)\((.*)\)$", call, re.M)
    program = re.search(rf"^{found[1]} = fusepass_kernel\('''(.*?)'''\)", code[0], re.M | re.S)
    assert program is not None
    tensors = re.findall(r"\b(?:buf|arg)\d\w*", found[2])
    n_operands = program[1].count("\nin ")
    return call, tensors[:n_operands], tensors[n_operands:]


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w)


def test_both_outputs_over_operands_that_die() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = _mm(x, w) + _mm(x, w.t())
        return s, F.rms_norm(s, (D,))

    call, operands, outputs = _call(fn, torch.randn(8, D), torch.randn(D, D))
    assert set(outputs) == set(operands)
    assert "clone" not in call and "copy_" not in call


def test_an_input_of_the_graph_is_kept() -> None:
    fn = lambda x, r: F.layer_norm(x + r, (D,))  # noqa: E731
    _, operands, outputs = _call(fn, torch.randn(8, D), torch.randn(8, D))
    assert set(outputs).isdisjoint(operands)


def test_what_is_used_later_or_returned_is_kept() -> None:
    def used_later(x: Tensor, w: Tensor) -> Tensor:
        r = _mm(x, w)
        return _mm(F.rms_norm(x + r, (D,)), r)

    def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = _mm(x, w)
        return F.rms_norm(x + r, (D,)), r.view(-1)

    for fn in (used_later, returned):
        call, operands, outputs = _call(fn, *(torch.randn(D, D, dtype=torch.float64) for _ in range(2)))
        assert set(outputs).isdisjoint(operands) and "clone" not in call


def test_two_operands_in_one_memory_are_kept() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        r = _mm(x, w)
        return F.rms_norm(r[:4] + r[4:], (D,))

    _, operands, outputs = _call(fn, torch.randn(8, D), torch.randn(D, D))
    assert set(outputs).isdisjoint(operands)


def test_another_dtype_is_kept() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x.double() + _mm(x, w), (D,))

    _, operands, outputs = _call(fn, torch.randn(8, D), torch.randn(D, D))
    assert set(outputs).isdisjoint(operands)


def test_a_chain_of_blocks_needs_no_buffers_beyond_inductors_own() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        s = _mm(x, w)
        for _ in range(6):
            s = s + _mm(F.rms_norm(s, (D,)), w)
        return F.rms_norm(s, (D,))

    call, _, _ = _call(fn, torch.randn(8, D), torch.randn(D, D))
    torch._dynamo.reset()
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(fn), torch.randn(8, D), torch.randn(D, D))
    tile = rf"empty_strided_cpu\(\(8, {D}\)"
    assert len(re.findall(tile, call)) <= len(re.findall(tile, code[0][code[0].index("def call(") :]))


HEAD = """row_program cols=8
in x0: tile f32 [row]
in x1: tile f32 [row]
v0: tile f32 = add(x0, x1)
v1: row f32 = row_mean(v0)
"""


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("v2: tile f32 = sub(v0, v1)\nout v0 [row]\nout v2 [row]", ((0, 1), (0, 1))),
        ("v2: tile f32 = sub(x0, v1)\nout v0 [row]\nout v2 [row]", ((1,), (0, 1))),
        ("v2: tile bf16 = sub(v0, v1)\nout v0 [row]\nout v2 [row]", ((0, 1), ())),
        ("v2: row f32 = sqrt(v1)\nout v0 [row]\nout v2 [row]", ((0, 1), ())),
        ("v2: tile f32 = sub(v0, v1)\nout v2 [0, row]\nout v0 [row]", ((), (0, 1))),
    ],
)
def test_which_operands_a_program_lets_go(rest: str, expected: tuple[tuple[int, ...], ...]) -> None:
    assert overwritable(parse(HEAD + rest)) == expected
