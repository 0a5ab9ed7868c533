"""The row program: the one description of a fused kernel.

A straight-line program over a `rows x cols` space, one row at a time. It is what regions of a graph become, what the
recogniser reads, and what both code printers print. Its text is complete: a process that finds only the text (in a
graph that Inductor has cached, say) can rebuild the kernel.

    row_program cols=768
    in x0: tile bf16 [row]
    in x1: tile bf16 [0, row % 128]
    in w0: col f32
    v0: tile bf16 = add(x0, x1)
    v1: tile f32 = square(v0)
    v2: row f32 = row_mean(v1)
    v3: row f32 = add(v2, 1e-06)
    v4: row f32 = rsqrt(v3)
    v5: tile f32 = mul(v0, v4)
    v6: tile bf16 = mul(v5, w0)
    out v0 [row]
    out v6 [row]

Every value has a kind (`tile`: rows x cols, `row`: one per row, `col`: one per column, `scalar`) and a dtype, to which
it is rounded before it is used: a row program has the roundings of the graph that it came from. Arithmetic between
roundings is FP32, or FP64 where a value is FP64. A value of dtype `b8` is a truth value, 1 or 0 in arithmetic; a
scalar `i64` seeds random numbers; `i8`, `e4m3` and `e5m2` are what a cast stores, and never an argument. A column
sum (`c: col bf16 = col_sum(t)`) adds up all rows in FP32 and rounds once; it is an output, never an argument. The
bracket after an operand or output has one row-index expression for each leading dimension of the tensor: element (row,
col) of `x1` is `x1[0, row % 128, col]`. An expression is a number or `row`, optionally `// divisor` and `% modulus`,
where divisors are numbers, names of `sizes`, or products. A semicolon may stand for a line break.

A tensor may also be looked up at *positions*: integers (`i64` or `i32`), one per row, that are an operand like any
other but serve no other purpose. The lines

    in p0: row i64 [row]
    in x0: tile bf16 [p0 < 50257]

read the rows of a table of 50,257 rows that `p0` numbers. A position outside of `0 <= p0 < 50257` is an error.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from .errors import ProgramError
from .row_ops import COL_REDUCTIONS, GENERATORS, POINTWISE, ROW_REDUCTIONS

MAX_COLS = 131_072
FLOATS: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
QUANTISED: dict[str, torch.dtype] = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
POSITIONS: dict[str, torch.dtype] = {"i64": torch.int64, "i32": torch.int32}
DTYPES: dict[str, torch.dtype] = {**FLOATS, "b8": torch.bool, **POSITIONS, **QUANTISED}
HALVES = frozenset({torch.bfloat16, torch.float16})
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Kind(enum.Enum):
    """How a value varies over the rows x cols space."""

    TILE = "tile"
    ROW = "row"
    COL = "col"
    SCALAR = "scalar"

    @staticmethod
    def join(kinds: list[Kind]) -> Kind:
        """The kind of a pointwise result: the smallest that all arguments broadcast to."""
        rows = any(k in (Kind.TILE, Kind.ROW) for k in kinds)
        cols = any(k in (Kind.TILE, Kind.COL) for k in kinds)
        return {(True, True): Kind.TILE, (True, False): Kind.ROW, (False, True): Kind.COL}.get(
            (rows, cols), Kind.SCALAR
        )


@dataclass(frozen=True)
class Operand:
    """A tensor that the program reads. `index` has one row-index expression per leading dimension of the tensor."""

    name: str
    kind: Kind
    dtype: torch.dtype
    index: tuple[str, ...] = ()

    @property
    def is_position(self) -> bool:
        """Whether it holds positions, which other operands are looked up at."""
        return self.kind is Kind.ROW and self.dtype in POSITIONS.values()


@dataclass(frozen=True)
class Statement:
    """`name: kind dtype = op(args)`; an argument is the name of an earlier value or a number."""

    name: str
    op: str
    args: tuple[str | float, ...]
    kind: Kind
    dtype: torch.dtype

    @property
    def value_args(self) -> tuple[str, ...]:
        return tuple(a for a in self.args if isinstance(a, str))


@dataclass(frozen=True)
class Output:
    """A value that is written to memory, with the row-index expressions of the tensor it goes to."""

    value: str
    index: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class RowProgram:
    """See the module's docstring. Construct, then `verify()`; `str()` gives the text that `parse` reads.

    Two programs are equal if their texts are: 0.0 and -0.0 are not.
    """

    cols: int
    operands: tuple[Operand, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[str, ...] = field(default=())

    @cached_property
    def values(self) -> dict[str, Operand | Statement]:
        values: list[Operand | Statement] = [*self.operands, *self.statements]
        return {v.name: v for v in values}

    @cached_property
    def digest(self) -> str:
        """A short stable name for this program's text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    @cached_property
    def row_reductions(self) -> tuple[Statement, ...]:
        return tuple(s for s in self.statements if s.op in ROW_REDUCTIONS)

    @cached_property
    def col_sums(self) -> tuple[Statement, ...]:
        return tuple(s for s in self.statements if s.op in COL_REDUCTIONS)

    @cached_property
    def phases(self) -> dict[str, int]:
        """For each value, how many row reductions must be finished, one after the other, before it can be computed."""
        phase: dict[str, int] = {o.name: 0 for o in self.operands}
        for s in self.statements:
            ready = max((phase[a] for a in s.value_args), default=0)
            phase[s.name] = ready + (s.op in ROW_REDUCTIONS)
        return phase

    @property
    def n_phases(self) -> int:
        return max(self.phases.values(), default=0) + 1

    @property
    def one_line(self) -> str:
        """The text without line breaks, for where a string may have none. `parse` reads it too."""
        return self._text.replace("\n", "; ")

    @cached_property
    def _text(self) -> str:
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowProgram) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def _lines(self) -> Iterator[str]:
        yield f"row_program cols={self.cols}" + (f" sizes={','.join(self.sizes)}" if self.sizes else "")
        for o in self.operands:
            yield f"in {o.name}: {o.kind.value} {DTYPE_NAMES[o.dtype]}{_index_text(o.index)}"
        for s in self.statements:
            args = ", ".join(a if isinstance(a, str) else repr(float(a)) for a in s.args)
            yield f"{s.name}: {s.kind.value} {DTYPE_NAMES[s.dtype]} = {s.op}({args})"
        for out in self.outputs:
            yield f"out {out.value}{_index_text(out.index)}"

    def verify(self) -> RowProgram:
        """Check every rule of a row program and return it. Raises `ProgramError` naming the line that breaks one."""
        _verify(self)
        return self


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that a statement over these dtypes computes in, before it rounds."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


