"""`python -m fusepass demo | explain | audit | env`."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

from . import environment
from .errors import FusepassError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a check fails, 2 if the command cannot run as given."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except CommandError as e:
        print(f"{given.command}: {e}", file=sys.stderr)
        return 2


class CommandError(FusepassError):
    """A command cannot run as given."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fusepass")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="fuse the reference models; sites, errors and times of each")
    demo.set_defaults(run=run_demo)
    explain = commands.add_parser("explain", help="report every norm of a model: fused, or why not")
    explain.add_argument(
        "factory", metavar="MODULE:CALLABLE", help="returns (model, args); bench.models:pre_norm_causal does"
    )
    explain.add_argument("--grad", action="store_true", help="run with gradients, forward and backward")
    explain.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the report as JSON")
    explain.set_defaults(run=run_explain)
    audit = commands.add_parser("audit", help="compile the GPU kernels, without a GPU, and read their machine code")
    audit.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows as JSON")
    audit.set_defaults(run=run_audit)
    commands.add_parser("env", help="versions, devices, compiler").set_defaults(run=run_env)
    return parser


def run_env(_: argparse.Namespace) -> int:
    print(tabulate(environment.describe().items(), tablefmt="plain"))
    return 0


def run_demo(_: argparse.Namespace) -> int:
    try:
        importlib.import_module("bench.models")
    except ModuleNotFoundError as e:
        if e.name not in ("bench", "bench.models"):
            raise
        raise CommandError("needs the reference models in bench/: run it in a checkout of the repository") from e
    missing = environment.missing_for_cpu()
    if missing:
        raise CommandError(missing)
    from . import demo

    return demo.run()


def run_explain(given: argparse.Namespace) -> int:
    from . import explain

    model, args = _call_factory(given.factory)
    with torch.set_grad_enabled(given.grad):
        report = explain(model, *args)
    print(report)
    if given.json:
        _write_json(given.json, report.to_dict())
    return 0


def run_audit(given: argparse.Namespace) -> int:
    from .kernels.audit import audit_table

    rows = audit_table()
    print(tabulate(rows, headers="keys"))
    if given.json:
        _write_json(given.json, rows)
    return 0


def _call_factory(name: str) -> tuple[Any, Sequence[Any]]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise CommandError(f"expected MODULE:CALLABLE, got {name!r}")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as e:
        raise CommandError(f"no {name!r}: {e}") from e
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise CommandError(f"expected {name} to return (model, args), got {type(made).__name__}")
    return made[0], made[1]


def _write_json(path: pathlib.Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
