"""A row program as Triton source: one readable, self-contained module with one kernel.

In the text, a tile is `[ROWS, BLOCK_N]`, a row value `[ROWS, 1]`, a column value `[1, BLOCK_N]` and a scalar `[1, 1]`.
Values are held in FP32 (FP64 where the program says so) and rounded where the program rounds. Three rules keep the
numbers right, whatever compiles the text:

- Lanes beyond the row are masked before every reduction, and loads widen 16-bit data at once.
- Literals stand in the text and literal arguments of functions are typed: a launch passes no floats.
- A product that is added to something is spelled as `fma(a, b, minus_zero)`, where the compiler cannot see that
  `minus_zero` is -0.0. That is the rounded product, for the price of a multiplication; `a * b + c` would be contracted
  (a launch by Inductor cannot switch contraction off), and the residual sum would differ from eager's.
"""

from __future__ import annotations

import hashlib
import itertools
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..errors import ProgramError
from ..row_ops import COL_REDUCTIONS, POINTWISE, ROW_REDUCTIONS
from ..row_program import Kind, Operand, Output, RowProgram, Statement, compute_dtype
from .schedule import Schedule

Strides = Mapping[str, Sequence[int | None]]

_TL_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
_MINUS_ZERO = {torch.float32: "minus_zero", torch.float64: "minus_zero_f64"}
_HALF = (torch.bfloat16, torch.float16)
_RESERVED = {"row", "rows", "col", "mask", "row_mask", "col_mask", "start", "tl", "triton", "libdevice"}
_RESERVED |= {"zero", *_MINUS_ZERO.values(), "range", "float"}
_INDENT = "    "

_FUNCTIONS: dict[str, str] = {
    "_mul": "def _mul(a, b, minus_zero):\n    return tl.fma(a, b, minus_zero)",
    "_fma": "def _fma(a, b, c):\n    return tl.fma(a, b, c)",
    "_div": "def _div(a, b):\n    return a / b if b.dtype.is_fp64() else tl.div_rn(a, b)",
    "_sqrt": "def _sqrt(a):\n    return tl.sqrt(a) if a.dtype.is_fp64() else tl.sqrt_rn(a)",
    "_rsqrt": "def _rsqrt(a):\n    return tl.rsqrt(a)",
    "_exp": "def _exp(a):\n    return libdevice.exp(a)",
    "_tanh": "def _tanh(a):\n    return libdevice.tanh(a)",
    "_erf": "def _erf(a):\n    return tl.erf(a)",
    "_sigmoid": "def _sigmoid(a):\n    return _div(tl.full([1, 1], 1.0, a.dtype), 1.0 + _exp(-a))",
    "_relu": "def _relu(a):\n    return tl.where(a < 0.0, 0.0, a)",
    "_maximum": "def _maximum(a, b):\n    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_minimum": "def _minimum(a, b):\n    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
}
"""The functions that op spellings call. A module holds those that its kernel uses."""


def kernel_name(program: RowProgram) -> str:
    """The name of the kernel in the generated module: the same for equal programs."""
    return f"fusepass_{program.digest}"


def arguments(program: RowProgram, strides: Strides) -> list[str]:
    """The names of the kernel's run-time arguments, in order."""
    pointers = [f"{o.name}_ptr" for o in program.operands] + [f"out{i}_ptr" for i in range(len(program.outputs))]
    strided = _strided(program, strides)
    run_time = [f"{name}_stride{k}" for name, dims in strided for k, stride in enumerate(dims) if stride is None]
    names = [*pointers, "rows", *program.sizes, *run_time]
    if len(set(names)) != len(names) or set(program.sizes) & set(program.values):
        raise ProgramError(f"two arguments or values of the kernel have one name: {', '.join(names)}")
    return names


def grid(program: RowProgram, schedule: Schedule, rows: Any) -> Any:
    """The number of program instances for `rows` rows, an int or a symbolic one."""
    return (rows + (schedule.rows_per_program - 1)) // schedule.rows_per_program


