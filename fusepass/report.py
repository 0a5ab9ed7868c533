"""What the pass did, norm by norm: `Site` is one row, `Report` is the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

from .verdict import Reason


@dataclass(frozen=True)
class Site:
    """One norm of the model.

    Attributes:
        module: dotted path of the module that computes the norm ("" for the model itself or a plain function).
        source: `file:line` of the call.
        norm: "layer_norm" or "rms_norm"; or "bias_gradient" for a kernel without a norm, which sums the columns of the
            tile that it computes (the backward of an activation behind a Linear with a bias).
        residual: whether the norm's input, seen through casts, dropout, views, and scalar and vector factors, is a sum
            of two activations or of embeddings.
        graph: "inference", "forward" or "backward".
        fused: whether a fused kernel computes it.
        reason: why not, a `Reason`; None when fused.
        detail: the facts behind the reason, or what the kernel covers.
        kernel: name of the fused kernel; None when not fused. Equal sites share one.
        tiles: whole (rows, columns) tensors that our kernel reads and writes; None when not fused.
        inductor_tiles: the same for Inductor's code, by estimate.
    """

    module: str
    source: str
    norm: str
    residual: bool
    graph: str
    fused: bool
    reason: Reason | None
    detail: str
    kernel: str | None
    tiles: float | None
    inductor_tiles: float | None


@dataclass(frozen=True)
class Untouched:
    """A reduction or a sum that was looked at and is no norm site, with the reason."""

    node: str
    module: str
    source: str
    graph: str
    reason: Reason
    detail: str


@dataclass
class Report:
    """The result of `explain`: every norm of the model, fused or not."""

    sites: list[Site] = field(default_factory=list)
    untouched: list[Untouched] = field(default_factory=list)
    graphs: int = 0

    @property
    def fused(self) -> int:
        """Residual-add + norm sites of the forward and inference graphs that a fused kernel computes."""
        return sum(s.fused for s in self._counted())

    @property
    def declined(self) -> int:
        """Residual-add + norm sites of the forward and inference graphs that were left to Inductor."""
        return sum(not s.fused for s in self._counted())

    @property
    def fused_backward(self) -> int:
        """Residual-add + norm sites of backward graphs that a fused kernel computes."""
        return sum(s.fused for s in self.sites if s.residual and s.graph == "backward")

    def _counted(self) -> list[Site]:
        return [s for s in self.sites if s.residual and s.graph in ("forward", "inference")]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON-ready data."""
        return {
            "fused": self.fused,
            "declined": self.declined,
            "fused_backward": self.fused_backward,
            "graphs": self.graphs,
            "sites": [asdict(s) for s in self.sites],
            "untouched": [asdict(u) for u in self.untouched],
        }

    def __str__(self) -> str:
        head = ["module", "source", "norm", "residual", "graph", "verdict", "kernel", "tiles", "Inductor"]
        rows = [
            [
                s.module or "-",
                "/".join(s.source.split("/")[-2:]) or "-",
                s.norm,
                "yes" if s.residual else "no",
                s.graph,
                "fused" if s.fused else str(s.reason),
                s.kernel or "-",
                _number(s.tiles),
                _number(s.inductor_tiles),
            ]
            for s in self.sites
        ]
        lines = [tabulate(rows, head, tablefmt="simple")] if rows else ["no norm found"]
        lines.append("")
        lines.append(
            f"{self.fused} of {self.fused + self.declined} residual-add + norm sites fused in {self.graphs} graph(s); "
            "tiles: whole tensors moved by our kernel, and by Inductor (estimate)"
        )
        lines += [f"{s.module or s.source}: {s.reason}: {s.detail}" for s in self.sites if not s.fused]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
