"""The figures of `--plot`: bandwidth against columns for the suite `kernels`, each model's speed-up for `models`."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from .suite import Row


def _new_figure(count: int, height: float) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5.5 * count, height), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def bandwidth(rows: Sequence[Row], path: pathlib.Path) -> None:
    """GB/s of one site against its columns: one panel per direction and thread count, one line per contender.

    Each contender is credited with the four tiles that a site has to move, whatever it moves.
    """
    panels = list(dict.fromkeys((r["direction"], r["threads"]) for r in rows))
    figure, axes = _new_figure(len(panels), 4.2)
    for axis, (direction, threads) in zip(axes, panels, strict=True):
        for norm, dtype in itertools.product(*(dict.fromkeys(r[k] for r in rows) for k in ("norm", "dtype"))):
            wanted = (direction, threads, norm, dtype)
            found = [r for r in rows if (r["direction"], r["threads"], r["norm"], r["dtype"]) == wanted]
            found.sort(key=lambda r: (r["cols"], r["rows"]))
            colour = f"C{['layer_norm', 'rms_norm'].index(norm) + 2 * (dtype == 'bfloat16')}"
            for contender, style in (("inductor", "--"), ("fusepass", "-")):
                label = f"{norm}, {dtype}, {contender}"
                axis.plot(
                    [r["cols"] for r in found],
                    [r[f"{contender}_gb_s"] for r in found],
                    style,
                    color=colour,
                    label=label,
                )
        axis.set(title=f"{direction}, {threads} thread(s)", xlabel="columns", ylabel="GB/s", xscale="log")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def speedups(rows: Sequence[Row], path: pathlib.Path) -> None:
    """The speed-up of each model over Inductor: one panel per mode, one bar per dtype."""
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    names = list(dict.fromkeys(r["model"] for r in rows))
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    figure, axes = _new_figure(len(modes), 1.5 + 0.4 * len(names))
    for axis, mode in zip(axes, modes, strict=True):
        for k, dtype in enumerate(dtypes):
            by_name = {r["model"]: r["speedup_inductor"] or 0 for r in rows if (r["mode"], r["dtype"]) == (mode, dtype)}
            places = [i + (k - (len(dtypes) - 1) / 2) * 0.8 / len(dtypes) for i in range(len(names))]
            axis.barh(places, [by_name.get(n, 0) for n in names], height=0.8 / len(dtypes), label=dtype)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=mode, xlabel="speed-up over Inductor", yticks=range(len(names)), yticklabels=names)
        axis.invert_yaxis()
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