def generate(program: RowProgram, schedule: Schedule, strides: Strides) -> str:
    """The text of a module whose kernel `kernel_name(program)` computes `program`.

    Args:
        program: the program.
        schedule: its schedule, see `schedule.choose`.
        strides: for each operand with a row index, and for output i under `out{i}`, one stride per leading dimension
            and, for a tile, one for the column; None where it is an argument of the kernel.
    """
    if any(s.op in COL_REDUCTIONS for s in program.statements):
        raise ProgramError("column sums need the backward schedule: none of the schedules here sums over rows")
    if bad := [o.value for o in program.outputs if program.values[o.value].kind in (Kind.COL, Kind.SCALAR)]:
        raise ProgramError(f"an output must be a tile or a row value, but {', '.join(bad)} is neither")
    kernel = _Kernel(program, schedule.verify(program), strides)
    _SCHEDULES[schedule.kind](kernel)
    return kernel.module()


@cache
def load(source: str, name: str) -> Any:
    """The kernel called `name` of a generated module; one object for equal texts, as Inductor tells kernels by `id`."""
    filename = f"<fusepass {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Triton and Inductor read a kernel's text through `inspect`. An entry without a time stamp is never dropped.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fusepass.generated.{name}", "__file__": filename}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def tile_traffic(program: RowProgram, schedule: Schedule) -> tuple[int, int]:
    """How many tiles the kernel reads and writes."""
    writes = sum(program.values[o.value].kind is Kind.TILE for o in program.outputs)
    if schedule.kind == "row":
        return sum(o.kind is Kind.TILE for o in program.operands), writes
    plans = [_plan_loop(program, phase) for phase in range(program.n_phases)]
    return sum(len(plan.tiles) + len(plan.reloads) for plan in plans), writes


def _strided(program: RowProgram, strides: Strides) -> Iterator[tuple[str, Sequence[int | None]]]:
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


