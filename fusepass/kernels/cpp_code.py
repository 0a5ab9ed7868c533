"""A row program as C++ source: one readable, self-contained file with one function called `kernel`.

The rows are split over threads. One row is a few loops over its columns, one loop for each phase: a loop ends where a
row reduction finishes. A tile value that a later loop needs is read again from where it already lies (an operand, an
output), computed again where that is a handful of instructions, or kept in a scratch row; all of these are in the
first- or second-level cache by then. Values per row are plain numbers; values per column are computed once per thread.

In the text a value is held in FP32 (FP64 where the program says f64) and rounded where the program rounds. The number
of columns and all strides are run-time arguments, so the text is the same for programs that differ only in these.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from ..row_ops import COL_REDUCTIONS, POINTWISE
from ..row_program import Kind, Operand, Output, RowProgram, Statement, compute_dtype

KERNEL_NAME = "kernel"

_C_TYPE = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
_ITEM_SIZE = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_REDUCTION = {"row_sum": "Sum", "row_mean": "Sum", "row_max": "Max", "row_min": "Min"}
_NOT_WORTH_REPEATING = frozenset({"div", "sqrt", "rsqrt", "reciprocal"})
_MAX_REPEATED = 3  # statements computed again for one value before a scratch row is the better choice


@cache
def prelude() -> str:
    """The part of the source that is the same for every kernel."""
    return Path(__file__).with_name("cpp_prelude.h").read_text()


def generate(program: RowProgram) -> str:
    """The C++ source of the kernel for `program`. Programs that differ only in `cols` have the same source."""
    return _Writer(program).source()


def argument_types(program: RowProgram) -> list[str]:
    """The C++ types of the kernel's arguments, in the order that `kernels/ops.py` passes them."""
    return [type_ for type_, _ in _Writer(program).arguments]


@cache
def overwritable(program: RowProgram) -> tuple[tuple[int, ...], ...]:
    """For each output, the numbers of the operands whose memory it may be written over.

    Each loop reads a column of a row before it writes that column, so an output may take the place of an operand of its
    own dtype and layout that no later loop reads again.
    """
    writer = _Writer(program)
    last_read = {o.name: -1 for o in program.operands}
    for loop in range(program.n_phases):
        last_read |= dict.fromkeys(last_read.keys() & writer.computed_in(loop), loop)

    def fits(out: Output, operand: Operand) -> bool:
        tiles = writer.kind(out.value) is operand.kind is Kind.TILE and operand.index == out.index == ("row",)
        return tiles and operand.dtype == writer.dtype(out.value) and last_read[operand.name] <= writer.phase[out.value]

    return tuple(tuple(i for i, x in enumerate(program.operands) if fits(o, x)) for o in program.outputs)


def n_strides(kind: Kind, index: tuple[str, ...]) -> int:
    """How many strides follow the pointer of an operand or output in the argument list."""
    return len(index) + (kind in (Kind.TILE, Kind.COL))


def _is_narrow(dtype: torch.dtype) -> bool:
    return _ITEM_SIZE[dtype] == 2


def _held(dtype: torch.dtype) -> str:
    """The C++ type of one number of a value of this dtype."""
    return "double" if dtype == torch.float64 else "float"


def _vector(dtype: torch.dtype) -> str:
    return "Doubles" if dtype == torch.float64 else "Floats"


def _c_name(name: str) -> str:
    """The variable for a value: its own name, with an underscore where that might be a word of C++ or of this text."""
    return name if re.fullmatch(r"[a-z]\d+", name) else f"{name}_"


def _row_offset(name: str, index: tuple[str, ...]) -> str:
    terms = []
    for k, expr in enumerate(index):
        if expr != "0":
            text = re.sub(r"[a-z]\w*", lambda m: "row" if m[0] == "row" else f"a.{_c_name(m[0])}", expr)
            terms.append(f"{text} * a.{name}_stride{k}" if text == "row" else f"({text}) * a.{name}_stride{k}")
    return " + ".join(terms) or "0"


