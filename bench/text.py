"""A small task for character-level language models: sums, spelled out. Made here, so that it is the same everywhere.

two hundred and eleven plus ninety is three hundred and one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

VOCABULARY = 128
"""Characters are ASCII codes. 0 stands for a hidden character."""

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen"),
    *("sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def spelled(n: int) -> str:
    """A number below 1000 in words."""
    if n < 20:
        return _SMALL[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f" {_SMALL[n % 10]}" if n % 10 else "")
    return f"{_SMALL[n // 100]} hundred" + (f" and {spelled(n % 100)}" if n % 100 else "")


def corpus(characters: int = 50_000) -> str:
    """The text: sums of numbers below 500, in an order that looks random and is always the same."""
    lines: list[str] = []
    length, state = 0, 1
    while length < characters:
        state = (1_103_515_245 * state + 12_345) % 2**31  # a linear congruential generator
        a, b = state // 2**16 % 500, state // 2**5 % 500
        lines.append(f"{spelled(a)} plus {spelled(b)} is {spelled(a + b)}.\n")
        length += len(lines[-1])
    return "".join(lines)[:characters]


def batches(count: int, batch: int, tokens: int, seed: int = 0) -> Iterator[Tensor]:
    """`count` tensors of character codes, each (batch, tokens): pieces of the text from random places."""
    codes = torch.frombuffer(bytearray(corpus().encode("ascii")), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(codes) - tokens + 1, (batch,), generator=generator)
        yield torch.stack([codes[s : s + tokens] for s in starts.tolist()])
