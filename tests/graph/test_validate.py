"""A lift that is wrong is caught before it is used, and costs nothing but the fusion."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusepass import fuse_pass, region_program, rules, validate
from fusepass.errors import StrictError
from tests.graph.capture import fuse

D = 24
aten = torch.ops.aten


def site(x: Tensor, r: Tensor) -> Tensor:
    return F.rms_norm(x + r, (D,), eps=1e-6)


def _args(*lead: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, D), torch.randn(*lead, D)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_checked", {})


def _wrong(op: str) -> rules.Rule:
    return rules.Rule(rules.Role.POINTWISE, lambda emit, node, args: emit(op, *args, dtype=node.meta["val"].dtype))


@pytest.mark.parametrize(
    ("target", "op"), [(aten.mul.Tensor, "sub"), (aten.rsqrt.default, "sqrt"), (aten.add.Tensor, "sub")]
)
def test_a_wrong_lift_is_never_used(monkeypatch: pytest.MonkeyPatch, target: object, op: str) -> None:
    monkeypatch.setitem(rules.RULES, target, (_wrong(op),))
    args = _args(2, 3)
    with torch.no_grad():
        captured = fuse(site, *args, options={"fusepass.strict": False})
        torch.testing.assert_close(captured.result, site(*args))
    assert captured.kernels == []


def test_a_mismatch_is_reported_and_raised_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit_third(emit: rules.Emit, node: torch.fx.Node, args: list[str]) -> str:
        return emit("mul", emit("square", args[0], dtype=torch.float32), 1.0 + 1e-6, dtype=torch.float32)

    monkeypatch.setitem(rules.RULES, aten.pow.Tensor_Scalar, (rules.Rule(rules.Role.POINTWISE, emit_third),))
    with torch.no_grad():
        captured = fuse(site, *_args(2, 3), options={"fusepass.strict": False})
        assert captured.reasons == ["VALIDATION_FAILED"] and "differs" in captured.sites[0].detail
        with pytest.raises(Exception, match="VALIDATION_FAILED") as e:
            fuse(site, *_args(2, 3))
    assert isinstance(e.value.__cause__, StrictError) or "StrictError" in str(e.value)


def test_a_wrong_row_index_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = region_program._Builder._indices
    wrong = lambda self, own, shape, outer: tuple(i.replace("%", "//") for i in right(self, own, shape, outer))  # noqa: E731
    monkeypatch.setattr(region_program._Builder, "_indices", wrong)
    x, p = torch.randn(2, 3, D), torch.randn(1, 3, D)
    with torch.no_grad():
        captured = fuse(site, x, p, options={"fusepass.strict": False})
        torch.testing.assert_close(captured.result, site(x, p))
    assert captured.kernels == [] and captured.reasons == ["VALIDATION_FAILED"]


@pytest.mark.parametrize("stage", ["lift", "find_regions", "build_region", "make_plan", "validate"])
def test_a_fault_in_any_stage_leaves_the_model_to_inductor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    def broken(*args: object) -> object:
        raise RuntimeError(f"broken {stage}")

    monkeypatch.setattr(fuse_pass, stage, broken)
    args = _args(2, 3)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fusepass"):
        captured = fuse(site, *args, options={"fusepass.strict": False})
        torch.testing.assert_close(captured.result, site(*args))
        with pytest.raises(Exception, match=f"broken {stage}"):
            fuse(site, *args)
    assert captured.kernels == [] and captured.ops("before") == captured.ops("after")
    assert f"broken {stage}" in caplog.text


def test_a_fault_while_rewriting_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepass import rewrite

    monkeypatch.setattr(rewrite._Edit, "_as_before", lambda *a: 1 / 0)
    args = _args(2, 3)
    with torch.no_grad():
        captured = fuse(site, *args, options={"fusepass.strict": False})
        torch.testing.assert_close(captured.result, site(*args))
    assert captured.kernels == [] and captured.ops("before") == captured.ops("after")
    assert captured.reasons == ["INTERNAL_ERROR"]


def test_each_distinct_structure_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    check = validate._check_values
    monkeypatch.setattr(validate, "_check_values", lambda *a: runs.append(1) or check(*a))

    def four(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.mm(F.rms_norm(x + r, (D,), eps=1e-6), w)
        return x

    with torch.no_grad():
        captured = fuse(four, *_args(6), torch.randn(D, D))
    assert len(captured.kernels) == 4
    assert len(runs) == 1


def test_the_program_is_checked_at_its_true_number_of_columns() -> None:
    """A divisor that is right for eight columns and wrong for this many must not slip through a small check."""
    with torch.no_grad():
        captured = fuse(site, *_args(3))
    (program,) = captured.programs
    assert program.startswith(f"row_program cols={D}")


def test_a_number_is_compared_as_eager_compares_it() -> None:
    """In bf16, 0.1 is 0.10009765625: many of these numbers lie between the two."""
    x = torch.linspace(0.0999, 0.1002, 3 * D).reshape(3, D)

    def masked(x: Tensor, r: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r * (u > 0.1)
        return s, F.rms_norm(s, (D,), eps=1e-6)

    half = torch.bfloat16
    args = (torch.zeros(3, D).to(half), torch.ones(3, D).to(half), x.to(half))
    with torch.no_grad():
        captured = fuse(masked, *args)
        assert torch.equal(captured.result[0], masked(*args)[0])
    assert "gt(" in captured.programs[0]
