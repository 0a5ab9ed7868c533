"""The backward of a chain of sites behind Linears with a bias, as training runs it: AOTAutograd's own backward graph.

    u_i = sublayer(s, y)               # attention or feed-forward, up to the bias of its last Linear
    s = s + (u_i + bias_i)             # the site
    y = norm(s)

so that the backward of one site reads ds, dy and s, writes dx = ds + norm's backward, and sums rows for the gradients
of the norm's weight and bias and of the Linear's bias (`sum(dx, [0], keepdim=True)`, as `addmm`'s backward has it).

`sublayer` is an opaque op that hands out a buffer u_i at no cost, as the product of its last matmul; its backward takes
dx and hands out a buffer dy_i, as the gradient that the matmuls in front have made. Each is a buffer of its own per
site, so that it is as cold as 16 such tiles make it. Since dx goes into an opaque op nobody may drop its store, and
since dy comes from one no site fuses with the next. What an op hands out belongs to whoever compiled the graph, who may
write over it, as over a matmul's product that is used no more; so the buffers are filled again, and the forward runs,
before each backward. Only the backward is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import chains
from .chains import LONG, SHORT, Point, Run, Setting

_library = torch.library.Library("fusepass_bench", "FRAGMENT")
_library.define("sublayer_product(Tensor s, Tensor y, int site) -> Tensor")
_library.define("sublayer_gradient(Tensor dx, int site) -> Tensor")
_library.impl("sublayer_product", lambda s, y, site: _handed_out[site].u, "CompositeExplicitAutograd")
_library.impl("sublayer_gradient", lambda dx, site: _handed_out[site].dy, "CompositeExplicitAutograd")
torch.library.register_fake("fusepass_bench::sublayer_product", lambda s, y, site: torch.empty_like(s), lib=_library)
torch.library.register_fake("fusepass_bench::sublayer_gradient", lambda dx, site: torch.empty_like(dx), lib=_library)


def _save(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.site = inputs[2]


def _backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None]:
    return None, torch.ops.fusepass_bench.sublayer_gradient(dx, ctx.site), None


torch.library.register_autograd("fusepass_bench::sublayer_product", _backward, setup_context=_save, lib=_library)


@dataclass(frozen=True)
class Buffers:
    """What one sublayer hands out."""

    u: Tensor
    dy: Tensor

    @property
    def layout(self) -> tuple[torch.Size, torch.dtype, torch.device]:
        return self.u.shape, self.u.dtype, self.u.device

    def fill(self, other: Buffers) -> None:
        self.u.copy_(other.u)
        self.dy.copy_(other.dy)


_handed_out: list[Buffers] = []
"""The buffers of the chain that runs, by site."""


@dataclass(frozen=True)
class Inputs:
    """Data of a chain.

    `parameters` are, per site, the Linear's bias, the norm's weight, and its bias if it has one; `incoming` the
    gradients of what the chain returns. `buffers` stay as they are: copies of them are handed out.
    """

    s: Tensor
    buffers: list[Buffers]
    parameters: list[list[Tensor]]
    incoming: tuple[Tensor, Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.s, *(p for site in self.parameters for p in site)]

    def first(self, sites: int) -> Inputs:
        """The same with fewer sites."""
        return Inputs(self.s, self.buffers[:sites], self.parameters[:sites], self.incoming)

    def double(self) -> Inputs:
        """The same in FP64, with leaves of its own."""
        buffers = [Buffers(b.u.double(), b.dy.double()) for b in self.buffers]
        parameters = [[_leaf(p.double()) for p in site] for site in self.parameters]
        ds, dy = self.incoming
        return Inputs(_leaf(self.s.double()), buffers, parameters, (ds.double(), dy.double()))

    def hand_out(self) -> None:
        """Fill what the sublayers hand out with this chain's buffers."""
        layout = self.s.shape, self.s.dtype, self.s.device
        if len(_handed_out) < len(self.buffers) or _handed_out[0].layout != layout:
            _handed_out[:] = [Buffers(torch.empty_like(b.u), torch.empty_like(b.dy)) for b in self.buffers]
        for ours, kept in zip(_handed_out, self.buffers, strict=False):
            ours.fill(kept)


def chain(kind: str, inputs: Inputs, site: chains.Site = chains.site) -> tuple[Tensor, Tensor]:
    """One site per sublayer, kept apart by them. Returns the last sum and the last norm."""
    s = y = inputs.s
    for number, (linear_bias, weight, *bias) in enumerate(inputs.parameters):
        u = torch.ops.fusepass_bench.sublayer_product(s, y, number)
        s, y = site(kind, s, u + linear_bias, weight, bias[0] if bias else None)
    return s, y


def random_inputs(point: Point, sites: int, device: str) -> Inputs:
    """Seeded normal data."""
    normal = chains.normals(point, device)
    buffers = [Buffers(normal(point.rows, point.cols), normal(point.rows, point.cols)) for _ in range(sites)]
    vectors = 3 if point.norm == "layer_norm" else 2
    parameters = [[_leaf(normal(point.cols)) for _ in range(vectors)] for _ in range(sites)]
    s, ds, dy = (normal(point.rows, point.cols) for _ in range(3))
    return Inputs(_leaf(s), buffers, parameters, (ds, dy))


def setting(point: Point, device: str) -> Setting:
    """The chains at a point."""
    inputs = random_inputs(point, LONG, device)
    short_inputs = inputs.first(SHORT)
    exact = gradients(chain, point.norm, short_inputs.double())
    expected = gradients(chain, point.norm, short_inputs)

    def runs(function: Callable[..., Any]) -> tuple[Run, Run]:
        return _run(function, point.norm, short_inputs), _run(function, point.norm, inputs)

    return Setting(runs, lambda name, got: _check_close(name, got, expected, exact), [b.u for b in inputs.buffers])


def gradients(function: Callable[..., Any], kind: str, inputs: Inputs) -> Sequence[Tensor]:
    """The gradients of the stream and of every parameter."""
    inputs.hand_out()
    return _run_backward(inputs, function(kind, inputs))


def _run(function: Callable[..., Any], kind: str, inputs: Inputs) -> Run:
    def forward() -> Any:
        inputs.hand_out()
        return function(kind, inputs)

    return Run(forward, partial(_run_backward, inputs))


def _run_backward(inputs: Inputs, outputs: Any) -> Sequence[Tensor]:
    return torch.autograd.grad(outputs, inputs.leaves, inputs.incoming)


def _check_close(name: str, got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Nobody is timed who computes something else: each gradient is about as far from FP64 as eager's.

    Beyond twice eager's distance, one rounding and what a plain sum over the rows in FP32 may lose are allowed.
    """
    rows = got[0].shape[0]
    for i, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)):
        error, eager_error = (float((t.double() - x).norm() / x.norm()) for t in (g, e))
        allowed = 2 * eager_error + torch.finfo(g.dtype).eps + math.sqrt(rows) * torch.finfo(torch.float32).eps
        if not error <= allowed:
            raise AssertionError(f"{name}: gradient {i} is off by {error:.2e}, eager's by {eager_error:.2e}")


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()
