"""Stage 1, lift: what each node of a post-grad ATen graph means in the terms of a row program.

`RULES` is the one table. A node whose overload is not in it, or whose call the rule refuses, is a *barrier*: it ends a
region. `lift` walks the graph once and gives every other node its space, its kind and its depth.

Depth is the largest number of barriers on a path from a liftable node. Two nodes of equal depth that touch have no
barrier between them, so a connected set of nodes of equal depth is convex. A pointwise node sinks to its users' depth,
so that a cheap node (DeepNorm's `alpha * x`, a cast) is computed where it is used.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ._torch_compat import no_dispatch_modes, same_size
from .row_program import DTYPE_NAMES, HALVES, MAX_COLS, Kind, compute_dtype

aten = torch.ops.aten
prims = torch.ops.prims

Value = str | float
Emit = Callable[..., str]
"""`emit(op, *args, dtype=...)`: append a statement to the program under construction, return its name."""


class Role(enum.Enum):
    """How a node takes part in a region."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    VIEW = "view"  # another shape of the same values
    PROJECT = "project"  # one of the several results of a reduction


@dataclass(frozen=True)
class Rule:
    """One line of the table: the role, whether this call is meant, and the statements that the node becomes.

    `emit(emit, node, args)` gets the node's positional arguments with tensors replaced by value names; it returns the
    name of the node's value, or a tuple of names for a node with several results.
    """

    role: Role
    emit: Callable[[Emit, fx.Node, Sequence[Any]], Any]
    accepts: Callable[[fx.Node], bool] = lambda node: True


class Space(NamedTuple):
    """A rows x cols space. `rows` is an int or a `torch.SymInt`; spaces are compared with `same_space`."""

    rows: Any
    cols: int


@dataclass
class Lifted:
    """A node that may join a region."""

    node: fx.Node
    rule: Rule
    space: Space
    kind: Kind  # TILE or ROW
    depth: int
    after_reduction: bool  # a row reduction of the same depth comes before it
    order: int


def val(node: fx.Node) -> Any:
    return node.meta.get("val")


def same_space(a: Space, b: Space) -> bool:
    return a.cols == b.cols and same_size(a.rows, b.rows)


# --- the table ------------------------------------------------------------------------------------------------------


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = val(node).dtype
    return dtype


def _pointwise(op: str) -> Rule:
    def emit_pointwise(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
        return emit(op, *(_number(emit, node, i, a) for i, a in enumerate(args)), dtype=_dtype(node))

    return Rule(Role.POINTWISE, emit_pointwise)


_ADDITIVE = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar})
_MULTIPLICATIVE = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})


def _number(emit: Emit, node: fx.Node, position: int, arg: Any) -> Any:
    """Argument `position` of a pointwise node, rounded as eager rounds a number beside a tensor.

    A number, or a tensor without dimensions, takes part in the dtype of the result, but a CPU multiplies and divides
    by it unrounded; and only a CPU rounds a plain number before it adds it to 16-bit values.
    """
    dtype = _dtype(node)
    on_cpu = val(node).device.type == "cpu"
    if isinstance(arg, (int, float)):
        return _round(float(arg), dtype) if on_cpu and node.target in _ADDITIVE else arg
    source = node.args[position] if position < len(node.args) else None
    if not isinstance(source, fx.Node) or val(source).ndim or not val(node).ndim or val(source).dtype is dtype:
        return arg
    if on_cpu and position == 1 and node.target in _MULTIPLICATIVE:
        return emit("cast", arg, dtype=compute_dtype(dtype))
    return emit("cast", arg, dtype=dtype)


