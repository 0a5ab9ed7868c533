"""Generated kernels compiled ahead of time for GPUs that are not here: no spills, wide accesses, each tile once."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from fusepass.kernels import audit, traffic, triton_code
from fusepass.kernels.schedule import Schedule, choose
from fusepass.row_program import parse
from tests.kernels.norm_programs import POINTWISE_PROGRAM, moved, norm_backward_program, norm_program

COLS = (1, 3, 17, 127, 128, 255, 768, 1000, 1024, 4096, 5120, 8192, 16384, 65536)
MORE_COLS = (63, 2047, 12345, 131072)
NORMS = ("layer_norm", "rms_norm")
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


def check(
    cols: tuple[int, ...],
    target: str,
    direction: str,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> None:
    table = audit.audit_table(cols, [target], dtypes, directions=[direction])
    assert len(table) == len(cols) * len(dtypes) * len(NORMS)
    bad = []
    for row in table:
        itemsize = 2 if row["dtype"] == "bfloat16" else 4
        vectors = row["cols"] >= 1024 and row["cols"] * itemsize % 16 == 0
        moved = row["tile_loads"] + row["tile_stores"]
        once = moved == row["floor"] if "(row)" in row["kernel"] or "(persistent)" in row["kernel"] else True
        wide = not vectors or min(row["load_bits"], row["store_bits"]) == 128
        few = row["registers"] <= (128 if direction == "forward" else 255)
        fits = row["shared"] <= SHARED_MEMORY[target]
        if row["spills"] or not once or moved > 2 + row["floor"] or not wide or not few or not fits:
            bad.append(row)
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("target", audit.TARGETS)
def test_no_spills_and_wide_accesses(target: str) -> None:
    check((17, 255, 1000, 1024, 8192, 16384, 65536), target, "forward")


@pytest.mark.parametrize("target", audit.TARGETS)
def test_no_spills_and_wide_accesses_with_column_sums(target: str) -> None:
    """Up to three sums: each tile once up to 8192 columns; from there the row statistics read what they need again."""
    check((1024, 8192, 16384), target, "backward", (torch.bfloat16,))


@pytest.mark.parametrize("target", audit.TARGETS)
def test_moved_rows_are_read_and_written_as_wide(target: str) -> None:
    program = parse(moved(norm_program("layer_norm", 1024, "bf16"), "row % 512, row // 512"))
    plain, by_batch = (1024, 1), (8 * 1024, 1024, 1)
    strides = {"x": by_batch, "r": plain, "out0": by_batch, "out1": plain}
    found = audit.compile_for(program, choose(program), strides, target)
    assert (found.spills, found.load_bits, found.store_bits) == (0, 128, 128)
    assert found.tile_loads + found.tile_stores == audit.tile_floor(program) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_width(direction: str, target: str) -> None:
    check((*COLS, *MORE_COLS), target, direction)


@pytest.mark.slow
@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("norm", NORMS)
def test_no_spills_with_dropout(norm: str, target: str) -> None:
    """In other spellings of a backward as well, with a mask and a second output."""
    for cols, dtype, dropout in itertools.product(
        (48, 127, 1024, 5000, 8192, 10000, 16384), ("bf16", "f32"), (None, 0.1)
    ):
        program = parse(norm_backward_program(norm, cols, dtype, dropout=dropout))
        result = audit.compile_for(program, choose(program), audit.contiguous_strides(program), target)
        assert result.spills == 0, (cols, dtype, dropout, choose(program), result)
        assert result.shared <= SHARED_MEMORY[target], (cols, dtype, dropout, choose(program), result)


@pytest.mark.parametrize("target", audit.TARGETS)
def test_the_kernel_that_adds_up_partial_sums(target: str) -> None:
    program = audit.backward_program("layer_norm", 4096, torch.bfloat16)
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    result = audit.resources(audit.compile_kernel(program, schedule, strides, target, source, sums=True), target)
    assert result[0] <= 64 and result[1] == 0, result


def test_loads_are_pipelined() -> None:
    """On NVIDIA every load of a tile is an asynchronous copy of 128 bits, n - 1 rounds ahead; nothing else copies."""
    program = audit.backward_program("layer_norm", 4096, torch.bfloat16)
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    ptx = audit.compile_kernel(program, schedule, strides, "sm_90", source).assembly
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)
    per_thread = 4096 * 2 // (schedule.num_warps * 32 * 16)
    assert len(copies) == 3 * schedule.num_stages * per_thread
    assert schedule.num_stages == 4
    unpipelined = source.replace(", num_stages=4)", ", num_stages=1)")
    assert "cp.async.cg" not in audit.compile_kernel(program, schedule, strides, "sm_90", unpipelined).assembly


@pytest.mark.parametrize("cols", [64, 16384])
def test_one_row_and_many_rows(cols: int) -> None:
    """A launch specialises an argument that is 1, and passes more rows than 32 bits hold in 64."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program = audit.backward_program("layer_norm", cols, torch.bfloat16)
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    for name, names in (
        (triton_code.kernel_name(program), triton_code.arguments(program, schedule, strides)),
        (triton_code.sum_name(program), triton_code.sum_arguments(program)),
    ):
        counted = "rows" if "rows" in names else "programs"
        for kind, constants in (("constexpr", {(names.index(counted),): 1}), ("i64", {})):
            signature = {n: audit.argument_type(program, n) for n in names} | {counted: kind}
            kernel = ASTSource(triton_code.load(source, name), signature, constants)
            assert triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]


