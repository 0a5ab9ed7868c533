"""Every residual-add + norm of 51 real models is found, in every mode, and their numbers are eager's.

The rewritten graphs run with the reference evaluator; `test_compiled` runs some with the compiled kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusepass.report import Site
from fusepass.verdict import Reason
from tests.graph.capture import Captured, fuse
from tests.tolerances import EAGER_FACTOR, ROUNDING_UNIT, assert_as_accurate_as_eager, assert_same_sums
from tests.zoo.models import BATCH, HIDDEN, MODELS, TOKENS, Call

# What other packages say about their own future, and what Dynamo says about their code.
pytestmark = pytest.mark.filterwarnings("ignore")
FEW = ("torch/encoder, pre", "torch/decoder layer, post", "hf/bert", "hf/gpt2", "hf/llama", "hf/gemma2", "hf/t5")
OPTIONS = {"fusepass.strict": True, "fusepass.profitability": "always"}


def every_model(quick: Iterable[str] = ()) -> Any:
    """All models; but for the quick ones the tests are slow."""
    names = [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
    return pytest.mark.parametrize("name", names)


def built(name: str, dropout: float = 0.0) -> Call:
    torch.manual_seed(0)
    return MODELS[name].build(dropout)


def to(dtype: torch.dtype, value: Any) -> Any:
    """Copies of a model, or of tensors in tuples and dictionaries, in another floating-point dtype."""
    if isinstance(value, nn.Module):
        model = copy.deepcopy(value).to(dtype)
        if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped matmul of the default one has no FP64
        return model
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: to(dtype, v) for k, v in value.items()}
    return tuple(to(dtype, v) for v in value) if isinstance(value, tuple) else value


def tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return [t for v in value.values() for t in tensors(v)] if hasattr(value, "values") else []


def norms(captured: Captured, backward: bool = False) -> list[Site]:
    return [s for s in captured.sites if s.norm != "bias_gradient" and (s.graph == "backward") is backward]


def check_counts(name: str, mode: str, captured: Captured) -> None:
    """Every site is fused, every other norm has a row that says why not, and there are no more."""
    hidden = [s for s in norms(captured) if s.reason is Reason.FAST_PATH]
    found = [s for s in norms(captured) if s not in hidden]
    total, sites = MODELS[name].counts(mode)
    assert bool(hidden) == ((total, sites) != (MODELS[name].norms, MODELS[name].sites))
    assert sum(s.fused for s in found if s.residual) == sites, [str(s) for s in found if not s.fused]
    assert len(found) == total
    assert {str(s.reason) for s in found if not s.fused} <= {"NO_RESIDUAL"}
    assert not any(s.residual for s in found if not s.fused)


def check_values(name: str, mode: str, call: Call, dynamic: bool | None = None) -> None:
    model, args, kwargs = call
    model.eval()
    with torch.no_grad():
        captured = fuse(lambda *a: model(*a, **kwargs), *args, dynamic=dynamic, options=OPTIONS)
        eager = tensors(model(*args, **kwargs))
        exact = tensors(to(torch.float64, model)(*to(torch.float64, args), **to(torch.float64, kwargs)))
    check_counts(name, mode, captured)
    check_together(tensors(captured.result), eager, exact)


def check_together(fused: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """All outputs at once, each in units of its size: some have so few elements that luck decides."""
    for got, want in zip(fused, eager, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
    dtype = max((e.dtype for e in eager), key=lambda d: torch.finfo(d).eps)
    sizes = [t.square().mean().sqrt() for t in exact]
    together = [
        torch.cat([(t.double() / size).flatten() for t, size in zip(outputs, sizes, strict=True)])
        for outputs in (fused, eager, exact)
    ]
    error, eager_error = (float((t - together[2]).square().mean().sqrt()) for t in together[:2])
    assert error <= EAGER_FACTOR * eager_error + ROUNDING_UNIT[dtype], f"error {error:.3e}, eager's {eager_error:.3e}"


@pytest.mark.usefixtures("by_reference")
@every_model(FEW)
def test_evaluation(name: str) -> None:
    check_values(name, "eval", built(name))


@pytest.mark.usefixtures("by_reference")
@every_model()
def test_bfloat16(name: str) -> None:
    model, args, kwargs = built(name)
    check_values(name, "bf16", to(torch.bfloat16, (model, args, kwargs)))


DYNAMIC = ["torch/encoder, pre", "torchscale/deepnorm encoder", *FEW[2:6], "hf/granite"]


@pytest.mark.slow
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_shapes(name: str) -> None:
    """Numbers of the model, such as eps and dropout's factor, may then be tensors in the graph."""
    check_values(name, "dynamic", built(name), dynamic=True)


