"""No condition of legality or recognition can be deleted unseen: without it, a near-miss is taken for a site.

Each case rewrites one condition in the source of one function, and names the near-miss that must then go wrong.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch.nn.functional as F

from fusepass import plan, recognise
from tests.graph import test_bias_gradient
from tests.graph import test_near_misses as near_misses


def near_miss(name: str) -> Callable[[], None]:
    return lambda: near_misses.test_left_alone_with_its_reason(name)


def normalize_is_no_norm() -> None:
    near_misses.test_other_reductions_are_no_norms(F.normalize)


CONDITIONS: dict[str, tuple[ModuleType, str, str, str, Callable[[], None]]] = {
    "the divisor": (
        recognise,
        "_reject",
        "if abs(float(ratio) - 1) > 1e-6 and",
        "if False and",
        near_miss("no divisor"),
    ),
    "the unbiased variance has a reason of its own": (
        recognise,
        "_reject",
        'if kind == "layer_norm" and cols > 1 and',
        "if False and",
        near_miss("unbiased variance"),
    ),
    "eps under the root": (recognise, "_reject", "if form.outside:", "if False:", near_miss("eps outside the root")),
    "the mean is subtracted from both": (
        recognise,
        "_reject",
        "if form.shift != wanted.shift:",
        "if False:",
        near_miss("the mean is not subtracted"),
    ),
    "the shift is a mean or nothing": (
        recognise,
        "_judge",
        "if form.shift not in (sympy.Integer(0), _MOMENTS[1]):",
        "if False:",
        near_miss("half of the mean"),
    ),
    "the radicand is a pattern's": (
        recognise,
        "_judge",
        "if not ratio.is_number:",
        "if False:",
        near_miss("the mean's square is added"),
    ),
    "a length is no root mean square": (
        recognise,
        "_judge",
        "if form.eps == 0 and",
        "if False and",
        normalize_is_no_norm,
    ),
    "the root": (recognise, "_root", "if exponent != -_HALF:", "if False:", near_miss("a root of the root")),
    "the residual": (
        plan,
        "_plan_region",
        "if not any(v.rejection is None and v.residual for v in verdicts) and",
        "if False and",
        near_miss("no residual"),
    ),
    "the residual stream": (
        plan,
        "_sums_in_the_stream",
        "and any(n.joined for n in norms)",
        "",
        lambda: test_bias_gradient.test_the_backward_of_another_norm_without_a_sum_in_front_is_left_alone(
            "nothing goes around it"
        ),
    ),
    "the sum is in the region": (
        plan,
        "_judge",
        "if rejection is None and sum_node is not None and",
        "if False and",
        near_miss("rows regrouped between sum and norm"),
    ),
    "eps beside a root": (recognise, "_root", "if half != _HALF:", "if False:", near_miss("a root too few")),
}


def without(module: ModuleType, function: str, condition: str, instead: str) -> Any:
    """The function with the condition rewritten, in its own module's world."""
    source = textwrap.dedent(inspect.getsource(getattr(module, function)))
    assert condition in source, f"{module.__name__}.{function} has no {condition!r} any more"
    text = source.replace(condition, instead)
    world = dict(vars(module))
    exec(compile(text, f"<{function} without a condition>", "exec"), world)
    changed = world[function]
    return type(changed)(changed.__code__, vars(module), function, changed.__defaults__)


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_near_miss_depends_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, condition, instead, check = CONDITIONS[name]
    recognise.recognise.cache_clear()
    check()
    monkeypatch.setattr(module, function, without(module, function, condition, instead))
    recognise.recognise.cache_clear()
    try:
        with pytest.raises(Exception, match=r".") as raised:
            check()
        assert not isinstance(raised.value, (NameError, SyntaxError)), raised.value
    finally:
        recognise.recognise.cache_clear()