_HEAD = re.compile(r"row_program cols=(\d+)(?: sizes=([\w,]+))?")
_OPERAND = re.compile(r"in (\w+): (tile|row|col|scalar) (\w+)(?: \[(.*)\])?")
_STATEMENT = re.compile(r"(\w+): (tile|row|col|scalar) (\w+) = (\w+)\((.*)\)")
_OUTPUT = re.compile(r"out (\w+)(?: \[(.*)\])?")
_TERM = r"(?:\d+|[a-z]\w*)(?:\*(?:\d+|[a-z]\w*))*"
_INDEX = re.compile(rf"0|row(?: // (?P<div>{_TERM}))?(?: % (?P<mod>{_TERM}))?")
_LOOKUP = re.compile(r"(?P<positions>[a-z]\w*) < (?P<bound>\d+|[a-z]\w*)")
_NUMBER = re.compile(r"[-+]?(\d.*|inf|nan)")


@cache
def parse(text: str) -> RowProgram:
    """The program that `text` spells, verified. Raises `ProgramError` with the offending line."""
    lines = [line.strip() for line in re.split(r"\n|;", text.strip())]
    head = _HEAD.fullmatch(lines[0])
    if not head:
        raise ProgramError(f"expected 'row_program cols=N [sizes=...]', got {lines[0]!r}")
    operands, statements, outputs = [], [], []
    for line in lines[1:]:
        if m := _OPERAND.fullmatch(line):
            operands.append(Operand(m[1], Kind(m[2]), _dtype(m[3], line), _split_index(m[4])))
        elif m := _OUTPUT.fullmatch(line):
            outputs.append(Output(m[1], _split_index(m[2])))
        elif m := _STATEMENT.fullmatch(line):
            args = tuple(float(a) if _NUMBER.fullmatch(a) else a for a in m[5].split(", "))
            statements.append(Statement(m[1], m[4], args, Kind(m[2]), _dtype(m[3], line)))
        else:
            raise ProgramError(f"not a line of a row program: {line!r}")
    sizes = tuple(head[2].split(",")) if head[2] else ()
    return RowProgram(int(head[1]), tuple(operands), tuple(statements), tuple(outputs), sizes).verify()


