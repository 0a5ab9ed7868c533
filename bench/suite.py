"""What every suite takes and gives: options in, a table out, and the table as text, JSON or Markdown."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from fusepass import environment

Row = Mapping[str, Any]
QUICK_SECONDS = 100.0


@dataclass(frozen=True)
class Options:
    """The command line's options.

    Attributes:
        device: "cpu" or "cuda".
        quick: fewer points and rounds.
        threads: CPU thread counts; empty for torch's default.
        direction: of the suite `kernels`, this one only; empty for both.
        plot: where to draw.
        seconds: no point of `kernels` or `models` begins later; None for no end.
        max_autotune: whether `models` runs Inductor's and fusepass' max-autotune too; None for the suite's choice.
    """

    device: str = "cpu"
    quick: bool = False
    threads: tuple[int, ...] = ()
    direction: str = ""
    plot: pathlib.Path | None = None
    seconds: float | None = None
    max_autotune: bool | None = None

    @property
    def budget(self) -> float | None:
        """The seconds within which points of `kernels` and `models` may begin: with `quick` there is always an end."""
        return QUICK_SECONDS if self.seconds is None and self.quick else self.seconds


@dataclass(frozen=True)
class Table:
    """A suite's result: rows with equal keys, lines of summary, and where it ran. `failed`: fusepass at some point."""

    suite: str
    rows: Sequence[Row]
    summary: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=environment.describe)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    failed: bool = False

    def text(self, style: str = "simple") -> str:
        """Header, table and summary. `style` is one of tabulate's."""
        facts = [f"{name}: {fact}" for name, fact in {**self.environment, "date": self.date}.items()]
        if style == "github":
            facts = [f"- {fact}" for fact in facts]
        table = tabulate([dict(r) for r in self.rows], headers="keys", tablefmt=style, floatfmt=".4g")
        return "\n".join([*facts, "", table, "", *self.summary])

    @property
    def result(self) -> dict[str, Any]:
        """What is written as JSON, but for where and when."""
        return {"rows": [dict(r) for r in self.rows], "summary": list(self.summary)}


def write_json(tables: Sequence[Table], path: pathlib.Path, several: bool = False) -> None:
    """One suite's rows and summary under those names, or those of `several` suites under "suites" and their names."""
    where = {"date": tables[0].date, "environment": dict(tables[0].environment)}
    if several:
        content = {**where, "suites": {t.suite: t.result for t in tables}}
    else:
        (table,) = tables
        content = {"suite": table.suite, **where, **table.result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_markdown(tables: Sequence[Table], path: pathlib.Path) -> None:
    """The tables one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"## {t.suite}\n\n{t.text('github')}\n" for t in tables))


def first_line(error: Exception) -> str:
    """An error in one line of summary."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
