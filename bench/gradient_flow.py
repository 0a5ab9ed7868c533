"""Suite `gradient-flow`: how far gradients reach in deep stacks, at initialisation and in training.

A row is a layer of stacks of 48 blocks, with the gradient norm over all of that layer's parameters for Pre-Norm,
Post-Norm and DeepNorm, in eager PyTorch and with fusepass: `difference` is the largest relative one of the three. Then
DeepNorm and Post-Norm of 200 layers are trained for some steps on the same text, with fusepass. In FP32.

What to see: in Post-Norm the norm grows with every layer towards the input, exponentially; in Pre-Norm it is flat but
for the first layers, and in DeepNorm flat throughout. With Adam, which scales every gradient to the same size, a
Post-Norm of 200 layers still learns how often each letter occurs, and no more (a loss of 2.76); a DeepNorm goes on.
`deep_stacks` says how the weights are drawn. Gradients that grow so much hang on roundings, so eager's own distance
from FP64 is told too.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from . import deep_stacks, text, training
from .deep_stacks import ARRANGEMENTS, Arrangement
from .models import Transformer
from .progress import progress
from .suite import Options, Row, Table


@dataclass(frozen=True)
class Size:
    """Of the stacks whose gradients are measured, and of those that are trained."""

    layers: int
    width: int
    deep_layers: int
    deep_width: int
    steps: int


FULL, QUICK = Size(48, 64, 200, 32, 80), Size(24, 32, 48, 32, 20)
BATCH, TOKENS, LEARNING_RATE = 8, 33, 3e-3
TRAINED: tuple[Arrangement, ...] = ("deep", "post")
NAMES = {"pre": "Pre-Norm", "post": "Post-Norm", "deep": "DeepNorm"}


def run(options: Options) -> Table:
    """Measure the three stacks, train two, and plot where asked to."""
    size = QUICK if options.quick else FULL
    profiles: dict[Arrangement, Profile] = {}
    curves: dict[Arrangement, list[float]] = {}
    notes = []
    with progress(len(ARRANGEMENTS) + len(TRAINED), "gradient-flow") as step:
        for arrangement in ARRANGEMENTS:
            step(f"{NAMES[arrangement]}, {size.layers} layers, gradients")
            profiles[arrangement] = profile(arrangement, size.layers, size.width)
            notes.append(_profile_note(arrangement, profiles[arrangement]))
        for arrangement in TRAINED:
            step(f"{NAMES[arrangement]}, {size.deep_layers} layers, {size.steps} steps of training")
            curves[arrangement] = train(arrangement, size.deep_layers, size.deep_width, size.steps)
            notes.append(_training_note(arrangement, size.deep_layers, curves[arrangement]))
    if options.plot:
        _plot(options.plot, profiles, curves, size)
    return Table("gradient-flow", _rows(profiles), notes)


@dataclass(frozen=True)
class Profile:
    """Gradient norms per layer, from the input to the output, and the stack that made those of fusepass."""

    eager: list[float]
    fused: list[float]
    exact: list[float]
    compiled: deep_stacks.Compiled

    @property
    def difference(self) -> float:
        """The largest relative difference between eager's and fusepass'."""
        return largest_difference(self.eager, self.fused)


def profile(arrangement: Arrangement, layers: int, width: int) -> Profile:
    """The gradient norms of one stack for one batch, in FP32, and in FP64."""
    model = deep_stacks.build(arrangement, layers, width)
    (ids,) = text.batches(1, BATCH, TOKENS)
    compiled = deep_stacks.Compiled(model)
    eager, fused = (norms(model, training.gradients(model, run, ids)) for run in (model, compiled))
    double = deep_stacks.build(arrangement, layers, width).double()
    return Profile(eager, fused, norms(double, training.gradients(double, double, ids)), compiled)


def train(arrangement: Arrangement, layers: int, width: int, steps: int) -> list[float]:
    """The losses of some steps with fusepass."""
    model = deep_stacks.build(arrangement, layers, width).train()
    compiled = deep_stacks.Compiled(model)
    return training.train(model, compiled, text.batches(steps, BATCH, TOKENS), LEARNING_RATE)


def norms(model: Transformer, gradients: Mapping[str, torch.Tensor]) -> list[float]:
    """The gradient norm over all parameters of each block, from the input to the output."""
    squares = [0.0] * model.config.layers
    for name, gradient in gradients.items():
        if name.startswith("blocks."):
            squares[int(name.split(".")[1])] += float(gradient.double().square().sum())
    return [math.sqrt(s) for s in squares]


def largest_difference(expected: Sequence[float], got: Sequence[float]) -> float:
    """The largest relative difference of two profiles."""
    return max(abs(g - e) / e for e, g in zip(expected, got, strict=True))


def _rows(profiles: Mapping[Arrangement, Profile]) -> list[Row]:
    layers = len(profiles["pre"].eager)
    rows: list[Row] = []
    for layer in range(layers):
        row: dict[str, float] = {"layer": layer + 1}
        for arrangement, p in profiles.items():
            row |= {f"{arrangement}_eager": p.eager[layer], f"{arrangement}_fusepass": p.fused[layer]}
        row["difference"] = max(largest_difference([p.eager[layer]], [p.fused[layer]]) for p in profiles.values())
        rows.append(row)
    return rows


def _profile_note(arrangement: Arrangement, p: Profile) -> str:
    return (
        f"{NAMES[arrangement]}: gradient norm of the first layer over the last one's {p.eager[0] / p.eager[-1]:.3g} "
        f"eager, {p.fused[0] / p.fused[-1]:.3g} fusepass; largest relative difference {p.difference:.1e}, "
        f"between eager and FP64 {largest_difference(p.exact, p.eager):.1e}; fused norms per segment of "
        f"{deep_stacks.SEGMENT} layers: {p.compiled.fused('forward')} forward, {p.compiled.fused('backward')} backward"
    )


def _training_note(arrangement: Arrangement, layers: int, losses: Sequence[float]) -> str:
    at = sorted({0, *range(9, len(losses), 10), len(losses) - 1})
    curve = ", ".join(f"{losses[i]:.3f} ({i + 1})" for i in at)
    return f"{NAMES[arrangement]}, {layers} layers, loss at step: {curve}"


def _plot(
    path: pathlib.Path,
    profiles: Mapping[Arrangement, Profile],
    curves: Mapping[Arrangement, list[float]],
    size: Size,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colours = {"pre": "tab:blue", "post": "tab:red", "deep": "tab:green"}
    for arrangement, p in profiles.items():
        numbers = range(1, size.layers + 1)
        left.plot(numbers, p.eager, color=colours[arrangement], label=f"{NAMES[arrangement]}, eager")
        left.plot(numbers, p.fused, "x", color=colours[arrangement], label=f"{NAMES[arrangement]}, fusepass")
    left.set(
        yscale="log",
        xlabel="layer, from the input",
        ylabel="gradient norm",
        title=f"{size.layers} layers, at the start",
    )
    for arrangement, losses in curves.items():
        right.plot(range(1, len(losses) + 1), losses, color=colours[arrangement], label=NAMES[arrangement])
    right.set(xlabel="step", ylabel="loss", title=f"{size.deep_layers} layers in training, fusepass")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