def index_terms(expr: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The factors of the divisor and of the modulus of a row-index expression; None for the constant `0`."""
    m = _INDEX.fullmatch(expr)
    assert m, expr
    if expr == "0":
        return None
    return tuple(m["div"].split("*")) if m["div"] else (), tuple(m["mod"].split("*")) if m["mod"] else ()


def lookup(expr: str) -> tuple[str, str] | None:
    """The positions that an index expression looks up and their bound, a number or a size; None if it is by row."""
    m = _LOOKUP.fullmatch(expr)
    return (m["positions"], m["bound"]) if m else None


def lookups(index: tuple[str, ...]) -> list[tuple[str, str]]:
    """The positions, and their bounds, that an operand is looked up at."""
    return [found for expr in index if (found := lookup(expr))]


def bracketed(expr: str) -> str:
    """A row-index expression with brackets around products, as Python and C++ need them."""
    return re.sub(r"(//|%) (\w+(?:\*\w+)+)", r"\1 (\2)", expr)


def _dtype(name: str, line: str) -> torch.dtype:
    if name not in DTYPES:
        raise ProgramError(f"dtype {name!r} is not one of {', '.join(DTYPES)}: {line!r}")
    return DTYPES[name]


def _split_index(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _index_text(index: tuple[str, ...]) -> str:
    return f" [{', '.join(index)}]" if index else ""


def _verify(p: RowProgram) -> None:
    if not 1 <= p.cols <= MAX_COLS:
        raise ProgramError(f"expected 1 <= cols <= {MAX_COLS}, got cols={p.cols}")
    seen: dict[str, Operand | Statement] = {}
    for o in p.operands:
        _check_index(p, o.name, o.kind, [e for e in o.index if not _is_lookup(p, seen, o.name, e)], bool(o.index))
        _define(seen, o)
        if o.dtype in QUANTISED.values():
            raise ProgramError(f"{o.name}: {DTYPE_NAMES[o.dtype]} is no operand's dtype")
        if o.dtype in POSITIONS.values() and not o.is_position and (o.dtype, o.kind) != (torch.int64, Kind.SCALAR):
            name = DTYPE_NAMES[o.dtype]
            raise ProgramError(f"{o.name}: an {name} operand is a scalar seed or one position a row, no {o.kind.value}")
    for s in p.statements:
        _check_statement(p, seen, s)
        _define(seen, s)
    if not p.outputs:
        raise ProgramError("a row program needs at least one output")
    for out in p.outputs:
        if out.value not in seen:
            raise ProgramError(f"out {out.value}: no such value")
        if seen[out.value].dtype in POSITIONS.values():
            raise ProgramError(f"out {out.value}: a seed or a position is no output")
        _check_index(p, out.value, seen[out.value].kind, out.index, bool(out.index))
    used = {a for s in p.statements for a in s.value_args} | {out.value for out in p.outputs}
    used |= {positions for o in p.operands for positions, _ in lookups(o.index)}
    if unused := [name for name in seen if name not in used]:
        raise ProgramError(f"values that nothing uses: {', '.join(unused)}")


def _define(seen: dict[str, Operand | Statement], value: Operand | Statement) -> None:
    if value.name in seen or value.name == "row" or not re.fullmatch(r"[a-z]\w*", value.name):
        raise ProgramError(
            f"{value.name!r} is defined twice or is not a name (a lower-case letter, then word characters)"
        )
    if value.dtype not in DTYPE_NAMES:
        raise ProgramError(f"{value.name}: dtype {value.dtype} is not one of {', '.join(DTYPES)}")
    seen[value.name] = value


def _is_lookup(p: RowProgram, seen: dict[str, Operand | Statement], name: str, expr: str) -> bool:
    if not (found := lookup(expr)):
        return False
    positions, bound = found
    value = seen.get(positions)
    if not isinstance(value, Operand) or not value.is_position:
        raise ProgramError(f"{name}: {expr!r} looks up {positions}, expected an earlier operand, row i64 or row i32")
    if bound == "0" or (not bound.isdigit() and bound not in p.sizes):
        raise ProgramError(f"{name}: the bound of {expr!r} is neither a positive number nor one of sizes={p.sizes}")
    return True


def _check_index(p: RowProgram, name: str, kind: Kind, index: Sequence[str], has_index: bool) -> None:
    if (kind in (Kind.TILE, Kind.ROW)) != has_index:
        raise ProgramError(f"{name}: a tile or row needs a row index and a col or scalar has none, got {index}")
    for expr in index:
        m = _INDEX.fullmatch(expr)
        if not m:
            raise ProgramError(f"{name}: {expr!r} is not a row index ('0' or 'row [// divisor] [% modulus]')")
        terms = [t for part in (m["div"], m["mod"]) if part for t in part.split("*")]
        if unknown := [t for t in terms if not t.isdigit() and t not in p.sizes]:
            raise ProgramError(f"{name}: {expr!r} uses {', '.join(unknown)}, which is not one of sizes={p.sizes}")
        if "0" in terms:
            raise ProgramError(f"{name}: {expr!r} divides by zero")


def _check_statement(p: RowProgram, seen: dict[str, Operand | Statement], s: Statement) -> None:
    where = f"{s.name} = {s.op}(...)"
    for a in s.args:
        if isinstance(a, str) and a not in seen:
            raise ProgramError(f"{where}: {a!r} is not defined before it is used")
        if isinstance(a, str) and getattr(seen[a], "op", None) in COL_REDUCTIONS:
            raise ProgramError(f"{where}: {a!r} is a column sum, which is only known after the last row")
    kinds = [seen[a].kind for a in s.value_args]
    if s.op in POINTWISE:
        if len(s.args) != POINTWISE[s.op].arity:
            raise ProgramError(f"{where}: expected {POINTWISE[s.op].arity} arguments, got {len(s.args)}")
        expected = Kind.join(kinds)
    elif s.op in ROW_REDUCTIONS | COL_REDUCTIONS:
        if kinds != [Kind.TILE] or len(s.args) != 1:
            raise ProgramError(f"{where}: a reduction takes one tile, got {s.args}")
        expected = Kind.ROW if s.op in ROW_REDUCTIONS else Kind.COL
    elif s.op in GENERATORS:
        if kinds != [Kind.SCALAR] or len(s.args) != 1 or seen[str(s.args[0])].dtype is not torch.int64:
            raise ProgramError(f"{where}: expected one i64 scalar, the seed, got {s.args}")
        expected = Kind.TILE
    else:
        raise ProgramError(
            f"{where}: no such operation; "
            f"known: {', '.join([*POINTWISE, *ROW_REDUCTIONS, *COL_REDUCTIONS, *GENERATORS])}"
        )
    _check_dtypes(seen, s, where)
    if s.kind != expected:
        raise ProgramError(f"{where}: is declared {s.kind.value}, but its arguments make it {expected.value}")
    if any(isinstance(a, float) and math.isnan(a) for a in s.args):
        raise ProgramError(f"{where}: a literal is NaN")


def _check_dtypes(seen: dict[str, Operand | Statement], s: Statement, where: str) -> None:
    boolean = s.op in POINTWISE and POINTWISE[s.op].boolean
    quantises = s.op == "cast" and s.dtype in QUANTISED.values()
    if (s.dtype is torch.bool) != boolean or (s.dtype not in (*FLOATS.values(), torch.bool) and not quantises):
        raise ProgramError(f"{where}: a comparison gives b8 and everything else a float, not {DTYPE_NAMES[s.dtype]}")
    if narrow := [a for a in s.value_args if seen[a].dtype in QUANTISED.values()]:
        raise ProgramError(f"{where}: {narrow[0]} is {DTYPE_NAMES[seen[narrow[0]].dtype]}, which is only stored")
    if s.op in GENERATORS and s.dtype is not torch.float32:
        raise ProgramError(f"{where}: random numbers are f32, not {DTYPE_NAMES[s.dtype]}")
    if s.op not in GENERATORS and any(seen[a].dtype in POSITIONS.values() for a in s.value_args):
        raise ProgramError(f"{where}: an i64 seeds random numbers or is a position, and nothing else")
