"""The embedded model on the GPU against transformers.

The error against float32 is at most that of transformers in bfloat16, in logits and in every layer;
and no bit depends on how the tokens were cut into steps.
"""

from __future__ import annotations

import numpy as np
import pytest

from openspec import _C
from openspec.tokenizer import Tokenizer
from tests.gates.test_logits import (
    DECODE_TOKENS,
    EMBEDDED,
    PROMPT_TOKENS,
    Rows,
    Subject,
    assert_same_bits,
    join,
    reference,
    rms_error,
)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]

TEXT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many "
    "clips in May. How many clips did Natalia sell altogether in April and May?\n"
    "def add(a, b):\n    return a + b\n" * 3
)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return Tokenizer.from_folder(EMBEDDED).encode(TEXT)[: PROMPT_TOKENS + DECODE_TOKENS]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(EMBEDDED, dtype="bfloat16", device="cuda")


@pytest.fixture(scope="module")
def whole(subject: Subject, token_ids: list[int]) -> Rows:
    return subject.score(token_ids, len(token_ids))


def test_error_is_no_larger_than_the_references(whole: Rows, token_ids: list[int]) -> None:
    truth = reference(EMBEDDED, token_ids, torch.float32)
    theirs = reference(EMBEDDED, token_ids, torch.bfloat16)
    assert rms_error(whole.logits, truth.logits) <= rms_error(theirs.logits, truth.logits)
    pairs = zip(whole.layers, theirs.layers, truth.layers, strict=True)
    for index, (our_layer, their_layer, true_layer) in enumerate(pairs):
        our_error, their_error = (rms_error(one, true_layer) for one in (our_layer, their_layer))
        assert our_error <= their_error * 1.05, f"layer {index}"


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_no_bit(
    subject: Subject, whole: Rows, token_ids: list[int], chunk: int
) -> None:
    assert_same_bits(subject.score(token_ids, chunk), whole)
    assert_same_bits(subject.score(token_ids, chunk, 1), whole)


def test_company_changes_no_bit(subject: Subject, whole: Rows, token_ids: list[int]) -> None:
    slots = [subject.add_scored(token_ids) for _ in range(3)]
    plans = ([40, 1, 1, 43], [1, 64, 10, 10], [7, 7, 1, 70])
    parts: list[list[Rows]] = [[], [], []]
    for lengths in zip(*plans, strict=True):
        rows = subject.step(*zip(slots, lengths, strict=True))
        begin = 0
        for part, length in zip(parts, lengths, strict=True):
            end = begin + length
            part.append(Rows(rows.logits[begin:end], rows.layers[:, begin:end]))
            begin = end
    for slot, part in zip(slots, parts, strict=True):
        assert_same_bits(join(part), whole)
        subject.runner.remove_sequence(slot)


def test_decode_equals_prefill(subject: Subject, token_ids: list[int]) -> None:
    slot = subject.add(token_ids[:PROMPT_TOKENS])
    rows = [subject.step((slot, PROMPT_TOKENS))]
    rows += [subject.step((slot, 1)) for _ in range(DECODE_TOKENS - 1)]
    decoded = subject.runner.token_ids(slot)
    subject.runner.remove_sequence(slot)
    logits = np.concatenate([part.logits for part in rows])
    assert decoded[PROMPT_TOKENS:] == logits.argmax(-1).tolist()
    again = subject.score(decoded, len(decoded))
    np.testing.assert_array_equal(logits, again.logits[PROMPT_TOKENS - 1 : -1])
