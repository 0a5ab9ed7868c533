"""The text of one Triton kernel while it is written: its frame, its memory accesses and its arithmetic.

In the text, a tile is `[ROWS, BLOCK_N]`, a row value `[ROWS, 1]`, a column value `[1, BLOCK_N]` and a scalar `[1, 1]`.
Values are held in FP32 (FP64 where the program says so) and rounded where the program rounds; truth values are held as
1.0 and 0.0. Three rules keep the numbers right, whatever compiles the text:

- Lanes beyond the row are masked before every reduction, and loads widen 16-bit data at once.
- Literals stand in the text and literal arguments of functions are typed: a launch passes no floats.
- A product that is added to something is spelled as `fma(a, b, minus_zero)`, where the compiler cannot see that
  `minus_zero` is -0.0. That is the rounded product, for the price of a multiplication; `a * b + c` would be contracted
  (a launch by Inductor cannot switch contraction off), and the residual sum would differ from eager's.
"""

from __future__ import annotations

import contextlib
import keyword
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from ..errors import ProgramError
from ..row_ops import GENERATORS, POINTWISE, ROW_REDUCTIONS
from ..row_program import (
    HALVES,
    POSITIONS,
    QUANTISED,
    Kind,
    Output,
    RowProgram,
    Statement,
    compute_dtype,
    lookup,
    lookups,
)
from .schedule import Schedule

Strides = Mapping[str, Sequence[int | None]]
"""For each operand with a row index, and for output i under `out{i}`, one stride per leading dimension and, for a
tile, one for the column; None where it is an argument of the kernel."""

TL_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int8: "tl.int8",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
}
_MINUS_ZERO = {torch.float32: "minus_zero", torch.float64: "minus_zero_f64"}
_RESERVED = {"ready", "row", "rows", "col", "mask", "row_mask", "col_mask", "start", "tl", "triton", "libdevice"}
_RESERVED |= {"zero", *_MINUS_ZERO.values(), "range", "float", "block", "begin", "end", "count", "offset", "partial"}
_INDENT = "    "

AWAIT = "ready = _ready()  # zero, when the kernels before this one have ended: every address depends on it"
READY = " + ready"
"""The first line of a kernel under programmatic dependent launch, and what makes an index wait for it.

Triton's own `gdc_wait` says that it has side effects, and of a kernel with such an instruction Inductor takes it that
every argument is written. `_ready` is a multiple of 16, so that the compiler still knows addresses to be aligned. The
kernel behind may be launched once all instances have come so far.
"""

_FUNCTIONS: dict[str, str] = {
    "_mul": "def _mul(a, b, minus_zero):\n    return tl.fma(a, b, minus_zero)",
    "_fma": "def _fma(a, b, c):\n    return tl.fma(a, b, c)",
    "_div": "def _div(a, b):\n    return a / b if b.dtype.is_fp64() else tl.div_rn(a, b)",
    "_sqrt": "def _sqrt(a):\n    return tl.sqrt(a) if a.dtype.is_fp64() else tl.sqrt_rn(a)",
    "_rsqrt": "def _rsqrt(a):\n    return tl.rsqrt(a)",
    "_round": "def _round(a):\n    return libdevice.rint(a)",
    "_exp": "def _exp(a):\n    return libdevice.exp(a)",
    "_tanh": "def _tanh(a):\n    return libdevice.tanh(a)",
    "_erf": "def _erf(a):\n    return tl.erf(a)",
    "_sigmoid": "def _sigmoid(a):\n    return _div(tl.full([1, 1], 1.0, a.dtype), 1.0 + _exp(-a))",
    "_relu": "def _relu(a):\n    return tl.where(a < 0.0, 0.0, a)",
    "_maximum": "def _maximum(a, b):\n    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_minimum": "def _minimum(a, b):\n    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_lt": "def _lt(a, b):\n    return (a < b).to(tl.float32)",
    "_le": "def _le(a, b):\n    return (a <= b).to(tl.float32)",
    "_gt": "def _gt(a, b):\n    return (a > b).to(tl.float32)",
    "_ge": "def _ge(a, b):\n    return (a >= b).to(tl.float32)",
    "_eq": "def _eq(a, b):\n    return (a == b).to(tl.float32)",
    "_ne": "def _ne(a, b):\n    return (a != b).to(tl.float32)",
    "_where": "def _where(c, a, b):\n    return tl.where(c != 0.0, a, b)",
    "_ready": "def _ready():\n    return 16 * tl.inline_asm_elementwise(\n"
    '        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",\n'
    '        "=r", [], dtype=tl.int32, is_pure=True, pack=1\n    )',
}
"""The functions that op spellings call. A module holds those that its kernels use."""


