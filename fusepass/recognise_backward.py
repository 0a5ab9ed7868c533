"""Stage 3, recognise, the backward: which gradients of norms a row program computes.

A norm turns a row z into `n = rstd * (z - mean)`, and the gradient g of n into

    dz = rstd * (g - mean(g) - n * mean(g * n))        LayerNorm
    dz = rstd * (g - n * mean(g * n))                  RMSNorm

For a pair of tiles (z, g), every later value of the program becomes a sympy expression in `Z` and `G` (an element of
either row), in the moments `mean(z)`, `mean(z^2)`, `mean(g)` and `mean(g * z)`, and in symbols for everything else:
rstd and the mean may have been saved by the forward, and then are any value per row. A gradient is a tile
`a * G + b * Z + c` with

    b = -a * p^2 * (mean(g * z) - q * mean(g))    and    c = -a * mean(g) - q' * b

for some q and q' (LayerNorm), or with `c = 0` and q = 0 (RMSNorm): then `n = p * (z - q)`. What has been added to it
already, as the gradient of the residual stream or of another norm of z, does not matter. And p is a where z is the
norm's input, or 1 where it is the normalised row itself; that tells the norm from its near-misses, where p is a times
another number: those divide by `D - 1`, or by the length of the row. (Where p and a come from two saved values, the
graph does not say.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy

from .recognise import Norm, evaluate, is_col, is_tile, value_symbol
from .row_program import Kind, RowProgram, Statement

_Z, _G = sympy.symbols("Z G", real=True)
_M1, _EG, _EGZ = sympy.symbols("m1 Eg Egz", real=True)
_M2 = sympy.Symbol("m2", positive=True)
_MOMENTS = {(0, 0): sympy.Integer(1), (1, 0): _M1, (2, 0): _M2, (0, 1): _EG, (1, 1): _EGZ}
_LINEAR = frozenset({"cast", "add", "sub", "mul", "div", "neg", "fma", "row_sum", "row_mean"})
_CLOSE = 1e-6


@lru_cache(maxsize=4096)
def recognise_backward(program: RowProgram) -> tuple[Norm, ...]:
    """The gradients of norms that `program` computes, in program order.

    Of each, `input` is the tile z, `output` the tile dz, and `reductions` the means over g.
    """
    found: list[Norm] = []
    explained: set[str] = set()
    for z, g, reductions in _candidates(program):
        if reductions <= explained:
            continue
        norm = _gradient_of(program, z, g, reductions)
        if norm is not None:
            found.append(norm)
            explained |= norm.reductions
    order = {name: i for i, name in enumerate(program.values)}
    return tuple(sorted(found, key=lambda n: order[n.output]))


def _candidates(program: RowProgram) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Pairs of tiles (z, g), and the row reductions that see no other tile; at least one sums a product of both."""
    tiles = [name for name, v in program.values.items() if v.kind is Kind.TILE]
    products = {g: _reduced_products(program, g) for g in tiles}
    for z in tiles:
        for g in tiles:
            if z == g or not products[g]:
                continue
            seen = {r.name: _seen(program, r, z, g) for r in program.row_reductions}
            reductions = frozenset(name for name, through in seen.items() if through)
            if any(seen[name] == {z, g} for name in products[g]):
                yield z, g, reductions


def _reduced_products(program: RowProgram, g: str) -> list[str]:
    """The row reductions that are linear in g, as a sum over `g * z` is, and over a product of it with another tile."""
    degree: dict[str, int] = {}  # of each value in g; 2 for all that is not linear
    multiplied: set[str] = set()
    for name, value in program.values.items():
        if not isinstance(value, Statement) or name == g:
            degree[name] = int(name == g)
            continue
        degrees = [degree[a] for a in value.value_args]
        degree[name] = sum(degrees) if value.op == "mul" else max(degrees, default=0)
        if max(degrees, default=0) and (
            value.op not in _LINEAR or (value.op == "div" and degree.get(str(value.args[1])))
        ):
            degree[name] = 2
        factors = [a for a in value.value_args if program.values[a].kind is Kind.TILE]
        is_product = value.op == "mul" and degree[name] == 1 and len(factors) == 2
        if is_product or not multiplied.isdisjoint(value.value_args):
            multiplied.add(name)
    return [r.name for r in program.row_reductions if degree[r.name] == 1 and r.value_args[0] in multiplied]


def _seen(program: RowProgram, reduction: Statement, z: str, g: str) -> set[str]:
    """Which of z and g a reduction sees; nothing if it also sees another tile."""
    stack, seen, through = [*reduction.value_args], set(), set()
    while stack:
        name = stack.pop()
        if name in (z, g):
            through.add(name)
        elif name not in seen:
            seen.add(name)
            value = program.values[name]
            if isinstance(value, Statement):
                stack.extend(value.value_args)
            elif value.kind is Kind.TILE:
                return set()
    return through


