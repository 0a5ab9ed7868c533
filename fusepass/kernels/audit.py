"""What a GPU compiler makes of a kernel, read off its code: registers, spills, width of each access, tiles moved.

Kernels are compiled ahead of time, so no GPU is needed. Which access belongs to which tensor follows from line
information: every load and store is a line of its own in the generated text.
"""

from __future__ import annotations

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
from . import triton_code
from .schedule import Schedule, choose

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
AUDIT_COLS = (128, 768, 1000, 1024, 4096, 5120, 8192, 16384, 65536)

_TRITON_TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Audit:
    """One compiled kernel. Bits are those of the narrowest access to a tile; tiles count whole rows x cols passes."""

    target: str
    registers: int
    spills: int
    shared: int
    load_bits: int
    store_bits: int
    tile_loads: float
    tile_stores: float


@dataclass(frozen=True)
class _Access:
    tensor: str
    store: bool
    bits: int


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
    assembly, binary = compile_kernel(program, schedule, strides, target, source)
    accesses = list(_tile_accesses(program, source, assembly))
    registers, spills, shared = _resources(assembly, binary, target)
    loads = [a for a in accesses if not a.store]
    stores = [a for a in accesses if a.store]
    return Audit(
        target=target,
        registers=registers,
        spills=spills,
        shared=shared,
        load_bits=min((a.bits for a in loads), default=0),
        store_bits=min((a.bits for a in stores), default=0),
        tile_loads=_passes(program, schedule, loads, target),
        tile_stores=_passes(program, schedule, stores, target),
    )


def compile_kernel(
    program: RowProgram, schedule: Schedule, strides: triton_code.Strides, target: str, source: str
) -> tuple[str, bytes]:
    """The assembly (PTX or amdgcn) and the binary of a kernel for `target`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target not in TARGETS:
        raise KernelError(f"expected target to be one of {', '.join(TARGETS)}, got target={target!r}")
    cuda = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    names = triton_code.arguments(program, strides)
    dtypes = [o.dtype for o in program.operands] + [program.values[o.value].dtype for o in program.outputs]
    signature = {name: f"*{_TRITON_TYPES[dtype]}" for name, dtype in zip(names, dtypes, strict=False)}
    signature |= {name: "i32" if name == "rows" or name in program.sizes else "i64" for name in names[len(dtypes) :]}
    aligned = [["tt.divisibility", 16]]
    attrs = {(i,): aligned for i, name in enumerate(names) if name.endswith("_ptr") or "_stride" in name}
    kernel = triton_code.load(source, triton_code.kernel_name(program))
    options = {"num_warps": schedule.num_warps, "num_stages": schedule.num_stages}
    compiled = triton.compile(ASTSource(kernel, signature, {}, attrs), target=gpu, options=options)
    return compiled.asm["ptx" if cuda else "amdgcn"], compiled.asm["cubin" if cuda else "hsaco"]


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


def audit_table(
    cols: Sequence[int] = AUDIT_COLS,
    targets: Sequence[str] = TARGETS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    norms: Sequence[str] = ("layer_norm", "rms_norm"),
) -> list[dict[str, Any]]:
    """One row per kernel, target, number of columns and dtype, for the forward of residual add + norm."""
    return list(audit_rows(cols, targets, dtypes, norms))


def audit_rows(
    cols: Iterable[int], targets: Sequence[str], dtypes: Sequence[torch.dtype], norms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """`audit_table`, row by row."""
    for n in cols:
        for norm in norms:
            for dtype in dtypes:
                program = forward_program(norm, n, dtype)
                schedule = choose(program)
                for target in targets:
                    audit = asdict(compile_for(program, schedule, contiguous_strides(program), target))
                    audit.pop("shared")
                    yield {
                        "kernel": f"add_{norm} ({schedule.kind})",
                        "target": audit.pop("target"),
                        "rows": "any",
                        "cols": n,
                        "dtype": str(dtype).removeprefix("torch."),
                        "direction": "forward",
                        **audit,
                        "floor": tile_floor(program),
                    }


_LOC = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v([24]))?\.[bfus](\d+)\b")
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


def _parse_access(instruction: str) -> tuple[bool, int] | None:
    """(is a store, bits) for an instruction that touches global memory."""
    if m := _PTX_ACCESS.search(instruction):
        return m[1] == "st", int(m[2] or 1) * int(m[3])
    if m := _AMD_ACCESS.match(instruction):
        bits = _AMD_BITS.get(m[2]) or (16 if "short" in m[2] else 8 if "byte" in m[2] else 0)
        return m[1] == "store", bits
    return None


def _passes(program: RowProgram, schedule: Schedule, accesses: Sequence[_Access], target: str) -> float:
    """How many times a thread's share of a tile is moved. In a loop, each access in its body is one pass in parts."""
    threads = schedule.num_warps * (32 if target.startswith("sm_") else 64)
    share = max(1.0, schedule.rows_per_program * schedule.block_n / threads)
    if schedule.kind == "loop":
        loads, stores = triton_code.tile_traffic(program, schedule)
        return float(stores if accesses and accesses[0].store else loads)
    bits: Counter[str] = Counter()
    for a in accesses:
        bits[a.tensor] += a.bits
    return sum(total / (share * 8 * _dtype(program, tensor).itemsize) for tensor, total in bits.items())


def _dtype(program: RowProgram, tensor: str) -> torch.dtype:
    if tensor in program.values:
        return program.values[tensor].dtype
    return program.values[program.outputs[int(tensor.removeprefix("out"))].value].dtype


def _resources(assembly: str, binary: bytes, target: str) -> tuple[int, int, int]:
    """Registers per thread, spilled registers or bytes of stack (0 is none), bytes of shared memory."""
    if not target.startswith("sm_"):
        field = {m[1]: int(m[2]) for m in re.finditer(r"\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
        spills = field["vgpr_spill_count"] + field["sgpr_spill_count"] + field["private_segment_fixed_size"]
        return field["vgpr_count"], spills, field["group_segment_fixed_size"]
    usage = _nvidia_tool("cuobjdump", ["-res-usage"], binary)
    fields = {m[1]: int(m[2]) for m in re.finditer(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"], fields["SHARED"]


def _nvidia_tool(name: str, options: Sequence[str], cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
