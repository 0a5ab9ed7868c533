"""Stage 4, plan: which regions become kernels, and for every norm the verdict.

Legality, overlap and profitability are decided here; the plan is frozen and nothing here touches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from . import cost
from ._torch_compat import BatchNorm, same_size
from .lift import Lifted
from .provenance import is_made_by
from .recognise import Norm, recognise
from .recognise_backward import recognise_backward
from .regions import Region, build_region
from .row_program import DTYPE_NAMES, MAX_COLS
from .rules import CASTS, REDUCTIONS, VIEWS, reduced_dims, val
from .verdict import Reason, Rejection

aten = torch.ops.aten

DEVICES = ("cpu", "cuda", "xpu")
_MOVES = frozenset({aten.permute.default, aten.transpose.int})
_FACTORS = frozenset(
    {
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.neg.default,
    }
)
_MAKES_A_SUM_OR_NORM = frozenset(f"aten.{op}" for op in ("add.Tensor", "native_layer_norm.default", "mul.Tensor"))
RESIDUAL_MARK = "fusepass_residual"
"""In a node's meta: whether the norm that the node belongs to has a residual sum in front of it."""
_ROOTS = frozenset({aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar, aten.reciprocal.default})


@dataclass(frozen=True)
class Verdict:
    """What is to happen to one norm. `node` is where it is reported; `rejection` is None where it is fused."""

    kind: str
    node: fx.Node
    sum_node: fx.Node | None
    rejection: Rejection | None

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
) -> Plan:
    """Decide every norm of the graph. `refused` are the nodes of regions that could not be written as a program."""
    planned = _refuse_cycles(graph, [p for r in regions if (p := _plan_region(r, lifted)) is not None])
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
        if n.target is aten.add.Tensor and _two_tiles(n) and n not in read
    ]


# --- legality and profitability of one region


def _plan_region(region: Region, lifted: dict[fx.Node, Lifted]) -> PlannedRegion | None:
    norms = (*recognise(region.program), *recognise_backward(region.program))
    device = val(region.tile).device
    if not norms:
        return _plan_column_sums(region, device)
    misses = [n for n in norms if n.rejection is not None]
    verdicts = [_judge(region, norm, device) for norm in norms]
    if misses and len(misses) < len(norms):  # what looks like a norm and is none stays out of the others' kernel
        untouched = [_judge(region, norm, device) for norm in misses]
        region = _without(region, misses, norms, lifted)
        again = (*recognise(region.program), *recognise_backward(region.program))
        verdicts = [_judge(region, n, device) for n in again if n.rejection is None] + untouched
    if not any(v.rejection is None and v.residual for v in verdicts):
        # beside a fused one, a norm without a residual sum (a sandwich block's inner norm) is part of its kernel
        verdicts = [v if v.rejection else _without_residual(v) for v in verdicts]
    return PlannedRegion(region, tuple(verdicts), cost.traffic(region, device.type), device)


def _plan_column_sums(region: Region, device: torch.device) -> PlannedRegion | None:
    """A region without a norm pays where it sums the columns of what it stores, as behind an activation."""
    p = region.program
    if p.row_reductions or device.type not in DEVICES or not cost.sums_what_it_stores(p):
        return None
    sums = [n for n in region.nodes if region.is_col_sum(n)]
    verdict = Verdict("bias_gradient", sums[0], None, None)
    return PlannedRegion(region, (verdict,), cost.traffic(region, device.type), device)


def _refuse_cycles(graph: fx.Graph, planned: list[PlannedRegion]) -> list[PlannedRegion]:
    """Reject the regions that cannot become one node each, since a path leaves one and comes back.

    Depth makes regions convex, so this finds nothing; but a graph with a cycle in it could not be repaired later.
    """
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
    sum_node = _gradient_sum(region, node, start) if norm.backward else residual_sum(start)
    rejection = norm.rejection
    if rejection is None and sum_node is not None and sum_node not in region.nodes and not norm.backward:
        rejection = Rejection(
            Reason.SUM_OUTSIDE_REGION, f"{_outside(start, region)} stands between the sum {sum_node.name} and the norm"
        )
    if rejection is None and device.type not in DEVICES:
        rejection = Rejection(Reason.UNSUPPORTED_DEVICE, f"device {device} is not one of {', '.join(DEVICES)}")
    return Verdict(norm.kind, node, sum_node, rejection)


def _gradient_sum(region: Region, gradient: fx.Node, start: fx.Node) -> fx.Node | None:
    """What tells that a norm's gradient belongs to a residual sum, or None.

    That is the joint pass's mark. Without it (this pass alone, in a user's own set-up) it is the sum, saved or computed
    again, or the normalised row, of which nobody can tell; or else the add that joins the gradient with the residual
    stream's own.
    """
    chain = look_back(start)
    marked = next((n for n in chain if RESIDUAL_MARK in n.meta), None)
    if marked is not None:
        return marked if marked.meta[RESIDUAL_MARK] else None
    if chain[-1].op == "placeholder" and str(chain[-1].meta.get("original_aten")) in _MAKES_A_SUM_OR_NORM:
        return chain[-1]
    adds = (n for n in region.nodes if n.target is aten.add.Tensor and _two_tiles(n))
    return residual_sum(start) or next((n for n in adds if _reads(n, gradient)), None)


def _reads(node: fx.Node, source: fx.Node) -> bool:
    """Whether `source`, seen through casts and views, is added by `node`, or is such a sum itself."""
    return any(isinstance(a, fx.Node) and source in look_back(a) for a in node.args[:2]) or node is source