def eager_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments, with the numbers rounded as eager rounds them (see `_number`)."""
    if node.target not in _ADDITIVE or val(node).device.type != "cpu":
        return node.args, dict(node.kwargs)
    dtype = _dtype(node)
    rounded = [_round(float(a), dtype) if isinstance(a, (int, float)) else a for a in node.args]
    return tuple(rounded), {k: _round(float(v), dtype) for k, v in node.kwargs.items()}  # type: ignore[arg-type]


def _round(number: float, dtype: torch.dtype) -> float:
    with no_dispatch_modes():
        return float(torch.tensor(number, dtype=torch.float64).to(dtype)) if dtype in HALVES else number


def _emit_add(sign: float) -> Callable[[Emit, fx.Node, Sequence[Any]], str]:
    def emit_add(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
        a, b = (_number(emit, node, i, arg) for i, arg in enumerate(args[:2]))
        alpha: Any = sign * (args[2] if len(args) > 2 else node.kwargs.get("alpha", 1))  # type: ignore[operator]
        if val(node).device.type == "cpu":
            alpha = _round(float(alpha), _dtype(node))
        if alpha in (1, -1):
            return emit("add" if alpha == 1 else "sub", a, b, dtype=_dtype(node))
        return emit("fma", b, float(alpha), a, dtype=_dtype(node))  # eager computes a + alpha * b with one rounding

    return emit_add


def _emit_rsub(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit("sub", _number(emit, node, 1, args[1]), args[0], dtype=_dtype(node))


def _numbers_only(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: (
        all(isinstance(node.kwargs.get(n, 1), (int, float)) for n in names)
        and all(not isinstance(a, fx.Node) for a in node.args[2:])
    )


_POWERS: dict[float, str] = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "cast"}


def _emit_pow(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit(_POWERS[float(args[1])], args[0], dtype=_dtype(node))


def _is_known_power(node: fx.Node) -> bool:
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and float(exponent) in _POWERS


def _emit_clamp(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    low: Any = args[1] if len(args) > 1 else node.kwargs.get("min")
    high: Any = args[2] if len(args) > 2 else node.kwargs.get("max")
    value = args[0]
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            value = emit(op, value, float(bound), dtype=_dtype(node))
    return str(value)


def _emit_cast(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit("cast", args[0], dtype=_dtype(node))


def _keeps_device(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and val(source).device == val(node).device and not node.kwargs.get("pin_memory")


def _dims(node: fx.Node) -> list[int] | None:
    """The reduced dimensions of a reduction node, non-negative; None where it reduces over all."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == []:
        return None
    ndim = val(node.args[0]).ndim  # type: ignore[arg-type]
    if ndim == 0:
        return []
    return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]  # type: ignore[union-attr]


def reduced_dims(node: fx.Node) -> list[int]:
    """The dimensions that a reduction node reduces."""
    return _dims(node) or list(range(val(node.args[0]).ndim))  # type: ignore[arg-type]


def _over_last_dim(node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node) or val(source).ndim == 0:
        return False
    return reduced_dims(node) == [val(source).ndim - 1]


