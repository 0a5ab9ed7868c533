"""The forward of a chain of sites, as a pre-norm model has them:

    sublayer(s, y, r_i)        # attention or feed-forward: reads y, writes r_i
    s = s + r_i                # the site: reads s and r_i, writes s and y
    y = norm(s)

Every r_i is a buffer of its own, so that it is as cold as 16 such tiles make it. `sublayer` is an op that declares that
it reads s and y and writes r_i, and does nothing. That is legal for an op that mutates (what it writes is what stood
there), and opaque to Inductor and to fusepass alike: neither may drop the stores of s and y, or fuse one site with the
next. It costs about a microsecond, in every contender's chain. So each contender moves the same four tiles a site.
(Without s among its arguments, Inductor would sum several r_i again in the next sites instead of storing s.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import chains
from .chains import LONG, SHORT, Point, Run, Setting

_library = torch.library.Library("fusepass_bench", "FRAGMENT")
_library.define("sublayer(Tensor s, Tensor y, Tensor(a!) r) -> ()")
_library.impl("sublayer", lambda s, y, r: None, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Inputs:
    """Fresh random data for a chain: the stream s, one r per site, and the norm's weight and bias."""

    s: Tensor
    r: list[Tensor]
    weight: Tensor
    bias: Tensor | None


def chain(kind: str, inputs: Inputs, site: chains.Site = chains.site) -> tuple[Tensor, Tensor]:
    """`len(inputs.r)` sites, kept apart by the opaque sublayer. Returns the last sum and the last norm."""
    s = y = inputs.s
    for r in inputs.r:
        torch.ops.fusepass_bench.sublayer(s, y, r)
        s, y = site(kind, s, r, inputs.weight, inputs.bias)
    return s, y


def random_inputs(point: Point, sites: int, device: str) -> Inputs:
    """Seeded normal data."""
    normal = chains.normals(point, device)
    tiles = [normal(point.rows, point.cols) for _ in range(sites + 1)]
    weight, bias = normal(point.cols), normal(point.cols)
    return Inputs(tiles[0], tiles[1:], weight, bias if point.norm == "layer_norm" else None)


def setting(point: Point, device: str) -> Setting:
    """The chains at a point."""
    inputs = random_inputs(point, LONG, device)
    short_inputs = replace(inputs, r=inputs.r[:SHORT])
    expected = _run(chain, point.norm, short_inputs)

    def runs(function: Callable[..., Any]) -> tuple[Run, Run]:
        short, long = (partial(_run, function, point.norm, i) for i in (short_inputs, inputs))
        return Run(lambda: None, lambda _: short()), Run(lambda: None, lambda _: long())

    return Setting(runs, lambda name, got: _check_equal(name, got, expected), inputs.r)


@torch.inference_mode()
def _run(function: Callable[..., Any], kind: str, inputs: Inputs) -> Any:
    return function(kind, inputs)


def _check_equal(name: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Nobody is timed who computes something else: the sum bit for bit, the norm to a few rounding units."""
    unit = torch.finfo(expected[1].dtype).eps
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, msg=lambda m: f"{name}: the sum differs: {m}")
    torch.testing.assert_close(got[1], expected[1], rtol=8 * unit, atol=8 * unit, msg=lambda m: f"{name}: {m}")
