"""The backward of every form of a site: one kernel that also sums the columns, and gradients that are eager's.

Gradients are compared in FP64, where a mistake of any size shows. The rewritten graphs run with the reference
evaluator, since FP64 kernels of a hundred forms would take longer to compile than to test; `tests/kernels` and
`tests/e2e` run the compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusepass.rules import reduced_dims, val
from tests.graph.capture import Captured, fuse
from tests.graph.test_forms import NORMS, SUMS, layer_norm, llama_rms_norm, rms_norm
from tests.tolerances import assert_as_accurate_as_eager, assert_same_sums

D = 48
Site = Callable[..., tuple[Tensor, Tensor]]
pytestmark = pytest.mark.usefixtures("by_reference")
aten = torch.ops.aten


def inputs(*lead: int, cols: int = D, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, r, weight, bias: leaves that require gradients."""
    shapes = [(*lead, cols), (*lead, cols), (cols,), (cols,)]
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    tensors[2] = 1 + 0.1 * tensors[2]
    return [t.to(dtype).requires_grad_() for t in tensors]


def backward(
    fn: Callable[..., object], args: list[Tensor], gradients: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """The gradients of `args`; an output whose gradient is None takes no part."""
    for a in args:
        a.grad = None
    outputs = fn(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [a.grad for a in args]


def check(
    site: Site,
    args: list[Tensor],
    gradients: tuple[Tensor | None, ...] | None = None,
    kernels: int = 1,
    scale: float = 1,
) -> Captured:
    """One kernel in the backward graph, no sum over rows or columns beside it, and eager's gradients."""
    if gradients is None:
        with torch.no_grad():
            gradients = tuple(torch.randn_like(o) for o in site(*args))
    expected = backward(site, args, gradients)
    captured = Captured()

    def fused(*a: Tensor) -> object:
        fuse(site, *a, into=captured)
        return captured.result

    got = backward(fused, args, gradients)
    assert captured.reasons == []
    forward, gradient = captured.after
    assert [len(kernels_of(g)) for g in (forward, gradient)] == [1, kernels]
    assert kernels == 0 or list(sums(gradient.graph)) == [], "row or column sums were left outside"
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            assert_same_sums(g, e, summed=args[0].numel(), scale=scale)
    return captured


def kernels_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if "fusepass" in n.meta]


def sums(graph: fx.Graph) -> Iterator[fx.Node]:
    """The row and column sums of tiles."""
    for n in graph.nodes:
        if n.target in (aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction):
            ndim = val(n.args[0]).ndim
            if ndim > 1 and reduced_dims(n) in ([ndim - 1], list(range(ndim - 1))):
                yield n


def site_of(norm: Callable[..., Tensor], how: str = "plain") -> Site:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = SUMS[how](x, r, w)
        return s, norm(s, w, b)  # type: ignore[return-value]

    return site


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_symbolic_rows(norm: Callable[..., Tensor]) -> None:
    args = inputs(3, 5)
    for tensor in args[:2]:
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    captured = check(site_of(norm), args)
    placeholders = [n for g in captured.after for n in g.graph.nodes if n.op == "placeholder"]
    assert any(isinstance(val(n), torch.SymInt) for n in placeholders)


@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_spelling_of_the_norm(norm: Callable[..., Tensor]) -> None:
    captured = check(site_of(norm), inputs(2, 3))
    (row,) = [s for s in captured.sites if s.graph == "backward"]
    assert row.residual and row.norm == ("layer_norm" if "layer" in norm.__name__ else "rms_norm")
    assert captured.programs[1].count("col_sum") == (2 if "layer" in norm.__name__ else 1)


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("norm", [layer_norm, llama_rms_norm], ids=lambda f: f.__name__)
def test_spelling_of_the_sum(how: str, norm: Callable[..., Tensor]) -> None:
    check(site_of(norm, how), inputs(2, 3))


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("frozen", ["wb", "w", "b", "x", "xwb", "rwb"])
def test_frozen_inputs(norm: Callable[..., Tensor], frozen: str) -> None:
    args = inputs(2, 3)
    for name, a in zip("xrwb", args, strict=True):
        a.requires_grad_(name not in frozen)
    captured = check(site_of(norm), args)
    trained = {"layer_norm": "wb", "rms_norm": "w"}[norm.__name__]
    assert captured.programs[1].count("col_sum") == sum(p not in frozen for p in trained)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_without_weights(norm: Callable[..., Tensor]) -> None:
    bare = {"layer_norm": lambda s: F.layer_norm(s, (D,)), "rms_norm": lambda s: F.rms_norm(s, (D,))}[norm.__name__]

    def site(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, bare(s)

    assert "col_sum" not in check(site, inputs(2, 3)[:2]).programs[1]


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["norm", "both"])
def test_what_receives_a_gradient(norm: Callable[..., Tensor], which: str) -> None:
    gradients = (torch.randn(2, 3, D).double() if which == "both" else None, torch.randn(2, 3, D).double())
    if which == "norm":
        check(lambda *a: (site_of(norm)(*a)[0].detach(), site_of(norm)(*a)[1]), inputs(2, 3), gradients)
    else:
        check(site_of(norm), inputs(2, 3), gradients)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_no_gradient_for_the_norm_needs_no_kernel(norm: Callable[..., Tensor]) -> None:
    args = inputs(2, 3)
    captured = Captured()
    fuse(lambda *a: (site_of(norm)(*a)[0], site_of(norm)(*a)[1].detach()), *args, into=captured)
    captured.result[0].backward(torch.ones(2, 3, D).double())
    assert torch.equal(args[0].grad, torch.ones(2, 3, D)) and torch.equal(args[1].grad, torch.ones(2, 3, D))
    assert args[2].grad is None


STRIDED: dict[str, Callable[[], Tensor]] = {
    "stride 0": lambda: torch.ones((), dtype=torch.float64).expand(4, 6, D),
    "rows repeat": lambda: torch.randn(1, 6, D).double().expand(4, 6, D),
    "slice": lambda: torch.randn(8, 6, 2 * D).double()[::2, :, ::2],
    "transposed rows": lambda: torch.randn(6, 4, D).double().transpose(0, 1),
    "transposed columns": lambda: torch.randn(4, D, 6).double().transpose(1, 2),
}


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", STRIDED)
def test_gradients_of_any_strides(norm: Callable[..., Tensor], layout: str) -> None:
    check(site_of(norm), inputs(4, 6), (STRIDED[layout](), STRIDED[layout]()))


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_a_summed_loss(norm: Callable[..., Tensor]) -> None:
    def loss(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor]:
        s = x + r
        return (s.square().sum() + norm(s, w, b).sum(),)

    captured = Captured()
    args = inputs(3, 5)
    one = (torch.ones((), dtype=torch.float64),)
    expected = backward(loss, args, one)
    got = backward(lambda *a: fuse(loss, *a, into=captured).result, args, one)
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            assert_same_sums(g, e, summed=15)
    assert captured.reasons == [] and len(kernels_of(captured.after[1])) == 1


@pytest.mark.parametrize("lead", [(7,), (2, 3), (2, 1, 3), (2, 1, 1, 2), (1, 5)], ids=str)
def test_any_leading_rank(lead: tuple[int, ...]) -> None:
    check(site_of(layer_norm), inputs(*lead))


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_a_single_row_without_leading_dimensions(norm: Callable[..., Tensor]) -> None:
    check(site_of(norm), inputs())


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_no_rows(lead: tuple[int, ...], norm: Callable[..., Tensor]) -> None:
    args = inputs(*lead)
    captured = Captured()
    fuse(site_of(norm), *args, into=captured)
    torch.autograd.backward(captured.result, [torch.randn(*lead, D).double() for _ in range(2)])
    assert args[0].grad is not None and args[0].grad.shape == (*lead, D)
    assert args[2].grad is not None and torch.equal(args[2].grad, torch.zeros(D).double())


@pytest.mark.parametrize("cols", [1, 2, 48, 1000])
@pytest.mark.parametrize("rows", [1, 1025])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_any_number_of_rows_and_columns(rows: int, cols: int, norm: Callable[..., Tensor]) -> None:
    """With one column, a value per row is a tile, and nothing tells a norm: the gradient is right, and not fused.

    It is a difference of equal numbers there, times rstd = eps^-1/2.
    """
    check(site_of(norm), inputs(rows, cols=cols), kernels=int(cols > 1), scale=1 if cols > 1 else 1e-5**-0.5)


def test_gradients_of_a_tile_that_repeats() -> None:
    """The position's gradient is a sum over the batch: it reads what the kernel wrote."""
    x, _, w, b = inputs(4, 6)
    position = torch.randn(1, 6, D, dtype=torch.float64, requires_grad=True)
    check(site_of(layer_norm), [x, position, w, b])


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_behind_a_linear_with_a_bias(norm: Callable[..., Tensor]) -> None:
    """The Linear's bias gradient is a sum over the columns of the tile that the kernel has just made."""

    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor, matrix: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        s = x + F.linear(r, matrix, bias)
        return s, norm(s, w, b)

    more = [torch.randn(D, D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)]
    captured = check(site, [*inputs(2, 3), *(t.requires_grad_() for t in more)])
    assert captured.programs[1].count("col_sum") == (3 if norm is layer_norm else 2)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda f: f.__name__)
