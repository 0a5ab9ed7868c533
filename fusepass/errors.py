"""The errors that fusepass raises. Each message says what was expected, what was given, and what to do."""

from __future__ import annotations


class FusepassError(Exception):
    """Base of every error that fusepass raises on purpose."""


class OptionError(FusepassError, ValueError):
    """A `fusepass.*` option or environment variable has an unknown name or a bad value."""


class ProgramError(FusepassError, ValueError):
    """A row program is malformed: its text does not parse, or the verifier refuses it."""


class KernelError(FusepassError, RuntimeError):
    """A fused kernel was called with tensors that its program does not describe."""


class PositionError(KernelError, IndexError):
    """A fused kernel was to look up a row that its table does not have, as of an embedding that is too short."""


class ExpectationError(FusepassError):
    """`fusepass.expect` is set, and another number of sites was fused."""


class StrictError(FusepassError, RuntimeError):
    """With `fusepass.strict`, an internal fault is raised instead of leaving the site to Inductor."""
