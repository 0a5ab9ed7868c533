"""The option table: names, defaults, environment variables, errors."""

from __future__ import annotations

import dataclasses

import pytest

from fusepass.errors import OptionError
from fusepass.options import OPTIONS, Options, resolve


def test_the_table_and_the_values_agree() -> None:
    assert [o.name for o in OPTIONS] == [f.name for f in dataclasses.fields(Options)]
    assert {o.name: o.default for o in OPTIONS} == dataclasses.asdict(Options())


def test_ours_are_taken_and_the_rest_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEPASS_PROFITABILITY")  # of the test run
    ours, rest = resolve({"fusepass.strict": True, "max_autotune": True, "triton.cudagraphs": False})
    assert ours == Options(strict=True)
    assert rest == {"max_autotune": True, "triton.cudagraphs": False}


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("FUSEPASS_STRICT", "1", "strict", True),
        ("FUSEPASS_ENABLED", "false", "enabled", False),
        ("FUSEPASS_PROFITABILITY", "always", "profitability", "always"),
        ("FUSEPASS_EXPECT", "3", "expect", 3),
        ("FUSEPASS_EXPECT", "all", "expect", "all"),
        ("FUSEPASS_AUTOTUNE", "on", "autotune", True),
        ("FUSEPASS_DUMP", "folder", "dump", "folder"),
    ],
)
def test_environment_gives_the_default_and_a_given_option_wins(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(resolve()[0], name) == value
    default = getattr(Options(), name)
    assert getattr(resolve({f"fusepass.{name}": default})[0], name) == default


_OTHERS = ("off", "on", "always", "3", "on", "folder")  # another value of each option


@pytest.mark.parametrize("value", ["maybe", 2, None])
def test_a_bad_value_names_what_is_accepted(value: object) -> None:
    with pytest.raises(OptionError, match=r"options\['fusepass.strict'\]: expected True or False, got"):
        resolve({"fusepass.strict": value})


@pytest.mark.parametrize("value", [-1, "-1", "some", True, 2.5, None])
def test_an_expectation_is_a_count_or_all(value: object) -> None:
    with pytest.raises(OptionError, match=r"expected a number of sites, 0 or more, or 'all', got"):
        resolve({"fusepass.expect": value})


def test_a_bad_environment_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPASS_PROFITABILITY", "never")
    with pytest.raises(OptionError, match="FUSEPASS_PROFITABILITY: expected 'auto' or 'always', got 'never'"):
        resolve()


def test_what_changes_code_changes_the_key_of_cached_graphs() -> None:
    keys = {Options(**{o.name: o.parse(text)}).code_key() for o, text in zip(OPTIONS, _OTHERS, strict=True)}
    assert len(keys) == len(OPTIONS) and Options(dump="folder").code_key() == Options().code_key()


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(OptionError) as e:
        resolve({"fusepass.profitable": "auto"})
    assert all(o.full_name in str(e.value) for o in OPTIONS)
