"""`python -m bench SUITE`: runs a suite, prints its table, and writes it as JSON or Markdown."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from fusepass import environment

from . import audit, compile_time, gradient_flow, kernels, timing, traffic, training, whole_models
from .suite import Options, Table, write_json, write_markdown


@dataclass(frozen=True)
class Group:
    """Several suites, each with the seconds within which its points may begin, if there is an end."""

    meaning: str
    suites: Mapping[str, float | None]
    max_autotune: bool | None = None


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
    "compile-time": "cold and warm, with depth",
    "traffic": "tiles moved on a GPU, counted without one",
    "training": "loss curves of 200 steps against eager and Inductor",
    "gradient-flow": "gradient norms per layer of deep stacks, and training of a very deep one",
    "audit": "registers, spills, access widths and tiles of the GPU kernels",
}
GROUPS: dict[str, Group] = {
    "all": Group("one after the other", dict.fromkeys(SUITES)),
    "gpu": Group("on a GPU, within six minutes", {"kernels": 200.0, "models": 110.0}, max_autotune=False),
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a suite failed, or fusepass within one."""
    given = _parser().parse_args(arguments)
    timing.keep_freed_memory()
    group = GROUPS.get(given.suite)
    wanted = group.suites if group else {given.suite: None}
    max_autotune = group.max_autotune if group and given.max_autotune is None else given.max_autotune
    options = Options(given.device, given.quick, given.threads, given.direction, None, given.seconds, max_autotune)
    json, markdown = given.json, given.markdown
    if given.results:
        stem = given.results / "-".join([*([] if group else [given.suite]), environment.slug(given.device), _today()])
        json, markdown = json or stem.with_suffix(".json"), markdown or stem.with_suffix(".md")
    tables: list[Table] = []
    failed = False
    for suite, seconds in wanted.items():
        plot = _named(given.plot, suite, several=group is not None)
        try:
            table = SUITES[suite](replace(options, plot=plot, seconds=given.seconds or seconds))
        except Exception:
            if group is None:
                raise
            failed = True
            print(f"{suite} failed:", traceback.format_exc(), sep="\n", file=sys.stderr)
            continue
        print(table.text())
        tables.append(table)
        failed |= table.failed
        # after each suite, so that what has been measured is kept whatever becomes of the next one
        if json:
            write_json(tables, json, several=group is not None)
        if markdown:
            write_markdown(tables, markdown)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("suite", choices=[*SUITES, *GROUPS], help=_meanings())
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="fewer points and rounds: within three minutes a suite")
    add("--threads", type=_counts, default=(), metavar="N,N", help="CPU thread counts to run with")
    add("--direction", choices=kernels.DIRECTIONS, default="", help="kernels: this one only")
    add("--seconds", type=float, metavar="N", help="kernels, models: begin no point later than this, in each suite")
    add("--max-autotune", action=argparse.BooleanOptionalAction, help="models: run with it too")
    add("--plot", type=pathlib.Path, metavar="FILE", help="kernels, models, gradient-flow: draw as PNG")
    add("--json", type=pathlib.Path, metavar="FILE", help="write the rows as JSON; of several suites, by their names")
    add("--markdown", type=pathlib.Path, metavar="FILE", help="write the tables as Markdown")
    add("--results", type=pathlib.Path, metavar="FOLDER", help="write both, named after the device and the date")
    return parser


def _meanings() -> str:
    return "; ".join(f"{n}: {m}" for n, m in [*MEANINGS.items(), *((n, g.meaning) for n, g in GROUPS.items())])


def _named(path: pathlib.Path | None, suite: str, several: bool) -> pathlib.Path | None:
    """Where a suite draws: `figure-kernels.png` for `figure.png` where there are several."""
    return path.with_stem(f"{path.stem}-{suite}") if path and several else path


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(c < 1 for c in counts):
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
