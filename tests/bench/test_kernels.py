"""The chains that the kernel bench times: what they compute, and that each site of a graph does the same work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from bench import backward_chain, chains, forward_chain, kernels, peers, timing
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

    monkeypatch.setattr(peers, "PEERS", ())

    def interleave(measures: Any, rounds: int) -> dict[str, timing.Sample]:
        assert all(isinstance(measure(), float) for measure in measures.values())
        return {name: timing.Sample((taken[name],) * rounds) for name in measures}

    monkeypatch.setattr(timing, "interleave", interleave)
    table = kernels.run(Options("cpu", quick=True, threads=(1,), direction=direction))
    row: Any = table.rows[0]
    assert (row["direction"], row["norm"], row["threads"], row["spread"]) == (direction, "layer_norm", 1, 0)
    assert [row[f"{n}_us"] for n in taken] == pytest.approx([3, 2, 1, 0.5])
    # two copies of a tile in 1 us move as much as a site does
    assert [row[f"{n}_pct_of_copy"] for n in chains.BACKENDS] == pytest.approx([50, 100])
    assert row["copy_gb_s"] == pytest.approx(2 * ROWS * COLS * 4 / 0.5e-6 / 1e9)
    for backend in chains.BACKENDS:
        assert row[f"{backend}_gb_s"] / row["copy_gb_s"] == pytest.approx(row[f"{backend}_pct_of_copy"] / 100)
    assert (row["inductor_launches"], row["fusepass_launches"]) == (1, 1)
    assert list(table.summary[:2]) == [
        f"{direction}, 1 thread(s): speed-up over Inductor: geometric mean 2.000, "
        f"minimum 2.000 (layer_norm {ROWS} {COLS} float32)",
        f"{direction}, 1 thread(s): percent of the copy's bandwidth: median 100, "
        f"minimum 100 (layer_norm {ROWS} {COLS} float32)",
    ]
    assert not table.failed


def test_points_of_a_gpu() -> None:
    points = list(kernels._grid(Options("cuda"), (16,)))
    assert len(points) == len(set(points))
    wide = [p for p in points if p.rows > 64 and p.direction == "forward" and p.dtype is torch.bfloat16]
    assert {p.cols for p in wide} == {1024, 2048, 4096, 8192, 16384}
    assert all(p.rows * p.cols * p.dtype.itemsize >= 2 * 60 << 20 for p in wide), "twice an H200's L2 cache"
    assert {p.rows for p in points if p.rows <= 64} == {1, 8, 64}
    few = [p for p in points if p.direction == "backward" and p.rows < 2 * p.cols]
    assert {p.cols for p in few} == {1024, 4096, 8192, 16384}
    assert {p.norm for p in points} == set(kernels.NORMS)
    quick = list(kernels._grid(Options("cuda", quick=True, direction="backward"), (16,)))
    assert set(quick) < set(points) and {p.direction for p in quick} == {"backward"}


def test_a_contender_that_fails_leaves_its_cells_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kind: str, s: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        s, y = chains.site(kind, s, r, weight, bias)
        return s, y * 1.1

    def broken() -> chains.Site:
        raise ImportError("no such symbol")

    right = peers.Peer("right", "cpu", ("torch",), site=lambda: chains.site)
    others = [
        peers.Peer("wrong", "cpu", ("torch",), site=lambda: wrong),
        peers.Peer("broken", "cpu", ("torch",), site=broken),
        peers.Peer("layer_norm_only", "cpu", ("torch",), norms=("layer_norm",), site=lambda: chains.site),
        peers.Peer("absent", "cpu", ("no_such_package",), site=lambda: chains.site),
        peers.Peer("models_only", "cpu", ("torch",)),
        peers.Peer("elsewhere", "cuda", ("torch",), site=lambda: chains.site),
    ]
    monkeypatch.setattr(peers, "PEERS", (right, *others))
    monkeypatch.setattr(timing, "rounds_within", lambda *_, **__: 2)
    found = peers.of_kernels("cpu")
    assert [p.name for p in found] == ["right", "wrong", "broken", "layer_norm_only"]
    assert peers.absent_note("cpu") == ["peers that are not installed: absent"]
    row, failed = kernels.measure(point("forward", "rms_norm"), found, Options("cpu"))
    assert row["right_us"] is not None and row["right_pct_of_copy"] is not None
    for name in ("wrong", "broken", "layer_norm_only"):
        assert row[f"{name}_us"] is row[f"{name}_pct_of_copy"] is None
    assert [line.split(": ")[1:] for line in failed] == [
        ["wrong", "AssertionError", "wrong", "Tensor-likes are not close!"],
        ["broken", "ImportError", "no such symbol"],
    ]
