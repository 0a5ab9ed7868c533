"""The gradient-flow experiment on small stacks: the profiles' shapes, and that eager and fusepass agree."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from bench import __main__ as cli
from bench import deep_stacks, gradient_flow, text, training
from bench.deep_stacks import ARRANGEMENTS, Arrangement

LAYERS, WIDTH = 24, 32

# Dynamo looks at the .grad of a segment's input, which is no leaf, and hides the warning, but not from "error".
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def eager_profile(arrangement: Arrangement, layers: int, seed: int = 0) -> list[float]:
    model = deep_stacks.build(arrangement, layers, WIDTH, seed)
    (ids,) = text.batches(1, 4, 33, seed)
    return gradient_flow.norms(model, training.gradients(model, model, ids))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_post_norm_grows_towards_the_input_pre_norm_less_deep_norm_not(seed: int) -> None:
    pre, post, deep = (eager_profile(a, LAYERS, seed) for a in ARRANGEMENTS)
    assert max(deep) / min(deep) < 1.2
    assert post[0] / post[-1] > 3 * pre[0] / pre[-1]
    # past the first layers Pre-Norm is flat
    assert max(pre[4:]) / min(pre[4:]) < 5 < 10 < post[4] / post[-1]


def test_the_growth_is_exponential() -> None:
    """The norm's logarithm falls as fast in the upper half of the stack as in the lower."""
    profile = [math.log(v) for v in eager_profile("post", 48)]
    lower, upper = profile[4] - profile[24], profile[24] - profile[44]
    assert lower > 1.5 and upper > 1.5, f"{lower:.2f} and {upper:.2f}"


def test_deep_norm_starts_as_the_paper_says() -> None:
    model = deep_stacks.build("deep", 8, 128)
    assert (model.config.alpha, model.config.beta) == (pytest.approx(16**0.25), pytest.approx(64**-0.25))
    attention = model.blocks[0].attention
    plain = (2 / (128 + 128)) ** 0.5
    deviations = [p.weight.std().item() / plain for p in (attention.query, attention.value)]
    assert deviations == pytest.approx([1, model.config.beta], rel=0.03)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones(128)) and torch.equal(module.bias, torch.zeros(128))


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_eager_and_fusepass_agree(arrangement: Arrangement) -> None:
    p = gradient_flow.profile(arrangement, LAYERS, WIDTH)
    compiled, from_fp64 = p.compiled, gradient_flow.largest_difference(p.exact, p.eager)
    assert p.difference < 1e-3 and from_fp64 < 1e-3, f"{p.difference:.1e}, eager from FP64 {from_fp64:.1e}"
    assert len(compiled.graphs) == 2, "one forward and one backward graph serve every segment"
    # the first norm of a Pre-Norm segment reads the segment's input, whose sum lies in the segment before
    assert compiled.fused("forward") == 2 * deep_stacks.SEGMENT - (arrangement == "pre")


def test_a_stack_that_no_segments_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        deep_stacks.Compiled(deep_stacks.build("pre", 6, 16))


@pytest.mark.slow
def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any) -> None:
    monkeypatch.setattr(gradient_flow, "QUICK", gradient_flow.Size(8, 16, 8, 16, 3))
    png, data = tmp_path / "profile.png", tmp_path / "rows.json"
    assert cli.main(["gradient-flow", "--quick", "--plot", str(png), "--json", str(data)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    rows = json.loads(data.read_text())["rows"]
    assert [r["layer"] for r in rows] == list(range(1, 9))
    assert all(r["difference"] < 1e-3 for r in rows)
    printed = capsys.readouterr().out
    for arrangement in ("Pre-Norm", "Post-Norm", "DeepNorm"):
        assert f"{arrangement}: gradient norm of the first layer over the last one's" in printed
    assert "DeepNorm, 8 layers, loss at step: " in printed
