from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from openspec.bench.client import Completion
from openspec.bench.load import LoadResult
from openspec.messages import SpecDecodeStats
from openspec.tools.demo import statistics_line, tinted

GREEN, RESET = "\x1b[1;32m", "\x1b[0m"


def tokenizer() -> Tokenizer:
    # "é" is two bytes, C3 A9, and here two tokens.
    vocab = {"a": 0, "b": 1, "c": 2, "Ã": 3, "©": 4}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    return made


def test_accepted_drafts_are_tinted() -> None:
    shown = tinted([0, 1, 2, 0, 1], [0, 2, 0], tokenizer())
    assert shown == f"a{GREEN}bc{RESET}ab"


def test_answer_that_ends_with_a_draft() -> None:
    assert tinted([0, 1, 2], [0, 2], tokenizer()) == f"a{GREEN}bc{RESET}"


def test_character_of_several_tokens() -> None:
    assert tinted([0, 3, 4, 1], [1, 1], tokenizer()) == f"{GREEN}aé{RESET}b"
    assert tinted([0, 1], [], tokenizer()) == "ab"


def result(token_ids: list[int], wall_s: float) -> LoadResult:
    stats = SpecDecodeStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6)
    return LoadResult([Completion(0.0, token_ids=token_ids, speculation=stats)], wall_s)


def test_statistics_line() -> None:
    line = statistics_line([result([1] * 8, 2.0)], [result([1] * 8, 1.0)], True)
    assert line == (
        "8 tokens at 8 tok/s, acceptance rate 75%, mean acceptance length 4.00, "
        "2.00x plain decoding (4 tok/s), identical to plain decoding: yes"
    )


def test_no_speed_for_a_different_text() -> None:
    line = statistics_line([result([1], 2.0)], [result([2], 1.0)], False)
    assert line == "identical to plain decoding: NO"
