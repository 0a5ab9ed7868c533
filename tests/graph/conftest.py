"""What the graph tests share."""

from __future__ import annotations

from functools import partial

import pytest

from fusepass.kernels import ops
from fusepass.row_program import parse


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels are computed by the reference evaluator: FP64 kernels take longer to compile than to test."""
    monkeypatch.setattr(ops, "prefetch", lambda program: None)
    monkeypatch.setattr(ops, "_load", lambda program: partial(ops._launch_reference, parse(program)))
