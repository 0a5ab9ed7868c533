"""Where a graph and its nodes come from: training or inference; the module's path and the source line."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INDEX = re.compile(r"""\._modules\[['"]?([^'"\]]+)['"]?\]|\[['"]?([^'"\]]+)['"]?\]""")


def module_path(node: fx.Node) -> str:
    """The dotted path of the innermost module that made this node, as in `named_modules()`; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values()]
    return _dotted(entries[-1]) if entries else ""


def is_made_by(node: fx.Node, kind: type) -> bool:
    """Whether the innermost module that made this node is of this class."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    made_by = list(stack.values())[-1][1] if stack else None
    return isinstance(made_by, type) and issubclass(made_by, kind)


def _dotted(expression: str) -> str:
    """`L['self']._modules['layers']._modules['0'].norm` as `layers.0.norm`."""
    path = re.sub(r"^L\[['\"][^'\"]+['\"]\]|^G\[['\"][^'\"]+['\"]\]|^L__self___?|^self", "", expression)
    path = _INDEX.sub(lambda m: f".{m[1] or m[2]}", path)
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", path).strip(".")


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside torch that made this node; "" where the graph does not say."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [f for f in frames if not f[0].startswith(_TORCH)] or frames
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def is_after_graph_break(node: fx.Node) -> bool:
    """Whether Dynamo had to begin a graph anew on the way to this node."""
    return "torch_dynamo_resume_in_" in (node.meta.get("stack_trace") or "")


def graph_kind(graph: fx.Graph) -> str:
    """ "backward" where the graph takes tangents, "forward" where it takes primals, otherwise "inference"."""
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    if any(n.startswith("tangents_") for n in names):
        return "backward"
    return "forward" if any(n.startswith("primals_") for n in names) else "inference"
