"""The pass: the stages in order, run once on every graph that Inductor is about to lower."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import provenance
from .errors import ExpectationError, StrictError
from .graph_pass import GraphPass
from .kernels import ops
from .kernels.source import source
from .lift import Lifted, first_mutation, lift
from .lookups import read_slices
from .merge import merge_equal
from .options import Options, resolve
from .plan import Plan, PlannedRegion, Verdict, make_plan, unnormed_sums
from .region_program import Region, Unsupported, build_region
from .regions import find_regions
from .report import Site, Untouched
from .rewrite import Rewriter, UnknownSize
from .rules import val
from .validate import validate
from .verdict import Reason, Rejection

log = logging.getLogger("fusepass.fuse_pass")


@dataclass(frozen=True)
class GraphReport:
    """What the pass did to one graph."""

    graph: str
    sites: tuple[Site, ...]
    untouched: tuple[Untouched, ...]


class FusePass(GraphPass):
    """Fuses residual-add + norm in a post-grad ATen graph.

    `torch.compile(model, backend="fusepass")` uses one; the same object serves plain Inductor:

        torch.compile(model, options={"post_grad_custom_pre_pass": fusepass.FusePass()})

    Args:
        options: `fusepass.*` options by full name (`{"fusepass.strict": True}`), as for `torch.compile`.
        listener: called with a `GraphReport` after each graph.

    Raises:
        OptionError: an unknown option or a bad value.
        ExpectationError: on a call, under `fusepass.expect`.
    """

    def __init__(
        self, options: dict[str, Any] | Options | None = None, listener: Callable[[GraphReport], None] | None = None
    ) -> None:
        super().__init__(options if isinstance(options, Options) else resolve(options)[0])
        self.listener = listener

    def run(self, graph: fx.Graph) -> None:
        """The stages, in order."""
        kind = provenance.graph_kind(graph)
        self._dump(f"{kind}-before", graph)
        try:
            lifted, plan = self._analyse(graph)
            fused = {n for p in plan.regions if p.fuse for n in p.region.nodes}
            if fused and (merge_equal(graph, fused) | read_slices(graph, fused)):
                lifted, plan = self._analyse(graph)
            quiet = unnormed_sums(graph, plan)
        except Exception as e:
            self._meet_expectation(kind, [], f"\n{self._fault('analysing a graph', e).detail}")
            return
        checked = [(p, self._check(p, lifted)) for p in plan.regions]
        rewriter = Rewriter(graph, self.options.autotune)
        sites: list[Site] = []
        for planned, rejection in checked:
            if planned.fuse and rejection is None:
                rejection = self._rewrite(rewriter, planned)
            sites += [_site(v, kind, planned, rejection) for v in planned.verdicts]
        rewriter.finish()
        self._await_kernels(kind, rewriter.done)
        sites += [_site(v, kind, None, None) for v in plan.others]
        self._dump(f"{kind}-after", graph)
        self._dump_kernels(p for p, _ in checked)
        self._tell(kind, sites, plan, quiet)
        self._meet_expectation(kind, sites)

    def _analyse(self, graph: fx.Graph) -> tuple[dict[fx.Node, Lifted], Plan]:
        lifted = lift(graph)
        regions, refused = self._build_regions(find_regions(lifted), lifted, first_mutation(graph))
        return lifted, make_plan(graph, lifted, regions, refused, self.options.profitability == "always")

    def _build_regions(
        self, node_sets: list[list[fx.Node]], lifted: dict[fx.Node, Lifted], mutation: fx.Node | None
    ) -> tuple[list[Region], dict[fx.Node, Rejection]]:
        regions: list[Region] = []
        refused: dict[fx.Node, Rejection] = {}
        for nodes in node_sets:
            if mutation is not None and any(mutation < n for n in nodes):
                detail = f"{mutation.name} ({mutation.target}) writes into a tensor before the norm is computed"
                refused |= dict.fromkeys(nodes, Rejection(Reason.NOT_FUNCTIONAL, detail))
                continue
            try:
                regions.append(build_region(nodes, lifted))
            except Unsupported as e:
                refused |= dict.fromkeys(nodes, Rejection(Reason.UNSUPPORTED_OP, str(e)))
            except Exception as e:
                refused |= dict.fromkeys(nodes, self._fault("writing a row program", e))
        return regions, refused

    def _check(self, planned: PlannedRegion, lifted: dict[fx.Node, Lifted]) -> Rejection | None:
        if not planned.fuse:
            return None
        try:
            rejection = validate(planned.region, lifted)
        except Exception as e:
            return self._fault(f"validating {planned.verdicts[0].node.name}", e)
        return self._mismatch(rejection) if rejection else None

    def _rewrite(self, rewriter: Rewriter, planned: PlannedRegion) -> Rejection | None:
        try:
            rewriter.rewrite(planned)
        except UnknownSize as e:
            return Rejection(Reason.SYMBOLIC_SHAPE, str(e))
        except Exception as e:
            return self._fault(f"rewriting {planned.verdicts[0].node.name}", e)
        return None

    def _await_kernels(self, kind: str, done: Iterable[PlannedRegion]) -> None:
        """Under `fusepass.strict`, a C++ kernel that cannot be built is a fault, and not slow torch operations."""
        for planned in done if self.options.strict else ():
            try:
                if planned.device.type == "cpu":
                    ops.built(str(planned.region.program))
            except Exception as e:
                self.fault(f"building a kernel of the {kind} graph", e)

    def _mismatch(self, rejection: Rejection) -> Rejection:
        if self.options.strict:
            raise StrictError(f"{rejection.reason}: {rejection.detail}")
        log.warning("a site is left to Inductor: %s: %s", rejection.reason, rejection.detail)
        return rejection

    def _fault(self, doing: str, error: Exception) -> Rejection:
        return Rejection(Reason.INTERNAL_ERROR, self.fault(doing, error))

    def _tell(self, kind: str, sites: list[Site], plan: Plan, quiet: list[tuple[fx.Node, Rejection]]) -> None:
        fused = sum(s.fused for s in sites)
        if not any(s.residual for s in sites):
            log.info("%s graph: 0 sites, left to Inductor as it is", kind)
        else:
            log.info("%s graph: %d of %d norms fused", kind, fused, len(sites))
        if self.listener is not None:
            untouched = tuple(
                Untouched(n.name, provenance.module_path(n), provenance.source_line(n), kind, r.reason, r.detail)
                for n, r in (*plan.not_norms, *quiet)
            )
            self.listener(GraphReport(kind, tuple(sites), untouched))

    def _meet_expectation(self, kind: str, sites: list[Site], fault: str = "") -> None:
        """Raise `ExpectationError` where `fusepass.expect` asks for other sites than those that were fused."""
        expected = self.options.expect
        if expected == "" or kind == "backward":
            return
        counted = [s for s in sites if s.residual]
        fused = sum(s.fused for s in counted)
        if not fault and fused == (len(counted) if expected == "all" else expected):
            return
        lost = [s for s in (counted if expected == "all" else sites) if not s.fused]
        lines = "".join(f"\n{s.module or s.source or s.norm}: {s.reason}: {s.detail}" for s in lost)
        raise ExpectationError(
            f"fusepass.expect={expected!r}: {fused} of {len(counted)} residual-add + norm sites of the {kind} graph "
            f"are fused. Norms that are not:{lines or ' none'}{fault}"
        )

    def _dump(self, name: str, graph: fx.Graph) -> None:
        if not self.options.dump:
            return
        folder = pathlib.Path(self.options.dump)
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob(f"{name}-*.txt")))
        (folder / f"{name}-{number}.txt").write_text(f"{graph}\n")

    def _dump_kernels(self, regions: Iterable[PlannedRegion]) -> None:
        for planned in regions if self.options.dump else ():
            if planned.fuse:
                program = planned.region.program
                suffix, text = source(program, planned.device.type)
                path = pathlib.Path(self.options.dump) / f"fusepass_{program.digest}"
                path.with_suffix(".txt").write_text(f"{program}\n")
                path.with_suffix(suffix).write_text(text)


def _site(v: Verdict, kind: str, planned: PlannedRegion | None, later: Rejection | None) -> Site:
    rejection = v.rejection or later
    fused = rejection is None
    traffic = planned.traffic if planned is not None else None
    return Site(
        module=provenance.module_path(v.node),
        source=provenance.source_line(v.node),
        norm=v.kind,
        residual=v.residual,
        graph=kind,
        fused=fused,
        reason=rejection.reason if rejection else None,
        detail=rejection.detail if rejection else _covers(planned),
        kernel=f"fusepass_{planned.region.program.digest}" if fused and planned else None,
        tiles=traffic.fusepass if fused and traffic else None,
        inductor_tiles=traffic.inductor if traffic else None,
    )


def _covers(planned: PlannedRegion | None) -> str:
    if planned is None:
        return ""
    p = planned.region.program
    rows = val(planned.region.tile).shape[:-1]
    return f"{len(planned.region.nodes)} nodes over {tuple(rows)} x {p.cols}"
