"""The chains that the kernel bench times: what they compute, and that each site of a graph does the same work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from bench import backward_chain, chains, forward_chain, kernels, timing
from bench.chains import Point
from bench.suite import Options

ROWS, COLS = 32, 64


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def point(direction: str, norm: str, dtype: torch.dtype = torch.float32) -> Point:
    return Point(direction, norm, ROWS, COLS, dtype, torch.get_num_threads())


def expected_gradients(kind: str, inputs: backward_chain.Inputs) -> list[Tensor]:
    """The chain's gradients with plain autograd, site by site, from the last one back."""
    streams = [inputs.s.detach()]
    for buffers, (linear_bias, *_) in zip(inputs.buffers, inputs.parameters, strict=True):
        streams.append(streams[-1] + buffers.u + linear_bias.detach())
    ds, dy = inputs.incoming
    found: list[list[Tensor]] = []
    for s, buffers, (_, *vectors) in reversed(list(zip(streams[1:], inputs.buffers, inputs.parameters, strict=True))):
        leaf = s.requires_grad_()
        y = chains.norm(kind, leaf, vectors[0], vectors[1] if len(vectors) > 1 else None)
        through_norm, *vector_gradients = torch.autograd.grad(y, [leaf, *vectors], dy)
        ds = ds + through_norm
        found.insert(0, [ds.sum(0), *vector_gradients])
        dy = buffers.dy
    return [ds + dy, *(g for site in found for g in site)]


@pytest.mark.parametrize("norm", kernels.NORMS)
def test_backward_chain_is_its_formula(norm: str) -> None:
    inputs = backward_chain.random_inputs(point("backward", norm), 3, "cpu").double()
    got = backward_chain.gradients(backward_chain.chain, norm, inputs)
    assert len(got) == len(inputs.leaves) == 1 + 3 * (3 if norm == "layer_norm" else 2)
    torch.testing.assert_close(list(got), expected_gradients(norm, inputs))


@pytest.mark.parametrize("backend", chains.BACKENDS)
def test_compiled_backward_chain(backend: str) -> None:
    inputs = backward_chain.random_inputs(point("backward", "layer_norm"), 3, "cpu")
    exact = backward_chain.gradients(backward_chain.chain, "layer_norm", inputs.double())
    eager = backward_chain.gradients(backward_chain.chain, "layer_norm", inputs)
    compiled = chains.contenders(backward_chain.chain)[backend]
    got, (_, code) = run_and_get_code(lambda: backward_chain.gradients(compiled, "layer_norm", inputs))
    backward_chain._check_close(backend, got, eager, exact)
    call = code[code.index("def call(") :]
    handed = re.findall(r"sublayer_gradient\.default\((\w+), (\d)\)", call)
    assert [int(site) for _, site in handed] == [2, 1, 0], "every site's dx is stored, last site first"
    again = backward_chain.gradients(compiled, "layer_norm", inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "what a run writes over is filled again"


def test_nobody_is_timed_who_is_wrong() -> None:
    inputs = backward_chain.random_inputs(point("backward", "rms_norm"), 2, "cpu")
    exact = backward_chain.gradients(backward_chain.chain, "rms_norm", inputs.double())
    eager = backward_chain.gradients(backward_chain.chain, "rms_norm", inputs)
    backward_chain._check_close("eager", eager, eager, exact)
    for i in range(len(eager)):
        wrong = [g.clone() for g in eager]
        wrong[i][..., -1] = 0
        with pytest.raises(AssertionError, match=f"backend: gradient {i} is off by"):
            backward_chain._check_close("backend", wrong, eager, exact)


def test_forward_chain_is_its_formula() -> None:
    inputs = forward_chain.random_inputs(point("forward", "rms_norm"), 3, "cpu")
    s, y = forward_chain.chain("rms_norm", inputs)
    total = inputs.s + inputs.r[0] + inputs.r[1] + inputs.r[2]
    assert torch.equal(s, total)
    assert torch.equal(y, chains.norm("rms_norm", total, inputs.weight, None))


@pytest.mark.slow
@pytest.mark.parametrize("direction", kernels.DIRECTIONS)
def test_a_row_of_the_table(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", ((ROWS, COLS), (ROWS, COLS)))
    monkeypatch.setattr(kernels, "NORMS", ("layer_norm",))
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32,))
    taken = {"eager": 3e-6, "inductor": 2e-6, "fusepass": 1e-6, "copy": 5e-7}

    def interleave(measures: Any, rounds: int) -> dict[str, timing.Sample]:
        assert all(isinstance(measure(), float) for measure in measures.values())
        return {name: timing.Sample((taken[name],) * rounds) for name in measures}

    monkeypatch.setattr(timing, "interleave", interleave)
    table = kernels.run(Options("cpu", quick=True, threads=(1,), direction=direction))
    row: Any = table.rows[0]
    assert (row["direction"], row["norm"], row["threads"], row["spread"]) == (direction, "layer_norm", 1, 0)
    assert [row[f"{n}_us"] for n in taken] == pytest.approx([3, 2, 1, 0.5])
    assert table.summary[0] == (
        f"{direction}, 1 thread(s): speed-up over Inductor: geometric mean 2.000, "
        f"minimum 2.000 (layer_norm {ROWS} {COLS} float32)"
    )
