"""The options, in one table.

Each can be given to `torch.compile(..., options={...})` under its full name, or set by the environment variable of its
name (`fusepass.strict` is `FUSEPASS_STRICT`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import OptionError

PREFIX = "fusepass."


@dataclass(frozen=True)
class Option:
    """One option. `parse` turns an environment string or a given value into the value, or raises ValueError."""

    name: str
    default: Any
    accepts: str
    meaning: str
    parse: Callable[[Any], Any]
    changes_code: bool = True

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def variable(self) -> str:
        return "FUSEPASS_" + self.name.upper()


def _bool(value: Any) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
        "": False,
    }
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return parse


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError
    return os.fspath(value)


def _count_or_all(value: Any) -> int | str:
    if value in ("", "all"):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or int(value) < 0:
        raise ValueError
    return int(value)


OPTIONS: tuple[Option, ...] = (
    Option("enabled", True, "True or False", "False leaves every graph to Inductor", _bool),
    Option(
        "strict", False, "True or False", "raise on an internal fault instead of leaving the site to Inductor", _bool
    ),
    Option(
        "profitability",
        "auto",
        "'auto' or 'always'",
        "'always' fuses every legal site; 'auto' those expected to gain over Inductor's own code",
        _one_of("auto", "always"),
    ),
    Option(
        "expect",
        "",
        "a number of sites, 0 or more, or 'all'",
        "raise unless so many residual-add + norm sites of each forward or inference graph are fused, or all of them",
        _count_or_all,
    ),
    Option(
        "autotune",
        False,
        "True or False",
        "on a GPU, measure several schedules of each kernel and keep the fastest, on disk too",
        _bool,
    ),
    Option(
        "dump",
        "",
        "a folder",
        "write each graph before and after, each row program and each kernel to this folder",
        _path,
        False,
    ),
)
_BY_NAME = {o.name: o for o in OPTIONS}


@dataclass(frozen=True)
class Options:
    """The options' values, checked. `resolve` builds one."""

    enabled: bool = True
    strict: bool = False
    profitability: str = "auto"
    expect: int | str = ""
    autotune: bool = False
    dump: str = ""

    def code_key(self) -> tuple[tuple[str, Any], ...]:
        """The values that the generated code depends on, for cache keys."""
        return tuple((o.name, getattr(self, o.name)) for o in OPTIONS if o.changes_code)


def resolve(given: Mapping[str, Any] | None = None) -> tuple[Options, dict[str, Any]]:
    """Split `torch.compile`'s options into ours (checked, defaults from the environment) and Inductor's (untouched).

    Raises:
        OptionError: an unknown `fusepass.*` name, or a value that the option does not accept.
    """
    values = {o.name: _from_environment(o) for o in OPTIONS}
    rest: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key.startswith(PREFIX):
            option = _find(key)
            values[option.name] = _parse(option, value, f"options[{key!r}]")
        else:
            rest[key] = value
    return Options(**values), rest


def _from_environment(option: Option) -> Any:
    text = os.environ.get(option.variable)
    return option.default if text is None else _parse(option, text, option.variable)


def _find(key: str) -> Option:
    name = key.removeprefix(PREFIX)
    if name in _BY_NAME:
        return _BY_NAME[name]
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"; did you mean {PREFIX}{close[0]!s}?" if close else ""
    raise OptionError(f"unknown option {key!r}{hint} Valid options: {', '.join(o.full_name for o in OPTIONS)}")


def _parse(option: Option, value: Any, where: str) -> Any:
    try:
        return option.parse(value)
    except ValueError:
        raise OptionError(f"{where}: expected {option.accepts}, got {value!r}") from None
