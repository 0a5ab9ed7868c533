"""What each ATen overload means in the terms of a row program: the one table, `RULES`.

A node whose overload is not in it, or whose call no rule of the overload accepts, is a *barrier*: it ends a region.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch_compat import no_dispatch_modes, same_size
from .row_program import HALVES, compute_dtype

aten = torch.ops.aten
prims = torch.ops.prims

Value = str | float
Emit = Callable[..., str]
"""`emit(op, *args, dtype=...)`: append a statement to the program under construction, return its name."""


class Role(enum.Enum):
    """How a node takes part in a region."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    COLUMN_SUM = "column sum"
    VIEW = "view"  # another shape of the same values
    MOVE = "move"  # the same rows in another order
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


def rule_of(node: fx.Node) -> Rule | None:
    """The rule for this call, or None where the node is a barrier."""
    if node.op != "call_function":
        return None
    return next((r for r in RULES.get(node.target, ()) if r.accepts(node)), None)


def val(node: fx.Node) -> Any:
    return node.meta.get("val")


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
    compared = val(node.args[0]).dtype if node.target in COMPARISONS else None  # type: ignore[arg-type]
    if compared is None and (node.target not in _ADDITIVE or val(node).device.type != "cpu"):
        return node.args, dict(node.kwargs)
    dtype = compared or _dtype(node)
    rounded = [_round(float(a), dtype) if isinstance(a, (int, float)) else a for a in node.args]
    return tuple(rounded), {k: _round(float(v), dtype) for k, v in node.kwargs.items()}  # type: ignore[arg-type]


def _round(number: float, dtype: torch.dtype) -> float:
    if dtype not in HALVES:
        return number
    with no_dispatch_modes():
        return float(torch.tensor(number, dtype=torch.float64).to(dtype))


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
    dtype = _dtype(node)
    if float(args[1]) == 3.0:
        return emit("mul", emit("square", args[0], dtype=compute_dtype(dtype)), args[0], dtype=dtype)
    return emit(_POWERS[float(args[1])], args[0], dtype=dtype)


def _is_known_power(node: fx.Node) -> bool:
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and (float(exponent) in _POWERS or float(exponent) == 3.0)


