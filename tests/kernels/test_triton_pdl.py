"""Kernels under programmatic dependent launch, compiled ahead of time: they wait before their first access."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.hints import DeviceProperties

from fusepass import _torch_compat
from fusepass.kernels import audit, triton_code
from fusepass.kernels.schedule import choose

CUDA = torch.device("cuda", 0)
PROGRAMS = {
    "row": audit.forward_program("layer_norm", 1024, torch.bfloat16),
    "loop": audit.forward_program("rms_norm", 65536, torch.bfloat16),
    "persistent": audit.backward_program("layer_norm", 1000, torch.bfloat16),
    "wide": audit.backward_program("rms_norm", 16384, torch.float32),
}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_kernel_waits_and_is_otherwise_the_same(kind: str, target: str) -> None:
    program = PROGRAMS[kind]
    schedule, strides = choose(program), audit.contiguous_strides(program)
    assert schedule.kind == kind
    source = triton_code.generate(program, schedule, strides, pdl=True)
    plain, waiting = (audit.compile_for(program, schedule, strides, target, text) for text in (None, source))
    assert waiting.spills == 0 and waiting.registers <= plain.registers + 8
    assert (waiting.load_bits, waiting.store_bits) == (plain.load_bits, plain.store_bits), "addresses stay aligned"
    assert (waiting.tile_loads, waiting.tile_stores) == (plain.tile_loads, plain.tile_stores)
    for sums in (False, True)[: 1 + bool(program.col_sums)]:
        compiled = audit.compile_kernel(program, schedule, strides, target, source, sums)
        assert compiled.assembly.count("griddepcontrol.wait") == 1
        assert compiled.assembly.count("griddepcontrol.launch_dependents") == 1
        # ACQBULK is the wait, PREEXIT lets the next kernel be launched; the rest are accesses to global memory.
        order = re.findall(r"\b(ACQBULK|PREEXIT|LDG\w*|STG)\b", audit.disassemble(compiled.binary))
        assert order[:2] == ["ACQBULK", "PREEXIT"] and len(order) > 2


@pytest.mark.parametrize("target", audit.TARGETS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_without_it_nothing_waits(kind: str, target: str) -> None:
    program = PROGRAMS[kind]
    schedule, strides = choose(program), audit.contiguous_strides(program)
    source = triton_code.generate(program, schedule, strides)
    assert "_ready" not in source
    assert "griddepcontrol" not in audit.compile_kernel(program, schedule, strides, target, source).assembly


@pytest.mark.parametrize(
    ("enabled", "hip", "capability", "device", "expected"),
    [
        (True, None, 90, CUDA, True),
        (True, None, 100, CUDA, True),
        (True, None, 80, CUDA, False),
        (True, "6.4", 942, CUDA, False),
        (True, None, 90, torch.device("cpu"), False),
        (False, None, 90, CUDA, False),
    ],
)
def test_where_inductor_launches_so(
    monkeypatch: pytest.MonkeyPatch,
    enabled: bool,
    hip: str | None,
    capability: int,
    device: torch.device,
    expected: bool,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: SimpleNamespace(cc=capability))
    with _torch_compat.inductor_config.patch({"triton.enable_pdl": enabled}):
        assert _torch_compat.pdl(device) is expected
