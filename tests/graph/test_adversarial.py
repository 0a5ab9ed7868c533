"""Inputs made to break the pass: broadcasts, odd layouts, roundings, mutation, norms of norms."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from fusepass.verdict import Reason
from tests.graph.capture import Captured, fuse
from tests.tolerances import assert_few_roundings_from_eager

D = 8
Fn = Callable[..., object]


def layer_norm(s: Tensor) -> Tensor:
    return F.layer_norm(s, (s.shape[-1],))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def as_eager(fn: Fn, *args: Tensor, kernels: int = 1, exact: tuple[int, ...] = (), strict: bool = True) -> Captured:
    """`kernels` kernels, every norm fused where there is one, eager's values; `exact` outputs to the bit."""
    with torch.no_grad():
        captured = fuse(fn, *args, options={"fusepass.strict": strict})
        wanted = fn(*args)
    results = [list(v) if isinstance(v, (tuple, list)) else [v] for v in (captured.result, wanted)]
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert_few_roundings_from_eager(got, want)
        if i in exact:
            assert torch.equal(got, want), f"{(got != want).sum()} of {want.numel()} elements are not eager's bits"
    assert len(captured.kernels) == kernels
    if kernels:
        assert captured.reasons == []
    return captured


SQUARE = [(4, 8, D), (8, 8, D), (2, 3, D), (1, 8, D), (8, 1, D)]


def _factors(b: int, s: int) -> list[tuple[int, ...]]:
    shapes = [(), (1,), (1, 1, 1), (s, 1), (1, s, 1), (b, 1, 1), (b, s, 1), (1, 1, D), (b, 1, D), (s, D), (b, s, D)]
    return list(dict.fromkeys(shapes))


FACTORS = [(shape, factor) for shape in SQUARE for factor in _factors(*shape[:2])]


@pytest.mark.parametrize(("shape", "factor"), FACTORS, ids=str)
def test_a_factor_of_the_norm_of_any_shape(shape: tuple[int, ...], factor: tuple[int, ...]) -> None:
    as_eager(lambda x, r, g: (x + r, layer_norm(x + r) * g), randn(*shape), randn(*shape, seed=1), randn(*factor))


@pytest.mark.parametrize(("shape", "factor"), FACTORS, ids=str)
def test_one_plus_a_factor_of_any_shape(shape: tuple[int, ...], factor: tuple[int, ...]) -> None:
    """`1 + g` has as many elements as there are columns where S == D: it is no per-column value for that."""
    as_eager(lambda x, r, g: layer_norm(x + r) * (1 + g), randn(*shape), randn(*shape, seed=1), randn(*factor))


@pytest.mark.parametrize("factor", [(D, 1), (1, D), (D,), (D, D)], ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_square_matrices(factor: tuple[int, ...], strict: bool) -> None:
    x, r, g = randn(D, D), randn(D, D, seed=1), randn(*factor)
    as_eager(lambda x, r, g: layer_norm(x + r) * (1 + g), x, r, g, strict=strict)
    as_eager(lambda x, r, g: layer_norm(x * (g * 2) + r), x, r, g, strict=strict)


@pytest.mark.parametrize(
    ("shape", "gate"),
    [((2, 5, D), (5, 1)), ((4, 5, 1, D), (5, 1, 1)), ((5, 2, D), (2, 1)), ((3, 3, D), (3, 1))],
    ids=str,
)
def test_a_gate_that_repeats_over_the_outer_rows(shape: tuple[int, ...], gate: tuple[int, ...]) -> None:
    as_eager(lambda x, r, g: layer_norm(x * g + r), randn(*shape), randn(*shape, seed=1), randn(*gate))


def test_a_symbolic_gate_that_repeats_over_the_outer_rows() -> None:
    x, r, g = randn(4, 6, D), randn(4, 6, D, seed=1), randn(6, 1)
    for tensor, dims in ((x, (0, 1)), (r, (0, 1)), (g, (0,))):
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)
    as_eager(lambda x, r, g: layer_norm(x * g + r), x, r, g)


def test_no_rows_and_a_gate() -> None:
    as_eager(lambda x, r, g: (x + r, layer_norm(x * g + r)), randn(2, 0, D), randn(2, 0, D), randn(0, 1))


@pytest.mark.parametrize(("rows", "regrouped"), [((4, 6), (6, 4)), ((2, 6), (3, 4)), ((4, 6), (8, 3))], ids=str)
def test_a_view_that_groups_the_rows_differently(rows: tuple[int, ...], regrouped: tuple[int, ...]) -> None:
    def chunked(x: Tensor, r: Tensor, q: Tensor) -> Tensor:
        return layer_norm((x + r).view(*regrouped, D)) + q

    as_eager(chunked, randn(*rows, D), randn(*rows, D, seed=1), randn(*regrouped, D, seed=2))


def test_two_symbolic_dimensions_viewed_as_one() -> None:
    x, r = randn(4, 6, D), randn(4, 6, D, seed=1)
    for tensor in (x, r):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    as_eager(lambda x, r: layer_norm((x + r).view(-1, D)), x, r)