@dataclass
class _Lines:
    """Source lines under construction, with their indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0

    def add(self, *lines: str) -> None:
        for line in lines:
            self.depth -= line.startswith("}")
            self.lines.append("  " * self.depth + line if line else "")
            self.depth += line.endswith("{")


class _Writer:
    """Writes one program. The methods are in the order of the text that they produce."""

    def __init__(self, program: RowProgram) -> None:
        self.program = program
        self.phase = program.phases
        self.col_sums = [s for s in program.statements if s.op in COL_REDUCTIONS]
        self.tile_outputs = [(i, o) for i, o in enumerate(program.outputs) if self.kind(o.value) is Kind.TILE]
        self.kept: list[str] = []  # tile values with a scratch row of their own, in program order
        self._keep()
        self.taken: Counter[str] = Counter()  # rows of scratch memory, by C++ type

    # ---- facts about values ----

    def kind(self, name: str) -> Kind:
        return self.program.values[name].kind

    def dtype(self, name: str) -> torch.dtype:
        return self.program.values[name].dtype

    def reductions_of(self, loop: int) -> list[Statement]:
        return [s for s in self.program.row_reductions if self.phase[s.args[0]] == loop]  # type: ignore[index]

    def col_sums_of(self, loop: int) -> list[Statement]:
        return [s for s in self.col_sums if self.phase[s.args[0]] == loop]  # type: ignore[index]

    def outputs_of(self, loop: int) -> list[tuple[int, Output]]:
        return [(i, o) for i, o in self.tile_outputs if self.phase[o.value] == loop]

    def roots(self, loop: int) -> list[str]:
        """The values for whose sake this loop runs."""
        reduced = [str(s.args[0]) for s in (*self.reductions_of(loop), *self.col_sums_of(loop))]
        written = [o.value for _, o in self.outputs_of(loop)]
        return [*reduced, *written, *(n for n in self.kept if self.phase[n] == loop)]

    def stored_in(self, name: str) -> int | None:
        """The output that holds this tile value, if one does."""
        return next((i for i, o in self.tile_outputs if o.value == name), None)

    def repeated(self, name: str) -> int | None:
        """How many statements computing this tile value in a later loop takes; None if it should be kept instead."""
        value = self.program.values[name]
        if isinstance(value, Operand) or self.stored_in(name) is not None:
            return 0
        tiles = [a for a in value.value_args if self.kind(a) is Kind.TILE]
        is_dear = not POINTWISE[value.op].cheap or value.op in _NOT_WORTH_REPEATING
        if is_dear or len(tiles) > 1 or _is_narrow(value.dtype):
            return None
        below = self.repeated(tiles[0]) if tiles else 0
        total = None if below is None else below + (value.op != "cast")
        return total if total is not None and total <= _MAX_REPEATED else None

    def computed_in(self, loop: int) -> set[str]:
        """The tile values whose statement (or load) stands in this loop."""
        found: set[str] = set()

        def visit(name: str) -> None:
            if name in found or self.kind(name) is not Kind.TILE:
                return
            found.add(name)
            value = self.program.values[name]
            if isinstance(value, Statement) and not self.is_reloaded(name, loop):
                for a in value.value_args:
                    visit(a)

        for root in self.roots(loop):
            visit(root)
        return found

    def is_reloaded(self, name: str, loop: int) -> bool:
        """Whether this loop reads a statement's tile value that an earlier loop has kept."""
        return self.phase[name] < loop and (self.stored_in(name) is not None or self.repeated(name) is None)

    def _keep(self) -> None:
        """Finds the tile values that need a scratch row of their own: those that only a later loop than theirs reads.

        From the last loop to the first, because what a loop has to keep for later it computes itself, from values that
        earlier loops may have to keep in turn.
        """
        for loop in reversed(range(self.program.n_phases)):
            for name in self.computed_in(loop):
                if self.is_statement(name) and self.is_reloaded(name, loop) and self.stored_in(name) is None:
                    self.kept.append(name)
        self.kept = [s.name for s in self.program.statements if s.name in self.kept]

    def is_statement(self, name: str) -> bool:
        return isinstance(self.program.values[name], Statement)

    @cached_property
    def loaded_cols(self) -> list[str]:
        """The column values that loops over a row read, in program order."""
        tile_args = {a for s in self.program.statements if s.kind is Kind.TILE for a in s.value_args}
        return [n for n in self.program.values if self.kind(n) is Kind.COL and n in tile_args]

    @cached_property
    def arguments(self) -> list[tuple[str, str]]:
        """Type and name of every argument of the kernel."""
        result = [("int64_t", "threads"), ("int64_t", "rows"), ("int64_t", "cols")]
        result += [("int64_t", _c_name(n)) for n in self.program.sizes]
        for o in self.program.operands:
            result += self._tensor_arguments(f"const {_C_TYPE[o.dtype]}*", _c_name(o.name), n_strides(o.kind, o.index))
        for i, out in enumerate(self.program.outputs):
            type_ = f"{_C_TYPE[self.dtype(out.value)]}*"
            result += self._tensor_arguments(type_, f"out{i}", n_strides(self.kind(out.value), out.index))
        return result

    @staticmethod
    def _tensor_arguments(type_: str, name: str, strides: int) -> list[tuple[str, str]]:
        return [(type_, name)] + [("int64_t", f"{name}_stride{k}") for k in range(strides)]

    # ---- the text ----

    def source(self) -> str:
        body = self._run_rows()
        head = ["// A fused row kernel. `cols` and the strides are arguments. The program:", "//"]
        text = re.sub(r"^row_program cols=\d+", "row_program cols=*", str(self.program))
        head += [f"//   {line}" for line in text.splitlines()]
        inner = ["namespace {", "", *self._struct(), "", *body, "", "}  // namespace"]
        return "\n".join([*head, "", prelude(), *inner, "", *self._kernel(), ""])

    def _struct(self) -> list[str]:
        fields = [f"  {type_} {name};" for type_, name in self.arguments if name != "threads"]
        return ["struct Arguments {", *fields, "};"]

    def _run_rows(self) -> list[str]:
        prologue, loop = _Lines(depth=1), _Lines(depth=1)
        self._scalars(prologue)
        self._columns(prologue)
        self._scratch_rows(prologue)
        self._row_loop(loop)
        out = _Lines()
        out.add("// The rows of one part; the first part also writes what does not depend on the row.")
        totals = ", double* totals" if self.col_sums else ""
        out.add(f"void run_rows(const Arguments& a, int64_t part, int64_t begin, int64_t end{totals}) {{")
        out.add("const int64_t cols = a.cols;")
        sizes = [f"{count} * Scratch::row_bytes<{type_}>(cols)" for type_, count in sorted(self.taken.items())]
        out.add("Scratch scratch(" + (" + ".join(sizes) or "0") + ");")
        out.lines += prologue.lines + loop.lines
        out.add("}")
        return out.lines

    def _row_loop(self, out: _Lines) -> None:
        loops = [q for q in range(self.program.n_phases) if self.roots(q)]
        self._addresses(out)
        out.add("for (int64_t row = begin; row < end; ++row) {")
        self._row_pointers(out)
        for q in range(self.program.n_phases):
            self._row_statements(out, q)
            if q in loops:
                self._loop(out, q, prefetch=len(loops) > 1 and q == loops[-1])
        self._row_ends(out)
        out.add("}")

    def _take(self, type_: str) -> str:
        self.taken[type_] += 1
        return f"scratch.take<{type_}>(cols)"

    def _scalars(self, out: _Lines) -> None:
        for o in self.program.operands:
            if o.kind is Kind.SCALAR:
                name, held = _c_name(o.name), _held(o.dtype)
                out.add(f"const {held} {name} = static_cast<{held}>(*a.{name});")
        for s in self.program.statements:
            if s.kind is Kind.SCALAR:
                out.add(self._number_statement(s))
        for i, output in self._outputs_of_kind(Kind.SCALAR):
            out.add(
                f"if (part == 0) *a.out{i} = static_cast<{_C_TYPE[self.dtype(output.value)]}>({_c_name(output.value)});"
            )

    def _outputs_of_kind(self, kind: Kind) -> list[tuple[int, Output]]:
        return [(i, o) for i, o in enumerate(self.program.outputs) if self.kind(o.value) is kind]

    def _columns(self, out: _Lines) -> None:
        """Column values: contiguous FP32 or FP64 operands in place, the others computed once into scratch."""
        statements = [s for s in self.program.statements if s.kind is Kind.COL and s.op not in COL_REDUCTIONS]
        outputs = [(i, o) for i, o in self._outputs_of_kind(Kind.COL) if o.value not in {s.name for s in self.col_sums}]
        if not self.loaded_cols and not outputs:
            return
        for o in self.program.operands:
            if o.kind is Kind.COL:
                name, c_type = _c_name(o.name), _C_TYPE[o.dtype]
                held = self._take(c_type)
                out.add(f"const {c_type}* {name}_in = contiguous_row(a.{name}, a.{name}_stride0, cols, {held});")
        stored = [n for n in self.loaded_cols if self.is_statement(n) or _is_narrow(self.dtype(n))]
        for n in self.loaded_cols:
            if n in stored:
                out.add(f"{_held(self.dtype(n))}* {_c_name(n)}_col = {self._take(_held(self.dtype(n)))};")
            else:
                out.add(f"const {_held(self.dtype(n))}* {_c_name(n)}_col = {_c_name(n)}_in;")
        for i, output in outputs:
            c_type = _C_TYPE[self.dtype(output.value)]
            held = self._take(c_type)
            out.add(f"{c_type}* out{i}_row = a.out{i}_stride0 == 1 && part == 0 ? a.out{i} : {held};")
        if stored or outputs:
            needed = self._col_values_for([*stored, *(o.value for _, o in outputs)])
            out.add("for_columns(0, cols, [&](int64_t c, auto n) {")
            for o in self.program.operands:
                if o.kind is Kind.COL and o.name in needed:
                    out.add(f"const {_vector(o.dtype)} {_c_name(o.name)} = load({_c_name(o.name)}_in + c, n);")
            for s in statements:
                if s.name in needed:
                    out.add(*self._vector_statement(s))
            for n in stored:
                out.add(f"store({_c_name(n)}_col + c, {_c_name(n)}, n);")
            for i, output in outputs:
                out.add(f"store(out{i}_row + c, {self._stored(output.value)}, n);")
            out.add("});")
        for i, _ in outputs:
            out.add(f"if (part == 0) scatter_row(a.out{i}, a.out{i}_stride0, cols, out{i}_row);")

    def _col_values_for(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()

        def visit(name: str) -> None:
            if name not in found:
                found.add(name)
                value = self.program.values[name]
                if isinstance(value, Statement):
                    for a in value.value_args:
                        visit(a)

        for name in names:
            visit(name)
        return found

    def _scratch_rows(self, out: _Lines) -> None:
        for o in self.program.operands:
            if o.kind is Kind.TILE:
                out.add(f"{_C_TYPE[o.dtype]}* {_c_name(o.name)}_gathered = {self._take(_C_TYPE[o.dtype])};")
        for i, output in self.tile_outputs:
            c_type = _C_TYPE[self.dtype(output.value)]
            out.add(f"{c_type}* out{i}_scattered = {self._take(c_type)};")
        for n in self.kept:
            out.add(f"{_held(self.dtype(n))}* {_c_name(n)}_row = {self._take(_held(self.dtype(n)))};")
        for s in self.col_sums:
            held = self._partial_type(s)
            out.add(f"{held}* {_c_name(s.name)}_partial = {self._take(held)};")
            out.add(f"std::fill_n({_c_name(s.name)}_partial, cols, {held}(0));")

    def _partial_type(self, s: Statement) -> str:
        return _held(self.dtype(str(s.args[0])))

    def _addresses(self, out: _Lines) -> None:
        """Functions from a row's number to where that row begins in each tensor."""
        tensors = [(_c_name(o.name), o.index) for o in self.program.operands]
        tensors += [(f"out{i}", o.index) for i, o in enumerate(self.program.outputs)]
        for name, index in tensors:
            if index:
                at = f"a.{name} + {_row_offset(name, index)}"
                out.add(f"const auto {name}_at = [&a](int64_t row) {{ return {at}; }};")

    def _row_pointers(self, out: _Lines) -> None:
        for o in self.program.operands:
            name, c_type = _c_name(o.name), _C_TYPE[o.dtype]
            if o.kind is Kind.TILE:
                stride = f"a.{name}_stride{len(o.index)}"
                out.add(f"const {c_type}* {name}_in = contiguous_row({name}_at(row), {stride}, cols, {name}_gathered);")
            elif o.kind is Kind.ROW:
                out.add(f"const {_held(o.dtype)} {name} = static_cast<{_held(o.dtype)}>(*{name}_at(row));")
        for i, output in self.tile_outputs:
            c_type = _C_TYPE[self.dtype(output.value)]
            out.add(
                f"{c_type}* out{i}_row = a.out{i}_stride{len(output.index)} == 1 ? out{i}_at(row) : out{i}_scattered;"
            )

    def _row_statements(self, out: _Lines, phase: int) -> None:
        for s in self.program.statements:
            if s.kind is Kind.ROW and self.phase[s.name] == phase and s.op in POINTWISE:
                out.add(self._number_statement(s))

    def _loop(self, out: _Lines, loop: int, prefetch: bool) -> None:
        """One loop over the columns. The last of several has time to fetch the next row from memory."""
        ahead = self._next_rows(out) if prefetch else []
        reductions = self.reductions_of(loop)
        for s in reductions:
            vector = _vector(self.dtype(str(s.args[0])))
            out.add(f"RowReduction<{_REDUCTION[s.op]}, {vector}> {_c_name(s.name)}_reduction;")
        if reductions:
            out.add("for (int64_t block = 0; block < cols; block += kBlock) {")
            out.add("for_columns(block, std::min(cols, block + kBlock), [&](int64_t c, auto n) {")
        else:
            out.add("for_columns(0, cols, [&](int64_t c, auto n) {")
        out.add(*ahead)
        self._step(out, loop)
        out.add("});")
        if reductions:
            out.add(*(f"{_c_name(s.name)}_reduction.end_block();" for s in reductions), "}")
        for s in reductions:
            out.add(self._reduced(s))

    def _next_rows(self, out: _Lines) -> list[str]:
        """Declares where the next row lies; returns the statements that prefetch one step of it."""
        out.add("const int64_t next = std::min(row + 1, end - 1);")
        reads = [_c_name(o.name) for o in self.program.operands if o.kind is Kind.TILE]
        writes = [f"out{i}" for i, _ in self.tile_outputs]
        out.add(*(f"const auto* {name}_next = {name}_at(next);" for name in (*reads, *writes)))
        return [f"prefetch_read({n}_next + c);" for n in reads] + [f"prefetch_write({n}_next + c);" for n in writes]

    def _step(self, out: _Lines, loop: int) -> None:
        """What a loop does for one step of columns."""
        computed = self.computed_in(loop)
        statements = [s for s in self.program.statements if s.name in computed]
        for n in self._cols_read_by(s for s in statements if not self.is_reloaded(s.name, loop)):
            out.add(f"const {_vector(self.dtype(n))} {_c_name(n)} = load({_c_name(n)}_col + c, n);")
        for o in self.program.operands:
            if o.name in computed:
                out.add(f"const {_vector(o.dtype)} {_c_name(o.name)} = load({_c_name(o.name)}_in + c, n);")
        for s in statements:
            if self.is_reloaded(s.name, loop):
                out.add(f"const {_vector(s.dtype)} {_c_name(s.name)} = load({self._home(s.name)} + c, n);")
                continue
            out.add(*self._vector_statement(s))
            if s.name in self.kept and self.phase[s.name] == loop:
                out.add(f"store({_c_name(s.name)}_row + c, {_c_name(s.name)}, n);")
        for i, output in self.outputs_of(loop):
            out.add(f"store(out{i}_row + c, {self._stored(output.value)}, n);")
        for s in self.col_sums_of(loop):
            out.add(f"accumulate({_c_name(s.name)}_partial + c, {_c_name(str(s.args[0]))}, n);")
        for s in self.reductions_of(loop):
            out.add(f"{_c_name(s.name)}_reduction.add({_c_name(str(s.args[0]))}, n);")

    def _cols_read_by(self, statements: Iterable[Statement]) -> list[str]:
        args = {a for s in statements for a in s.value_args}
        return [n for n in self.loaded_cols if n in args]

    def _home(self, name: str) -> str:
        output = self.stored_in(name)
        return f"{_c_name(name)}_row" if output is None else f"out{output}_row"

    def _reduced(self, s: Statement) -> str:
        wide = self.dtype(str(s.args[0]))
        value = f"{_c_name(s.name)}_reduction.value()"
        if s.op == "row_mean":
            value = f"{value} / static_cast<{_held(wide)}>(cols)"
        value = self._rounded(value, compute_dtype(wide), s.dtype)
        return f"const {_held(s.dtype)} {_c_name(s.name)} = {value};"

    def _row_ends(self, out: _Lines) -> None:
        for i, output in self._outputs_of_kind(Kind.ROW):
            out.add(f"*out{i}_at(row) = static_cast<{_C_TYPE[self.dtype(output.value)]}>({_c_name(output.value)});")
        for i, output in self.tile_outputs:
            out.add(f"scatter_row(out{i}_at(row), a.out{i}_stride{len(output.index)}, cols, out{i}_row);")
        if self.col_sums:
            out.add("if ((row - begin) % kRowBlock == kRowBlock - 1 || row + 1 == end) {")
            for i, s in enumerate(self.col_sums):
                out.add(f"flush_partial({_c_name(s.name)}_partial, totals + {i} * cols, cols);")
            out.add("}")

    def _kernel(self) -> list[str]:
        arguments = ", ".join(f"{type_} {name}" for type_, name in self.arguments)
        values = ", ".join(name for _, name in self.arguments if name != "threads")
        out = _Lines()
        out.add(f'extern "C" void {KERNEL_NAME}({arguments}) {{')
        out.add(f"const Arguments a{{{values}}};")
        out.add("const int64_t n_parts = parts_of(threads, rows, cols);")
        call = "run_rows(a, part, begin, end"
        if self.col_sums:
            out.add(f"std::vector<double> totals(n_parts * {len(self.col_sums)} * cols);")
            call += f", totals.data() + part * {len(self.col_sums)} * cols"
        out.add("parallel_rows(n_parts, rows, [&](int64_t part, int64_t begin, int64_t end) {", f"{call});", "});")
        for i, output in self._outputs_of_kind(Kind.COL):
            for k, s in enumerate(self.col_sums):
                if s.name == output.value:
                    totals = f"totals.data() + {k} * cols, {len(self.col_sums)} * cols"
                    out.add(f"write_column_sum(a.out{i}, a.out{i}_stride0, cols, n_parts, {totals});")
        out.add("}")
        return out.lines

    # ---- statements ----

    def _number_statement(self, s: Statement) -> str:
        """A statement whose value is one number (per row, or for all rows)."""
        wide = compute_dtype(s.dtype, *(self.dtype(a) for a in s.value_args))
        args = [self._argument(a, wide, Kind.ROW) for a in s.args]
        value = self._rounded(POINTWISE[s.op].cpp.format(*args), wide, s.dtype)
        return f"const {_held(s.dtype)} {_c_name(s.name)} = {value};"

    def _vector_statement(self, s: Statement) -> list[str]:
        """A statement over one step of columns. A 16-bit value is also there as it is stored."""
        wide = compute_dtype(s.dtype, *(self.dtype(a) for a in s.value_args))
        args = [self._argument(a, wide, Kind.TILE) for a in s.args]
        value, name = POINTWISE[s.op].cpp.format(*args), _c_name(s.name)
        if not _is_narrow(s.dtype):
            return [f"const {_vector(s.dtype)} {name} = {self._rounded(value, wide, s.dtype)};"]
        c_type = _C_TYPE[s.dtype]
        value = f"to_floats({value})" if wide == torch.float64 else value
        return [
            f"const Narrow<{c_type}> {name}_narrow = narrow<{c_type}>({value});",
            f"const Floats {name} = to_floats({name}_narrow);",
        ]

    def _argument(self, arg: str | float, wide: torch.dtype, context: Kind) -> str:
        """An argument in the dtype that the statement computes in; a number stands for a whole step of columns."""
        type_ = _held(wide) if context is Kind.ROW else _vector(wide)
        if not isinstance(arg, str):
            return f"{type_}({_literal(arg)})"
        if self.kind(arg) in (Kind.ROW, Kind.SCALAR):
            is_same = context is Kind.ROW and _held(self.dtype(arg)) == _held(wide)
            return _c_name(arg) if is_same else f"{type_}({_c_name(arg)})"
        return f"to_doubles({_c_name(arg)})" if _vector(self.dtype(arg)) != _vector(wide) else _c_name(arg)

    @staticmethod
    def _rounded(value: str, wide: torch.dtype, dtype: torch.dtype) -> str:
        if wide == torch.float64 and dtype != torch.float64:
            value = f"to_floats({value})"
        return f"round_to<{_C_TYPE[dtype]}>({value})" if _is_narrow(dtype) else value

    def _stored(self, name: str) -> str:
        """A step of columns as it is written to an output."""
        if not _is_narrow(self.dtype(name)):
            return _c_name(name)
        is_computed = self.is_statement(name)
        return f"{_c_name(name)}_narrow" if is_computed else f"narrow<{_C_TYPE[self.dtype(name)]}>({_c_name(name)})"


def _literal(number: float) -> str:
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return repr(number)