def test_spills_and_narrow_accesses_are_seen() -> None:
    """The audit must be able to fail: far too few threads, and rows that begin at odd addresses."""
    program = audit.forward_program("layer_norm", 16384, torch.float32)
    crowded = Schedule("row", 16384, 1, 2)
    strides = audit.contiguous_strides(program)
    assert audit.compile_for(program, crowded, strides, "sm_90").spills > 0
    narrow = strides | {"x": (16385, 1)}
    assert audit.compile_for(program, choose(program), narrow, "sm_90").load_bits == 32
    source = triton_code.generate(program, choose(program), strides)
    reread = "    s += tl.load(r_ptr + row * 16384 + col, cache_modifier='.cv')\n"
    again = source.replace("    d = s - mean", f"{reread}    d = s - mean")
    assert audit.compile_for(program, choose(program), strides, "sm_90", again).tile_loads == 3


@pytest.mark.slow
def test_spills_are_seen_on_amd() -> None:
    program = audit.forward_program("layer_norm", 65536, torch.float32)
    crowded = Schedule("row", 65536, 1, 2)
    assert audit.compile_for(program, crowded, audit.contiguous_strides(program), "gfx942").spills > 0


def test_strides_at_run_time_keep_wide_accesses_when_divisible() -> None:
    program = audit.forward_program("rms_norm", 4096, torch.bfloat16)
    strides = {"x": (None, 1), "r": (None, 1), "out0": (4096, 1), "out1": (4096, 1), "out2": (1,)}
    result = audit.compile_for(program, choose(program), strides, "sm_90")
    assert (result.load_bits, result.store_bits) == (128, 128)


def test_rms_norm_loop_reads_each_tile_and_the_stored_sum_once() -> None:
    program = audit.forward_program("rms_norm", 65536, torch.bfloat16)
    assert choose(program).kind == "loop"
    assert traffic.tile_traffic(program, choose(program)) == (3, 2)
    source = triton_code.generate(program, choose(program), audit.contiguous_strides(program))
    assert source.count("tl.debug_barrier()") == 1
    # Nothing to read back where the sum is not stored: two operands twice.
    unsaved = parse(norm_program("rms_norm", 65536, "bf16").replace("out s [row]\n", ""))
    assert traffic.tile_traffic(unsaved, choose(unsaved)) == (4, 1)


