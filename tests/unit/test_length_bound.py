"""A text that would fit is never refused by its length."""

from __future__ import annotations

import json
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from openspec.errors import RequestError
from openspec.text.length_bound import _MAX_COMPOSED
from openspec.text.tokenizer import Tokenizer
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import MARKUP, SPECIAL, tokenizer_json, toy_tokenizer

PIECES = [*SPECIAL, *MARKUP, "the", " quick", "\n", " " * 30, "0123", "e\u0301", "\u212b\u0301"]
PIECES += ["\u1fbe\u0308\u0301", "\u1112\u1175\u11c2", "\u1fef", "日本語", "😀", "_" * 20]


@examples(400)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_has_fewer_tokens(text: str) -> None:
    tokenizer = toy_tokenizer()
    try:
        num_tokens = len(tokenizer.encode(text, parse_special=True))
    except RequestError:
        return  # lone surrogates
    assert tokenizer.min_num_tokens(text) <= num_tokens


def test_long_texts_of_every_kind_have_many() -> None:
    for piece in ("a", "7", "\n", "+", "a 7\n+", "é"):
        assert toy_tokenizer().min_num_tokens(piece * 100_000) > 1000


def changed(change: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    if change == "normalizer":
        backend.normalizer = normalizers.Replace("a", "")
    elif change == "removing":
        steps = [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel()]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif change == "stripping":
        backend.add_tokens([AddedToken("<pad>", lstrip=True)])
    else:
        model = json.loads(backend.to_str())
        del model["model"]["vocab"]["Ā"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(model))
    return Tokenizer(backend)


@pytest.mark.parametrize("change", ["normalizer", "removing", "stripping", "incomplete"])
def test_where_bytes_can_vanish_nothing_is_known(change: str) -> None:
    assert changed(change).min_num_tokens("a" * 100_000) == 0


def test_nfc_makes_one_byte_of_four_at_most() -> None:
    """By each character's full decomposition, and the longest spelling of each of its parts.

    Above U+2FFFF nothing is decomposed.
    """
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    longest: dict[str, float] = {}
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        share = len(character.encode()) / len(parts)
        for part in parts:
            longest[part] = max(longest.get(part, 0), share)
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        spelt = sum(longest[part] for part in parts)
        assert spelt <= _MAX_COMPOSED * len(character.encode())


def test_a_pattern_that_gives_up_is_named() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    steps = [pre_tokenizers.Split(Regex("(a+)+b"), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(RequestError, match=r"the tokenizer fails on this text: .*retry-limit"):
        Tokenizer(backend).encode("a" * 60)
