"""No more kernels than Inductor alone: nothing that it would have fused is left behind as a kernel of its own.

What is counted is the code that Inductor writes for each graph, which is neither compiled nor run: calls of its own
kernels, and of ours. Matmuls and attention are the same calls in both.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from bench import launches, models
from fusepass.kernels import ops

WIDTH = 256  # more than what is too narrow to gain

SAVES = ("pre_norm_causal", "pre_norm_encoder", "tutorial_pre_norm", "parallel_causal_rms", "post_norm_encoder")
"""The models whose first site adds embeddings and whose backward needs them, or the positions, in memory: one kernel
more stores these."""


class _Written(Exception):
    """Raised where the compiled graph would run."""


class _Unloaded:
    """Stands for the module that Inductor would build."""

    @staticmethod
    def call(*_: object) -> None:
        raise _Written


def _modules(backend: str, name: str, training: bool, dtype: torch.dtype) -> list[str]:
    """The text of each module that Inductor writes for a reference model, and for its backward if `training`."""
    texts: list[str] = []

    def write(lowering: GraphLowering) -> type[_Unloaded]:
        texts.append(lowering.codegen()[0].value)
        return _Unloaded

    model, args = models.example(name, width=WIDTH)
    model = model.to(dtype)
    ours = {"fusepass.profitability": "auto"} if backend == "fusepass" else {}
    compiled = torch.compile(model, backend=backend, options={"fx_graph_cache": False, **ours})
    with (
        mock.patch.object(GraphLowering, "compile_to_module", write),
        mock.patch.object(ops, "prefetch", lambda program: None),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(compile_threads=1),
        torch.set_grad_enabled(training),
        pytest.raises(_Written),
    ):
        compiled(*args)
    assert len(texts) == 1 + training
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", models.REFERENCE)
def test_the_number_of_kernels_never_grows(name: str, mode: str) -> None:
    training = mode == "training"
    dtype = torch.float32 if name.startswith("parallel") else torch.bfloat16  # which Inductor alone does not compile
    alone = _modules("inductor", name, training, dtype)
    torch._dynamo.reset()
    fused = _modules("fusepass", name, training, dtype)
    assert not any(launches.calls_of_ours(text) for text in alone)
    assert launches.calls_of_ours(fused[0])
    allowed = 1 if training and name.startswith(SAVES) else 0
    for ours, theirs in zip(fused, alone, strict=True):
        assert 0 < launches.calls(ours) <= launches.calls(theirs) + allowed
