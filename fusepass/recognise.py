"""Stage 3, recognise: which norms a row program computes, by meaning and not by spelling.

For a candidate input `z` of a norm, every later value of the program becomes a sympy expression in `Z` (an element of
z's row), in the moments `m1 = mean(z)` and `m2 = mean(z^2)` of the row, and in symbols for everything else. The mean of
a polynomial in `Z` is the same polynomial in the moments, so `var`, `mean((z - mean(z))^2)` and
`mean(z^2) - mean(z)^2` are all `m2 - m1^2`; casts are facts about rounding and leave no trace here.

A norm of z is then a tile `gain * (Z - shift) * (radicand + eps)^(-1/2)`, and the pair (shift, radicand) is its normal
form: (m1, m2 - m1^2) for LayerNorm, (0, m2) for RMSNorm. The normal forms to compare with come from the functions in
`patterns/`, read in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import sympy
import torch

from ._torch_compat import isolated_trace
from .lift import lift
from .patterns import PATTERNS, Fn
from .region_program import build_region
from .regions import find_regions
from .row_ops import POINTWISE
from .row_program import Kind, RowProgram, Statement
from .verdict import Reason, Rejection

_Z = sympy.Symbol("Z", real=True)
_MOMENTS = (sympy.Integer(1), sympy.Symbol("m1", real=True), sympy.Symbol("m2", positive=True))
_MOST_OPERATIONS = 60  # of an expression: no norm of z is larger; norms of norms of z grow without bound
_MAXIMUM = POINTWISE["maximum"].sympy
_HALF = sympy.Rational(1, 2)


@dataclass(frozen=True)
class Norm:
    """A norm that a program computes.

    `kind` is the pattern's name; `input` the value that is normalised; `output` the normalised tile (times its weight,
    where it has one); `reductions` the row statistics it uses; `rejection` is set for a near-miss. Of a norm's
    gradient (`backward`), `input` is still the norm's own input and `output` the gradient of it. `scaled` says that
    the statistic is a multiple of the pattern's and a factor makes up for it: perhaps it is a multiple of `input` that
    is normalised. `joined` says that the program adds another gradient to a norm's.
    """

    kind: str
    input: str
    output: str
    reductions: frozenset[str]
    rejection: Rejection | None = None
    backward: bool = False
    scaled: bool = False
    joined: bool = False


@dataclass(frozen=True)
class _Form:
    """`gain * (Z - shift) * (radicand + eps)^(-1/2)`; `outside` where eps is added to the root instead."""

    gain: Any
    shift: Any
    radicand: Any
    eps: Any
    outside: bool


@lru_cache(maxsize=4096)
def recognise(program: RowProgram) -> tuple[Norm, ...]:
    """The norms and near-misses that `program` computes, in program order. Each distinct program is analysed once."""
    found: list[Norm] = []
    explained: set[str] = set()
    scaled: list[Norm] = []
    misses: list[Norm] = []
    for z, reductions in _candidates(program):
        if reductions <= explained:
            continue
        norms = [n for n in _norms_of(program, z, reductions) if not n.reductions <= explained]
        exact = [n for n in norms if n.rejection is None and not n.scaled]
        found += exact
        explained |= {r for n in exact for r in n.reductions}
        scaled += [n for n in norms if n.rejection is None and n.scaled]
        misses += [n for n in norms if n.rejection and not any(n.reductions & m.reductions for m in misses)]
    for n in (*scaled, *misses):
        if not n.reductions <= explained:
            found.append(n)
            explained |= n.reductions if n.scaled else set()
    order = {name: i for i, name in enumerate(program.values)}
    return tuple(sorted(found, key=lambda n: order[n.output]))


def _candidates(program: RowProgram) -> Iterator[tuple[str, frozenset[str]]]:
    """The tiles that may be a norm's input, first to last, each with the row reductions of it alone."""
    tiles = [name for name, v in program.values.items() if v.kind is Kind.TILE]
    for z in tiles:
        alone = frozenset(r.name for r in program.row_reductions if _depends_on_tile_only(program, r, z))
        if alone:
            yield z, alone


def _depends_on_tile_only(program: RowProgram, reduction: Statement, z: str) -> bool:
    """Whether every tile that `reduction` sees comes through `z`, and `z` is seen."""
    stack, seen, through = [*reduction.value_args], set(), False
    while stack:
        name = stack.pop()
        if name == z:
            through = True
        elif name not in seen:
            seen.add(name)
            value = program.values[name]
            if not isinstance(value, Statement):
                if value.kind is not Kind.SCALAR:
                    return False
                continue
            stack.extend(value.value_args)
    return through


def _norms_of(program: RowProgram, z: str, reductions: frozenset[str]) -> list[Norm]:
    expressions, used = _evaluate(program, z, reductions)
    forms: dict[str, _Form] = {}
    for s in program.statements:
        if s.kind is Kind.TILE and used.get(s.name):
            form = _normal_form(expressions[s.name])
            if form is not None:
                forms[s.name] = form
    norms: list[Norm] = []
    while forms:  # a near-miss may be a step on the way to a norm, as `z * scale` is to `z * scale - mean * scale`
        judged = {n: _judge(program, z, n, forms[n], frozenset(used[n])) for n in _outermost(program, forms)}
        norms += [n for n in judged.values() if n is not None]
        misses = {name for name, n in judged.items() if n is not None and n.rejection}
        forms = {n: f for n, f in forms.items() if n not in misses} if misses else {}
    return norms


