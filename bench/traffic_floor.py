"""The least traffic of a graph: every group of nodes between two matmuls as one kernel.

Such a kernel reads each tile that comes from outside once and writes each tile that is used outside once; what stays
inside costs nothing. Vectors, row statistics, partial sums and constants are left out. For one site that gives

    forward    x, u read; s, y written                          4 tiles
    backward   ds, dy, s read; dx written                       4 tiles; all column sums come for nothing
    dropout    forward: the mask written (one byte an element); backward: the mask read, and the gradient behind it
               written beside the one of the residual stream:   4.5 and 5.5 tiles of bf16

A residual add right behind a matmul without a bias may also be part of that matmul, which then reads one tile more.
The smaller of the two is the floor.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

aten = torch.ops.aten

_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)


def least_bytes(graph: fx.Graph, tile: int) -> int:
    """Bytes that must move outside matmuls. A tensor counts if it has at least `tile` elements."""
    return min(_Groups(graph, tile, {}).bytes(), _Groups(graph, tile, _foldable(graph, tile)).bytes())


class _Groups:
    """The fusible nodes of a graph in groups. `folded`: adds that are part of a matmul, with the tile they add."""

    def __init__(self, graph: fx.Graph, tile: int, folded: dict[fx.Node, fx.Node]) -> None:
        self.graph, self.tile, self.folded = graph, tile, folded
        inner = {m for add, addend in folded.items() for m in add.all_input_nodes if m is not addend}
        self.barriers = {n for n in graph.nodes if n.target in _MATMULS} - inner | set(folded)
        self.inside = [n for n in graph.nodes if n.op == "call_function" and not self._outside(n) and n not in inner]
        self.depth = self._depths()
        self.group = self._number()

    def bytes(self) -> int:
        read: dict[int, dict[fx.Node, int]] = defaultdict(dict)
        written = 0
        for node in self.inside:
            mine = self.group[node]
            for source in node.all_input_nodes:
                root = _root(source)
                if self.group.get(root) != mine:
                    part = min(self._size(source), self._size(root))
                    read[mine][root] = max(read[mine].get(root, 0), part)
            if self._leaves(node, mine):
                written += self._size(node)
        added = sum(self._size(addend) for addend in self.folded.values())
        return written + sum(sum(roots.values()) for roots in read.values()) + added

    def _outside(self, node: fx.Node) -> bool:
        return node in self.barriers or _is_view(node)

    def _leaves(self, node: fx.Node, mine: int) -> bool:
        """Whether something outside the group uses the node, through views too."""
        return any(self._leaves(u, mine) if _is_view(u) else self.group.get(u) != mine for u in node.users)

    def _depths(self) -> dict[fx.Node, int]:
        """The number of matmuls on the longest path to a node; what is not needed at once sinks to where it is."""
        depth: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            depth[node] = max((depth[i] + (i in self.barriers) for i in node.all_input_nodes), default=0)
        for node in reversed(list(self.graph.nodes)):
            users = [depth[u] for u in node.users if u.op != "output"]
            if node.op == "call_function" and node not in self.barriers and users:
                depth[node] = max(depth[node], min(users))
        return depth

    def _number(self) -> dict[fx.Node, int]:
        """A number for each fusible node; equal for nodes of equal depth that touch, or that read one tile."""
        parent = {n: n for n in self.inside}

        def find(n: fx.Node) -> fx.Node:
            while parent[n] is not n:
                parent[n] = parent[parent[n]]
                n = parent[n]
            return n

        first_reader: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in self.inside:
            for root in {_root(i) for i in node.all_input_nodes}:
                if root in parent and self.depth[root] == self.depth[node]:
                    parent[find(node)] = find(root)
                elif self._size(root):
                    other = first_reader.setdefault((root, self.depth[node]), node)
                    parent[find(node)] = find(other)
        numbers = {root: i for i, root in enumerate(dict.fromkeys(find(n) for n in self.inside))}
        return {n: numbers[find(n)] for n in self.inside}

    def _size(self, node: fx.Node) -> int:
        return _bytes(node, self.tile)


def _foldable(graph: fx.Graph, tile: int) -> dict[fx.Node, fx.Node]:
    """Adds of a tile to the product of a matmul that nothing else uses, and that tile."""
    found: dict[fx.Node, fx.Node] = {}
    for add in graph.nodes:
        if add.target is aten.add.Tensor and all(isinstance(a, fx.Node) and _bytes(a, tile) for a in add.args):
            for product, addend in (add.args, add.args[::-1]):
                if product.target is aten.mm.default and len(product.users) == 1:
                    found[add] = addend
                    break
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return node.target in _VIEWS


def _is_constant(node: fx.Node) -> bool:
    """Whether a kernel can make this tensor out of nothing."""
    return node.op == "call_function" and not node.all_input_nodes


def _root(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _bytes(node: fx.Node, tile: int) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() < tile or _is_constant(node):
        return 0
    return min(value.numel() * value.itemsize, value.untyped_storage().nbytes())
