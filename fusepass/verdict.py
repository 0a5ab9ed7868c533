"""Why a norm was not fused: a closed set of reasons, each with the facts of the case."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.StrEnum):
    """The value is what `explain` shows."""

    # The norm has no residual sum in front of it: there is nothing to fuse.
    NO_RESIDUAL = "NO_RESIDUAL"
    # The norm cannot be seen, or what stands in front of it cannot.
    FAST_PATH = "FAST_PATH"
    GRAPH_BREAK = "GRAPH_BREAK"
    # Near-misses: looks like a norm, computes something else. Left untouched.
    NOT_LAST_DIM = "NOT_LAST_DIM"
    WRONG_DIVISOR = "WRONG_DIVISOR"
    UNBIASED_VARIANCE = "UNBIASED_VARIANCE"
    EPS_OUTSIDE_ROOT = "EPS_OUTSIDE_ROOT"
    MISMATCHED_MEAN = "MISMATCHED_MEAN"
    # A row reduction that is no norm (softmax, a loss), or a residual sum that no norm reads.
    NOT_A_NORM = "NOT_A_NORM"
    NO_NORM = "NO_NORM"
    # The norm is right, the region around it is not.
    SUM_OUTSIDE_REGION = "SUM_OUTSIDE_REGION"
    NOT_CONVEX = "NOT_CONVEX"
    NOT_FUNCTIONAL = "NOT_FUNCTIONAL"
    UNSUPPORTED_OP = "UNSUPPORTED_OP"
    UNSUPPORTED_DTYPE = "UNSUPPORTED_DTYPE"
    UNSUPPORTED_DEVICE = "UNSUPPORTED_DEVICE"
    SYMBOLIC_COLUMNS = "SYMBOLIC_COLUMNS"
    SYMBOLIC_SHAPE = "SYMBOLIC_SHAPE"
    TOO_MANY_COLUMNS = "TOO_MANY_COLUMNS"
    # All is right, but Inductor's own code is expected to be as good.
    NOT_PROFITABLE = "NOT_PROFITABLE"
    # Trust: the lifted program disagreed with the graph, or a stage of ours failed.
    VALIDATION_FAILED = "VALIDATION_FAILED"
    INTERNAL_ERROR = "INTERNAL_ERROR"


@dataclass(frozen=True)
class Rejection:
    """A reason with its facts: which node, which dtype, which shape."""

    reason: Reason
    detail: str