def test_layer_scale_has_its_gradient_in_the_kernel(norm: Callable[..., Tensor]) -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        s = x + scale * r
        return s, norm(s, w, b)

    scale = torch.randn(D, dtype=torch.float64).requires_grad_()
    captured = check(site, [*inputs(2, 3), scale])
    assert captured.programs[1].count("col_sum") == (3 if norm is layer_norm else 2)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (7,)], ids=str)
def test_two_norms_share_a_weight(lead: tuple[int, ...]) -> None:
    """Its gradient is the sum of two column sums, which with one row have the shape of a tile."""

    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = x + r
        return s, layer_norm(s, w, b), rms_norm(s, w, b)  # type: ignore[return-value]

    check(site, inputs(*lead))  # type: ignore[arg-type]


def test_two_norms_of_one_sum() -> None:
    def site(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = x + r
        return s, layer_norm(s, w, b), layer_norm(s, b, w)

    captured = check(site, inputs(2, 3))
    assert [s.norm for s in captured.sites if s.graph == "backward"] == ["layer_norm"] * 2


def test_chained_sites() -> None:
    """Post-norm: each site's gradient is the sum of two, made by the site behind it."""

    def block(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = layer_norm(x + r, w, b)
        return y, layer_norm(y + torch.mm(y, w.expand(D, D)), w, b)

    args = inputs(6)
    gradients = (torch.randn(6, D).double(), torch.randn(6, D).double())
    expected = backward(block, args, gradients)
    captured = Captured()
    got = backward(lambda *a: fuse(block, *a, into=captured).result, args, gradients)
    for g, e in zip(got, expected, strict=True):
        assert_same_sums(g, e, summed=6 * D)  # type: ignore[arg-type]
    assert captured.reasons == [] and len(kernels_of(captured.after[1])) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_gradients_are_as_accurate_as_eager(norm: Callable[..., Tensor], dtype: torch.dtype) -> None:
    args = inputs(16, 9, dtype=dtype)
    gradients = tuple(torch.randn(16, 9, D).to(dtype) for _ in range(2))
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = backward(site_of(norm), wide, tuple(g.double() for g in gradients))
    eager = backward(site_of(norm), args, gradients)
    got = backward(lambda *a: fuse(site_of(norm), *a).result, args, gradients)
    for g, e, t in zip(got, eager, exact, strict=True):
        if e is not None:
            assert_as_accurate_as_eager(g, e, t)  # type: ignore[arg-type]


NOT_A_NORM: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: torch.softmax(s, -1),
    "log-softmax": lambda s: torch.log_softmax(s, -1),
    "divided by its length": lambda s: F.normalize(s, dim=-1),
    "mean subtracted": lambda s: s - s.mean(-1, keepdim=True),
    "scaled by its mean": lambda s: s * s.mean(-1, keepdim=True),
    "scaled by its mean square": lambda s: s * s.square().mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", NOT_A_NORM)
def test_what_is_no_gradient_of_a_norm_is_left_alone(name: str) -> None:
    captured = Captured()
    args = inputs(4, 6)[:2]

    def site(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        return s, NOT_A_NORM[name](s)

    gradients = tuple(torch.randn(4, 6, D).double() for _ in range(2))
    expected = backward(site, args, gradients)
    got = backward(lambda *a: fuse(site, *a, into=captured).result, args, gradients)
    assert captured.kernels == []
    for g, e in zip(got, expected, strict=True):
        assert_same_sums(g, e, summed=D)  # type: ignore[arg-type]
