"""Stage 2, regions: the maximal connected sets of liftable nodes around the row reductions.

Nodes join a region when they share a space and a depth (see `lift`) and one reads the other. Because every barrier adds
one to the depth, no path leaves such a set and comes back: regions are convex. A weight or an input tile that two sets
both read does not join them; a move of the rows between them does so only where `moves` says. `region_program` writes
each set's program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from ._torch_compat import same_size
from .lift import Lifted, is_move, same_space
from .moves import join_moved
from .row_program import Kind
from .rules import CASTS, MOVES, VIEWS, Role, val

aten = torch.ops.aten

REPEATABLE = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}) | CASTS
"""What is computed again for every row that it repeats over, rather than in a kernel of its own."""


def find_regions(lifted: dict[fx.Node, Lifted]) -> list[list[fx.Node]]:
    """The node sets, in graph order, that contain a row reduction, or sum the columns of a tile that they compute."""
    parent: dict[fx.Node, fx.Node] = {n: n for n in lifted}

    def root(n: fx.Node) -> fx.Node:
        while parent[n] is not n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for node, entry in lifted.items():
        for source in node.all_input_nodes:
            other = lifted.get(source)
            if other and other.depth == entry.depth and _joined(other, entry):
                parent[root(source)] = root(node)
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in lifted:
        groups[root(node)].append(node)
    _join_readers(groups, lifted)
    join_moved(groups, lifted)
    _join_sums_behind_matmuls(groups, lifted)
    chosen = [g for g in groups.values() if _has(g, Role.REDUCTION, lifted) or _sums_own_tile(g, lifted)]
    taken = {n for g in chosen for n in g}
    found = []
    for group in chosen:
        found.append(absorb_results(absorb_vectors(group, lifted, taken), lifted, taken))
        taken.update(found[-1])
    return found


def _has(nodes: list[fx.Node], role: Role, lifted: dict[fx.Node, Lifted]) -> bool:
    return any(lifted[n].rule.role is role for n in nodes)


def _sums_own_tile(nodes: list[fx.Node], lifted: dict[fx.Node, Lifted]) -> bool:
    """Whether a set sums the columns of a tile that one of its pointwise nodes computes."""
    members = set(nodes)
    for node in nodes:
        if lifted[node].rule.role is Role.COLUMN_SUM:
            source: Any = node.args[0]
            while source in lifted and lifted[source].rule.role is Role.VIEW:
                source = source.args[0]
            if source in members and lifted[source].rule.role is Role.POINTWISE:
                return True
    return False


def _join_readers(groups: dict[fx.Node, list[fx.Node]], lifted: dict[fx.Node, Lifted]) -> None:
    """Move a set with sums into another one of its own depth or a later one, where the two make one kernel:

    - The other alone reads its results, as the add reads a norm's gradient where the residual stream's own arrives
      behind more barriers.
    - It sums columns only, and the other reduces rows of a tile that both read from outside: in FP32 the sum for a
      norm's weight gradient has no edge to the input's gradient, nor has a bias gradient that sums what comes in.

    The two are convex together, since whatever else reads the first set is later than the second.
    """
    home = {n: key for key, nodes in groups.items() for n in nodes}
    summing = [k for k, g in groups.items() if _has(g, Role.REDUCTION, lifted) or _has(g, Role.COLUMN_SUM, lifted)]
    for key in sorted(summing, key=lambda k: lifted[groups[k][0]].depth):
        nodes = groups[key]
        own, members = set(nodes), set(absorb_results(nodes, lifted))
        reads = [(n, u) for n in members for u in n.users if u not in members]
        row_by_row = [(n, u) for n, u in reads if n in own and u in lifted and _joined(lifted[n], lifted[u])]
        others = {home[u] for _, u in row_by_row}
        if len(others) > 1:
            continue
        if not others and not _has(nodes, Role.REDUCTION, lifted):
            others = _sharers(nodes, groups, home, lifted)
        for other in sorted(others, key=lambda k: lifted[groups[k][0]].order):
            first, last = (max(lifted[n].depth for n in groups[k]) for k in (key, other))
            rest = [u for n, u in reads if (n, u) not in row_by_row]
            if first <= last and all(_is_later(u, first, last, lifted) for u in rest):
                groups[other] = sorted([*groups.pop(key), *groups[other]], key=lambda n: lifted[n].order)
                home |= dict.fromkeys(nodes, other)
                break


def _join_sums_behind_matmuls(groups: dict[fx.Node, list[fx.Node]], lifted: dict[fx.Node, Lifted]) -> None:
    """On a CPU, move a sum of columns that stands alone into a norm's backward that reads what a matmul makes of the
    same tile: the bias gradient of a query beside the gradient of the norm before it. Inductor joins the two as well.

    One for each set, that of the last such matmul: its tile lives nearly so long anyway.
    """
    alone = {_memory_of(_source(s)): (k, s) for k, g in groups.items() if (s := _sum_alone(g, lifted))}
    for key, nodes in list(groups.items()):
        if not _has(nodes, Role.REDUCTION, lifted) or not _has(nodes, Role.COLUMN_SUM, lifted):
            continue
        last = max(lifted[n].depth for n in nodes)
        products = {i for n in nodes for i in n.all_input_nodes if i not in lifted}
        for tile in [_memory_of(i) for p in sorted(products, reverse=True) for i in p.all_input_nodes]:
            home, column_sum = alone.get(tile, (key, None))
            if column_sum is None or not same_space(lifted[column_sum].space, lifted[nodes[0]].space):
                continue
            if _feeds_only_later(column_sum, last, lifted):
                groups[home].remove(column_sum)
                groups[key] = sorted([*nodes, column_sum], key=lambda n: lifted[n].order)
                del alone[tile]
                break


def _sum_alone(nodes: list[fx.Node], lifted: dict[fx.Node, Lifted]) -> fx.Node | None:
    """The sum of columns of a set that holds nothing but that sum and views of its tile."""
    sums = [n for n in nodes if lifted[n].rule.role is Role.COLUMN_SUM]
    only = len(sums) == 1 and all(lifted[n].rule.role is Role.VIEW for n in nodes if n not in sums)
    return sums[0] if only and val(sums[0]).device.type == "cpu" else None


def _feeds_only_later(column_sum: fx.Node, last: int, lifted: dict[fx.Node, Lifted]) -> bool:
    """Whether all that reads a column sum's result comes after depth `last`, or is the end of the graph."""
    members = set(absorb_results([column_sum], lifted))
    readers = {u for n in members for u in n.users if u not in members}
    return all(u.op == "output" or (u in lifted and lifted[u].depth > last) for u in readers)