class _Kernel:
    """The text of one kernel while it is written. Schedules call `emit`, `load`, `statement`, `reduce` and `store`."""

    def __init__(self, program: RowProgram, schedule: Schedule, strides: Strides) -> None:
        self.program = program
        self.schedule = schedule
        self.arguments = arguments(program, strides)
        self.strides = dict(_strided(program, strides))
        self.operands = {o.name: o for o in program.operands}
        self.row_masked = schedule.rows_per_program > 1
        self.col_masked = program.cols % schedule.block_n != 0
        self.exact = _products_that_are_added(program)
        self.lines: list[str] = []
        self.depth = 1

    # Writing.

    def emit(self, line: str) -> None:
        self.lines.append(_INDENT * self.depth + line)

    def module(self) -> str:
        body = "\n".join(self.lines)
        functions = _functions_used(body)
        s = self.schedule
        head = [
            f"# {s.kind} schedule: tile {s.rows_per_program} x {s.block_n}, num_warps={s.num_warps}, "
            f"num_stages={s.num_stages}",
            *(f"# {line}" for line in str(self.program).splitlines()),
            "import triton",
            "import triton.language as tl",
        ]
        if any("libdevice." in f for f in functions):
            head.append("from triton.language.extra import libdevice")
        kernel = f"def {kernel_name(self.program)}({', '.join(self.arguments)}):\n{body}"
        return "\n".join([*head, *(f"\n\n@triton.jit\n{f}" for f in (*functions, kernel))]) + "\n"

    def start(self) -> None:
        rows = self.schedule.rows_per_program
        first = "tl.program_id(0).to(tl.int64)" + (f" * {rows}" if rows > 1 else "")
        self.emit(f"row = {first} + tl.arange(0, {rows})[:, None]")
        if self.row_masked:
            self.emit("row_mask = row < rows")
        wides = {self.wide(s) for s in self.program.statements if s.name in self.exact}
        if wides or self.schedule.kind == "loop":
            self.emit("zero = tl.program_id(1)  # the grid has one dimension, but the compiler does not know")
        if torch.float32 in wides:
            self.emit("minus_zero = (zero | -2147483648).to(tl.float32, bitcast=True)  # keeps products rounded: _mul")
        if torch.float64 in wides:
            sign = "tl.full([], -9223372036854775808, tl.int64)"
            self.emit(f"minus_zero_f64 = (zero | {sign}).to(tl.float64, bitcast=True)  # keeps products rounded: _mul")

    def columns(self, start: str = "") -> None:
        """Define `col` and the masks for the block of columns that begins at `start`."""
        self.emit(f"col = {start}tl.arange(0, {self.schedule.block_n})[None, :]")
        if self.col_masked:
            self.emit(f"col_mask = col < {self.program.cols}")
            if self.row_masked:
                self.emit("mask = row_mask & col_mask")

    def mask(self, kind: Kind) -> str:
        """The name of the mask for a value of this kind, or nothing where every lane is inside."""
        rows = self.row_masked and kind in (Kind.TILE, Kind.ROW)
        cols = self.col_masked and kind in (Kind.TILE, Kind.COL)
        return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((rows, cols), "")

    # Memory.

    def pointer(self, name: str, kind: Kind, index: tuple[str, ...]) -> str:
        """The addresses of a tensor's elements: one term for each leading dimension, then the column."""
        if kind is Kind.SCALAR:
            return f"{name}_ptr + tl.zeros([1, 1], tl.int32)"
        if kind is Kind.COL:
            return f"{name}_ptr + col"
        terms = [f"{name}_ptr"]
        strides = self.strides[name]
        for k, expr in enumerate(index):
            if expr != "0" and strides[k] != 0:
                terms.append(_times(_row_index(expr), strides[k], f"{name}_stride{k}"))
        if len(terms) == 1:
            terms.append("tl.zeros_like(row)")
        if kind is Kind.TILE:
            last = strides[-1]
            wide = last is None or last * self.program.cols >= 2**31
            terms.append(_times("col.to(tl.int64)" if wide else "col", last, f"{name}_stride{len(index)}"))
        return " + ".join(terms)

    def load(self, operand: Operand, keep: bool = False) -> None:
        self.read(operand.name, operand.name, operand.kind, operand.index, operand.dtype, keep)

    def reload(self, i: int, output: Output) -> None:
        """Read back what an earlier loop stored as output i."""
        value = self.program.values[output.value]
        self.read(output.value, f"out{i}", value.kind, output.index, value.dtype, keep=True)

    def read(self, name: str, tensor: str, kind: Kind, index: tuple[str, ...], dtype: torch.dtype, keep: bool) -> None:
        mask = self.mask(kind)
        options = f", mask={mask}, other=0.0" if mask else ""
        if kind is Kind.TILE and self.schedule.kind == "loop":
            options += f', eviction_policy="{"evict_last" if keep else "evict_first"}"'
        widen = ".to(tl.float32)" if dtype in _HALF else ""
        self.emit(f"{_name(name)} = tl.load({self.pointer(tensor, kind, index)}{options}){widen}")

    def store(self, i: int, output: Output) -> None:
        value = self.program.values[output.value]
        mask = self.mask(value.kind)
        narrow = f"{_name(value.name)}.to({_TL_DTYPES[value.dtype]})" if value.dtype in _HALF else _name(value.name)
        pointer = self.pointer(f"out{i}", value.kind, output.index)
        self.emit(f"tl.store({pointer}, {narrow}{f', mask={mask}' if mask else ''})")

    # Arithmetic.

    def wide(self, s: Statement) -> torch.dtype:
        return compute_dtype(s.dtype, *(self.program.values[a].dtype for a in s.value_args))

    def argument(self, a: str | float, wide: torch.dtype, typed: bool) -> str:
        if not isinstance(a, str):
            literal = f'float("{a}")' if a in (float("inf"), float("-inf")) else repr(float(a))
            return f"tl.full([1, 1], {literal}, {_TL_DTYPES[wide]})" if typed else literal
        narrow = self.program.values[a].dtype != torch.float64 and wide == torch.float64
        return f"{_name(a)}.to(tl.float64)" if narrow else _name(a)

    def statement(self, s: Statement) -> None:
        """A pointwise statement, computed in FP32 or FP64 and rounded to its dtype."""
        wide = self.wide(s)
        spelling = POINTWISE[s.op].triton
        typed = "(" in spelling or s.op == "cast" or not s.value_args
        args = [self.argument(a, wide, typed or s.name in self.exact) for a in s.args]
        if s.name in self.exact:
            expr = f"_mul({args[0]}, {args[-1]}, {_MINUS_ZERO[wide]})"
        else:
            expr = re.sub(r"(?<=\()1\.0(?=,)", f"tl.full([1, 1], 1.0, {_TL_DTYPES[wide]})", spelling).format(*args)
        self.emit(f"{_name(s.name)} = {_rounded(expr, wide, s.dtype)}")

    def reduction_argument(self, s: Statement) -> str:
        """The reduction's tile with the lanes beyond the row replaced by what leaves the result alone."""
        mask = self.mask(Kind.TILE)
        value = self.argument(s.args[0], self.wide(s), typed=False)
        fill = {"row_max": 'float("-inf")', "row_min": 'float("inf")'}.get(s.op, "0.0")
        return f"tl.where({mask}, {value}, {fill})" if mask else value

    def reduce(self, s: Statement, tile: str) -> None:
        """`s`, a row reduction, from a tile whose lanes beyond the row do not matter."""
        wide = self.wide(s)
        function = {"row_max": "_maximum", "row_min": "_minimum"}.get(s.op)
        expr = f"tl.reduce({tile}, 1, {function})" if function else f"tl.sum({tile}, 1)"
        expr += "[:, None]"
        if s.op == "row_mean":
            expr = f"_div({expr}, tl.full([1, 1], {float(self.program.cols)}, {_TL_DTYPES[wide]}))"
        self.emit(f"{_name(s.name)} = {_rounded(expr, wide, s.dtype)}")

    def stores(self, names: Iterable[str]) -> None:
        wanted = set(names)
        for i, output in enumerate(self.program.outputs):
            if output.value in wanted:
                self.store(i, output)


