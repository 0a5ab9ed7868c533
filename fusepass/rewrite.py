"""Stage 6, rewrite: one planned region becomes a kernel call; nothing else about the graph changes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ._torch_compat import detect_fake_mode, is_called, size_text, stable_topological_sort, tree_leaves
from .errors import FusepassError
from .lookups import erase_unread
from .lower import KernelCall, lower
from .plan import PlannedRegion
from .region_program import Read
from .row_program import Kind
from .rules import val

aten = torch.ops.aten

_PROVENANCE = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
)


class UnknownSize(FusepassError):
    """A symbolic size is not held by any node of the graph."""


class Rewriter:
    """Rewrites the regions of one graph, one after the other; later ones read what earlier ones wrote."""

    def __init__(self, graph: fx.Graph, autotune: bool = False) -> None:
        self.graph = graph
        self.autotune = autotune
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.done: list[PlannedRegion] = []

    def rewrite(self, planned: PlannedRegion) -> fx.Node:
        """Replace the region by a kernel call; return the node that runs it. The graph is unchanged if this raises."""
        edit = _Edit(self.graph, planned, self.replaced, self.autotune)
        try:
            results = edit.append_call()
        except BaseException:
            edit.undo()
            raise
        for old, new in zip(planned.region.writes, results, strict=True):
            old.replace_all_uses_with(new)
            self.replaced[old] = new
            edit.renew_views(new, _storages(old))
        for node in reversed(planned.region.nodes):
            if not node.users:
                self.graph.erase_node(node)
        for read in planned.region.reads:
            if read.lookup is not None:
                erase_unread(self.graph, read.lookup)
        self.done.append(planned)
        return edit.kernel

    def finish(self) -> None:
        """Put the graph back into topological order (a kernel's users may stand before its last input) and check it."""
        if self.replaced:
            stable_topological_sort(self.graph)
            self.graph.lint()


class _Edit:
    """The nodes added for one region."""

    def __init__(
        self, graph: fx.Graph, planned: PlannedRegion, replaced: dict[fx.Node, fx.Node], autotune: bool
    ) -> None:
        self.graph = graph
        self.autotune = autotune
        self.reads = [(r, replaced.get(r.node, r.node)) for r in planned.region.reads]
        self.planned = planned
        self.region = planned.region
        self.members = frozenset(self.region.nodes)
        self.fake_mode = detect_fake_mode([val(self.region.tile)])
        self.added: list[fx.Node] = []
        self.kernel: fx.Node
        self.meta = {k: v for k, v in planned.verdicts[0].node.meta.items() if k in _PROVENANCE}

    def append_call(self) -> list[fx.Node]:
        region = self.region
        self.point = self.start = self._last_input()
        rows = self.size(region.space.rows)
        ins = [self._operand(read, node) for read, node in self.reads]
        sizes = [self.size(s) for s in region.sizes.values()]
        dying = frozenset(i for i, (_, node) in enumerate(self.reads) if self._dies(node))
        leads = [[self.size(d) for d in region.orders[n].lead] if n in region.orders else [rows] for n in region.writes]
        kernel = KernelCall(region.program, rows, ins, sizes, self.planned.device, leads, dying, self.autotune)
        outs = lower(self.call, kernel)
        self.kernel = outs[0].args[0]  # type: ignore[assignment]
        self.kernel.meta["fusepass"] = region.program.digest
        return [self._as_before(new, old) for new, old in zip(outs, region.writes, strict=True)]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_after(self.point):
            node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), val)
        with self.fake_mode:  # type: ignore[union-attr]
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        node.meta.update(self.meta)
        self.added.append(node)
        self.point = node
        return node

    def undo(self) -> None:
        for node in reversed(self.added):
            self.graph.erase_node(node)

    def renew_views(self, node: fx.Node, storages: set[int]) -> None:
        """Give the views of a result that lay in one of `storages` fake values that are views of `node`.

        Later regions, and Inductor, tell by them what shares memory with what.
        """
        for user in node.users:
            if user.op == "call_function" and not storages.isdisjoint(_storages(user)):
                fake_args, fake_kwargs = fx.node.map_arg((user.args, user.kwargs), val)
                with self.fake_mode:  # type: ignore[union-attr]
                    user.meta["val"] = user.target(*fake_args, **fake_kwargs)  # type: ignore[operator]
                self.renew_views(user, storages)

    def _last_input(self) -> fx.Node:
        inputs = {node for _, node in self.reads}
        return next(n for n in reversed(self.graph.nodes) if n in inputs or n.op == "placeholder")

    def _dies(self, node: fx.Node) -> bool:
        """Whether nothing uses the memory of this operand after the kernel, and no other operand lies in it.

        Only what a call makes, of a matmul or another kernel: what Inductor computes itself it may compute where it is
        used, and copy then.
        """
        if not val(node).is_contiguous():
            return False
        aliases = _aliases(node)
        makers = [n for n in aliases if aliases.isdisjoint(n.all_input_nodes)]
        if not all(is_called(n.target) for n in makers):
            return False
        neighbours = sum(not _storages(node).isdisjoint(_storages(other)) for _, other in self.reads)
        if neighbours > 1:
            return False
        users = {u for n in aliases for u in n.users} - aliases - self.members - set(self.added)
        return all(u.op != "output" and u < self.start for u in users)

    def _operand(self, read: Read, node: fx.Node) -> fx.Node:
        if node.target is torch.ops.prims.inductor_lookup_seed.default:
            return self.call(aten.select.int, node.args[0], 0, node.args[1])  # a view: it needs no kernel of its own
        if read.lead:
            return self.call(aten.reshape.default, node, [*map(self.size, read.lead), self.region.space.cols])
        shape = [-1, self.region.space.cols] if read.kind is Kind.TILE else [-1]
        if not read.flatten or val(node).ndim == len(shape):
            return node
        return self.call(aten.reshape.default, node, shape)

    def _as_before(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """`new` in the shape of the node that it replaces."""
        shape = list(val(old).shape)
        if val(new).ndim != len(shape) or any(
            size_text(a) != size_text(b) for a, b in zip(val(new).shape, shape, strict=True)
        ):
            new = self.call(aten.reshape.default, new, [self.size(d) for d in shape])
        if val(new).dtype is not val(old).dtype or val(new).device != val(old).device:
            raise FusepassError(f"{old.name}: expected {val(old).dtype} on {val(old).device}, got {val(new).dtype}")
        return new

    def size(self, size: Any) -> Any:
        """An int, or a node of the graph that holds this SymInt."""
        if isinstance(size, int):
            return size
        text = size_text(size)
        for node in self.graph.nodes:
            if isinstance(val(node), torch.SymInt) and size_text(val(node)) == text and node not in self.members:
                return node
        for _, source in self.reads:
            for i, d in enumerate(val(source).shape):
                if size_text(d) == text:
                    return self.call(aten.sym_size.int, source, i)
        for shape in self._row_shapes():
            if len(shape) > 1 and size_text(math.prod(shape)) == text:
                product = self.size(shape[0])
                for d in shape[1:]:
                    product = self.call(operator.mul, product, self.size(d))
                return product
        raise UnknownSize(f"no node of the graph holds the size {text}")

    def _row_shapes(self) -> Iterator[Sequence[Any]]:
        """The leading dimensions of the region's tiles and of what it reads."""
        for node in (self.region.tile, *self.region.nodes, *(n for _, n in self.reads)):
            if isinstance(val(node), torch.Tensor):
                yield val(node).shape[:-1]
                yield val(node).shape


def _aliases(node: fx.Node) -> set[fx.Node]:
    """The nodes that share their memory with `node`, as far as views, and ops with several results, tell."""
    storage = _storages(node)
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in found and not storage.isdisjoint(_storages(n)):
            found.add(n)
            stack += [*n.all_input_nodes, *n.users]
    return found


def _storages(node: fx.Node) -> set[int]:
    tensors = [t for t in tree_leaves(val(node)) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}