BROADCAST: dict[str, tuple[Fn, tuple[int, ...]]] = {
    "a gate": (lambda x, r, g: (lambda e: (layer_norm(x + r * e), e))(g.expand_as(x) * 2.0), (2, 3, 1)),
    "a vector": (lambda x, r, g: (lambda e: (layer_norm(x + r * e), e))(g.expand_as(x) * 2.0), (D,)),
    "a statistic": (lambda x, r, g: (lambda s: (layer_norm(s) * g, s.mean(-1, True).expand_as(s) * 2.0))(x + r), (D,)),
    "a sum of it": (lambda x, r, g: layer_norm(x + r) + (x + r).mean(-1, True).expand_as(x).sum(-1, True) * g, (D,)),
}


@pytest.mark.parametrize("what", BROADCAST)
def test_something_expanded_to_a_tile_is_an_output(what: str) -> None:
    """A node of a tile's shape whose value does not vary over all of the tile."""
    fn, factor = BROADCAST[what]
    as_eager(fn, randn(2, 3, D), randn(2, 3, D, seed=1), randn(*factor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "total",
    [
        lambda x, r, a: torch.add(x, r, alpha=0.1),
        lambda x, r, a: torch.add(x, r, alpha=3),
        lambda x, r, a: x * 0.1 + r,
        lambda x, r, a: x / 0.1 + r,
        lambda x, r, a: (x + 0.1) + r,
        lambda x, r, a: (0.1 - x) + r,
        lambda x, r, a: x * a + r,
        lambda x, r, a: a * x + r,
        lambda x, r, a: (x + a) + r,
    ],
    ids=["alpha=0.1", "alpha=3", "x * 0.1", "x / 0.1", "x + 0.1", "0.1 - x", "x * 0-dim", "0-dim * x", "x + 0-dim"],
)
def test_the_sum_of_16_bit_values_and_numbers_is_eagers(dtype: torch.dtype, total: Fn) -> None:
    """Eager rounds a number that it adds (and `alpha`) to the tensor's dtype first, but not one it multiplies by."""

    def site(x: Tensor, r: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        s: Tensor = total(x, r, a)  # type: ignore[assignment]
        return s, layer_norm(s)

    as_eager(site, randn(64, 16).to(dtype), randn(64, 16, seed=1).to(dtype), torch.tensor(0.1), exact=(0,))


@pytest.mark.parametrize("total", [lambda x, r, a: x * a + r, lambda x, r, a: (x + a) + r], ids=["times", "plus"])
def test_a_double_number_beside_a_float_tensor_is_rounded_first(total: Fn) -> None:
    def site(x: Tensor, r: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        s: Tensor = total(x, r, a)  # type: ignore[assignment]
        return s, layer_norm(s)

    as_eager(site, randn(64, 16), randn(64, 16, seed=1), torch.tensor(0.1, dtype=torch.float64), exact=(0,))


def test_a_mean_in_fp64_of_fp32_values_is_summed_in_fp64() -> None:
    def site(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        square = s.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
        return s * torch.rsqrt(square + 1e-6), square

    args = randn(4, 4096), randn(4, 4096, seed=1)
    with torch.no_grad():
        _, square = fuse(site, *args).result
        _, wanted = site(*args)
    assert_few_roundings_from_eager(square, wanted)


@pytest.mark.parametrize("strict", [True, False])
def test_a_literal_that_is_not_a_number(strict: bool) -> None:
    """NaN literals are left to Inductor or fused; they are no fault of ours, so `strict` does not raise."""
    site = lambda x, r: layer_norm(torch.add(x, r, alpha=math.nan))  # noqa: E731
    with torch.no_grad():
        captured = fuse(site, randn(4, D), randn(4, D, seed=1), options={"fusepass.strict": strict})
    assert captured.result.isnan().all()
    assert Reason.INTERNAL_ERROR not in captured.reasons


def test_zeros_of_both_signs() -> None:
    def site(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        s = x + r
        return layer_norm(s), 1 / (s.abs() * 0.0), 1 / (s.abs() * -0.0)

    as_eager(site, randn(4, D), randn(4, D, seed=1))


@pytest.mark.parametrize("alpha", [0, -1, 2, 0.1])
def test_alpha_and_values_that_are_not_finite(alpha: float) -> None:
    x, r = randn(6, D), randn(6, D, seed=1)
    x[1, 2], x[2, 0], r[3, 5], r[4, 1] = math.inf, math.nan, -math.inf, math.nan
    as_eager(lambda x, r: (torch.add(x, r, alpha=alpha), layer_norm(torch.add(x, r, alpha=alpha))), x, r)


def test_a_statistic_of_a_number_beside_a_site() -> None:
    """`reduced_dims` of a tensor without dimensions."""
    as_eager(lambda x, r, t: (layer_norm(x + r), (t.pow(2).mean(-1) + 1).sqrt()), randn(4, D), randn(4, D), randn())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before the norm", "from residual", "from post"])
def test_norm_after_norm_compiles_in_reasonable_time(how: str) -> None:
    """With nothing but sums and norms, all of a model is one region: the time must not explode with its length."""
    body = {
        "before the norm": "s = s + F.rms_norm(s, (16,))",
        "from residual": "s = x + F.rms_norm(s, (16,))",
        "from post": "s = F.layer_norm(s + x, (16,))",
    }[how]
    script = f"""
        import torch, torch.nn.functional as F
        from tests.graph.capture import fuse
        def chain(x, r):
            s = x + r
            for _ in range(6):
                {body}
            return F.rms_norm(s, (16,))
        x, r = torch.randn(4, 16), torch.randn(4, 16)
        with torch.no_grad():
            captured = fuse(chain, x, r)
            torch.testing.assert_close(captured.result, chain(x, r))
        assert captured.reasons == [], captured.reasons
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr[-2000:]


class InputMutatedBetweenUses(nn.Module):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        mean = s.mean(-1, keepdim=True)
        x.zero_()
        variance = (s - mean).pow(2).mean(-1, keepdim=True)
        return (s - mean) * torch.rsqrt(variance + 1e-5) + (x + r)


class SumMutatedBetweenUses(nn.Module):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        variance = s.pow(2).mean(-1, keepdim=True)
        s.mul_(2)
        return s * torch.rsqrt(variance + 1e-6)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize("model", [InputMutatedBetweenUses(), SumMutatedBetweenUses()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("decomposed", [True, False])
def test_an_exported_graph_with_mutation(model: nn.Module, decomposed: bool) -> None:
    """Export keeps in-place ops until it is decomposed; in such a graph, equal expressions are not equal values."""
    x, r = randn(4, D), randn(4, D, seed=1)
    with torch.no_grad():
        program = torch.export.export(model, (x.clone(), r.clone()))
        program = program.run_decompositions() if decomposed else program
        fusepass.FusePass({"fusepass.strict": True})(program.graph)
        program.graph_module.recompile()
        wanted_x, got_x = x.clone(), x.clone()
        torch.testing.assert_close(program.module()(got_x, r), model(wanted_x, r))
    assert torch.equal(got_x, wanted_x)


def test_a_near_miss_beside_a_fused_norm_is_not_in_its_kernel() -> None:
    def site(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return layer_norm(s), (s - s.mean(-1, keepdim=True)) / (s.std(-1, keepdim=True) + 1e-5)

    with torch.no_grad():
        captured = fuse(site, randn(4, D), randn(4, D, seed=1))
        torch.testing.assert_close(captured.result, site(randn(4, D), randn(4, D, seed=1)))
    assert [s.fused for s in captured.sites].count(True) == len(captured.kernels) == 1
    assert "row_sum" not in captured.programs[0], "the unfused norm's statistics belong to Inductor"


@pytest.mark.parametrize("how", ["a function around it", "a bound method"])
def test_explain_leaves_the_modules_of_a_function_as_they_were(how: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.LayerNorm(D)).train()
    target = model.forward if how == "a bound method" else lambda x: model(x)
    model(randn(4, D)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    buffers = [b.clone() for b in model.buffers()]
    fusepass.explain(target, randn(4, D, seed=1))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert all(torch.equal(b, old) for b, old in zip(model.buffers(), buffers, strict=True))


def test_explain_does_not_call_a_batch_norm_a_layer_norm() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).train()
    sites = fusepass.explain(model, randn(4, D)).sites
    assert {s.norm for s in sites} <= {"bias_gradient"}, "sums over the columns of a tile that it has just computed"


def one_row_after_a_column_sum(x: Tensor, r: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n = layer_norm(x + r)
    return n, layer_norm(n.sum(0).view(1, D) + y)


def one_row_after_a_cast_column_sum(x: Tensor, r: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n = layer_norm(x + r)
    return n, layer_norm(n.sum(0, keepdim=True).double() + y).float()


def a_column_sum_as_a_weight(x: Tensor, r: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n = layer_norm(x + r)
    return n, F.layer_norm(n + x, (D,), n.sum(0).double().float() + y[0])


def the_norm_of_one_row_as_a_weight(x: Tensor, r: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n = layer_norm(x[:1] + y)
    return n, F.layer_norm(x + r, (D,)) * (1 + n)


@pytest.mark.parametrize(
    ("fn", "rows", "kernels"),
    [
        (one_row_after_a_column_sum, 1, 2),
        (one_row_after_a_column_sum, 5, 2),
        (one_row_after_a_cast_column_sum, 1, 2),
        (one_row_after_a_cast_column_sum, 5, 2),
        (a_column_sum_as_a_weight, 1, 1),  # both norms' statistics and the column sum; the weight comes after it
        (a_column_sum_as_a_weight, 5, 1),
        (the_norm_of_one_row_as_a_weight, 1, 1),
        (the_norm_of_one_row_as_a_weight, 5, 2),
    ],
)
def test_regions_with_a_vector_between_them_do_not_overlap(fn: Fn, rows: int, kernels: int) -> None:
    """A vector that one region computes and another reads belongs to one of them."""
    as_eager(fn, randn(rows, D), randn(rows, D, seed=1), randn(1, D, seed=2), kernels=kernels)