def _row_schedule(k: _Kernel) -> None:
    """The whole row at once: every operand is read once, where it is first used."""
    k.start()
    k.columns()
    loaded: set[str] = set()

    def need(names: Iterable[str]) -> None:
        for name in names:
            if name in k.operands and name not in loaded:
                loaded.add(name)
                k.load(k.operands[name])
                k.stores([name])

    for s in k.program.statements:
        need(s.value_args)
        if s.op in ROW_REDUCTIONS:
            k.reduce(s, k.reduction_argument(s))
        else:
            k.statement(s)
        k.stores([s.name])
    need(output.value for output in k.program.outputs)


def _loop_schedule(k: _Kernel) -> None:
    """One pass over the columns for each phase: blocks are read again, not held."""
    p = k.program
    k.start()
    rows_loaded: set[str] = set()

    def once(names: Iterable[str]) -> None:
        """Load the row and scalar operands among `names`, outside any loop."""
        for name in names:
            if name in k.operands and name not in rows_loaded and k.operands[name].kind in (Kind.ROW, Kind.SCALAR):
                rows_loaded.add(name)
                k.load(k.operands[name])
                k.stores([name])

    plans = [_plan_loop(p, phase) for phase in range(p.n_phases)]
    for phase, plan in enumerate(plans):
        for s in p.statements:
            if p.phases[s.name] == phase and s.kind in (Kind.ROW, Kind.SCALAR) and s.op not in ROW_REDUCTIONS:
                once(s.value_args)
                k.statement(s)
                k.stores([s.name])
        once(name for s in plan.statements for name in s.value_args)
        if phase == 0:
            once(output.value for output in p.outputs)
        if not plan.roots:
            continue
        _emit_loop(k, plan, later={t for after in plans[phase + 1 :] for t in after.tiles})
        for s in plan.reductions:
            k.reduce(s, f"{_name(s.name)}_block")
            k.stores([s.name])


def _emit_loop(k: _Kernel, plan: _LoopPlan, later: set[str]) -> None:
    p, block = k.program, [k.schedule.rows_per_program, k.schedule.block_n]
    if plan.reloads:
        k.emit("tl.debug_barrier()  # what other threads stored is read back below")
    for s in plan.reductions:
        fill = {"row_max": 'float("-inf")', "row_min": 'float("inf")'}.get(s.op, "0.0")
        k.emit(f"{_name(s.name)}_block = tl.full({block}, {fill}, {_TL_DTYPES[k.wide(s)]})")
    # A trip count that the compiler knows makes it unroll the loop, and spill.
    k.emit(f"for start in range(0, {p.cols} + zero, {k.schedule.block_n}):")
    k.depth += 1
    k.columns("start + ")
    for i, output in enumerate(p.outputs):
        if i in plan.reloads:
            k.reload(i, output)
    loaded: set[str] = set()

    def need(names: Iterable[str]) -> None:
        for name in names:
            if name in k.operands and name not in loaded and k.operands[name].kind in (Kind.TILE, Kind.COL):
                loaded.add(name)
                k.load(k.operands[name], keep=name in later)
                k.stores({name} & plan.stores)

    reductions = {s.args[0]: [r for r in plan.reductions if r.args[0] == s.args[0]] for s in plan.reductions}

    def accumulate(name: str) -> None:
        for s in reductions.get(name, []):
            acc, tile = f"{_name(s.name)}_block", k.reduction_argument(s)
            function = {"row_max": "_maximum", "row_min": "_minimum"}.get(s.op)
            k.emit(f"{acc} = {function}({acc}, {tile})" if function else f"{acc} += {tile}")

    for s in plan.statements:
        need(s.value_args)
        k.statement(s)
        k.stores({s.name} & plan.stores)
        accumulate(s.name)
    need(plan.roots)
    for name in plan.roots:
        if name in k.operands:
            accumulate(name)
    k.depth -= 1


