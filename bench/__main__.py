"""`python -m bench SUITE`: runs a suite, prints its table, and writes it as JSON or Markdown."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from . import audit, compile_time, gradient_flow, kernels, timing, traffic, training, whole_models
from .suite import Options, Table

SUITES: dict[str, Callable[[Options], Table]] = {
    "kernels": kernels.run,
    "models": whole_models.run,
    "compile-time": compile_time.run,
    "traffic": traffic.run,
    "gradient-flow": gradient_flow.run,
    "training": training.run,
    "audit": audit.run,
}
MEANINGS = {
    "kernels": "time per site",
    "models": "whole models, and their kernels other than matmuls and attention",
    "compile-time": "cold, with depth",
    "traffic": "tiles moved on a GPU, counted without one",
    "training": "loss curves of 200 steps against eager and Inductor",
    "gradient-flow": "gradient norms per layer of deep stacks, and training of a very deep one",
    "audit": "registers, spills, access widths and tiles of the GPU kernels",
}
ALL = "all"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, ALL], help=_meanings())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--threads", type=_counts, default=(), metavar="N,N", help="CPU thread counts to run with")
    parser.add_argument("--direction", choices=kernels.DIRECTIONS, default="", help="kernels: this one only")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="kernels, models, gradient-flow: draw as PNG")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the rows as JSON; `all` adds the suite's name"
    )
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the table as Markdown, likewise")
    given = parser.parse_args(arguments)
    timing.keep_freed_memory()
    options = Options(given.device, given.quick, given.threads, given.direction, given.plot)
    for suite in SUITES if given.suite == ALL else [given.suite]:
        several = given.suite == ALL
        table = SUITES[suite](replace(options, plot=_named(options.plot, suite, several)))
        print(table.text())
        if path := _named(given.json, suite, several):
            table.write_json(path)
        if path := _named(given.markdown, suite, several):
            table.write_markdown(path)
    return 0


def _meanings() -> str:
    return "; ".join(f"{n}: {m}" for n, m in {**MEANINGS, ALL: "one after the other"}.items())


def _named(path: pathlib.Path | None, suite: str, several: bool) -> pathlib.Path | None:
    """Where a suite's result goes: `results-kernels.json` for `results.json` where there are several."""
    return path.with_stem(f"{path.stem}-{suite}") if path and several else path


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(c < 1 for c in counts):
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
