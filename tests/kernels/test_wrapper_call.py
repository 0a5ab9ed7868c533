"""Which strides a direct call hands to the kernel, and where a tensor has to be looked at when it runs."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from fusepass._torch_compat import PlacedTensor
from fusepass.kernels.wrapper_call import direct_call

PROGRAM = """row_program cols=8
in x: tile f32 [row]
in p: tile f32 [0, row % 5]
in g: row f32 [row]
in w: col f32
in a: scalar f32
v0: tile f32 = add(x, p)
v1: tile f32 = mul(v0, g)
v2: tile f32 = fma(v1, w, a)
out v2 [row]"""
F32 = torch.float32
GOOD: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # size and stride
    "x": ((15, 8), (8, 1)),
    "p": ((1, 5, 8), (40, 8, 1)),
    "g": ((15,), (1,)),
    "w": ((8,), (1,)),
    "a": ((), ()),
    "out": ((15, 8), (8, 1)),
}


def call(rows: Any = 15, dtype: torch.dtype = F32, **tensors: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Any:
    placed = [PlacedTensor(n, dtype if n in tensors else F32, *tensors.get(n, t)) for n, t in GOOD.items()]
    return direct_call(PROGRAM, rows, placed[:-1], [], placed[-1:])


def strides_of(name: str, found: Any) -> list[Any]:
    arguments = found[2]
    at = arguments.index(name) + 1
    end = next((i for i in range(at, len(arguments)) if isinstance(arguments[i], str)), len(arguments))
    return arguments[at:end]  # type: ignore[no-any-return]


def test_the_whole_call() -> None:
    name, definition, arguments = call()
    assert name.startswith("fusepass_") and definition == f"fusepass_kernel('''{PROGRAM}''')"
    expected = ["torch.get_num_threads()", 15, 8, "x", 8, 1, "p", 40, 8, 1, "g", 1, "w", 1, "a", "out", 8, 1]
    assert arguments == expected


@pytest.mark.parametrize(
    ("name", "size", "stride", "expected"),
    [
        ("x", (3, 5, 8), (40, 8, 1), [8, 1]),
        ("x", (3, 5, 8), (80, 16, 2), [16, 2]),
        ("x", (3, 1, 5, 8), (40, 7, 8, 1), [8, 1]),
        ("x", (3, 5, 8), (0, 0, 1), [0, 1]),
        ("g", (15, 1), (3, 1), [3]),
        ("g", (3, 5, 1), (5, 1, 1), [1]),
        ("g", (3, 5), (5, 1), [1]),
        ("w", (1, 8), (9, 2), [2]),
        ("w", (8,), (0,), [0]),
        ("a", (1, 1), (1, 1), []),
        ("x", (3, 5, 8), (8, 24, 1), None),
        ("x", (14, 8), (8, 1), None),
        ("x", (15, 9), (9, 1), None),
        ("x", (120,), (1,), None),
        ("p", (5, 8), (8, 1), None),
        ("w", (7,), (1,), None),
        ("w", (2, 4), (4, 1), None),
        ("a", (2,), (1,), None),
        ("out", (16, 8), (8, 1), None),
    ],
)
def test_strides(name: str, size: tuple[int, ...], stride: tuple[int, ...], expected: list[int] | None) -> None:
    found = call(**{name: (size, stride)})
    assert (None if found is None else strides_of(name, found)) == expected


def test_another_dtype_is_looked_at_when_it_runs() -> None:
    assert call(dtype=torch.bfloat16, x=GOOD["x"]) is None


def test_symbolic_sizes() -> None:
    b, t = sympy.symbols("s0 s1", positive=True, integer=True)
    found = call(b * t, x=((b, t, 8), (8 * t, 8, 1)), g=((b, t, 1), (t, 1, 1)), out=((b * t, 8), (8, 1)))
    assert strides_of("x", found) == [8, 1] and strides_of("g", found) == [1] and found[2][1] == b * t
    assert call(b * t, x=((b + t, 8), (8, 1)), g=((b * t,), (1,)), out=((b * t, 8), (8, 1))) is None
