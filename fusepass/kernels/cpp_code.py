"""A row program as C++ source: one readable, self-contained file with one function called `kernel`.

The rows are split over threads. One row is a few loops over its columns, one loop for each phase: a loop ends where a
row reduction finishes (`cpp_placement.py`). What a later loop reads again is in the first- or second-level cache by
then. Values per row are plain numbers; values per column are computed once per thread. A column sum adds each row to a
partial row of its thread; every few rows these go to FP64 totals, and at the end those of all threads are added up.

The number of columns and all strides are run-time arguments, so the text is the same for programs that differ only in
these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch

from ..row_ops import GENERATORS, POINTWISE
from ..row_program import HALVES, Kind, Output, RowProgram, Statement, bracketed, lookup, lookups
from .cpp_placement import Placement
from .cpp_shift import ROW_FIRST, without_waiting
from .cpp_statements import (
    C_TYPE,
    c_name,
    check,
    computed_in,
    held,
    number_statement,
    rounded,
    summand,
    vector,
    vector_statement,
)

KERNEL_NAME = "kernel"

_REDUCTION = {"row_sum": "Sum", "row_mean": "Sum", "row_max": "Max", "row_min": "Min"}


@cache
def prelude(*, random: bool = False) -> str:
    """The part of the source that does not depend on the program, except for whether it draws random numbers."""
    names = ["cpp_vectors.h", "cpp_prelude.h", *(["cpp_random.h"] if random else [])]
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


def generate(program: RowProgram) -> str:
    """The C++ source of the kernel for `program`. Programs that differ only in `cols` have the same source.

    Raises `ProgramError` for random numbers that are not a CPU's.
    """
    check(program)
    return _Writer(program).source()


def argument_types(program: RowProgram) -> list[str]:
    """The C++ types of the kernel's arguments, in the order that `kernels/ops.py` passes them."""
    return [type_ for type_, _ in _Writer(program).arguments]


def n_strides(kind: Kind, index: tuple[str, ...]) -> int:
    """How many strides follow the pointer of an operand or output in the argument list."""
    return len(index) + (kind in (Kind.TILE, Kind.COL))


