"""The text that the benches train on."""

from __future__ import annotations

import hashlib

import pytest
import torch

from bench import text


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (98, "ninety eight"),
        (100, "one hundred"),
        (305, "three hundred and five"),
        (998, "nine hundred and ninety eight"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert text.spelled(number) == words


def test_every_line_is_a_right_sum() -> None:
    values = {text.spelled(n): n for n in range(1000)}
    lines = text.corpus(20_000).split("\n")[:-1]
    assert len(set(lines)) > 200, "lines do not repeat within a few"
    for line in lines:
        a, rest = line.removesuffix(".").split(" plus ")
        b, total = rest.split(" is ")
        assert values[a] + values[b] == values[total], line


def test_the_text_is_the_same_everywhere() -> None:
    assert text.corpus(40) == text.corpus()[:40]
    assert len(text.corpus(12_345)) == 12_345
    digest = hashlib.sha256(text.corpus().encode()).hexdigest()
    assert digest.startswith(DIGEST)


DIGEST = "b66c1af73c559f9c"


def test_batches_are_pieces_of_the_text() -> None:
    drawn = list(text.batches(3, 4, 50))
    assert [tuple(b.shape) for b in drawn] == [(4, 50)] * 3
    assert all(torch.equal(a, b) for a, b in zip(drawn, text.batches(3, 4, 50), strict=True))
    assert not torch.equal(drawn[0], next(text.batches(1, 4, 50, seed=1)))
    whole = text.corpus()
    for row in torch.cat(drawn):
        assert "".join(map(chr, row.tolist())) in whole
        assert int(row.min()) > 0 and int(row.max()) < text.VOCABULARY
