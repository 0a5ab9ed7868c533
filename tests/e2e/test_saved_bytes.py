"""What the forward keeps for the backward is never more than what plain Inductor keeps.

Counted from the graphs that Inductor is about to lower, after all passes: the memory behind what a forward graph
returns beyond the user's outputs. Memory that an input or an output of the user's holds anyway is not counted, and
views of one tensor are counted once. Compilation ends there, so that nothing is built and nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from bench import models

WIDTH, TOKENS = 32, 16


class Counted(Exception):
    """Raised in place of lowering."""


def saved(fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> dict[str, int]:
    """Bytes kept for the backward by the first graph of `fn(*args)`, by the name of the node that made them."""
    found: dict[str, int] = {}

    def count(graph: fx.Graph) -> None:
        found.update(_beyond_the_users(graph))
        raise Counted

    options: dict[str, Any] = {"post_grad_custom_post_pass": count, "fx_graph_cache": False}
    if backend == "fusepass":
        options["fusepass.strict"] = True
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Counted"):
        torch.compile(fn, backend=backend, options=options, fullgraph=True)(*args)
    return found


def _beyond_the_users(graph: fx.Graph) -> dict[str, int]:
    (output,) = graph.find_nodes(op="output")
    returned = tree_leaves(output.args[0])
    users = {returned[i] for i in output.meta["user_visible_output_idxs"]}
    held = {_storage(n) for n in (*graph.find_nodes(op="placeholder"), *users) if _is_tensor(n)}
    kept: dict[str, int] = {}
    for node in returned:
        if isinstance(node, fx.Node) and _is_tensor(node) and _storage(node) not in held:
            held.add(_storage(node))
            kept[node.name] = node.meta["val"].untyped_storage().nbytes()
    return kept


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _model(name: str, dtype: torch.dtype, dropout: float) -> tuple[nn.Module, tuple[Tensor]]:
    shape: dict[str, Any] = {"width": WIDTH, "heads": 2, "vocabulary": 64, "max_tokens": 64, "dropout": dropout}
    ids = models.sample_inputs(name, 2, TOKENS, **shape)
    return models.build(name, **shape).to(dtype).train(), ids


@pytest.mark.parametrize("backend", ["inductor", "fusepass"])
def test_the_count_on_a_function_worked_out_by_hand(backend: str) -> None:
    """exp keeps its result, which is the user's; sin keeps its argument, a product made here; mm its inputs."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(x, w)
        return product.sin(), torch.exp(x)

    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    assert list(saved(fn, (x, w), backend).values()) == [8 * 4 * 4]


@pytest.mark.parametrize("backend", ["inductor", "fusepass"])
def test_the_count_on_a_site(backend: str) -> None:
    """The sum, once, though norm and Linear both read it; the norm's result for the Linear's weight; two statistics."""
    norm, linear = nn.LayerNorm(16), nn.Linear(16, 4, bias=False)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        s = x + torch.mm(x, w)
        return linear(norm(s)) + linear(s)

    kept = saved(fn, (torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)), backend)
    tile = 8 * 16 * 4
    assert sorted(kept.values()) in ([8 * 4, 8 * 4, tile], [8 * 4, 8 * 4, tile, tile])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float32, 0.0), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("name", models.REFERENCE)
def test_no_more_than_inductor(name: str, dtype: torch.dtype, dropout: float) -> None:
    model, args = _model(name, dtype, dropout)
    ours, inductors = (saved(model, args, backend) for backend in ("fusepass", "inductor"))
    tile = 2 * TOKENS * WIDTH * dtype.itemsize
    assert sum(inductors.values()) > models.REFERENCE[name].sites * tile, "at least the sum of each site"
    more = sum(ours.values()) - sum(inductors.values())
    assert more <= 0, f"{more} bytes more; ours {ours}, Inductor's {inductors}"
