"""Stage 4, plan: a value that a graph computes twice, where a kernel would compute one of them, is computed once.

`norm(x + r)` beside another `x + r` is one residual sum, and not a site and a stray kernel. (AOTAutograd merges equal
nodes where it differentiates, not in inference; Inductor computes them again in each loop that reads them.) What the
graph returns stays a tensor of its own, so that no two results share memory.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from .rules import MOVES, VIEWS, Role, is_random, rule_of, val


def merge_equal(graph: fx.Graph, members: Set[fx.Node]) -> bool:
    """Merge the repeated pointwise values of which one is among `members`; whether there are any.

    The readers of a repeated value read the first one, and what nobody reads any more is erased.
    """
    first: dict[Any, fx.Node] = {}
    merged = False
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            break  # what is read from here on may have changed
        if not _is_pointwise(node):
            continue
        original = first.setdefault(_key(node), node)
        if original is node or members.isdisjoint({original, node}):
            continue
        keep = any(_is_returned(u) for u in original.users)
        for user in list(node.users):
            if not (keep and _is_returned(user)):
                user.replace_input_with(node, original)
                merged = True
        if not node.users:
            graph.erase_node(node)
    return merged


def _is_pointwise(node: fx.Node) -> bool:
    rule = rule_of(node)
    return rule is not None and rule.role is Role.POINTWISE and not is_random(node)


def _key(node: fx.Node) -> Any:
    tensor = val(node)
    like = (tensor.dtype, tensor.device, str(tensor.shape), str(tensor.stride()))
    return node.target, _hashable(node.args), _hashable(node.kwargs), like


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))  # 0.0 and -0.0 are equal, not the same


def _is_returned(node: fx.Node) -> bool:
    """Whether this is the graph's output, or a view whose memory the graph returns."""
    if node.op == "output":
        return True
    return node.target in VIEWS | MOVES and any(_is_returned(u) for u in node.users)