def backward(model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The gradients of all parameters for a loss with a weight for every element of the output."""
    model.zero_grad(set_to_none=True)
    outputs = tensors(run(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    torch.autograd.backward([(o * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad])
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_gradients(
    fused: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Together as accurate as eager's; and each as near to eager's as sums in another order are."""
    assert set(fused) == set(eager) == set(exact)
    together = [torch.cat([gradients[n].flatten().double() for n in exact]) for gradients in (fused, eager, exact)]
    got, want, truth = (v.float() for v in together)
    scale = float(truth.abs().amax())
    assert_as_accurate_as_eager(got, want, together[2])
    for n, e in eager.items():
        assert_same_sums(fused[n].to(dtype), e.to(dtype), summed=BATCH * TOKENS * HIDDEN, scale=scale)


@pytest.mark.usefixtures("by_reference")
@every_model()
def test_gradients(name: str) -> None:
    check_training(name)


@pytest.mark.slow
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_gradients(name: str) -> None:
    captured = check_training(name, dynamic=True)
    assert sum(s.fused for s in norms(captured, backward=True) if s.residual) == MODELS[name].counts("train")[1]
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in captured.after[-1].graph.nodes)


def check_training(name: str, dynamic: bool | None = None) -> Captured:
    """Counts of the forward, and all gradients; returns both graphs."""
    model, args, kwargs = built(name)
    model.train()  # without any dropout
    captured = Captured()

    def run(*a: Any, **k: Any) -> Any:
        return fuse(lambda *b: model(*b, **k), *a, options=OPTIONS, into=captured, dynamic=dynamic).result

    fused = backward(model, run, args, kwargs)
    eager = backward(model, model, args, kwargs)
    double = to(torch.float64, model)
    exact = backward(double, double, to(torch.float64, args), to(torch.float64, kwargs))
    check_counts(name, "train", captured)
    check_gradients(fused, eager, exact, torch.bfloat16 if "autocast" in name else torch.float32)
    return captured


@pytest.mark.slow
@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("name", [*FEW, "hf/llama, checkpointing", "x-transformers, sandwich", "timm/vit, layer scale"])
def test_training_with_dropout(name: str) -> None:
    """Forward and backward are fused alike; checkpointed layers have some of their forward again in the backward."""
    model, args, kwargs = built(name, dropout=0.1)
    model.train()
    captured = Captured()
    gradients = backward(
        model, lambda *a, **k: fuse(lambda *b: model(*b, **k), *a, options=OPTIONS, into=captured).result, args, kwargs
    )
    assert all(bool(g.isfinite().all()) for g in gradients.values())
    check_counts(name, "train", captured)
    fused = sum(s.fused for s in norms(captured, backward=True) if s.residual)
    sites = MODELS[name].counts("train")[1]
    assert fused == sites if "checkpointing" not in name else fused > sites
    assert not any(s.residual for s in norms(captured, backward=True) if not s.fused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf/gemma2", "diffusers/DiT"])
def test_compiled(name: str) -> None:
    """Through Inductor, with the generated kernels."""
    torch._dynamo.reset()
    model, args, kwargs = built(name)
    model.train()
    options = {**OPTIONS, "fusepass.expect": MODELS[name].sites, "fx_graph_cache": False}
    run = torch.compile(model, backend="fusepass", options=options)
    double = to(torch.float64, model)
    double_args, double_kwargs = to(torch.float64, args), to(torch.float64, kwargs)
    fused, eager = (backward(model, r, args, kwargs) for r in (run, model))
    check_gradients(fused, eager, backward(double, double, double_args, double_kwargs))
    outputs = [tensors(r(*args, **kwargs)) for r in (run, model)]
    check_together(*outputs, tensors(double(*double_args, **double_kwargs)))
