"""What the passes over graphs share: they can be switched off, are timed, are told apart in caches, and never break."""

from __future__ import annotations

import hashlib
import logging
import pathlib
import time
from abc import abstractmethod
from functools import cache
from typing import ClassVar

from torch import fx

from ._torch_compat import CustomGraphPass
from .errors import StrictError
from .options import Options

log = logging.getLogger("fusepass.graph_pass")


class GraphPass(CustomGraphPass):
    """One pass over a graph; a subclass has `run`."""

    seconds: ClassVar[float] = 0.0
    """Wall time that all passes of this process have taken, in seconds."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def run(self, graph: fx.Graph) -> None:
        """Rewrite the graph."""

    def __call__(self, graph: fx.Graph) -> None:
        if not self.options.enabled:
            return
        started = time.perf_counter()
        try:
            self.run(graph)
        finally:
            GraphPass.seconds += time.perf_counter() - started

    def uuid(self) -> str | None:
        """This package's source and every option that changes code. None (no caching) where a dump is asked for."""
        return None if self.options.dump else f"{type(self).__name__} {_source_hash()} {self.options.code_key()}"

    def fault(self, doing: str, error: Exception) -> str:
        """Log a fault of ours and say what it was. Raises StrictError instead under `fusepass.strict`."""
        if self.options.strict:
            raise StrictError(f"{doing} failed: {type(error).__name__}: {error}") from error
        _warn_once(f"{doing} failed and is left to Inductor: {type(error).__name__}: {error}")
        log.debug("traceback of the fault", exc_info=error)
        return f"{doing}: {type(error).__name__}: {error}"


@cache
def _source_hash() -> str:
    """A hash of every file of this package, so that a cached graph of another version is never used."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".h"):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)
