"""OpenVINO's torch.compile backend as a contender on CPUs, with as many threads as torch has.

It runs what it cannot compile with PyTorch, and tells only its debug log: here that is a failure.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_LOGGERS = ("backend", "execute")
_GIVES_UP = ("Failed in OpenVINO execution", "OpenVINO execution failed")


def model(module: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The model, compiled."""
    _register()
    options: dict[str, Any] = {"device": "CPU", "config": {"INFERENCE_NUM_THREADS": str(torch.get_num_threads())}}
    compiled: Callable[[Tensor], Tensor] = torch.compile(module, backend="openvino", dynamic=False, options=options)
    with _falling_back_is_an_error(), torch.inference_mode():
        compiled(ids)
    return compiled


def _register() -> None:
    """Import the backend. Doing so sets an option of Dynamo's for everybody, which is undone."""
    config = torch._dynamo.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = config.inline_inbuilt_nn_modules
        import openvino.torch  # noqa: F401

        config.inline_inbuilt_nn_modules = before


@contextlib.contextmanager
def _falling_back_is_an_error() -> Iterator[None]:
    heard = _Listener()
    loggers = [logging.getLogger(f"openvino.frontend.pytorch.torchdynamo.{name}") for name in _LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(heard)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(heard)
            logger.setLevel(level)
            logger.propagate = propagate
    if heard.messages:
        raise RuntimeError(heard.messages[0])


class _Listener(logging.Handler):
    """Keeps the messages which say that OpenVINO gave up."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_GIVES_UP):
            self.messages.append(record.getMessage())