def _row_offset(name: str, index: tuple[str, ...]) -> str:
    terms = []
    for k, expr in enumerate(index):
        if found := lookup(expr):
            terms.append(f"static_cast<int64_t>(*{c_name(found[0])}_at(row)) * a.{name}_stride{k}")
        elif expr != "0":
            text = re.sub(r"[a-z]\w*", lambda m: "row" if m[0] == "row" else f"a.{c_name(m[0])}", bracketed(expr))
            text = text.replace("//", "/")  # which begins a comment in C++
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
        self.given = program
        self.program = program = without_waiting(program)
        self.placement = Placement(program)
        self.kind, self.dtype = self.placement.kind, self.placement.dtype
        self.taken: Counter[str] = Counter()  # rows of scratch memory, by C++ type

    @cached_property
    def arguments(self) -> list[tuple[str, str]]:
        """Type and name of every argument of the kernel."""
        result = [("int64_t", "threads"), ("int64_t", "rows"), ("int64_t", "cols")]
        result += [("int64_t", c_name(n)) for n in self.program.sizes]
        for o in self.program.operands:
            result += self._tensor_arguments(f"const {C_TYPE[o.dtype]}*", c_name(o.name), n_strides(o.kind, o.index))
        for i, out in enumerate(self.program.outputs):
            type_ = f"{C_TYPE[self.dtype(out.value)]}*"
            result += self._tensor_arguments(type_, f"out{i}", n_strides(self.kind(out.value), out.index))
        return result

    @staticmethod
    def _tensor_arguments(type_: str, name: str, strides: int) -> list[tuple[str, str]]:
        return [(type_, name)] + [("int64_t", f"{name}_stride{k}") for k in range(strides)]

    # ---- the text ----

    def source(self) -> str:
        body = self._run_rows()
        head = ["// A fused row kernel. `cols` and the strides are arguments. The program:", "//"]
        text = re.sub(r"^row_program cols=\d+", "row_program cols=*", str(self.given))
        head += [f"//   {line}" for line in text.splitlines()]
        draws = any(s.op in GENERATORS for s in self.program.statements)
        inner = ["namespace {", "", *self._struct(), "", *body, "", "}  // namespace"]
        return "\n".join([*head, "", prelude(random=draws), *inner, "", *self._kernel(), ""])

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
        totals = ", double* totals" if self.program.col_sums else ""
        out.add(f"void run_rows(const Arguments& a, int64_t part, int64_t begin, int64_t end{totals}) {{")
        out.add("const int64_t cols = a.cols;")
        sizes = [f"{count} * Scratch::row_bytes<{type_}>(cols)" for type_, count in sorted(self.taken.items())]
        out.add("Scratch scratch(" + (" + ".join(sizes) or "0") + ");")
        out.lines += prologue.lines + loop.lines
        out.add("}")
        return out.lines

    def _row_loop(self, out: _Lines) -> None:
        loops = [q for q in range(self.program.n_phases) if self.placement.roots(q)]
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
                name, type_ = c_name(o.name), held(o.dtype)
                if o.dtype == torch.int64:
                    out.add(f"const Philox {name}(*a.{name});")
                else:
                    out.add(f"const {type_} {name} = static_cast<{type_}>(*a.{name});")
        for s in self.program.statements:
            if s.kind is Kind.SCALAR:
                out.add(number_statement(self.program, s))
        for i, output in self._outputs_of_kind(Kind.SCALAR):
            out.add(
                f"if (part == 0) *a.out{i} = static_cast<{C_TYPE[self.dtype(output.value)]}>({c_name(output.value)});"
            )

    def _outputs_of_kind(self, kind: Kind) -> list[tuple[int, Output]]:
        return [(i, o) for i, o in enumerate(self.program.outputs) if self.kind(o.value) is kind]

    def _columns(self, out: _Lines) -> None:
        """Column values: contiguous FP32 or FP64 operands in place, the others computed once into scratch."""
        statements = [s for s in self.program.statements if s.kind is Kind.COL and s not in self.program.col_sums]
        sums = {s.name for s in self.program.col_sums}
        outputs = [(i, o) for i, o in self._outputs_of_kind(Kind.COL) if o.value not in sums]
        if not self.placement.loaded_cols and not outputs:
            return
        for o in self.program.operands:
            if o.kind is Kind.COL:
                name, c_type = c_name(o.name), C_TYPE[o.dtype]
                row = self._take(c_type)
                out.add(f"const {c_type}* {name}_in = contiguous_row(a.{name}, a.{name}_stride0, cols, {row});")
        stored = [
            n
            for n in self.placement.loaded_cols
            if self.placement.is_statement(n) or C_TYPE[self.dtype(n)] != held(self.dtype(n))
        ]
        for n in self.placement.loaded_cols:
            if n in stored:
                out.add(f"{held(self.dtype(n))}* {c_name(n)}_col = {self._take(held(self.dtype(n)))};")
            else:
                out.add(f"const {held(self.dtype(n))}* {c_name(n)}_col = {c_name(n)}_in;")
        for i, output in outputs:
            c_type = C_TYPE[self.dtype(output.value)]
            row = self._take(c_type)
            out.add(f"{c_type}* out{i}_row = a.out{i}_stride0 == 1 && part == 0 ? a.out{i} : {row};")
        if stored or outputs:
            needed = self._col_values_for([*stored, *(o.value for _, o in outputs)])
            out.add("for_columns(0, cols, [&](int64_t c, auto n) {")
            for o in self.program.operands:
                if o.kind is Kind.COL and o.name in needed:
                    out.add(f"const {vector(o.dtype)} {c_name(o.name)} = load({c_name(o.name)}_in + c, n);")
            for s in statements:
                if s.name in needed:
                    out.add(*vector_statement(self.program, s))
            for n in stored:
                out.add(f"store({c_name(n)}_col + c, {c_name(n)}, n);")
            for i, output in outputs:
                out.add(f"store(out{i}_row + c, {c_name(output.value)}, n);")
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
                out.add(f"{C_TYPE[o.dtype]}* {c_name(o.name)}_gathered = {self._take(C_TYPE[o.dtype])};")
        for i, output in self.placement.tile_outputs:
            c_type = C_TYPE[self.dtype(output.value)]
            out.add(f"{c_type}* out{i}_scattered = {self._take(c_type)};")
        for n in self.placement.kept:
            out.add(f"{held(self.dtype(n))}* {c_name(n)}_row = {self._take(held(self.dtype(n)))};")
        for s in self.program.col_sums:
            type_ = held(computed_in(self.program, s))
            out.add(f"{type_}* {c_name(s.name)}_partial = {self._take(type_)};")
            out.add(f"std::fill_n({c_name(s.name)}_partial, cols, {type_}(0));")

    def _addresses(self, out: _Lines) -> None:
        """Functions from a row's number to where that row begins in each tensor."""
        tensors = [(c_name(o.name), o.index) for o in self.program.operands]
        tensors += [(f"out{i}", o.index) for i, o in enumerate(self.program.outputs)]
        for name, index in tensors:
            if index:
                out.add(self._address(name, index))

    @staticmethod
    def _address(name: str, index: tuple[str, ...]) -> str:
        captured = ", ".join(["&a", *dict.fromkeys(f"&{c_name(positions)}_at" for positions, _ in lookups(index))])
        return f"const auto {name}_at = [{captured}](int64_t row) {{ return a.{name} + {_row_offset(name, index)}; }};"

    def _row_pointers(self, out: _Lines) -> None:
        for o in self.program.operands:
            name, c_type = c_name(o.name), C_TYPE[o.dtype]
            if o.kind is Kind.TILE:
                stride = f"a.{name}_stride{len(o.index)}"
                out.add(f"const {c_type}* {name}_in = contiguous_row({name}_at(row), {stride}, cols, {name}_gathered);")
            elif o.kind is Kind.ROW and not o.is_position:
                out.add(f"const {held(o.dtype)} {name} = static_cast<{held(o.dtype)}>(*{name}_at(row));")
        for i, output in self.placement.tile_outputs:
            c_type = C_TYPE[self.dtype(output.value)]
            out.add(
                f"{c_type}* out{i}_row = a.out{i}_stride{len(output.index)} == 1 ? out{i}_at(row) : out{i}_scattered;"
            )

    def _row_statements(self, out: _Lines, phase: int) -> None:
        for s in self.program.statements:
            if s.kind is Kind.ROW and self.placement.phase[s.name] == phase and s.op in POINTWISE:
                out.add(number_statement(self.program, s))
            elif s.op == ROW_FIRST and phase == 0:
                out.add(f"const float {c_name(s.name)} = static_cast<float>(*{c_name(s.value_args[0])}_in);")

    def _loop(self, out: _Lines, loop: int, prefetch: bool) -> None:
        """One loop over the columns. The last of several has time to fetch the next row from memory."""
        ahead = self._next_rows(out) if prefetch else []
        reductions = self.placement.reductions_of(loop)
        for s in reductions:
            summed = vector(computed_in(self.program, s))
            out.add(f"RowReduction<{_REDUCTION[s.op]}, {summed}> {c_name(s.name)}_reduction;")
        if reductions:
            out.add("for (int64_t block = 0; block < cols; block += kBlock) {")
            out.add("for_columns_by_turns(block, std::min(cols, block + kBlock), [&](int64_t c, auto n, auto turn) {")
        else:
            out.add("for_columns(0, cols, [&](int64_t c, auto n) {")
        out.add(*ahead)
        self._step(out, loop)
        out.add("});")
        if reductions:
            out.add(*(f"{c_name(s.name)}_reduction.end_block();" for s in reductions), "}")
        for s in reductions:
            out.add(self._reduced(s))

    def _next_rows(self, out: _Lines) -> list[str]:
        """Declares where the next row lies; returns the statements that prefetch one step of it."""
        out.add("const int64_t next = std::min(row + 1, end - 1);")
        reads = [c_name(o.name) for o in self.program.operands if o.kind is Kind.TILE]
        out.add(*(f"const auto* {name}_next = {name}_at(next);" for name in reads))
        return [f"prefetch({n}_next + c);" for n in reads]

    def _step(self, out: _Lines, loop: int) -> None:
        """What a loop does for one step of columns."""
        computed = self.placement.computed_in(loop)
        packed = {o.value for _, o in self.placement.outputs_of(loop) if self.dtype(o.value) in HALVES} & {
            s.name for s in self.program.statements if s.op in POINTWISE
        }
        statements = [s for s in self.program.statements if s.name in computed]
        for n in self._cols_read_by(s for s in statements if not self.placement.is_reloaded(s.name, loop)):
            out.add(f"const {vector(self.dtype(n))} {c_name(n)} = load({c_name(n)}_col + c, n);")
        for o in self.program.operands:
            if o.name in computed:
                out.add(f"const {vector(o.dtype)} {c_name(o.name)} = load({c_name(o.name)}_in + c, n);")
        for s in statements:
            if self.placement.is_reloaded(s.name, loop):
                out.add(f"const {vector(s.dtype)} {c_name(s.name)} = load({self._home(s.name)} + c, n);")
                continue
            is_packed = s.name in packed
            out.add(*vector_statement(self.program, s, is_packed))
            if s.name in self.placement.kept and self.placement.first_loop[s.name] == loop:
                out.add(f"store({c_name(s.name)}_row + c, {c_name(s.name)}, n);")
        for i, output in self.placement.outputs_of(loop):
            value = c_name(output.value)
            out.add(f"store(out{i}_row + c, {f'{value}_rounded.packed' if output.value in packed else value}, n);")
        for s in self.placement.col_sums_of(loop):
            out.add(f"accumulate({c_name(s.name)}_partial + c, {summand(self.program, s)}, n);")
        for s in self.placement.reductions_of(loop):
            out.add(f"{c_name(s.name)}_reduction.add({summand(self.program, s)}, n, turn);")

    def _cols_read_by(self, statements: Iterable[Statement]) -> list[str]:
        args = {a for s in statements for a in s.value_args}
        return [n for n in self.placement.loaded_cols if n in args]

    def _home(self, name: str) -> str:
        output = self.placement.stored_in(name)
        return f"{c_name(name)}_row" if output is None else f"out{output}_row"

    def _reduced(self, s: Statement) -> str:
        wide = computed_in(self.program, s)
        value = f"{c_name(s.name)}_reduction.value()"
        if s.op == "row_mean":
            value = f"{value} / static_cast<{held(wide)}>(cols)"
        value = rounded(value, wide, s.dtype)
        return f"const {held(s.dtype)} {c_name(s.name)} = {value};"

    def _row_ends(self, out: _Lines) -> None:
        for i, output in self._outputs_of_kind(Kind.ROW):
            out.add(f"*out{i}_at(row) = static_cast<{C_TYPE[self.dtype(output.value)]}>({c_name(output.value)});")
        for i, output in self.placement.tile_outputs:
            out.add(f"scatter_row(out{i}_at(row), a.out{i}_stride{len(output.index)}, cols, out{i}_row);")
        if self.program.col_sums:
            out.add("if ((row - begin) % kRowBlock == kRowBlock - 1 || row + 1 == end) {")
            for i, s in enumerate(self.program.col_sums):
                out.add(f"flush_partial({c_name(s.name)}_partial, totals + {i} * cols, cols);")
            out.add("}")

    def _check_positions(self, out: _Lines) -> None:
        """Every position is looked at before a row is read, and before there are threads: they could raise no error."""
        for o in self.program.operands:
            if o.is_position:
                out.add(self._address(c_name(o.name), o.index))
        for o in self.program.operands:
            for positions, bound in lookups(o.index):
                end = bound if bound.isdigit() else f"a.{c_name(bound)}"
                out.add(f'check_positions("{o.name}", rows, {end}, {c_name(positions)}_at);')

    def _kernel(self) -> list[str]:
        arguments = ", ".join(f"{type_} {name}" for type_, name in self.arguments)
        values = ", ".join(name for _, name in self.arguments if name != "threads")
        out = _Lines()
        out.add(f'extern "C" void {KERNEL_NAME}({arguments}) {{')
        out.add(f"const Arguments a{{{values}}};")
        self._check_positions(out)
        out.add("const int64_t n_parts = parts_of(threads, rows, cols);")
        call = "run_rows(a, part, begin, end"
        if self.program.col_sums:
            out.add(f"std::vector<double> totals(n_parts * {len(self.program.col_sums)} * cols);")
            call += f", totals.data() + part * {len(self.program.col_sums)} * cols"
        out.add("parallel_rows(n_parts, rows, [&](int64_t part, int64_t begin, int64_t end) {", f"{call});", "});")
        for i, output in self._outputs_of_kind(Kind.COL):
            for k, s in enumerate(self.program.col_sums):
                if s.name == output.value:
                    totals = f"totals.data() + {k} * cols, {len(self.program.col_sums)} * cols"
                    out.add(f"write_column_sum(a.out{i}, a.out{i}_stride0, cols, n_parts, {totals});")
        out.add("}")
        return out.lines
