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


@dataclass(frozen=True)
class Options:
    """The command line's options. `threads` is empty for torch's default, `direction` and `plot` where not given."""

    device: str = "cpu"
    quick: bool = False
    threads: tuple[int, ...] = ()
    direction: str = ""
    plot: pathlib.Path | None = None


@dataclass(frozen=True)
class Table:
    """A suite's result: rows with equal keys, lines of summary, and where it ran."""

    suite: str
    rows: Sequence[Row]
    summary: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=environment.describe)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def text(self, style: str = "simple") -> str:
        """Header, table and summary. `style` is one of tabulate's."""
        facts = [f"{name}: {fact}" for name, fact in {**self.environment, "date": self.date}.items()]
        if style == "github":
            facts = [f"- {fact}" for fact in facts]
        table = tabulate([dict(r) for r in self.rows], headers="keys", tablefmt=style, floatfmt=".4g")
        return "\n".join([*facts, "", table, "", *self.summary])

    def write_json(self, path: pathlib.Path) -> None:
        content = {
            "suite": self.suite,
            "date": self.date,
            "environment": dict(self.environment),
            "rows": [dict(r) for r in self.rows],
            "summary": list(self.summary),
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def write_markdown(self, path: pathlib.Path) -> None:
        path.write_text(f"## {self.suite}\n\n{self.text('github')}\n")