_SCHEDULES: dict[str, Callable[[_Kernel], None]] = {"row": _row_schedule, "loop": _loop_schedule}


class _LoopPlan:
    """What one pass over the columns does. `reloads` are the outputs that it reads back instead of computing."""

    def __init__(self, program: RowProgram, phase: int, reloads: frozenset[int]) -> None:
        phases, values = program.phases, program.values
        tile_outputs = {o.value for o in program.outputs if values[o.value].kind is Kind.TILE}
        self.stores = {name for name in tile_outputs if phases[name] == phase}
        self.reductions = [s for s in program.row_reductions if phases[s.name] == phase + 1]
        self.roots = [n for n in values if n in self.stores or any(s.args[0] == n for s in self.reductions)]
        read_back = {program.outputs[i].value for i in reloads}
        needed: set[str] = set()
        pending = list(self.roots)
        while pending:
            name = pending.pop()
            value = values[name]
            if name in needed or value.kind in (Kind.ROW, Kind.SCALAR):
                continue
            needed.add(name)
            if isinstance(value, Statement) and name not in read_back:
                pending += value.value_args
        self.reloads = frozenset(i for i in reloads if program.outputs[i].value in needed)
        self.statements = [s for s in program.statements if s.name in needed and s.name not in read_back]
        self.tiles = [
            o.name for o in program.operands if o.name in needed and o.kind is Kind.TILE and o.name not in read_back
        ]
        moved = [*(values[t] for t in self.tiles), *(values[program.outputs[i].value] for i in self.reloads)]
        costly = sum(not POINTWISE[s.op].cheap for s in self.statements)
        self.cost = (sum(v.dtype.itemsize for v in moved), costly, len(self.reloads))


def _plan_loop(program: RowProgram, phase: int) -> _LoopPlan:
    """The plan that reads the fewest bytes, then computes least again, then needs no barrier."""
    stored = [
        i
        for i, o in enumerate(program.outputs)
        if program.values[o.value].kind is Kind.TILE and program.phases[o.value] < phase
    ][:6]
    choices = itertools.chain.from_iterable(itertools.combinations(stored, n) for n in range(len(stored) + 1))
    return min((_LoopPlan(program, phase, frozenset(c)) for c in choices), key=lambda plan: plan.cost)


def _products_that_are_added(program: RowProgram) -> set[str]:
    """The products in FP32 or FP64 that a compiler would contract with an addition into an fma."""
    products: set[str] = set()
    through: set[str] = set()  # values that a later add would see as a product
    for s in reversed(program.statements):
        if s.op in ("add", "sub", "row_sum", "row_mean") or (s.op in ("neg", "cast") and s.name in through):
            through.update(s.value_args)
        if s.op in ("mul", "square") and s.name in through and s.dtype not in _HALF:
            products.add(s.name)
    return products


def _functions_used(body: str) -> list[str]:
    used: set[str] = set()
    pending = [body]
    while pending:
        text = pending.pop()
        new = {name for name in _FUNCTIONS if re.search(rf"(?<![\w.]){name}\b", text)} - used
        used |= new
        pending += [_FUNCTIONS[name].split("\n", 1)[1] for name in new]
    return [text for name, text in _FUNCTIONS.items() if name in used]


def _rounded(expr: str, wide: torch.dtype, dtype: torch.dtype) -> str:
    """`expr` rounded to `dtype` and held as FP32 again; FP64 becomes a half by way of FP32, as in torch."""
    if dtype == wide:
        return expr
    steps = [torch.float32] * (wide == torch.float64) + [dtype, torch.float32] * (dtype in _HALF)
    return f"({expr})" + "".join(f".to({_TL_DTYPES[step]})" for step in steps)


def _name(name: str) -> str:
    """A value's name in the text: its own, unless Python or the kernel's frame has taken it."""
    taken = name in _RESERVED or keyword.iskeyword(name) or name.endswith(("_ptr", "_block"))
    return f"{name}_" if taken else name


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