def _source(node: fx.Node) -> fx.Node:
    assert isinstance(node.args[0], fx.Node)
    return node.args[0]


def _memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.target in VIEWS or node.target in MOVES:
        node = _source(node)
    return node


def _sharers(
    nodes: list[fx.Node],
    groups: dict[fx.Node, list[fx.Node]],
    home: dict[fx.Node, fx.Node],
    lifted: dict[fx.Node, Lifted],
) -> set[fx.Node]:
    """The sets with row reductions that read a tile which these nodes read too, from outside."""
    tiles = {i for n in nodes for i in n.all_input_nodes if home.get(i) != home[n] and _is_full_tile(i, lifted[n])}
    users = [u for t in tiles for u in t.users if u in lifted and same_space(lifted[u].space, lifted[nodes[0]].space)]
    return {home[u] for u in users if home[u] != home[nodes[0]] and _has(groups[home[u]], Role.REDUCTION, lifted)}


def _is_later(reader: fx.Node, first: int, last: int, lifted: dict[fx.Node, Lifted]) -> bool:
    """Whether a reader of a set at depth `first` comes after every node of depth `last`."""
    if reader in lifted:
        return lifted[reader].depth > last
    return reader.op == "output" or first >= last  # a barrier is later than what it reads


def _joined(source: Lifted, user: Lifted) -> bool:
    """Whether the value of one liftable node enters the other row by row. A column sum enters nothing of its depth."""
    moved = is_move(source) or is_move(user)
    return source.kind is not Kind.COL and not moved and same_space(source.space, user.space)


def _is_full_tile(source: fx.Node, user: Lifted) -> bool:
    tensor = val(source)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or same_size(tensor.shape[-1], 1):
        return False
    return same_size(tensor.shape[-1], user.space.cols) and same_size(tensor.numel(), user.space.rows * user.space.cols)


def absorb_vectors(nodes: list[fx.Node], lifted: dict[fx.Node, Lifted], taken: Set[fx.Node]) -> list[fx.Node]:
    """Add arithmetic per column (`1 + w`, `w.float()`), per row (`rstd / D`) or on a tile that repeats over the rows
    (`1 + scale` of adaLN) whose every user is in the region.

    A node of another region is not added: where there is one row, that is a vector too.
    """
    own, members = frozenset(nodes), set(nodes)
    rows, cols = lifted[nodes[0]].space

    def is_tile(user: fx.Node) -> bool:
        if user not in members or lifted[user].rule.role is not Role.POINTWISE:
            return False
        return user in own or user.target in REPEATABLE

    queue = [i for n in nodes for i in n.all_input_nodes]
    while queue:
        node = queue.pop()
        if node in taken or node in members or node not in lifted or lifted[node].rule.role is not Role.POINTWISE:
            continue
        shape = val(node).shape
        per_column = all(same_size(d, 1) for d in shape[:-1]) and same_size(shape[-1], cols)
        per_row = same_size(shape[-1], 1) and same_size(val(node).numel(), rows)
        repeats = node.target in REPEATABLE and same_size(shape[-1], cols) and all(map(is_tile, node.users))
        if (per_column or per_row or repeats) and set(node.users) <= members:
            members.add(node)
            queue.extend(node.all_input_nodes)
    return sorted(members, key=lambda n: lifted[n].order)


def absorb_results(
    nodes: list[fx.Node], lifted: dict[fx.Node, Lifted], taken: Set[fx.Node] = frozenset()
) -> list[fx.Node]:
    """Add the casts and views of column sums, where nothing else reads the sum: the kernel writes the result."""
    members = set(nodes)
    for node in [n for n in nodes if lifted[n].kind is Kind.COL]:
        while len(node.users) == 1:
            (user,) = node.users
            if user in taken or user not in lifted:
                break
            if user.target not in CASTS and lifted[user].rule.role is not Role.VIEW:
                break
            members.add(user)
            node = user
    return sorted(members, key=lambda n: lifted[n].order)