def _reduction(op: str) -> Rule:
    def emit_reduction(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
        value = args[0]
        if node.kwargs.get("dtype") is not None:  # eager converts first, and so sums in this dtype
            value = emit("cast", value, dtype=node.kwargs["dtype"])
        return emit(op, value, dtype=_dtype(node))

    return Rule(Role.REDUCTION, emit_reduction, _over_last_dim)


def _emit_var_mean(emit: Emit, node: fx.Node, args: Sequence[Any]) -> tuple[str, str]:
    return _emit_moments(emit, node, args[0], val(node)[0].dtype)


def _emit_var(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return _emit_moments(emit, node, args[0], _dtype(node))[0]


def _emit_std(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit("sqrt", _emit_var(emit, node, args), dtype=_dtype(node))


def _emit_moments(emit: Emit, node: fx.Node, x: str, dtype: torch.dtype) -> tuple[str, str]:
    """(variance, mean) of centred values. The mean stays wide inside and is rounded only where the graph holds it."""
    cols = int(val(node.args[0]).shape[-1])  # type: ignore[arg-type]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    mean = emit("row_mean", x, dtype=wide)
    squares = emit("square", emit("sub", x, mean, dtype=wide), dtype=wide)
    correction: Any = node.kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    if correction == 0:
        return emit("row_mean", squares, dtype=dtype), _rounded(emit, mean, wide, dtype)
    total = emit("row_sum", squares, dtype=wide)
    divisor = float(max(cols - correction, 0))
    return emit("div", total, divisor, dtype=dtype), _rounded(emit, mean, wide, dtype)


def _rounded(emit: Emit, value: str, wide: torch.dtype, dtype: torch.dtype) -> str:
    return value if wide is dtype else emit("cast", value, dtype=dtype)


def _is_plain_var(node: fx.Node) -> bool:
    correction = node.kwargs.get("correction", 1)
    return _over_last_dim(node) and (correction is None or isinstance(correction, (int, float)))


def _emit_view(emit: Emit, node: fx.Node, args: Sequence[Any]) -> Any:
    return args[0]


def _emit_getitem(emit: Emit, node: fx.Node, args: Sequence[Any]) -> Any:
    return args[0][args[1]]


_VIEW = Rule(Role.VIEW, _emit_view)
_CAST = Rule(Role.POINTWISE, _emit_cast, _keeps_device)

RULES: dict[Any, Rule] = {
    aten.add.Tensor: Rule(Role.POINTWISE, _emit_add(1.0), _numbers_only("alpha")),
    aten.add.Scalar: Rule(Role.POINTWISE, _emit_add(1.0), _numbers_only("alpha")),
    aten.sub.Tensor: Rule(Role.POINTWISE, _emit_add(-1.0), _numbers_only("alpha")),
    aten.sub.Scalar: Rule(Role.POINTWISE, _emit_add(-1.0), _numbers_only("alpha")),
    aten.rsub.Scalar: Rule(Role.POINTWISE, _emit_rsub, lambda n: len(n.args) == 2 and not n.kwargs),
    aten.mul.Tensor: _pointwise("mul"),
    aten.mul.Scalar: _pointwise("mul"),
    aten.div.Tensor: _pointwise("div"),
    aten.div.Scalar: _pointwise("div"),
    aten.neg.default: _pointwise("neg"),
    aten.abs.default: _pointwise("abs"),
    aten.square.default: _pointwise("square"),
    aten.sqrt.default: _pointwise("sqrt"),
    aten.rsqrt.default: _pointwise("rsqrt"),
    aten.reciprocal.default: _pointwise("reciprocal"),
    aten.pow.Tensor_Scalar: Rule(Role.POINTWISE, _emit_pow, _is_known_power),
    aten.exp.default: _pointwise("exp"),
    aten.tanh.default: _pointwise("tanh"),
    aten.erf.default: _pointwise("erf"),
    aten.sigmoid.default: _pointwise("sigmoid"),
    aten.relu.default: _pointwise("relu"),
    aten.maximum.default: _pointwise("maximum"),
    aten.minimum.default: _pointwise("minimum"),
    aten.clamp_min.default: Rule(Role.POINTWISE, _emit_clamp, _numbers_only("min")),
    aten.clamp.default: Rule(Role.POINTWISE, _emit_clamp, _numbers_only("min", "max")),
    prims.convert_element_type.default: _CAST,
    aten._to_copy.default: _CAST,
    aten.mean.dim: _reduction("row_mean"),
    aten.sum.dim_IntList: _reduction("row_sum"),
    aten.amax.default: _reduction("row_max"),
    aten.amin.default: _reduction("row_min"),
    aten.var_mean.correction: Rule(Role.REDUCTION, _emit_var_mean, _is_plain_var),
    aten.var.correction: Rule(Role.REDUCTION, _emit_var, _is_plain_var),
    aten.std.correction: Rule(Role.REDUCTION, _emit_std, _is_plain_var),
    operator.getitem: Rule(Role.PROJECT, _emit_getitem),
    aten.view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.unsqueeze.default: _VIEW,
    aten.squeeze.dim: _VIEW,
    aten.squeeze.dims: _VIEW,
    aten.squeeze.default: _VIEW,
    aten.expand.default: _VIEW,
    aten.alias.default: _VIEW,
    aten.detach.default: _VIEW,
    aten.clone.default: _VIEW,
}

REDUCTIONS: frozenset[Any] = frozenset(target for target, rule in RULES.items() if rule.role is Role.REDUCTION)
VIEWS: frozenset[Any] = frozenset(target for target, rule in RULES.items() if rule.role is Role.VIEW)


def first_mutation(graph: fx.Graph) -> fx.Node | None:
    """The first node that writes into a tensor; post-grad graphs have such nodes at their end only, if at all."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return node
    return None


# --- the walk -------------------------------------------------------------------------------------------------------


def lift(graph: fx.Graph) -> dict[fx.Node, Lifted]:
    """Every node of `graph` that may join a region, in graph order, with its space, kind and (sunk) depth."""
    lifted: dict[fx.Node, Lifted] = {}
    depth: dict[fx.Node, int] = {}
    follows: set[fx.Node] = (
        set()
    )  # the nodes that come after some liftable node: only there can a barrier stand between
    for order, node in enumerate(graph.nodes):
        before = max((depth[i] for i in node.all_input_nodes), default=0)
        entry = _lift_node(node, lifted, before, order)
        if entry is not None:
            lifted[node] = entry
        if any(i in follows or i in lifted for i in node.all_input_nodes):
            follows.add(node)
        depth[node] = before + (entry is None and node in follows)
    _sink(graph, lifted, depth)
    return lifted


def _lift_node(node: fx.Node, lifted: dict[fx.Node, Lifted], depth: int, order: int) -> Lifted | None:
    rule = RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        return None
    if rule.role is Role.PROJECT:
        source = lifted.get(node.args[0])  # type: ignore[arg-type]
        if source is None or source.rule.role is not Role.REDUCTION:
            return None
        return Lifted(node, rule, source.space, Kind.ROW, depth, True, order)
    if not _is_computable(node, rule):
        return None
    inputs = [lifted[i] for i in node.all_input_nodes if i in lifted and lifted[i].depth == depth]
    after = rule.role is Role.REDUCTION or any(i.after_reduction for i in inputs)
    placed = _place(node, rule, lifted)
    return None if placed is None else Lifted(node, rule, placed[0], placed[1], depth, after, order)


def _is_computable(node: fx.Node, rule: Rule) -> bool:
    """Whether the printers can express this call: floating tensors of one device, numbers, a form the rule knows."""
    results = val(node) if isinstance(val(node), (tuple, list)) else [val(node)]
    tensors = [*results, *(val(i) for i in node.all_input_nodes)]
    if not all(isinstance(t, torch.Tensor) and t.dtype in DTYPE_NAMES and t.layout is torch.strided for t in tensors):
        return False
    if len({t.device for t in tensors}) != 1:
        return False
    if any(
        isinstance(t, torch.Tensor) and type(t).__name__ not in ("FakeTensor", "Tensor", "Parameter") for t in tensors
    ):
        return False
    if any(isinstance(a, float) and math.isnan(a) for a in (*node.args, *node.kwargs.values())):
        return False
    return bool(node.args) and isinstance(node.args[0], fx.Node | int | float) and rule.accepts(node)


def _natural_space(tensor: torch.Tensor) -> Space | None:
    """A tensor of shape (..., cols) read as rows x cols; None where cols is symbolic, zero, or too large."""
    if tensor.ndim == 0 or not isinstance(tensor.shape[-1], int) or not 1 <= tensor.shape[-1] <= MAX_COLS:
        return None
    return Space(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _place(node: fx.Node, rule: Rule, lifted: dict[fx.Node, Lifted]) -> tuple[Space, Kind] | None:
    if rule.role is Role.REDUCTION:
        source = node.args[0]
        if isinstance(source, fx.Node) and source in lifted and lifted[source].kind is Kind.ROW:
            return None
        space = _natural_space(val(source))  # type: ignore[arg-type]
        return None if space is None else (space, Kind.ROW)
    row_inputs = [lifted[i] for i in node.all_input_nodes if i in lifted and lifted[i].kind is Kind.ROW]
    if not row_inputs:
        return _place_tile(node, rule)
    space = row_inputs[0].space
    if not all(same_space(r.space, space) for r in row_inputs):
        return None
    out = val(node)
    if _is_tile_of(out, space) and (
        space.cols > 1 or any(_is_tile_input(i, lifted, space) for i in node.all_input_nodes)
    ):
        aligned = rule.role is Role.VIEW or all(
            r.node.meta["val"].ndim > 0 and val(r.node).shape[-1] == 1 for r in row_inputs
        )
        return (space, Kind.TILE) if aligned and _broadcasts_rows(node, row_inputs) else None
    return (space, Kind.ROW) if same_size(out.numel(), space.rows) and _same_rows(node, row_inputs) else None


def _place_tile(node: fx.Node, rule: Rule) -> tuple[Space, Kind] | None:
    space = _natural_space(val(node))
    if space is None:
        return None
    if rule.role is Role.VIEW:  # the same rows: a view that regroups the last dimension, or repeats rows, is a barrier
        source = _natural_space(val(node.args[0]))  # type: ignore[arg-type]
        if source is None or not same_space(source, space):
            return None
    return space, Kind.TILE


def _is_tile_of(tensor: torch.Tensor, space: Space) -> bool:
    natural = _natural_space(tensor)
    return natural is not None and same_space(natural, space)


def _is_tile_input(node: fx.Node, lifted: dict[fx.Node, Lifted], space: Space) -> bool:
    return node in lifted and lifted[node].kind is Kind.TILE and same_space(lifted[node].space, space)


def _broadcasts_rows(node: fx.Node, row_inputs: list[Lifted]) -> bool:
    """Whether each row input has one value for every row of the tile `node`, so that row i meets row i."""
    out = val(node)
    for r in row_inputs:
        shape = val(r.node).shape
        if len(shape) > out.ndim:
            return False
        lead = out.shape[: out.ndim - len(shape)]
        if not all(same_size(d, 1) for d in lead):
            return False
        if not all(same_size(a, b) for a, b in zip(shape[:-1], out.shape[out.ndim - len(shape) : -1], strict=True)):
            return False
    return True


def _same_rows(node: fx.Node, row_inputs: list[Lifted]) -> bool:
    """Whether a row-valued node pairs row i of each input with row i (views always do: they keep the order)."""
    shapes = [val(r.node).shape for r in row_inputs]
    if node.target in VIEWS:
        return True
    out = val(node).shape
    return all(len(s) == len(out) and all(same_size(a, b) for a, b in zip(s, out, strict=True)) for s in shapes)


def _sink(graph: fx.Graph, lifted: dict[fx.Node, Lifted], depth: dict[fx.Node, int]) -> None:
    for node in reversed(graph.nodes):
        entry = lifted.get(node)
        if entry is None or entry.after_reduction or entry.rule.role is Role.PROJECT:
            continue
        users = [u for u in node.users if u.op != "output"]
        if len(users) < len(node.users) or not users:
            continue
        latest = min(lifted[u].depth if u in lifted else depth[u] - 1 for u in users)
        entry.depth = max(entry.depth, latest)
