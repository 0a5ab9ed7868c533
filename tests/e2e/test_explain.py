"""`fusepass.explain`: one row per norm, with its place, its verdict and its reason."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusepass
from bench import models


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.first = nn.RMSNorm(32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x))
        return x


def test_every_norm_has_a_row() -> None:
    with torch.no_grad():
        report = fusepass.explain(Model(), torch.randn(4, 32))
    assert [(s.module, s.norm, s.residual, s.fused) for s in report.sites] == [
        ("first", "rms_norm", False, False),
        ("norms.0", "layer_norm", True, True),
        ("norms.1", "layer_norm", True, True),
    ]
    assert (report.fused, report.declined, report.fused_backward) == (2, 0, 0)
    assert [s.reason for s in report.sites] == ["NO_RESIDUAL", None, None]
    first, *rest = report.sites
    assert first.kernel is None and first.tiles is None and "no residual" in first.detail
    lines = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "x = norm(x + layer(x))" in text)
    for site in rest:
        assert site.source == f"{__file__}:{line}"
        assert site.graph == "inference" and site.tiles == 3 and site.inductor_tiles == 5
    assert rest[0].kernel == rest[1].kernel and str(rest[0].kernel).startswith("fusepass_")


def test_to_dict_is_json_and_str_is_a_table() -> None:
    with torch.no_grad():
        report = fusepass.explain(Model(), torch.randn(4, 32))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["fused"] == 2 and data["sites"][0]["reason"] == "NO_RESIDUAL"
    assert set(data["sites"][0]) == {
        *("module", "source", "norm", "residual", "graph", "fused", "reason", "detail", "kernel", "tiles"),
        "inductor_tiles",
    }
    table = str(report)
    assert "norms.1" in table and "2 of 2 residual-add + norm sites fused" in table and "NO_RESIDUAL" in table


def test_it_follows_the_callers_grad_mode_and_leaves_the_model_as_it_was() -> None:
    model = Model()
    x = torch.randn(4, 32, requires_grad=True)
    state = torch.get_rng_state()
    report = fusepass.explain(model, x)
    sites = [s.graph for s in report.sites if s.fused and s.residual]
    assert sites == ["forward", "forward", "backward", "backward"]
    assert report.fused == report.fused_backward == 2
    assert report.graphs == 2, "one forward and one backward graph"
    assert all(p.grad is None for p in model.parameters()) and x.grad is None
    assert float(model.calls) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_and_a_compiled_model() -> None:
    with torch.no_grad():
        x, r = torch.randn(4, 32), torch.randn(4, 32)
        report = fusepass.explain(lambda x, r: F.rms_norm(x + r, (32,)), x, r)
        assert [(s.module, s.fused) for s in report.sites] == [("", True)]
        compiled = torch.compile(Model())
        assert fusepass.explain(compiled, x).fused == 2


@pytest.mark.parametrize("name", ["pre_norm_causal_rms", "post_norm_encoder"])
def test_module_paths_are_those_of_the_model(name: str) -> None:
    model, args = models.example(name)
    with torch.no_grad():
        report = fusepass.explain(model, *args)
    names = dict(model.named_modules())
    assert len({s.module for s in report.sites}) == models.REFERENCE[name].norms
    assert all(type(names[s.module]).__name__ in ("LayerNorm", "RMSNorm") for s in report.sites)


def test_a_graph_break_between_sum_and_norm() -> None:
    def broken(x: Tensor, r: Tensor) -> Tensor:
        s = x + r
        torch._dynamo.graph_break()
        return F.rms_norm(s, (32,))

    with torch.no_grad():
        report = fusepass.explain(broken, torch.randn(4, 32), torch.randn(4, 32))
    assert [(s.residual, s.fused, str(s.reason)) for s in report.sites] == [(False, False, "GRAPH_BREAK")]
    assert report.graphs == 2
    assert {str(u.reason) for u in report.untouched} == {"NO_NORM"}


def test_options_reach_the_backend() -> None:
    with torch.no_grad():
        assert fusepass.explain(Model(), torch.randn(4, 32), options={"fusepass.enabled": False}).sites == []
        with pytest.raises(Exception, match="unknown option"):
            fusepass.explain(Model(), torch.randn(4, 32), options={"fusepass.nothing": 1})
