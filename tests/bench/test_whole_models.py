"""The suite `models`: what counts as glue, a row of its table, and the figures."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from bench import plots, whole_models
from bench.suite import Options


@pytest.mark.parametrize(
    ("name", "glue"),
    [
        ("graph_0_cpp_fused_add_native_layer_norm_2", True),
        ("graph_1_cpp_fused_addmm_gelu_0", True),
        ("fusepass_0123456789ab", True),
        ("aten::copy_", True),
        ("aten::index_put_", True),
        ("aten::mm", False),
        ("aten::addmm", False),
        ("aten::bmm", False),
        ("aten::linear", False),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", False),
        ("mkldnn::_linear_pointwise", False),
        ("Torch-Compiled Region: 0/0", False),
        ("CompiledFunctionBackward", False),
        ("TorchDynamo Cache Lookup", False),
    ],
)
def test_glue_is_what_is_neither_matmul_nor_attention(name: str, glue: bool) -> None:
    assert whole_models._is_glue(name) is glue


@pytest.mark.slow
@pytest.mark.parametrize("mode", whole_models.MODES)
def test_a_row_of_the_table(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_models, "PROFILED_CALLS", 2)
    entry = whole_models.Entry("pre_norm_causal", mode, torch.bfloat16)
    result = whole_models.measure(entry, Options(quick=True))
    row: Any = result[0]
    assert result[1] == []
    assert (row["model"], row["mode"], row["dtype"]) == ("pre_norm_causal", mode, "bfloat16")
    assert row["sites"] == row["fused"] == (5 if mode == "inference" else 10)
    for backend in whole_models.BACKENDS:
        assert 0 < row[f"{backend}_glue_ms"] < row[f"{backend}_ms"]
    assert row["fusepass_peak_mb"] == pytest.approx(row["inductor_peak_mb"], rel=0.05)
    assert row["eager_peak_mb"] > 4 * 128 * 2 * 4 * 128 / 1e6, "the feed-forward's inner tensor, and what it is made of"
    if mode == "inference":
        # 5 sites and 2 GELUs; the first site looks the embeddings up
        assert (row["inductor_launches"], row["fusepass_launches"]) == (7, 7)
    assert row["speedup_inductor"] == pytest.approx(row["inductor_ms"] / row["fusepass_ms"])
    promised = "model mode dtype eager_ms inductor_ms fusepass_ms speedup_eager speedup_inductor spread"
    assert list(row)[:6] == promised.split()[:6]
    assert set(promised.split()) | {"inductor_glue_ms", "fusepass_glue_ms", "sites", "fused"} <= set(row)


def test_figures(tmp_path: pathlib.Path) -> None:
    point = {"direction": "forward", "threads": 1, "norm": "layer_norm", "dtype": "float32", "rows": 4}
    sites = [{**point, "cols": c, "inductor_gb_s": 1.0 * c, "fusepass_gb_s": 2.0 * c} for c in (64, 256)]
    plots.bandwidth(sites, tmp_path / "kernels.png")
    entry = {"model": "gpt2_blocks", "dtype": "bfloat16"}
    entries = [{**entry, "mode": mode, "speedup_inductor": s} for mode, s in (("inference", 1.1), ("train", None))]
    plots.speedups(entries, tmp_path / "models.png")
    for name in ("kernels", "models"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
