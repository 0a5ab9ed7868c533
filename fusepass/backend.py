"""The entry for `torch.compile`: Inductor with the pass in front, and `explain`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ._torch_compat import (
    fresh_compile,
    inductor,
    mode_options,
    reset_cudagraphs,
    tree_leaves,
)
from .fuse_pass import FusePass, GraphReport
from .joint_pass import JointPass
from .options import resolve
from .report import Report


def fusepass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    listener: Callable[[GraphReport], None] | None = None,
) -> Any:
    """The backend: `torch.compile(model, backend="fusepass", mode=..., options={...})`.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        mode: one of Inductor's modes ("default", "reduce-overhead", "max-autotune", ...).
        options: `fusepass.*` options are ours (see `options.OPTIONS`); all others go to Inductor untouched.
        listener: called with a `GraphReport` after each graph.

    Raises:
        OptionError: an unknown `fusepass.*` option or a bad value.
        ExpectationError: when a graph is compiled, under `fusepass.expect`.
        RuntimeError: Inductor's own error for an unknown mode or option of its own.
    """
    ours, inductors = resolve(options)
    patches = {**mode_options(mode, None), **inductors}
    passes = {"post_grad_custom_pre_pass": FusePass(ours, listener), "joint_custom_post_pass": JointPass(ours)}
    return inductor(gm, example_inputs, patches, passes)


# What `torch._dynamo.reset()` calls, as on Inductor's own backend.
fusepass.reset = reset_cudagraphs  # type: ignore[attr-defined]


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compile `model` afresh, run it once, and report every norm: fused, or the exact reason why not.

    The model runs under the caller's grad mode, and once backward where an output requires grad; the model itself, its
    parameters' gradients and the random number generators are left as they were.

    Args:
        model: a module or a function, already compiled or not.
        *args: its arguments.
        options: options for the backend, as for `torch.compile`.
        **kwargs: its keyword arguments.

    Returns:
        A `Report`; `str()` of it is a table.
    """
    report = Report()

    def listen(graph: GraphReport) -> None:
        report.graphs += 1
        report.sites += graph.sites
        report.untouched += graph.untouched

    target = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model
    with fresh_compile():
        compiled = torch.compile(target, backend=partial(fusepass, options=options, listener=listen))
        with torch.random.fork_rng(), _state_kept(target, (args, kwargs)):
            _backward(compiled(*args, **kwargs))
    return report


def _backward(output: Any) -> None:
    """Backward from every output that requires grad, with gradients of one."""
    roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


@contextlib.contextmanager
def _state_kept(target: Any, used: Any) -> Iterator[None]:
    """Put back the gradients and the values of all tensors and modules that the target and its arguments hold."""
    leaves = tree_leaves((used, _held_by(target)))
    modules = [m for m in leaves if isinstance(m, torch.nn.Module)]
    tensors = {t for t in leaves if isinstance(t, torch.Tensor)} | {p for m in modules for p in m.parameters()}
    gradients = [(t, t.grad) for t in tensors if t.is_leaf]
    written = [t for t in leaves if isinstance(t, torch.Tensor)] + [b for m in modules for b in m.buffers()]
    values = [(t, t.detach().clone()) for t in written]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _held_by(target: Any) -> list[Any]:
    """The target if it is a module; otherwise what a function, a method or a partial refers to."""
    if isinstance(target, torch.nn.Module):
        return [target]
    if isinstance(target, partial):
        return [*_held_by(target.func), *target.args, *target.keywords.values()]
    held = [target.__self__] if hasattr(target, "__self__") else []
    function = getattr(target, "__func__", target)
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        held += [*names.nonlocals.values(), *names.globals.values()]
    return held
