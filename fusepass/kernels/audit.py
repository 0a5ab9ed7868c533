"""What a GPU compiler makes of a kernel, read off its code: registers, spills, width of each access, tiles moved.

Kernels are compiled ahead of time, so no GPU is needed. Which access belongs to which tensor follows from line
information: every load and store is a line of its own in the generated text.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import KernelError
from ..row_program import DTYPE_NAMES, Kind, RowProgram, parse
from . import traffic, triton_code
from .column_sums import kept_dtype, sum_dtype
from .schedule import SUM_WARPS, Schedule, choose

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
AUDIT_COLS = (128, 768, 1000, 1024, 4096, 5120, 8192, 16384, 65536)

_TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.bool: "i1",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Audit:
    """One compiled kernel. Bits are those of the narrowest access to a tile; tiles count whole rows x cols passes.

    Masks, of one byte an element, are tiles; but their accesses, as many elements wide as those of the floats beside
    them, do not count among the bits. `shared` is in bytes, and what a launch asks for besides what the code declares.
    """

    target: str
    registers: int
    spills: int
    shared: int
    load_bits: int
    store_bits: int
    tile_loads: float
    tile_stores: float


@dataclass(frozen=True)
class Compiled:
    """The assembly (PTX or amdgcn) and the binary of a kernel, and the bytes of shared memory that its launch needs."""

    assembly: str
    binary: bytes
    shared: int


@dataclass(frozen=True)
class _Access:
    tensor: str
    store: bool
    bits: int
    pipelined: bool


def compile_for(
    program: RowProgram, schedule: Schedule, strides: triton_code.Strides, target: str, source: str | None = None
) -> Audit:
    """Compile the kernel as a launch with 16-byte aligned tensors would, and read its code.

    Args:
        program: the program, and its `schedule` and `strides`, see `triton_code.generate`.
        target: one of `TARGETS`.
        source: the kernel's text, where it is not `generate`'s.
    """
    source = source or triton_code.generate(program, schedule, strides)
    compiled = compile_kernel(program, schedule, strides, target, source)
    accesses = list(_tile_accesses(program, source, compiled.assembly))
    registers, spills = resources(compiled, target)
    loads = [a for a in accesses if not a.store]
    stores = [a for a in accesses if a.store]
    wide = [a for a in accesses if _dtype(program, a.tensor) is not torch.bool]
    return Audit(
        target=target,
        registers=registers,
        spills=spills,
        shared=compiled.shared,
        load_bits=min((a.bits for a in wide if not a.store), default=0),
        store_bits=min((a.bits for a in wide if a.store), default=0),
        tile_loads=_passes(program, schedule, loads, target),
        tile_stores=_passes(program, schedule, stores, target),
    )


def compile_kernel(
    program: RowProgram, schedule: Schedule, strides: triton_code.Strides, target: str, source: str, sums: bool = False
) -> Compiled:
    """A program's kernel compiled for `target`, or the one that adds `sums`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise KernelError(f"expected target to be one of {', '.join(TARGETS)}, got target={target!r}")
    cuda = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    names = triton_code.sum_arguments(program) if sums else triton_code.arguments(program, schedule, strides)
    signature = {name: argument_type(program, name) for name in names}
    aligned = [["tt.divisibility", 16]]
    attrs = {(i,): aligned for i, name in enumerate(names) if name.endswith("_ptr") or "_stride" in name}
    name = triton_code.sum_name(program) if sums else triton_code.kernel_name(program)
    options = {"num_warps": SUM_WARPS if sums else schedule.num_warps, "num_stages": 1}
    source_of_kernel = ASTSource(triton_code.load(source, name), signature, {}, attrs)
    compiled = triton.compile(source_of_kernel, target=gpu, options=options)
    assembly, binary = compiled.asm["ptx" if cuda else "amdgcn"], compiled.asm["cubin" if cuda else "hsaco"]
    return Compiled(assembly, binary, compiled.metadata.shared)


