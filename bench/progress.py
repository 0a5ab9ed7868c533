"""Progress on standard error: a bar where rich is installed and a person watches, a line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Yields `step(text)`: call it when each of `total` steps begins."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        yield _lines(total, title)
        return
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total, title)
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        begun = -1

        def step(text: str) -> None:
            nonlocal begun
            begun += 1
            bar.update(task, completed=begun, description=f"{title}: {text}")

        yield step


def _lines(total: int, title: str) -> Callable[[str], None]:
    started = time.monotonic()
    begun = 0

    def step(text: str) -> None:
        nonlocal begun
        begun += 1
        print(f"{title} {begun}/{total} ({time.monotonic() - started:.0f} s): {text}", file=sys.stderr, flush=True)

    return step