DEEPNORM = {
    "f32": "row_program cols=1024\nin x: tile f32 [row]\nin r: tile f32 [row]\n"
    "a: tile f32 = mul(x, 2.3)\ns: tile f32 = add(a, r)\nout s [row]",
    "f64": "row_program cols=1024\nin x: tile f64 [row]\nin r: tile f64 [row]\n"
    "a: tile f64 = mul(x, 2.3)\ns: tile f64 = add(r, a)\nout s [row]",
    "neg": "row_program cols=1024\nin x: tile f32 [row]\nin r: tile f32 [row]\n"
    "a: tile f32 = mul(x, 2.3)\nb: tile f32 = neg(a)\ns: tile f32 = sub(r, b)\nout s [row]",
    "square": "row_program cols=1024\nin x: tile bf16 [row]\nin r: tile bf16 [row]\n"
    "a: tile f32 = square(x)\ns: tile bf16 = add(a, r)\nout s [row]",
}
_ADDS = {"sm": r"\b[FD]ADD2?\b", "gf": r"\bv_(?:pk_)?(?:add|sub)_f(?:32|64)"}


@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("name", DEEPNORM)
def test_a_product_is_rounded_before_it_is_added(name: str, target: str) -> None:
    """Under a launch's default of contracting, the machine code still has one addition per element of the sum."""
    program = parse(DEEPNORM[name])
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    contracted = re.sub(r"= _mul\((\w+), (.*), minus_zero\w*\)", r"= \1 * \2", source)
    assert contracted != source

    def adds(text: str) -> int:
        compiled = audit.compile_kernel(program, schedule, strides, target, text)
        code = audit.disassemble(compiled.binary) if target.startswith("sm_") else compiled.assembly
        return sum(2 if m.endswith("ADD2") or "_pk_" in m else 1 for m in re.findall(_ADDS[target[:2]], code))

    per_thread = 1024 // (schedule.num_warps * (32 if target.startswith("sm_") else 64))
    assert adds(contracted) == 0, "plain products are contracted, or this test shows nothing"
    assert adds(source) == per_thread


def test_division_and_root_are_ieee() -> None:
    text = "row_program cols=1024\nin x: tile f32 [row]\na: tile f32 = sqrt(x)\nb: tile f32 = div(a, 3.0)\nout b [row]"
    program = parse(text)
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    ptx = audit.compile_kernel(program, schedule, strides, "sm_90", source).assembly
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert "div.full" not in ptx
    assert "approx" not in ptx


@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("kind", ["row", "loop"])
def test_every_operation_compiles(kind: str, target: str) -> None:
    program = parse(POINTWISE_PROGRAM.format(cols=1000, dtype="bf16"))
    schedule = choose(program) if kind == "row" else Schedule("loop", 256, 2, 4)
    assert audit.compile_for(program, schedule, audit.contiguous_strides(program), target).spills == 0


def test_inductor_can_copy_a_kernel_with_its_functions() -> None:
    """Inductor writes a kernel into its own module by walking the functions that it calls."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as closure

    program = parse(POINTWISE_PROGRAM.format(cols=1000, dtype="bf16"))
    schedule, strides = choose(program), audit.contiguous_strides(program)
    name = triton_code.kernel_name(program)
    text = closure(triton_code.load(triton_code.generate(program, schedule, strides), name))
    imports = "import triton\nimport triton.language as tl\n"
    imports += "from torch._inductor.runtime.triton_helpers import libdevice\n"
    copy = f"{imports}@triton.jit\n{text}"
    assert audit.compile_for(program, schedule, strides, "sm_90", copy).spills == 0


@pytest.mark.parametrize("target", audit.TARGETS)
def test_f64_program_compiles(target: str) -> None:
    for cols in (255, 4096, 65536):
        program = parse(norm_program("layer_norm", cols, "f64", alpha=2.3))
        assert audit.compile_for(program, choose(program), audit.contiguous_strides(program), target).spills == 0
