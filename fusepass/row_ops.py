"""The operations of a row program: one table that every consumer reads.

Each operation has a meaning (`torch`, used by the reference evaluator, and `sympy`, used by the recogniser) and two
spellings (`triton` and `cpp`), which may be expressions over `{0}`, `{1}`, ... Truth values are held as 1.0 and 0.0. A
new operation costs one line here, one line in `rules.py`, and, where C++ has no operator for it, one overload in
`kernels/cpp_prelude.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch


@dataclass(frozen=True)
class Pointwise:
    """An elementwise operation, computed in FP32 (FP64 if an argument or the result is FP64), then rounded."""

    arity: int
    torch: Callable[..., torch.Tensor]
    sympy: Callable[..., Any]
    triton: str
    cpp: str
    cheap: bool = True  # a handful of instructions: may be computed again rather than stored
    boolean: bool = False  # the result is a truth value: 1 or 0, of dtype b8


def _opaque(name: str) -> Callable[..., Any]:
    """A function that the recogniser knows only by name."""
    return sympy.Function(name, real=True)


def _comparison(name: str, function: Callable[..., torch.Tensor]) -> Pointwise:
    return Pointwise(
        2, function, _opaque(f"{name}_"), f"_{name}({{0}}, {{1}})", f"op_{name}({{0}}, {{1}})", boolean=True
    )


POINTWISE: dict[str, Pointwise] = {
    "cast": Pointwise(1, lambda a: a, lambda a: a, "{0}", "{0}"),
    "add": Pointwise(2, torch.add, lambda a, b: a + b, "{0} + {1}", "{0} + {1}"),
    "sub": Pointwise(2, torch.sub, lambda a, b: a - b, "{0} - {1}", "{0} - {1}"),
    "mul": Pointwise(2, torch.mul, lambda a, b: a * b, "{0} * {1}", "{0} * {1}"),
    "div": Pointwise(2, torch.div, lambda a, b: a / b, "_div({0}, {1})", "{0} / {1}"),
    "fma": Pointwise(
        3, lambda a, b, c: a * b + c, lambda a, b, c: a * b + c, "_fma({0}, {1}, {2})", "op_fma({0}, {1}, {2})"
    ),
    "neg": Pointwise(1, torch.neg, lambda a: -a, "{0} * -1.0", "op_neg({0})"),
    "abs": Pointwise(1, torch.abs, _opaque("abs_"), "tl.abs({0})", "op_abs({0})"),
    "square": Pointwise(1, torch.square, lambda a: a**2, "{0} * {0}", "{0} * {0}"),
    "sqrt": Pointwise(1, torch.sqrt, sympy.sqrt, "_sqrt({0})", "op_sqrt({0})"),
    "rsqrt": Pointwise(1, torch.rsqrt, lambda a: 1 / sympy.sqrt(a), "_rsqrt({0})", "op_rsqrt({0})"),
    "reciprocal": Pointwise(1, torch.reciprocal, lambda a: 1 / a, "_div(1.0, {0})", "op_reciprocal({0})"),
    "round": Pointwise(1, torch.round, _opaque("round_"), "_round({0})", "op_round({0})"),
    "exp": Pointwise(1, torch.exp, _opaque("exp_"), "_exp({0})", "op_exp({0})", cheap=False),
    "tanh": Pointwise(1, torch.tanh, _opaque("tanh_"), "_tanh({0})", "op_tanh({0})", cheap=False),
    "erf": Pointwise(1, torch.erf, _opaque("erf_"), "_erf({0})", "op_erf({0})", cheap=False),
    "sigmoid": Pointwise(1, torch.sigmoid, _opaque("sigmoid_"), "_sigmoid({0})", "op_sigmoid({0})", cheap=False),
    "relu": Pointwise(1, torch.relu, _opaque("relu_"), "_relu({0})", "op_relu({0})"),
    "maximum": Pointwise(2, torch.maximum, _opaque("maximum_"), "_maximum({0}, {1})", "op_maximum({0}, {1})"),
    "minimum": Pointwise(2, torch.minimum, _opaque("minimum_"), "_minimum({0}, {1})", "op_minimum({0}, {1})"),
    "lt": _comparison("lt", torch.lt),
    "le": _comparison("le", torch.le),
    "gt": _comparison("gt", torch.gt),
    "ge": _comparison("ge", torch.ge),
    "eq": _comparison("eq", torch.eq),
    "ne": _comparison("ne", torch.ne),
    "where": Pointwise(
        3,
        lambda c, a, b: torch.where(c != 0, a, b),
        _opaque("where_"),
        "_where({0}, {1}, {2})",
        "op_where({0}, {1}, {2})",
    ),
}

GENERATORS: dict[str, str] = {"rand": "cuda", "rand_cpu": "cpu"}
"""Uniform random numbers in [0, 1), one per element: `u: tile f32 = rand(seed)` of an i64 scalar, and where they run.

Element (row, col) is number `row * cols + col` (modulo 2^32) of the Philox stream of that seed. These are the numbers
that Inductor draws: `rand` is Triton's `tl.rand`, `rand_cpu` is `normalized_rand_cpu` of Inductor's C++ prefix.
"""

ROW_REDUCTIONS: frozenset[str] = frozenset({"row_sum", "row_mean", "row_max", "row_min"})
"""Tile to one value per row. `row_mean` is `row_sum / cols`. Sums run in FP32 (FP64 for FP64)."""

COL_REDUCTIONS: frozenset[str] = frozenset({"col_sum"})
"""Tile to one value per column, summed over all rows in a fixed order; an output of the program, never an argument."""