def _without(region: Region, misses: list[Norm], norms: Sequence[Norm], lifted: dict[fx.Node, Lifted]) -> Region:
    """The region less the statistics of near-misses, and what depends on them."""
    kept = {r for n in norms if n.rejection is None for r in n.reductions}
    dropped = {region.node_of(r) for n in misses for r in n.reductions - kept}
    for node in region.nodes:
        if any(i in dropped for i in node.all_input_nodes):
            dropped.add(node)
    return build_region([n for n in region.nodes if n not in dropped], lifted)


def _without_residual(v: Verdict) -> Verdict:
    return Verdict(
        v.kind, v.node, v.sum_node, Rejection(Reason.NO_RESIDUAL, f"{v.node.name} normalises no residual sum")
    )


def _outside(start: fx.Node, region: Region) -> str:
    for node in look_back(start):
        if node not in region.nodes:
            return f"{node.name} ({node.target})"
    return start.name


# --- where a norm's input comes from


def residual_sum(node: fx.Node) -> fx.Node | None:
    """The add of two activations that `node` is, seen through casts, views, dropout and factors; or None."""
    for n in look_back(node):
        if n.target is aten.add.Tensor and _two_tiles(n):
            return n
    return None


def look_back(node: fx.Node) -> list[fx.Node]:
    """`node` and what it is, seen through casts, views, moves of rows, masks, and sums and products with vectors."""
    chain = [node]
    while True:
        inner = _inner(chain[-1])
        if inner is None:
            return chain
        chain.append(inner)


def _inner(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in VIEWS | CASTS | _MOVES:
        return node.args[0]
    if node.target in _FACTORS:
        operands = [a for a in node.args[:2] if isinstance(a, fx.Node) and not _is_vector(a, node)]
        return operands[0] if len(operands) == 1 else None
    return None


def _two_tiles(node: fx.Node) -> bool:
    return all(isinstance(a, fx.Node) and _is_tile(a, node) for a in node.args[:2])


def _is_tile(arg: fx.Node, user: fx.Node) -> bool:
    """Whether `arg` varies over the rows and the columns of the tile `user` (it may repeat over some of the rows)."""
    return not _is_vector(arg, user) and val(arg).ndim > 0 and same_size(val(arg).shape[-1], val(user).shape[-1])


def _is_vector(arg: fx.Node, user: fx.Node) -> bool:
    """Whether `arg` is a scalar, a per-column vector, or a dropout mask, beside the tile `user`."""
    tensor, out = val(arg), val(user)
    if not isinstance(tensor, torch.Tensor) or not isinstance(out, torch.Tensor):
        return True
    if tensor.dtype is torch.bool or (tensor.ndim < out.ndim and same_size(tensor.numel(), 1)):
        return True
    one_row = all(same_size(d, 1) for d in out.shape[:-1])
    return all(same_size(d, 1) for d in tensor.shape[:-1]) and (tensor.ndim < out.ndim or not one_row)


# --- norms that no region holds


def _norms_outside(graph: fx.Graph, in_regions: set[fx.Node], refused: Mapping[fx.Node, Rejection]) -> list[Verdict]:
    found = []
    for node in graph.nodes:
        if node.target in REDUCTIONS and node not in in_regions and (kind := resembles(node)) is not None:
            source = normalised(node)
            rejection = refused.get(node) or _why_not_lifted(node)
            found.append(Verdict(kind, node, residual_sum(source), rejection))
    return found


def resembles(node: fx.Node) -> str | None:
    """The norm that a reduction outside every region belongs to, by the square before it and the root after it."""
    dims, ndim = reduced_dims(node), val(node.args[0]).ndim  # type: ignore[arg-type]
    if ndim == 0 or (0 in dims and 1 not in dims and ndim > 2) or is_made_by(node, BatchNorm):
        return None  # a number, or BatchNorm: over the batch and all of each channel
    if node.target in (aten.var_mean.correction, aten.var.correction, aten.std.correction):
        kind = "layer_norm"
    elif node.target in (aten.mean.dim, aten.sum.dim_IntList) and _square_of(node) is not None:
        inner = _square_of(node)
        kind = "layer_norm" if inner is not None and inner.target is aten.sub.Tensor else "rms_norm"
    else:
        return None
    return kind if _reaches_root(node) else None


def _square_of(node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or not source.args or not isinstance(source.args[0], fx.Node):
        return None
    is_square = (source.target is aten.pow.Tensor_Scalar and source.args[1] == 2) or (
        source.target is aten.mul.Tensor and source.args[0] is source.args[1]
    )
    return source.args[0] if is_square or source.target is aten.square.default else None


def normalised(node: fx.Node) -> fx.Node:
    """The node whose values are normalised: what is squared, before its mean is subtracted."""
    inner = _square_of(node)
    if inner is None:
        inner = node.args[0]  # type: ignore[assignment]
    elif inner.target is aten.sub.Tensor and isinstance(inner.args[0], fx.Node):
        inner = inner.args[0]
    assert isinstance(inner, fx.Node)
    return inner


def _reaches_root(node: fx.Node, steps: int = 6) -> bool:
    """Whether a root is taken of this statistic, a few small pointwise steps on."""
    frontier = [node]
    for _ in range(steps):
        frontier = [u for n in frontier for u in n.users]
        if any(u.target in _ROOTS and not (u.target is aten.pow.Tensor_Scalar and u.args[1] == 2) for u in frontier):
            return True
        small = val(node)[0] if isinstance(val(node), (tuple, list)) else val(node)
        frontier = [
            u for u in frontier if not isinstance(val(u), torch.Tensor) or same_size(val(u).numel(), small.numel())
        ]
    return False


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
