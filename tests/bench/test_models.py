"""The reference models: their norms as their configuration counts them, and their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench import models

NORM_MODULES = (nn.LayerNorm, nn.RMSNorm, models.HandWrittenLayerNorm, models.HandWrittenRMSNorm)


def run(name: str, **overrides: object) -> torch.Tensor:
    model, args = models.example(name, **overrides)
    with torch.no_grad():
        return model(*args)


@pytest.mark.parametrize("name", models.REFERENCE)
@pytest.mark.parametrize("layers", [1, 3])
def test_norms_are_those_that_run(name: str, layers: int) -> None:
    model, args = models.example(name, layers=layers)
    ran: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, NORM_MODULES):
            module.register_forward_hook(lambda m, *_: ran.append(m))
    with torch.no_grad():
        model(*args)
    assert len(ran) == len(set(ran)) == model.config.norms


SITES_AT_TWO_LAYERS = {
    "pre_norm_encoder": 5,
    "pre_norm_causal": 5,
    "pre_norm_encoder_rms": 5,
    "pre_norm_causal_rms": 4,
    "post_norm_encoder": 5,
    "post_norm_causal": 4,
    "post_norm_causal_rms": 4,
    "deep_norm_encoder": 4,
    "deep_norm_causal": 4,
    "deep_norm_encoder_rms": 4,
    "deep_norm_causal_rms": 4,
    "tutorial_pre_norm": 5,
    "tutorial_pre_norm_rms": 5,
    "tutorial_post_norm": 4,
    "tutorial_deep_norm_rms": 4,
    "parallel_causal": 2,
    "parallel_causal_rms": 3,
}


def test_sites_counted_by_hand() -> None:
    assert {name: config.sites for name, config in models.REFERENCE.items()} == SITES_AT_TWO_LAYERS


@pytest.mark.parametrize("name", models.REFERENCE)
def test_every_layer_adds_the_same_sites(name: str) -> None:
    two, five = (models.build(name, layers=n, width=16, heads=2).config for n in (2, 5))
    per_layer = 1 if two.arrangement == "parallel" else 2
    assert five.sites - two.sites == five.norms - two.norms == 3 * per_layer


@pytest.mark.parametrize("name", models.REFERENCE)
def test_shape_and_determinism(name: str) -> None:
    once, again = run(name), run(name)
    config = models.REFERENCE[name]
    assert once.shape == (2, 32, config.vocabulary if config.causal else config.width)
    assert torch.equal(once, again)
    assert not torch.equal(once, models.build(name, seed=1)(*models.example(name)[1]))


@pytest.mark.parametrize("name", [n for n, c in models.REFERENCE.items() if c.causal])
def test_a_causal_model_does_not_look_ahead(name: str) -> None:
    model, (ids,) = models.example(name)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % model.config.vocabulary
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hand_written_norms_are_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(n, 48, dtype=dtype) * 3 + 1 for n in (5, 1, 1))
    layer, rms = models.HandWrittenLayerNorm(48).to(dtype), models.HandWrittenRMSNorm(48).to(dtype)
    layer.gamma.data, layer.beta.data, rms.weight.data = weight[0], bias[0], weight[0]
    torch.testing.assert_close(layer(x), F.layer_norm(x, (48,), weight[0], bias[0]))
    torch.testing.assert_close(rms(x), F.rms_norm(x, (48,), weight[0], 1e-6))


def test_deep_norm_constants() -> None:
    """The paper's table: alpha = (2N)^(1/4), beta = (8N)^(-1/4)."""
    config = models.build("deep_norm_encoder", layers=8, width=16, heads=2).config
    assert config.alpha == 2.0
    assert config.beta == pytest.approx(64**-0.25)


def test_deep_norm_scales_values_output_and_feed_forward() -> None:
    model = models.build("deep_norm_causal", layers=8, width=256)
    attention, feed_forward = model.blocks[0].attention, model.blocks[0].feed_forward
    plain = (2 / (256 + 256)) ** 0.5
    deviations = [p.weight.std().item() / plain for p in (attention.query, attention.key)]
    assert deviations == pytest.approx([1, 1], rel=0.02)
    scaled = [p.weight.std().item() / plain for p in (attention.value, attention.output)]
    assert scaled == pytest.approx([model.config.beta] * 2, rel=0.02)
    wide = (2 / (256 + 1024)) ** 0.5
    assert feed_forward.up.weight.std().item() / wide == pytest.approx(model.config.beta, rel=0.02)


def test_deep_norm_block_is_its_formula() -> None:
    block = models.build("deep_norm_encoder").blocks[0]
    x = torch.randn(2, 3, 128)
    y = block.attention_norm(4**0.25 * x + block.attention(x))
    torch.testing.assert_close(block(x), block.feed_forward_norm(4**0.25 * y + block.feed_forward(y)))


@pytest.mark.parametrize(
    ("wrapped", "arrangement"),
    [("tutorial_pre_norm", "pre"), ("tutorial_post_norm", "post"), ("tutorial_deep_norm_rms", "deep")],
)
def test_the_wrapper_is_the_plain_block(wrapped: str, arrangement: models.Arrangement) -> None:
    model = models.build(wrapped)
    block = model.blocks[0]
    plain = models.BLOCKS[arrangement](model.config).eval()
    plain.attention, plain.feed_forward = block.attention, block.feed_forward
    plain.attention_norm, plain.feed_forward_norm = (c.norm for c in block.connections)
    x = torch.randn(2, 3, 128)
    torch.testing.assert_close(block(x), plain(x))


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = models.rotary_table(16, 8).double()
    q, k = torch.randn(2, 8, dtype=torch.float64).unbind()
    turned_q, turned_k = (models.rotate(x.expand(1, 1, 16, 8), table)[0, 0] for x in (q, k))
    # the table's sines and cosines are FP32
    torch.testing.assert_close(turned_q.norm(dim=-1).float(), q.norm().expand(16).float())
    torch.testing.assert_close((turned_q[5] @ turned_k[2]).float(), (turned_q[13] @ turned_k[10]).float())


def test_models_are_factories_by_name() -> None:
    model, args = models.pre_norm_causal()
    assert model.config == models.REFERENCE["pre_norm_causal"]
    assert model(*args).shape == (2, 32, 256)
    with pytest.raises(AttributeError, match="no attribute 'pre_norm'"):
        models.pre_norm  # noqa: B018


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    models.build("deep_norm_causal")
    assert torch.equal(torch.get_rng_state(), before)


def test_no_trace_of_fusepass() -> None:
    assert "fusepass" not in vars(models)
    with open(models.__file__) as source:
        assert "import fusepass" not in source.read()


@pytest.mark.parametrize("name", models.REFERENCE)
def test_is_one_graph(name: str) -> None:
    model, args = models.example(name)
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(*args), model(*args))
