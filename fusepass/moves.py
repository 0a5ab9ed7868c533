"""Stage 2, regions: sets that cross a move of the rows, as `(x + r).transpose(0, 1)` in front of a norm does.

The rows of a region have one order, that of its row reductions. Members on the other side of a permute that keeps the
last dimension have another; a kernel reads and writes their tensors by row-index expressions, so that the move itself
costs nothing. That side may be pointwise or sum columns; it may not reduce rows, and it draws no random numbers, which
belong to the elements in the order in which they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ._torch_compat import same_size
from .lift import Lifted, is_move, same_space
from .row_program import Kind
from .rules import Role, is_random, move_order, val


@dataclass(frozen=True)
class RowOrder:
    """How the rows of some members lie: dimension `order[k]` of `lead` is dimension k of the region's own rows."""

    lead: tuple[Any, ...]
    order: tuple[int, ...]

    @property
    def own(self) -> tuple[Any, ...]:
        """The shape of the region's rows, in its own order."""
        return tuple(self.lead[i] for i in self.order)

    def same_as(self, other: RowOrder) -> bool:
        """Whether two moves are the same."""
        return self.order == other.order and all(same_size(a, b) for a, b in zip(self.lead, other.lead, strict=True))


def row_orders(nodes: Iterable[fx.Node], lifted: dict[fx.Node, Lifted]) -> dict[fx.Node, RowOrder] | None:
    """The members in another order than the row reductions' and that order; None where members have no one order."""
    members = set(nodes)
    moves = [n for n in members if is_move(lifted[n])]
    found: dict[fx.Node, RowOrder] = {}
    for move in moves:
        before = _side(move.args[0], members, lifted)  # type: ignore[arg-type]
        after = {n for u in move.users if u in members for n in _side(u, members, lifted)}
        reduces_before, reduces_after = (any(_reduces(n, lifted) for n in side) for side in (before, after))
        if reduces_before == reduces_after or not before.isdisjoint(after):
            return None
        side, order = (after, _order_after(move)) if reduces_before else (before, _order_before(move))
        for node in side:
            if node in found and not found[node].same_as(order):
                return None
            if is_random(node):
                return None
            found[node] = order
    return found


def _side(start: fx.Node, members: set[fx.Node], lifted: dict[fx.Node, Lifted]) -> set[fx.Node]:
    """The members that are joined to `start` without a move between."""
    found: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node in members and node not in found and not is_move(lifted[node]):
            found.add(node)
            stack += [*node.all_input_nodes, *node.users]
    return found


def _reduces(node: fx.Node, lifted: dict[fx.Node, Lifted]) -> bool:
    return lifted[node].rule.role is Role.REDUCTION or lifted[node].kind is Kind.ROW


def _order_before(move: fx.Node) -> RowOrder:
    return RowOrder(tuple(val(move.args[0]).shape[:-1]), tuple(move_order(move)[:-1]))  # type: ignore[arg-type]


def _order_after(move: fx.Node) -> RowOrder:
    order = move_order(move)[:-1]
    return RowOrder(tuple(val(move).shape[:-1]), tuple(order.index(k) for k in range(len(order))))


def join_moved(groups: dict[fx.Node, list[fx.Node]], lifted: dict[fx.Node, Lifted]) -> None:
    """Join a set that reduces rows with a pointwise one from which, or to which, its rows are moved.

    Whatever else reads the moved rows reads them outside.
    """
    moves = [n for n in lifted if is_move(lifted[n])]
    home = {n: key for key, nodes in groups.items() for n in nodes} if moves else {}
    for move in moves:
        for core, side in _pairs(move, home, groups, lifted):
            drawn = _drawn(groups[side])
            between = [n for n in moves if n in groups and any({core, side} == set(e) for e in _ends(n, home))]
            joined = sorted({*groups[core], *between, *groups[side]} - drawn, key=lambda n: lifted[n].order)
            if not same_space(lifted[core].space, lifted[side].space) or not _is_convex(joined):
                continue
            if row_orders(joined, lifted):
                groups[core], groups[side] = joined, [n for n in groups[side] if n in drawn]
                for n in between:
                    del groups[n]
                home |= dict.fromkeys(joined, core)
                break


def _pairs(
    move: fx.Node,
    home: dict[fx.Node, fx.Node],
    groups: dict[fx.Node, list[fx.Node]],
    lifted: dict[fx.Node, Lifted],
) -> list[tuple[fx.Node, fx.Node]]:
    """The sets on both sides of a move of which the first reduces rows and the second does not."""
    if move not in groups:
        return []
    found = []
    for ends in _ends(move, home):
        reducing = [k for k in ends if any(_reduces(n, lifted) for n in groups[k])]
        if len(reducing) == 1:
            found.append((reducing[0], next(k for k in ends if k != reducing[0])))
    return found


def _ends(move: fx.Node, home: dict[fx.Node, fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """For each set that reads a move: the set that it is moved from, and that one."""
    source = home.get(move.args[0])  # type: ignore[arg-type]
    readers = dict.fromkeys(home[u] for u in move.users if u in home)
    return [(source, reader) for reader in readers if source is not None and source is not reader]


def _drawn(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Random numbers, and what is made of nothing else: a dropout's mask."""
    found: set[fx.Node] = set()
    for node in nodes:
        if is_random(node) or (node.all_input_nodes and all(i in found for i in node.all_input_nodes)):
            found.add(node)
    return found


def _is_convex(nodes: Sequence[fx.Node]) -> bool:
    """Whether no path leaves the set and comes back. `nodes` are in graph order."""
    members, last = set(nodes), nodes[-1]
    stack = [u for n in nodes for u in n.users if u not in members]
    seen = set(stack)
    while stack:
        for user in stack.pop().users:
            if user in members:
                return False
            if user not in seen and user < last:
                seen.add(user)
                stack.append(user)
    return True
