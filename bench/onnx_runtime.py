"""ONNX Runtime as a contender on CPUs: what torch.onnx exports, in a session with as many threads as torch has.

Inputs and outputs are bound to tensors of torch's, so that no call copies them.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import chains


def chain() -> Callable[..., tuple[Tensor, Tensor]]:
    """A chain of sites with nothing between them; the norms of all but the last go to two buffers in turn.

    Each chain is exported when it first runs, and bound to the inputs that it is given then.
    """
    sessions: dict[int, Callable[[], object]] = {}
    results: dict[int, tuple[Tensor, Tensor]] = {}

    def run(kind: str, inputs: Any) -> tuple[Tensor, Tensor]:
        key = id(inputs)
        if key not in sessions:
            tiles = [inputs.s, *inputs.r]
            s, last, *turns = (torch.empty_like(inputs.s) for _ in range(4))
            norms = [turns[i % 2] for i in range(len(inputs.r) - 1)]
            sites = _Sites(kind, inputs.weight, inputs.bias).eval()
            sessions[key] = _session(sites, tiles, [s, *norms, last])
            results[key] = s, last
        sessions[key]()
        return results[key]

    return run


def model(module: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The model for this one input; its output is written over by the next call."""
    with torch.no_grad():
        output = torch.empty_like(module(ids))
    run = _session(module, [ids], [output])

    def call(_: Tensor) -> Tensor:
        run()
        return output

    return call


class _Sites(nn.Module):
    """(s, r_0, r_1, ...) to the last sum, and the norm of every sum."""

    def __init__(self, kind: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, s: Tensor, *rs: Tensor) -> tuple[Tensor, ...]:
        norms = []
        for r in rs:
            s, y = chains.site(self.kind, s, r, self.weight, self.bias)
            norms.append(y)
        return s, *norms


def _session(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], object]:
    import onnxruntime

    with _quiet(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(module, tuple(inputs), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # its threads go on spinning after a call, on the cores that the next contender needs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    assert program is not None
    text = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for slot, tensor in zip(session.get_inputs(), inputs, strict=True):
        binding.bind_input(slot.name, "cpu", 0, _element_type(tensor), list(tensor.shape), tensor.data_ptr())
    for slot, tensor in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_output(slot.name, "cpu", 0, _element_type(tensor), list(tensor.shape), tensor.data_ptr())
    return partial(_run, session, binding, [*inputs, *outputs])


def _run(session: Any, binding: Any, bound: list[Tensor]) -> None:
    """`bound` is only held: the binding knows addresses."""
    session.run_with_iobinding(binding)


def _element_type(tensor: Tensor) -> Any:
    import onnx

    return {torch.float32: onnx.TensorProto.FLOAT, torch.int64: onnx.TensorProto.INT64}[tensor.dtype]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that it could export too, were they there, and of deprecated calls of its own."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