def _emit_clamp(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    low: Any = args[1] if len(args) > 1 else node.kwargs.get("min")
    high: Any = args[2] if len(args) > 2 else node.kwargs.get("max")
    value = args[0]
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            value = emit(op, value, float(bound), dtype=_dtype(node))
    return str(value)


def _emit_clamp_max(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit("minimum", args[0], float(args[1] if len(args) > 1 else node.kwargs["max"]), dtype=_dtype(node))  # type: ignore[arg-type]


def _emit_cast(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    if is_random(node.args[0]) and all(u.target in COMPARISONS for u in node.users):
        return str(args[0])  # Inductor compares the numbers that it drew: rounded ones would give other masks
    return emit("cast", args[0], dtype=_dtype(node))


def _emit_compare(op: str) -> Callable[[Emit, fx.Node, Sequence[Any]], str]:
    def emit_compare(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
        dtype = val(node.args[0]).dtype  # type: ignore[arg-type]
        numbers = [_round(float(a), dtype) if isinstance(a, (int, float)) else a for a in args]
        return emit(op, *numbers, dtype=torch.bool)

    return emit_compare


def is_random(node: Any) -> bool:
    """Whether this node draws uniform random numbers as Inductor's own prim."""
    return isinstance(node, fx.Node) and node.target is prims.inductor_random.default


def random_op(node: fx.Node) -> str:
    """The row program's operation for a random node, by its device: "rand" or "rand_cpu"."""
    return "rand_cpu" if val(node).device.type == "cpu" else "rand"


def _emit_random(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
    return emit(random_op(node), args[1], dtype=torch.float32)


def _is_plain_uniform(node: fx.Node) -> bool:
    return node.args[2] == "rand" and not node.kwargs


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


def _reduction(op: str, role: Role = Role.REDUCTION) -> Rule:
    def emit_reduction(emit: Emit, node: fx.Node, args: Sequence[Any]) -> str:
        value = args[0]
        if node.kwargs.get("dtype") is not None:  # eager converts first, and so sums in this dtype
            value = emit("cast", value, dtype=node.kwargs["dtype"])
        return emit(op, value, dtype=_dtype(node))

    return Rule(role, emit_reduction, _over_last_dim if role is Role.REDUCTION else _over_rows)


def _over_rows(node: fx.Node) -> bool:
    """Whether a sum leaves one value per column: over all dimensions but the last, bar those of size one."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or val(source).ndim < 2:
        return False
    dims, shape = reduced_dims(node), val(source).shape
    return len(shape) - 1 not in dims and all(i in dims or same_size(d, 1) for i, d in enumerate(shape[:-1]))


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


def move_order(node: fx.Node) -> list[int]:
    """For each dimension of a permuted or transposed tensor, the dimension that it is of the original."""
    ndim = val(node).ndim
    if node.target is aten.permute.default:
        return [d % ndim for d in node.args[1]]  # type: ignore[union-attr]
    order = list(range(ndim))
    a, b = (int(d) % ndim for d in node.args[1:])  # type: ignore[arg-type]
    order[a], order[b] = b, a
    return order


def _keeps_last_dim(node: fx.Node) -> bool:
    return val(node).ndim > 2 and move_order(node)[-1] == val(node).ndim - 1


_VIEW = Rule(Role.VIEW, _emit_view)
_MOVE = Rule(Role.MOVE, _emit_view, _keeps_last_dim)
_CAST = Rule(Role.POINTWISE, _emit_cast, _keeps_device)

COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, op), overload): op
    for op in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Scalar", "Tensor")
}

_SINGLE: dict[Any, Rule] = {
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
    aten.round.default: _pointwise("round"),
    aten.exp.default: _pointwise("exp"),
    aten.tanh.default: _pointwise("tanh"),
    aten.erf.default: _pointwise("erf"),
    aten.sigmoid.default: _pointwise("sigmoid"),
    aten.relu.default: _pointwise("relu"),
    aten.maximum.default: _pointwise("maximum"),
    aten.minimum.default: _pointwise("minimum"),
    aten.clamp_min.default: Rule(Role.POINTWISE, _emit_clamp, _numbers_only("min")),
    aten.clamp_max.default: Rule(Role.POINTWISE, _emit_clamp_max, _numbers_only("max")),
    aten.clamp.default: Rule(Role.POINTWISE, _emit_clamp, _numbers_only("min", "max")),
    prims.convert_element_type.default: _CAST,
    aten._to_copy.default: _CAST,
    aten.where.self: _pointwise("where"),
    prims.inductor_random.default: Rule(Role.POINTWISE, _emit_random, _is_plain_uniform),
    **{target: Rule(Role.POINTWISE, _emit_compare(op)) for target, op in COMPARISONS.items()},
    aten.mean.dim: _reduction("row_mean"),
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
    aten.permute.default: _MOVE,
    aten.transpose.int: _MOVE,
    aten.alias.default: _VIEW,
    aten.detach.default: _VIEW,
    aten.clone.default: _VIEW,
}

RULES: dict[Any, tuple[Rule, ...]] = {
    **{target: (rule,) for target, rule in _SINGLE.items()},
    aten.sum.dim_IntList: (_reduction("row_sum"), _reduction("col_sum", Role.COLUMN_SUM)),
}
"""The rules of each overload, in the order in which they are tried."""


def _targets(role: Role) -> frozenset[Any]:
    return frozenset(target for target, rules in RULES.items() if any(r.role is role for r in rules))


REDUCTIONS: frozenset[Any] = _targets(Role.REDUCTION)
VIEWS: frozenset[Any] = _targets(Role.VIEW)
MOVES: frozenset[Any] = _targets(Role.MOVE)
CASTS: frozenset[Any] = frozenset({prims.convert_element_type.default, aten._to_copy.default})