def _evaluate(program: RowProgram, z: str, reductions: frozenset[str]) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Each value as an expression relative to z, and which of z's reductions each value uses."""
    return evaluate(program, {z: _Z}, reductions, lambda s, e: _reduce(s, e, program.cols))


def evaluate(
    program: RowProgram, known: Mapping[str, Any], reductions: frozenset[str], reduce: Callable[[Statement, Any], Any]
) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Each value as an expression relative to the `known` ones, and which of the reductions each value uses.

    `reduce(statement, expression)` gives a reduction's value. What is too large, or no arithmetic, is a symbol.
    """
    expressions: dict[str, Any] = {}
    used: dict[str, set[str]] = {}
    for name, value in program.values.items():
        args = value.value_args if isinstance(value, Statement) else ()
        used[name] = set().union(*(used[a] for a in args)) if args else set()
        if name in known:
            expressions[name], used[name] = known[name], set()
        elif not isinstance(value, Statement):
            expressions[name] = value_symbol(name, value.kind)
        elif value.op in POINTWISE:
            expressions[name] = POINTWISE[value.op].sympy(
                *(expressions[a] if isinstance(a, str) else exact(a) for a in value.args)
            )
        elif name in reductions:
            expressions[name] = reduce(value, expressions[args[0]])
            used[name] = used[name] | {name}
        else:
            expressions[name] = value_symbol(name, value.kind)
        if expressions[name].count_ops() > _MOST_OPERATIONS:
            expressions[name] = value_symbol(name, value.kind)
    return expressions, used


def exact(number: float) -> Any:
    """A literal as the fraction that it stands for: 1/768 is not the nearest float to it."""
    fraction = Fraction(number).limit_denominator(1_000_000) if math.isfinite(number) else number
    is_it = math.isfinite(number) and abs(float(fraction) - number) <= 1e-14 * abs(number)
    return sympy.Rational(fraction) if is_it else sympy.nsimplify(number, rational=True)


def value_symbol(name: str, kind: Kind) -> Any:
    """A value that is known only by name."""
    return sympy.Symbol(f"{kind.value}_{name}", positive=kind is Kind.SCALAR, real=True)


def is_col(symbol: Any) -> bool:
    """Whether a symbol stands for a value per column."""
    return str(symbol).startswith("col_")


def is_tile(symbol: Any) -> bool:
    """Whether a symbol stands for a tile, other than those that expressions are relative to."""
    return str(symbol).startswith("tile_")


def _is_tile(symbol: Any) -> bool:
    return symbol == _Z or is_tile(symbol)


def _reduce(s: Statement, expression: Any, cols: int) -> Any:
    """A row sum or mean as a polynomial in the moments; anything else is known only by name.

    So is a statistic of values that are normalised already: it belongs to a norm with another input.
    """
    if s.op not in ("row_sum", "row_mean") or any(_is_root(p) for p in expression.atoms(sympy.Pow)):
        return value_symbol(s.name, Kind.ROW)
    try:
        poly = sympy.Poly(sympy.expand(expression), _Z)
    except sympy.PolynomialError:
        return value_symbol(s.name, Kind.ROW)
    coefficients = list(reversed(poly.all_coeffs()))
    if len(coefficients) > len(_MOMENTS) or any(_is_tile(f) or is_col(f) for c in coefficients for f in c.free_symbols):
        return value_symbol(s.name, Kind.ROW)
    mean = sympy.expand(sum(c * m for c, m in zip(coefficients, _MOMENTS, strict=False)))
    return mean * cols if s.op == "row_sum" else mean


def _is_root(power: Any) -> bool:
    return bool(not power.exp.is_Integer and power.base.has(*_MOMENTS[1:]))


def _normal_form(expression: Any) -> _Form | None:
    """Read `gain * (Z - shift) * (radicand + eps)^(-1/2)` off an expression that is linear in Z, or None."""
    if not expression.has(_Z):
        return None
    slope = sympy.diff(expression, _Z)
    if slope == 0 or any(_is_tile(f) for f in slope.free_symbols):
        return None
    gain, scale = slope.as_independent(*_MOMENTS[1:], as_Add=False)
    root = _root(scale)
    if root is None:
        return None
    intercept = expression.subs(_Z, 0)
    shift = sympy.simplify(-intercept / slope)
    if not shift.free_symbols <= set(_MOMENTS[1:]):  # as in `x * scale + (bias - mean * scale)`
        bias, rest = sympy.expand(intercept).as_independent(*_MOMENTS[1:], as_Add=True)
        if rest == 0 or not all(is_col(f) for f in bias.free_symbols):
            return None
        shift = sympy.simplify(-rest / slope)
    if not shift.free_symbols <= set(_MOMENTS[1:]):
        return None
    radicand, eps, outside = root
    return _Form(gain, shift, radicand, eps, outside)


def _root(scale: Any) -> tuple[Any, Any, bool] | None:
    """(radicand, eps, eps is outside) of `(radicand + eps)^(-1/2)` or `1 / (sqrt(radicand) + eps)`.

    Of `1 / max(sqrt(radicand), eps)`, as `F.normalize` has it, eps is 0: it bounds the root, and is added to nothing.
    """
    base, exponent = scale.as_base_exp()
    if exponent == -1 and base.func == _MAXIMUM and base.args[1].is_number:
        factor, power = base.args[0].as_independent(*_MOMENTS[1:], as_Add=False)
        inner, half = power.as_base_exp()
        return (sympy.expand(factor**2 * inner), sympy.Integer(0), False) if half == _HALF else None
    if exponent == -1 and base.is_Add:
        roots = [t for t in base.args if t.has(*_MOMENTS[1:])]
        if len(roots) != 1:
            return None
        factor, power = roots[0].as_independent(*_MOMENTS[1:], as_Add=False)
        inner, half = power.as_base_exp()
        if half != _HALF:
            return None
        return sympy.expand(factor**2 * inner), base - roots[0], True
    if exponent != -_HALF:
        return None
    eps, radicand = sympy.expand(base).as_independent(*_MOMENTS[1:], as_Add=True)
    return radicand, eps, False


def _outermost(program: RowProgram, forms: dict[str, _Form]) -> list[str]:
    """One value for each norm: where a normalised value is multiplied by weights, each product; otherwise itself."""
    weighted = {name for name, form in forms.items() if any(is_col(f) for f in form.gain.free_symbols)}
    parents = {
        name: [a for s in program.statements if s.name == name for a in s.value_args if a in forms] for name in forms
    }
    products = [n for n in weighted if not any(p in weighted for p in parents[n])]
    bases: set[str] = set()
    for n in products:
        bases |= _ancestors(n, parents)
    plain = [n for n in forms if n not in weighted and n not in bases and not any(p in forms for p in parents[n])]
    return [n for n in forms if n in products or n in plain]


def _ancestors(name: str, parents: dict[str, list[str]]) -> set[str]:
    stack, seen = [*parents[name]], set()
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(parents[n])
    return seen


def _judge(program: RowProgram, z: str, output: str, form: _Form, reductions: frozenset[str]) -> Norm | None:
    for pattern in PATTERNS:
        wanted = _pattern_form(pattern.fn)
        ratio = sympy.simplify(form.radicand / wanted.radicand)
        if not ratio.is_number:
            continue
        if form.shift not in (sympy.Integer(0), _MOMENTS[1]):
            continue
        if form.eps == 0 and not _is_unit(form.gain, math.sqrt(abs(float(ratio)))):
            continue  # without an epsilon, dividing by the length of the row (F.normalize) differs only in scale
        rejection = _reject(program, pattern.name, form, wanted, ratio)
        scaled = rejection is None and abs(float(ratio) - 1) > 1e-6
        return Norm(pattern.name, z, output, reductions, rejection, scaled=scaled)
    return None


def _is_unit(gain: Any, unit: float = 1.0) -> bool:
    return bool(abs(float(sympy.Abs(gain.as_independent(*gain.free_symbols)[0])) / unit - 1) < 1e-6)


def _reject(program: RowProgram, kind: str, form: _Form, wanted: _Form, ratio: Any) -> Rejection | None:
    cols = program.cols
    if abs(float(ratio) - 1) > 1e-6 and not _is_unit(form.gain, math.sqrt(abs(float(ratio)))):
        if kind == "layer_norm" and cols > 1 and abs(float(ratio) - cols / (cols - 1)) < 1e-6 * cols / (cols - 1):
            where = " and eps is added outside the root" if form.outside else ""
            return Rejection(Reason.UNBIASED_VARIANCE, f"the variance is divided by {cols - 1}, not by {cols}{where}")
        return Rejection(
            Reason.WRONG_DIVISOR, f"the statistic is {float(ratio):.6g} times the mean over {cols} columns"
        )
    if form.outside:
        return Rejection(Reason.EPS_OUTSIDE_ROOT, f"eps={form.eps} is added to the root, not under it")
    if form.shift != wanted.shift:
        return Rejection(
            Reason.MISMATCHED_MEAN, "the mean is subtracted from the values or from the variance, not from both"
        )
    return None


@cache
def _pattern_form(fn: Fn) -> _Form:
    program = pattern_program(fn)
    z = program.operands[0].name
    expressions, _ = _evaluate(program, z, frozenset(r.name for r in program.row_reductions))
    form = _normal_form(expressions[program.outputs[-1].value])
    assert form is not None, f"pattern {fn.__name__} has no normal form"
    return form


def pattern_program(fn: Fn, cols: int = 8) -> RowProgram:
    """The row program of a pattern function, traced on an FP64 tile of shape (2, cols) and a 0-dim epsilon."""
    graph = isolated_trace(fn, *(torch.ones(s, dtype=torch.float64) for s in ((2, cols), ())))
    lifted = lift(graph)
    (nodes,) = find_regions(lifted)
    return build_region(nodes, lifted).program