class Writer:
    """Writes one kernel. A schedule calls `tile_shape`, `rows_from` and `columns`, then loads, computes and stores."""

    def __init__(self, program: RowProgram, schedule: Schedule, strides: Strides, pdl: bool = False) -> None:
        self.program = program
        self.ready = READY if pdl else ""
        self.schedule = schedule
        self.strides = dict(strided(program, strides))
        self.exact = _products_that_are_added(program)
        self.lines: list[str] = []
        self._depth = 1
        if pdl:
            self.emit(AWAIT)
        self.tile_shape(schedule.rows_per_program, schedule.block_n)

    def tile_shape(self, rows: int, cols: int) -> None:
        """The shape of a tile from here on."""
        self.shape = (rows, cols)
        self.row_masked = rows > 1
        self.col_masked = self.program.cols % cols != 0

    # The frame.

    def emit(self, line: str) -> None:
        self.lines.append(_INDENT * self._depth + line)

    @contextlib.contextmanager
    def block(self, line: str) -> Iterator[None]:
        """What is written in this context is the body of `line`, a loop."""
        self.emit(line)
        self._depth += 1
        yield
        self._depth -= 1

    def body(self) -> str:
        return "\n".join(self.lines)

    def constants(self) -> None:
        """Zeros that the compiler cannot see through, where the kernel uses them."""
        wides = {self.wide(s) for s in self.program.statements if s.name in self.exact}
        if wides or self.schedule.kind in ("loop", "wide"):
            self.emit("zero = tl.program_id(1)  # always zero, but the compiler does not know")
        if torch.float32 in wides:
            self.emit("minus_zero = (zero | -2147483648).to(tl.float32, bitcast=True)  # keeps products rounded: _mul")
        if torch.float64 in wides:
            sign = "tl.full([], -9223372036854775808, tl.int64)"
            self.emit(f"minus_zero_f64 = (zero | {sign}).to(tl.float64, bitcast=True)  # keeps products rounded: _mul")

    def rows_from(self, first: str, end: str = "rows") -> None:
        """Define `row`, in 64 bits, and its mask, for the rows from `first` that lie before `end`."""
        self.emit(f"row = {first}{self.ready} + tl.arange(0, {self.shape[0]})[:, None]")
        if self.row_masked:
            self.emit(f"row_mask = row < {end}")

    def columns(self, start: str = "") -> None:
        """Define `col` and its mask for the block of columns that begins at `start`."""
        self.emit(f"col = {start}tl.arange(0, {self.shape[1]})[None, :]")
        if self.col_masked:
            self.emit(f"col_mask = col < {self.program.cols}")

    def masks(self) -> None:
        """Define the mask of a tile, where rows and columns have one each."""
        if self.row_masked and self.col_masked:
            self.emit("mask = row_mask & col_mask")

    def mask(self, kind: Kind) -> str:
        """The name of the mask for a value of this kind, or nothing where every lane is inside."""
        rows = self.row_masked and kind in (Kind.TILE, Kind.ROW)
        cols = self.col_masked and kind in (Kind.TILE, Kind.COL)
        return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((rows, cols), "")

    # Memory.

    def pointer(self, name: str, kind: Kind, index: tuple[str, ...], dtype: torch.dtype) -> str:
        """The addresses of a tensor's elements: one term for each leading dimension, then the column."""
        if kind is Kind.SCALAR:
            return f"{name}_ptr + tl.zeros([1, 1], tl.int32){self.ready}"
        if kind is Kind.COL:
            return f"{name}_ptr{self.ready} + col"
        terms = [f"{name}_ptr"]
        strides = self.strides[name]
        for k, expr in enumerate(index):
            if found := lookup(expr):
                terms.append(_times(local(found[0]), strides[k], f"{name}_stride{k}"))
            elif expr != "0" and strides[k] != 0:
                terms.append(_times(_row_index(expr), strides[k], f"{name}_stride{k}"))
        if len(terms) == 1:
            terms.append(f"tl.zeros_like(row){self.ready}")
        if kind is Kind.TILE:
            last = strides[-1]
            wide = last is None or last * self.program.cols >= 2**31
            col = "col.to(tl.int64)" if wide else "col"
            if dtype is torch.bool and last == 1 and (elements := self._elements_of_an_access()) > 1:
                col = f"tl.max_contiguous({col}, [1, {elements}])"
            terms.append(_times(col, last, f"{name}_stride{len(index)}"))
        return " + ".join(terms)

    def _elements_of_an_access(self) -> int:
        """How many elements of the program's narrowest float tile 128 bits hold.

        Masks are read in pieces of as many elements: in wider ones they would be spread over the threads differently
        from the floats, and one or the other would have to change hands.
        """
        tiles = [*self.program.operands, *(self.program.values[o.value] for o in self.program.outputs)]
        sizes = [v.dtype.itemsize for v in tiles if v.kind is Kind.TILE and v.dtype is not torch.bool]
        return min(16 // min(sizes, default=1), self.shape[1])

    def read(
        self,
        name: str,
        tensor: str,
        kind: Kind,
        index: tuple[str, ...],
        dtype: torch.dtype,
        keep: bool = False,
        as_tile: bool = False,
    ) -> None:
        """Load the value called `name` from `tensor`.

        `keep` if a later pass will read it again. A column value is read `as_tile` where it is loaded ahead of a loop:
        each thread holds the columns of its own elements, and nothing changes hands in the loop.
        """
        mask, pointer = self.mask(kind), self.pointer(tensor, kind, index, dtype)
        if as_tile and kind is Kind.COL and self.shape[0] > 1:
            pointer = f"tl.broadcast_to({pointer}, {list(self.shape)})"
        is_position = kind is Kind.ROW and dtype in POSITIONS.values()
        options = f", mask={mask}, other={0 if is_position else 0.0}" if mask else ""
        if kind is Kind.TILE and self.schedule.kind == "loop":
            options += f', eviction_policy="{"evict_last" if keep else "evict_first"}"'
        widen = ".to(tl.float32)" if dtype in HALVES or dtype is torch.bool else ".to(tl.int64)" * is_position
        self.emit(f"{local(name)} = tl.load({pointer}{options}){widen}")
        for bound in dict.fromkeys(bound for o in self.program.operands for p, bound in lookups(o.index) if p == name):
            inside = f"({local(name)} >= 0) & ({local(name)} < {bound})"
            self.emit(f'tl.device_assert({inside}, "index out of bounds: 0 <= {name} < {bound}")')

    def store(self, i: int, output: Output) -> None:
        value = self.program.values[output.value]
        mask = self.mask(value.kind)
        pointer = self.pointer(f"out{i}", value.kind, output.index, value.dtype)
        self.emit(f"tl.store({pointer}, {stored(local(value.name), value.dtype)}{f', mask={mask}' if mask else ''})")

    def stores(self, names: Collection[str]) -> None:
        """Store every output whose value is among `names`."""
        for i, output in enumerate(self.program.outputs):
            if output.value in names:
                self.store(i, output)

    # Arithmetic.

    def wide(self, s: Statement) -> torch.dtype:
        return compute_dtype(s.dtype, *(self.program.values[a].dtype for a in s.value_args))

    def argument(self, a: str | float, wide: torch.dtype, typed: bool) -> str:
        if not isinstance(a, str):
            literal = f'float("{a}")' if a in (float("inf"), float("-inf")) else repr(float(a))
            return f"tl.full([1, 1], {literal}, {TL_DTYPES[wide]})" if typed else literal
        narrow = self.program.values[a].dtype != torch.float64 and wide == torch.float64
        return f"{local(a)}.to(tl.float64)" if narrow else local(a)

    def statement(self, s: Statement) -> None:
        """A pointwise statement or random numbers, computed in FP32 or FP64 and rounded to its dtype."""
        wide = self.wide(s)
        if s.op in GENERATORS:
            number = f"(row * {self.program.cols} + col).to(tl.uint32)"  # wraps at 2^32, as Inductor's does
            expr = f"tl.rand({local(s.value_args[0])}, {number})"
        else:
            spelling = POINTWISE[s.op].triton
            typed = "(" in spelling or s.op == "cast" or not s.value_args
            args = [self.argument(a, wide, typed or s.name in self.exact) for a in s.args]
            if s.name in self.exact:
                expr = f"_mul({args[0]}, {args[-1]}, {_MINUS_ZERO[wide]})"
            else:
                expr = re.sub(r"(?<=\()1\.0(?=,)", f"tl.full([1, 1], 1.0, {TL_DTYPES[wide]})", spelling).format(*args)
        self.emit(f"{local(s.name)} = {_rounded(expr, wide, s.dtype)}")

    def reduction_argument(self, s: Statement) -> str:
        """The reduction's tile with the lanes beyond the row replaced by what leaves the result alone."""
        mask = self.mask(Kind.TILE)
        value = self.argument(s.args[0], self.wide(s), typed=False)
        return f"tl.where({mask}, {value}, {neutral(s)})" if mask else value

    def reduce(self, s: Statement, tile: str) -> None:
        """`s`, a row reduction, from a tile whose lanes beyond the row do not matter."""
        wide = self.wide(s)
        function = {"row_max": "_maximum", "row_min": "_minimum"}.get(s.op)
        expr = f"tl.reduce({tile}, 1, {function})" if function else f"tl.sum({tile}, 1)"
        expr += "[:, None]"
        if s.op == "row_mean":
            expr = f"_div({expr}, tl.full([1, 1], {float(self.program.cols)}, {TL_DTYPES[wide]}))"
        self.emit(f"{local(s.name)} = {_rounded(expr, wide, s.dtype)}")


class Loads:
    """Part of a kernel in which operands of some kinds are loaded where they are first used, each once.

    `stores` are the values that are stored as soon as they are known, `keep` the operands that a later pass reads too.
    `as_tiles`, see `Writer.read`.
    """

    def __init__(
        self,
        k: Writer,
        kinds: Collection[Kind],
        stores: Collection[str],
        keep: Collection[str] = frozenset(),
        as_tiles: bool = False,
    ) -> None:
        self.k = k
        self.stores = stores
        self.keep = keep
        self.as_tiles = as_tiles
        self.waiting = {o.name: o for o in k.program.operands if o.kind in kinds}

    def need(self, names: Iterable[str]) -> None:
        for name in names:
            if o := self.waiting.pop(name, None):
                self.need(positions for positions, _ in lookups(o.index))
                self.k.read(name, name, o.kind, o.index, o.dtype, name in self.keep, self.as_tiles)
                self.k.stores({name} & set(self.stores))

    def run(self, statements: Iterable[Statement]) -> None:
        """Compute these statements, which are in order; whole tiles are reduced at once."""
        for s in statements:
            self.need(s.value_args)
            if s.op in ROW_REDUCTIONS:
                self.k.reduce(s, self.k.reduction_argument(s))
            else:
                self.k.statement(s)
            self.k.stores({s.name} & set(self.stores))


def strided(program: RowProgram, strides: Strides) -> Iterator[tuple[str, Sequence[int | None]]]:
    """Name and strides of every operand and output that is indexed by row, checked against its index."""
    tensors: list[tuple[str, Kind, tuple[str, ...]]] = [(o.name, o.kind, o.index) for o in program.operands]
    tensors += [(f"out{i}", program.values[o.value].kind, o.index) for i, o in enumerate(program.outputs)]
    for name, kind, index in tensors:
        if not index:
            continue
        expected = len(index) + (kind is Kind.TILE)
        if name not in strides or len(strides[name]) != expected:
            raise ProgramError(f"{name}: expected {expected} strides, got strides[{name!r}]={strides.get(name)}")
        yield name, strides[name]


def functions_used(body: str) -> list[str]:
    """The definitions of the functions that this text calls, and of those that they call."""
    used: set[str] = set()
    pending = [body]
    while pending:
        text = pending.pop()
        new = {name for name in _FUNCTIONS if re.search(rf"(?<![\w.]){name}\b", text)} - used
        used |= new
        pending += [_FUNCTIONS[name].split("\n", 1)[1] for name in new]
    return [text for name, text in _FUNCTIONS.items() if name in used]


def local(name: str) -> str:
    """A value's name in the text: its own, unless Python or the kernel's frame has taken it."""
    taken = name in _RESERVED or keyword.iskeyword(name) or name.endswith(("_ptr", "_block", "_sum"))
    return f"{name}_" if taken else name


def stored(text: str, dtype: torch.dtype) -> str:
    """The text of a value as memory holds it."""
    if dtype is torch.bool:
        return f"{text} != 0.0"
    return f"{text}.to({TL_DTYPES[dtype]})" if dtype in (*HALVES, *QUANTISED.values()) else text


def neutral(s: Statement) -> str:
    """What a reduction starts from."""
    return {"row_max": 'float("-inf")', "row_min": 'float("inf")'}.get(s.op, "0.0")


def _products_that_are_added(program: RowProgram) -> set[str]:
    """The products in FP32 or FP64 that a compiler would contract with an addition into an fma.

    Into a column sum it may: no graph holds the sum of some of the rows, and the contracted one is nearer to the truth.
    """
    products: set[str] = set()
    through: set[str] = set()  # values that a later add would see as a product
    for s in reversed(program.statements):
        if s.op in ("add", "sub", "row_sum", "row_mean") or (s.op in ("neg", "cast") and s.name in through):
            through.update(s.value_args)
        if s.op in ("mul", "square") and s.name in through and s.dtype not in HALVES:
            products.add(s.name)
    return products


def _rounded(expr: str, wide: torch.dtype, dtype: torch.dtype) -> str:
    """`expr` rounded to `dtype` and held as FP32 again; FP64 becomes a half by way of FP32, as in torch."""
    if dtype in (wide, torch.bool):
        return expr
    steps = [torch.float32] * (wide == torch.float64) + [dtype, torch.float32] * (dtype in HALVES)
    return f"({expr})" + "".join(f".to({TL_DTYPES[step]})" for step in steps)


def _times(index: str, stride: int | None, argument: str) -> str:
    if stride is None:
        return f"{index} * {argument}"
    return index if stride == 1 else f"{index} * {stride}"


_INDEX = re.compile(r"row(?: // (?P<div>[\w*]+))?(?: % (?P<mod>[\w*]+))?")


def _row_index(expr: str) -> str:
    """A row-index expression in the text, in 64 bits: a divisor that is a product divides by each factor in turn."""
    m = _INDEX.fullmatch(expr)
    if not m:
        raise ProgramError(f"{expr!r} is not a row index that moves with the row")
    text = "row"
    for factor in (m["div"] or "").split("*"):
        if factor:
            text = f"{text} // {factor}"
    if m["mod"]:
        factors = m["mod"].split("*")
        text += f" % {m['mod']}" if len(factors) == 1 else f" % (tl.full([], 1, tl.int64) * {' * '.join(factors)})"
    return "row" if text == "row" else f"({text})"