def _gradient_of(program: RowProgram, z: str, g: str, reductions: frozenset[str]) -> Norm | None:
    """The gradient with respect to z: the last value before another tile is added to it."""
    relative = _Relative(program, z, g, reductions)
    found: Norm | None = None
    added: set[Any] = set()  # the tiles that had been added to it by then
    for s in program.statements:
        used = relative.used[s.name]
        if s.kind is Kind.TILE and used and (kind := relative.kind_of(s.name)) is not None:
            tiles = {f for f in relative.expressions[s.name].free_symbols if is_tile(f)}
            if found is not None and tiles != added:
                return replace(found, joined=True)
            added = tiles
            found = Norm(kind, z, s.name, frozenset(used), backward=True, joined=bool(tiles))
    return found


class _Relative:
    """The values of a program as expressions relative to a pair (z, g), and which of the reductions each uses.

    Where g meets the norm's weight only inside a sum, `weight` is that factor: then G stands for `weight * g`.
    """

    def __init__(self, program: RowProgram, z: str, g: str, reductions: frozenset[str]) -> None:
        self.cols = program.cols
        self.weight: Any = None
        self.expressions, self.used = evaluate(program, {z: _Z, g: _G}, reductions, self._reduce)

    def _reduce(self, s: Statement, expression: Any) -> Any:
        """A row sum or mean as a polynomial in the moments; anything else is known only by name."""
        poly = self._polynomial(expression)
        if s.op not in ("row_sum", "row_mean") or poly is None or any(powers not in _MOMENTS for powers in poly):
            return value_symbol(s.name, Kind.ROW)
        mean = sympy.expand(sum(c * _MOMENTS[powers] for powers, c in poly.items()))
        return mean * self.cols if s.op == "row_sum" else mean

    def _polynomial(self, expression: Any) -> dict[tuple[int, int], Any] | None:
        """{(power of Z, power of G): coefficient}, the coefficients free of tiles and of values per column."""
        try:
            terms = dict(sympy.Poly(sympy.expand(expression), _Z, _G).terms())
        except sympy.PolynomialError:
            return None
        for powers, coefficient in terms.items():
            columns = [f for f in coefficient.free_symbols if is_col(f)]
            rest, factor = coefficient.as_independent(*columns, as_Add=False)
            if powers[1] == 1 and self.weight is None:
                self.weight = factor
            if factor != (self.weight if powers[1] == 1 else 1):
                return None
            terms[powers] = rest
        if any(is_tile(f) for c in terms.values() for f in c.free_symbols):
            return None
        return terms

    def _is_residual(self, term: Any) -> bool:
        """Whether a term of a gradient comes from the residual stream: another tile, or g without the norm's weight."""
        if not term.has(_Z, _G):
            return any(is_tile(f) for f in term.free_symbols)
        return bool(term.has(_G) and self.weight is not None and self.weight != 1 and not term.has(self.weight))

    def kind_of(self, name: str) -> str | None:
        """The norm that this value is the gradient of, or None."""
        expression = self.expressions[name]
        if not expression.has(_G) or not expression.has(_EGZ):
            return None
        terms = sympy.Add.make_args(sympy.expand(expression))
        poly = self._polynomial(sum(t for t in terms if not self._is_residual(t)))
        if poly is None or not poly.keys() <= {(0, 0), (1, 0), (0, 1)}:
            return None
        a, b, c = (poly.get(powers, sympy.Integer(0)) for powers in ((0, 1), (1, 0), (0, 0)))
        return _kind(a, b, c)


def _kind(a: Any, b: Any, c: Any) -> str | None:
    """The norm whose gradient is `a * G + b * Z + c`, or None."""
    if a == 0 or a.has(_EG, _EGZ):
        return None
    scale, shift = _in_means(b), _in_means(c)
    if scale is None or shift is None or scale == (0, 0):
        return None
    squared = sympy.simplify(-scale[1] / a)
    if squared == 0 or _is_negative(squared, a) or _is_other_scale(squared, a):
        return None
    if shift == (0, 0):
        return "rms_norm" if scale[0] == 0 else None
    quotient = sympy.simplify(((shift[0] + a) * _EG + shift[1] * _EGZ) / (scale[0] * _EG + scale[1] * _EGZ))
    return None if quotient.has(_EG, _EGZ) else "layer_norm"


def _in_means(expression: Any) -> tuple[Any, Any] | None:
    """The coefficients of mean(g) and mean(g * z); None where it is not linear in them.

    What is free of both is another norm's part of the gradient: two norms of one sum add up in one value.
    """
    poly = sympy.Poly(expression, _EG, _EGZ) if expression.is_polynomial(_EG, _EGZ) else None
    if poly is None or not set(poly.monoms()) <= {(0, 0), (1, 0), (0, 1)}:
        return None
    return sympy.simplify(poly.coeff_monomial(_EG)), sympy.simplify(poly.coeff_monomial(_EGZ))


def _is_negative(squared: Any, a: Any) -> bool:
    """Whether p^2 would be negative if a is positive. Another saved value may have any sign."""
    return bool(squared.could_extract_minus_sign()) and squared.free_symbols <= a.free_symbols


def _is_other_scale(squared: Any, a: Any) -> bool:
    """Whether p^2 is known to be neither a^2, for a norm's input, nor 1, for what it made of it."""
    ratio = sympy.simplify(squared / a**2)
    if ratio.is_number:
        return abs(float(ratio) - 1) > _CLOSE
    return bool(squared.is_number) and abs(float(squared) - 1) > _CLOSE