def argument_type(program: RowProgram, name: str) -> str:
    """The Triton type of the argument called `name`."""
    if not name.endswith("_ptr"):
        return "i64" if "_stride" in name else "i32"
    tensor = name.removesuffix("_ptr")
    buffers = {"partial": sum_dtype(program), "kept": kept_dtype(program)}
    return f"*{_TRITON_TYPES[buffers[tensor] if tensor in buffers else _dtype(program, tensor)]}"


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin."""
    return _nvidia_tool("cuobjdump", ["-sass"], cubin)


def contiguous_strides(program: RowProgram) -> dict[str, tuple[int, ...]]:
    """Strides for contiguous tensors, for programs whose operands and outputs have one leading dimension."""
    tensors = {o.name: (o.kind, o.index) for o in program.operands}
    tensors |= {f"out{i}": (program.values[o.value].kind, o.index) for i, o in enumerate(program.outputs)}
    if bad := [name for name, (_, index) in tensors.items() if len(index) > 1]:
        raise KernelError(f"more than one leading dimension: {', '.join(bad)}; pass the strides")
    return {n: (program.cols, 1) if kind is Kind.TILE else (1,) for n, (kind, index) in tensors.items() if index}


def tile_floor(program: RowProgram) -> int:
    """The fewest tiles that the program can move: each tile operand and output once."""
    values = [*program.operands, *(program.values[o.value] for o in program.outputs)]
    return sum(v.kind is Kind.TILE for v in values)


def forward_program(norm: str, cols: int, dtype: torch.dtype) -> RowProgram:
    """Residual add + "layer_norm" or "rms_norm", with weights and saved statistics, as a training forward has it."""
    t = DTYPE_NAMES[dtype]
    layer_norm = norm == "layer_norm"
    centred = "d" if layer_norm else "s"
    lines = [
        f"row_program cols={cols}",
        f"in x: tile {t} [row]",
        f"in r: tile {t} [row]",
        f"in w: col {t}",
        *([f"in b: col {t}"] if layer_norm else []),
        f"s: tile {t} = add(x, r)",
        *(["mean: row f32 = row_mean(s)", "d: tile f32 = sub(s, mean)"] if layer_norm else []),
        f"q: tile f32 = square({centred})",
        "var: row f32 = row_mean(q)",
        "ve: row f32 = add(var, 1e-05)",
        "rstd: row f32 = rsqrt(ve)",
        f"n: tile f32 = mul({centred}, rstd)",
        f"nw: tile {'f32' if layer_norm else t} = mul(n, w)",
        *([f"y: tile {t} = add(nw, b)"] if layer_norm else []),
        "out s [row]",
        f"out {'y' if layer_norm else 'nw'} [row]",
        *(["out mean [row]"] if layer_norm else []),
        "out rstd [row]",
    ]
    return parse("\n".join(lines))


def backward_program(norm: str, cols: int, dtype: torch.dtype, bias: bool = True) -> RowProgram:
    """The backward of `forward_program` with the sum's own gradient, and all column sums.

    They are those of the weights and, with `bias`, of the bias of a Linear in front of the norm.
    """
    t = DTYPE_NAMES[dtype]
    layer_norm = norm == "layer_norm"
    lines = [
        f"row_program cols={cols}",
        f"in dy: tile {t} [row]",
        f"in w: col {t}",
        f"in s: tile {t} [row]",
        *(["in mean: row f32 [row]"] if layer_norm else []),
        "in rstd: row f32 [row]",
        f"in ds: tile {t} [row]",
        "g: tile f32 = cast(dy)",
        "gw: tile f32 = mul(g, w)",
        *(["d: tile f32 = sub(s, mean)"] if layer_norm else ["d: tile f32 = cast(s)"]),
        "n: tile f32 = mul(d, rstd)",
        "gn: tile f32 = mul(gw, n)",
        "c: row f32 = row_sum(gn)",
        f"gc: tile f32 = mul(gw, {float(cols)})",
        *(["b: row f32 = row_sum(gw)", "gb: tile f32 = sub(gc, b)"] if layer_norm else []),
        "nc: tile f32 = mul(n, c)",
        f"e: tile f32 = sub({'gb' if layer_norm else 'gc'}, nc)",
        f"k: row f32 = div(rstd, {float(cols)})",
        f"p: tile {t} = mul(e, k)",
        f"dx: tile {t} = add(ds, p)",
        "gg: tile f32 = mul(g, n)",
        f"dw: col {t} = col_sum(gg)",
        *([f"dbeta: col {t} = col_sum(g)"] if layer_norm else []),
        *([f"dbias: col {t} = col_sum(dx)"] if bias else []),
        "out dx [row]",
        "out dw",
        *(["out dbeta"] if layer_norm else []),
        *(["out dbias"] if bias else []),
    ]
    return parse("\n".join(lines))


def audit_table(
    cols: Sequence[int] = AUDIT_COLS,
    targets: Sequence[str] = TARGETS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    norms: Sequence[str] = ("layer_norm", "rms_norm"),
    directions: Sequence[str] = ("forward", "backward"),
) -> list[dict[str, Any]]:
    """One row per kernel, target, number of columns and dtype: residual add + norm, and its backward with all sums."""
    return list(audit_rows(cols, targets, dtypes, norms, directions))


def audit_rows(
    cols: Iterable[int],
    targets: Sequence[str],
    dtypes: Sequence[torch.dtype],
    norms: Sequence[str],
    directions: Sequence[str] = ("forward", "backward"),
) -> Iterator[dict[str, Any]]:
    """`audit_table`, row by row."""
    for n, direction, norm, dtype in itertools.product(cols, directions, norms, dtypes):
        program = {"forward": forward_program, "backward": backward_program}[direction](norm, n, dtype)
        schedule = choose(program)
        for target in targets:
            audit = asdict(compile_for(program, schedule, contiguous_strides(program), target))
            yield {
                "kernel": f"add_{norm} ({schedule.kind})",
                "target": audit.pop("target"),
                "rows": "any",
                "cols": n,
                "dtype": str(dtype).removeprefix("torch."),
                "direction": direction,
                **audit,
                "floor": tile_floor(program),
            }


_LOC = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v([24]))?\.[bfus](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\s+\[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_AMD_ACCESS = re.compile(r"^\s*(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_SOURCE_ACCESS = re.compile(r"tl\.(load|store)\((\w+)_ptr\b")


def _tile_accesses(program: RowProgram, source: str, assembly: str) -> Iterator[_Access]:
    """Every load and store in the assembly that belongs to a line of the source which accesses a tile."""
    tiles = {o.name for o in program.operands if o.kind is Kind.TILE}
    tiles |= {f"out{i}" for i, o in enumerate(program.outputs) if program.values[o.value].kind is Kind.TILE}
    text = source.splitlines()
    line = 0
    for instruction in assembly.splitlines():
        if loc := _LOC.match(instruction):
            line = int(loc[1]) or line
            continue
        access = _parse_access(instruction)
        statement = _SOURCE_ACCESS.search(text[line - 1]) if access and 0 < line <= len(text) else None
        if access and statement and statement[2] in tiles and statement[1] == ("store" if access[0] else "load"):
            yield _Access(statement[2], *access)


def _parse_access(instruction: str) -> tuple[bool, int, bool] | None:
    """(is a store, bits, may be pipelined) for an instruction that touches global memory.

    NVIDIA's pipelined loads are copies to shared memory. On AMD a pipelined loop's last rounds store by themselves.
    """
    if m := _PTX_COPY.search(instruction):
        return False, 8 * int(m[1], 0), True
    if m := _PTX_ACCESS.search(instruction):
        return m[1] == "st", int(m[2] or 1) * int(m[3]), False
    if m := _AMD_ACCESS.match(instruction):
        bits = _AMD_BITS.get(m[2]) or (16 if "short" in m[2] else 8 if "byte" in m[2] else 0)
        return m[1] == "store", bits, True
    return None


def _passes(program: RowProgram, schedule: Schedule, accesses: Sequence[_Access], target: str) -> float:
    """How many times a thread's share of a tile is moved. In a loop, each access in its body is one pass in parts.

    A loop that is pipelined in n stages begins n - 1 rounds ahead: it has n accesses for one pass.
    """
    threads = schedule.num_warps * (32 if target.startswith("sm_") else 64)
    share = max(1.0, schedule.rows_per_program * schedule.block_n / threads)
    if schedule.kind == "loop":
        loads, stores = traffic.tile_traffic(program, schedule)
        return float(stores if accesses and accesses[0].store else loads)
    bits: Counter[str] = Counter()
    for a in accesses:
        bits[a.tensor] += a.bits * (1 if a.pipelined else schedule.num_stages)
    share *= schedule.num_stages
    return sum(total / (share * 8 * _dtype(program, tensor).itemsize) for tensor, total in bits.items())


def _dtype(program: RowProgram, tensor: str) -> torch.dtype:
    if tensor in program.values:
        return program.values[tensor].dtype
    return program.values[program.outputs[int(tensor.removeprefix("out"))].value].dtype


def resources(compiled: Compiled, target: str) -> tuple[int, int]:
    """Registers per thread, and registers spilled to memory or bytes of stack (0 is none)."""
    if not target.startswith("sm_"):
        field = {m[1]: int(m[2]) for m in re.finditer(r"\.(\w+):\s+(\d+)\s*$", compiled.assembly, re.MULTILINE)}
        # A scalar register that lies in a lane of a vector register is in no memory. (Nor does ptxas report any such.)
        return field["vgpr_count"], field["vgpr_spill_count"] + field["private_segment_fixed_size"]
    usage = _nvidia_tool("cuobjdump", ["-res-usage"], compiled.binary)
    fields = {m[1]: int(m[2]) for m in re.finditer(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"]


def _nvidia_tool(name: str, options: Sequence[str], cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
