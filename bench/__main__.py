"""`python -m bench SUITE`: runs a suite, prints its table, and writes it as JSON or Markdown."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

import torch

from . import compile_time, kernels
from .suite import Options, Table

SUITES: dict[str, Callable[[Options], Table]] = {
    "kernels": kernels.run,
    "compile-time": compile_time.run,
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", choices=SUITES, help="kernels: time per site; compile-time: cold, with depth")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--threads", type=_counts, default=(), metavar="N,N", help="CPU thread counts to run with")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the table as Markdown")
    given = parser.parse_args(arguments)
    table = SUITES[given.suite](Options(given.device, given.quick, given.threads))
    print(table.text())
    if given.json:
        table.write_json(given.json)
    if given.markdown:
        table.write_markdown(given.markdown)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(c < 1 for c in counts):
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
