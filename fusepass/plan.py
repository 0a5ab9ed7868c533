"""Stage 4, plan: which regions become kernels, and for every norm the verdict.

Legality, overlap and profitability are decided here; the plan is frozen and nothing here touches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from . import cost
from .lift import Lifted
from .provenance import graph_kind, is_after_graph_break
from .recognise import Norm, recognise
from .recognise_backward import recognise_backward
from .region_program import Region, build_region
from .residual import gradient_sum, is_residual_add, look_back, normalised, resembles, residual_sum
from .row_program import DTYPE_NAMES, MAX_COLS
from .rules import REDUCTIONS, reduced_dims, val
from .verdict import Reason, Rejection

aten = torch.ops.aten

DEVICES = ("cpu", "cuda", "xpu")


@dataclass(frozen=True)
class Verdict:
    """What is to happen to one norm.

    `node` is where it is reported, `start` holds its input; `rejection` is None where it is fused.
    """

    kind: str
    node: fx.Node
    sum_node: fx.Node | None
    rejection: Rejection | None
    start: fx.Node | None = None

    @property
    def residual(self) -> bool:
        return self.sum_node is not None


@dataclass(frozen=True)
class PlannedRegion:
    """A region with the verdicts on its norms; it becomes a kernel where at least one of them is fused."""

    region: Region
    verdicts: tuple[Verdict, ...]
    traffic: cost.Traffic
    device: torch.device

    @property
    def fuse(self) -> bool:
        return any(v.rejection is None for v in self.verdicts)


@dataclass(frozen=True)
class Plan:
    """All regions that hold norms, the verdicts on norms outside any region, and the reductions that are no norms."""

    regions: tuple[PlannedRegion, ...]
    others: tuple[Verdict, ...]
    not_norms: tuple[tuple[fx.Node, Rejection], ...]


def make_plan(
    graph: fx.Graph,
    lifted: dict[fx.Node, Lifted],
    regions: Sequence[Region],
    refused: Mapping[fx.Node, Rejection],
    always: bool = False,
) -> Plan:
    """Decide every norm of the graph. `refused` are the nodes of regions that could not be written as a program.

    With `always`, what is legal is fused, whether or not it is expected to gain.
    """
    is_backward = graph_kind(graph) == "backward"
    planned = [p for r in regions if (p := _plan_region(r, lifted, is_backward)) is not None]
    planned = _refuse_cycles(graph, planned if always else [_if_it_gains(p) for p in planned])
    in_regions = {n for r in regions for n in r.nodes}
    others = _norms_outside(graph, in_regions, refused)
    with_norms = {n for p in planned for n in p.region.nodes} | {v.node for v in others}
    not_norms = [
        (n, Rejection(Reason.NOT_A_NORM, f"{n.name} ({n.target}) is not the statistic of a norm"))
        for n in graph.nodes
        if n.target in REDUCTIONS and n not in with_norms
    ]
    return Plan(tuple(planned), tuple(others), tuple(not_norms))


def unnormed_sums(graph: fx.Graph, plan: Plan) -> list[tuple[fx.Node, Rejection]]:
    """The sums of two activations that no norm reads, with that reason."""
    verdicts = [*plan.others, *(v for p in plan.regions for v in p.verdicts)]
    read = {v.sum_node for v in verdicts}
    return [
        (n, Rejection(Reason.NO_NORM, f"no norm reads the sum {n.name}"))
        for n in graph.nodes
        if n.target is aten.add.Tensor and is_residual_add(n) and n not in read
    ]


# --- legality and profitability of one region


def _plan_region(region: Region, lifted: dict[fx.Node, Lifted], is_backward: bool) -> PlannedRegion | None:
    norms = (*recognise(region.program), *recognise_backward(region.program))
    device = val(region.tile).device
    if not norms:
        return _plan_bias_gradient(region, device) if is_backward else None
    misses = [n for n in norms if n.rejection is not None]
    verdicts = [_judge(region, norm, device) for norm in norms]
    if misses and len(misses) < len(norms):  # what looks like a norm and is none stays out of the others' kernel
        untouched = [_judge(region, norm, device) for norm in misses]
        region = _without(region, misses, norms, lifted)
        norms = (*recognise(region.program), *recognise_backward(region.program))
        verdicts = [_judge(region, n, device) for n in norms if n.rejection is None] + untouched
    if not any(v.rejection is None and v.residual for v in verdicts) and not _sums_in_the_stream(region, norms):
        # beside a fused one, a norm without a residual sum (a sandwich block's inner norm) is part of its kernel
        verdicts = [v if v.rejection else _without_residual(v) for v in verdicts]
    return PlannedRegion(region, tuple(verdicts), cost.traffic(region, device.type), device)


def _if_it_gains(p: PlannedRegion) -> PlannedRegion:
    """The region, its site left to Inductor where that is expected to be as fast."""
    if not p.fuse or p.traffic.gains:
        return p
    rejection = Rejection(Reason.NOT_PROFITABLE, str(p.traffic))
    return replace(p, verdicts=tuple(replace(v, rejection=v.rejection or rejection) for v in p.verdicts))


def _plan_bias_gradient(region: Region, device: torch.device) -> PlannedRegion | None:
    """A region without a norm pays where it sums the columns of what it stores, as behind an activation."""
    p = region.program
    if p.row_reductions or device.type not in DEVICES or not cost.sums_what_it_stores(p):
        return None
    sums = [n for n in region.nodes if region.is_col_sum(n)]
    verdict = Verdict("bias_gradient", sums[0], None, None)
    return PlannedRegion(region, (verdict,), cost.traffic(region, device.type), device)


def _refuse_cycles(graph: fx.Graph, planned: list[PlannedRegion]) -> list[PlannedRegion]:
    """Reject the regions that cannot become one node each, since a path leaves one and comes back, or two overlap.

    Depth makes regions convex, so this finds nothing; but a graph with a cycle in it could not be repaired later.
    """
    taken: set[fx.Node] = set()
    for i, p in enumerate(planned):
        if p.fuse and not taken.isdisjoint(p.region.nodes):
            planned[i] = _reject_all(p)
        elif p.fuse:
            taken.update(p.region.nodes)
    stands_for: dict[fx.Node, fx.Node] = {n: p.region.nodes[0] for p in planned if p.fuse for n in p.region.nodes}
    inputs: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        group = stands_for.get(node, node)
        sources = {stands_for.get(i, i) for i in node.all_input_nodes} - {group}
        inputs.setdefault(group, set()).update(sources)
    users: dict[fx.Node, list[fx.Node]] = {}
    for group, sources in inputs.items():
        for source in sources:
            users.setdefault(source, []).append(group)
    ready = [group for group, sources in inputs.items() if not sources]
    while ready:
        done = ready.pop()
        del inputs[done]
        for user in users.get(done, ()):
            inputs[user].discard(done)
            if not inputs[user]:
                ready.append(user)
    return [_reject_all(p) if p.fuse and p.region.nodes[0] in inputs else p for p in planned]


def _reject_all(p: PlannedRegion) -> PlannedRegion:
    rejection = Rejection(Reason.NOT_CONVEX, f"a path leaves the region of {p.region.nodes[0].name} and comes back")
    return replace(p, verdicts=tuple(replace(v, rejection=v.rejection or rejection) for v in p.verdicts))


def _judge(region: Region, norm: Norm, device: torch.device) -> Verdict:
    node = region.node_of(norm.output)
    start = region.holder_of(norm.input)
    sum_node = gradient_sum(region.nodes, node, start) if norm.backward else residual_sum(start)
    rejection = norm.rejection
    if rejection is None and sum_node is not None and sum_node not in region.nodes and not norm.backward:
        rejection = Rejection(
            Reason.SUM_OUTSIDE_REGION, f"{_outside(start, region)} stands between the sum {sum_node.name} and the norm"
        )
    if rejection is None and device.type not in DEVICES:
        rejection = Rejection(Reason.UNSUPPORTED_DEVICE, f"device {device} is not one of {', '.join(DEVICES)}")
    return Verdict(norm.kind, node, sum_node, rejection, start)


def _sums_in_the_stream(region: Region, norms: Sequence[Norm]) -> bool:
    """Whether a region sums columns, and adds a norm's gradient to that of the residual stream around the norm.

    That is a kernel to be had even where no sum stands in front of the norm: a Pre-Norm model's first one.
    """
    return bool(region.program.col_sums) and any(n.joined for n in norms)


def _without(region: Region, misses: list[Norm], norms: Sequence[Norm], lifted: dict[fx.Node, Lifted]) -> Region:
    """The region less the statistics of near-misses, and what depends on them."""
    kept = {r for n in norms if n.rejection is None for r in n.reductions}
    dropped = {region.node_of(r) for n in misses for r in n.reductions - kept}
    for node in region.nodes:
        if any(i in dropped for i in node.all_input_nodes):
            dropped.add(node)
    return build_region([n for n in region.nodes if n not in dropped], lifted)


def _without_residual(v: Verdict) -> Verdict:
    source = look_back(v.start or v.node)[-1]
    if source.op == "placeholder" and is_after_graph_break(v.node):
        detail = f"{source.name} was computed before a graph break: whether it is a residual sum cannot be seen"
        return replace(v, rejection=Rejection(Reason.GRAPH_BREAK, detail))
    return replace(v, rejection=Rejection(Reason.NO_RESIDUAL, f"{v.node.name} normalises no residual sum"))


def _outside(start: fx.Node, region: Region) -> str:
    for node in look_back(start):
        if node not in region.nodes:
            return f"{node.name} ({node.target})"
    return start.name


# --- norms that no region holds


_FAST_PATH = (
    "in evaluation torch.nn.TransformerEncoderLayer computes the whole layer, with both of its norms, by one operator; "
    "torch.backends.mha.set_fastpath_enabled(False) makes the norms visible"
)


def _norms_outside(graph: fx.Graph, in_regions: set[fx.Node], refused: Mapping[fx.Node, Rejection]) -> list[Verdict]:
    found = []
    for node in graph.nodes:
        if node.target in REDUCTIONS and node not in in_regions and (kind := resembles(node)) is not None:
            source = normalised(node)
            rejection = refused.get(node) or _why_not_lifted(node)
            found.append(Verdict(kind, node, residual_sum(source), rejection))
        elif node.target is aten._transformer_encoder_layer_fwd.default:
            found.append(Verdict("layer_norm", node, None, Rejection(Reason.FAST_PATH, _FAST_PATH)))
    return found


def _why_not_lifted(node: fx.Node) -> Rejection:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    tensor = val(source)
    shape = tuple(tensor.shape)
    dims = reduced_dims(node)
    if dims != [tensor.ndim - 1]:
        return Rejection(
            Reason.NOT_LAST_DIM, f"{node.name} reduces dimensions {dims} of {shape}, not the last one alone"
        )
    if tensor.dtype not in DTYPE_NAMES:
        return Rejection(Reason.UNSUPPORTED_DTYPE, f"{source.name} is {tensor.dtype}")
    if not isinstance(tensor.shape[-1], int):
        return Rejection(Reason.SYMBOLIC_COLUMNS, f"the last dimension of {source.name} {shape} is symbolic")
    if tensor.shape[-1] > MAX_COLS:
        return Rejection(
            Reason.TOO_MANY_COLUMNS, f"{source.name} has {tensor.shape[-1]} columns, at most {MAX_COLS} are fused"
        )
    return Rejection(Reason.UNSUPPORTED_OP, f"{node.name} ({node.target}) of {source.name} cannot be lifted")
