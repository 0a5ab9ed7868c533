"""What every test run shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

HAS_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if HAS_GPU else ["gpu/*"]

# How long drawing an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fusepass", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fusepass")


def pytest_report_header(config: pytest.Config) -> str:
    if HAS_GPU:
        return f"GPU: {torch.cuda.get_device_name()}"
    return (
        "GPU: none, so tests/gpu is not collected; kernels run in the Triton interpreter and are compiled ahead of time"
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers in every run."""
    torch.manual_seed(0)
