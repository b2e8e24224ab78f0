"""The embedded model, and models of other families, on the GPU against transformers.

The error against float32 is at most that of transformers in bfloat16, in logits and in every layer;
and no bit depends on how the tokens were cut into steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.random_target import PUBLISHED, write_random_target

from openspec import _C
from openspec.text.tokenizer import Tokenizer
from tests.gates import other_targets
from tests.gates.test_logits import (
    DECODE_TOKENS,
    EMBEDDED,
    PROMPT_TOKENS,
    Rows,
    Subject,
    assert_same_bits,
    check_bfloat16,
    check_company,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]

TEXT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many "
    "clips in May. How many clips did Natalia sell altogether in April and May?\n"
    "def add(a, b):\n    return a + b\n" * 3
)


# Heads wider than hidden_size / heads, as many as a KV head takes; every weight random.
SHAPES = list(other_targets.SHAPES)
RANDOM = PUBLISHED["mistral-nemo-12b"] | {
    "num_hidden_layers": 2,
    "hidden_size": 320,
    "intermediate_size": 608,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
}


@pytest.fixture(scope="module", params=["embedded", *SHAPES, "random"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "embedded":
        return EMBEDDED
    if request.param in SHAPES:
        return other_targets.folder(request.param)
    return write_random_target(tmp_path_factory.mktemp("random"), RANDOM)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return Tokenizer.from_folder(EMBEDDED).encode(TEXT)[: PROMPT_TOKENS + DECODE_TOKENS]


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder, dtype="bfloat16", device="cuda")


@pytest.fixture(scope="module")
def whole(subject: Subject, token_ids: list[int]) -> Rows:
    return subject.score(token_ids, len(token_ids))


def test_error_is_no_larger_than_the_references(
    folder: Path, subject: Subject, token_ids: list[int]
) -> None:
    check_bfloat16(subject, folder, token_ids)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_no_bit(
    subject: Subject, whole: Rows, token_ids: list[int], chunk: int
) -> None:
    assert_same_bits(subject.score(token_ids, chunk), whole)
    assert_same_bits(subject.score(token_ids, chunk, 1), whole)


def test_company_changes_no_bit(subject: Subject, whole: Rows, token_ids: list[int]) -> None:
    check_company(subject, token_ids, whole)


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
