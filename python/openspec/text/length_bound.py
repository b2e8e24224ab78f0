"""How many tokens a text has at least, told by its length: a text that cannot fit is not encoded.

A token covers at most as many letters as the vocabulary's token with the most letters, and so with
digits, white space, other ASCII, and bytes of any kind. Each gives a lower bound.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable

import tokenizers

from openspec.checkpoint.strict_json import JsonValue
from openspec.text.vocabulary import SPACE_MARK

_ASCII = bytes(range(128))
_KINDS = [kind.encode() for kind in (string.ascii_letters, string.digits, string.whitespace)]
_KINDS += [_ASCII.translate(None, b"".join(_KINDS)), bytes(range(256))]
"""The kinds of bytes; the last one is all of them."""
_MAX_COMPOSED = 4
"""Bytes that Unicode's NFC makes one of, at most: 7 bytes of U+1FBE U+0308 U+0301 become 2."""
_MARKING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE_MARK},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
    ],
}
_KEEPING = {"ByteLevel", "Digits", "Sequence", "Split"}


class LengthBound:
    """The bound of one vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Iterable[bytes]) -> None:
        """`tokens` are the bytes of all tokens."""
        state = backend.normalizer.__getstate__() if backend.normalizer else b"null"
        self._composes = state != b"null"
        self._most = [0] * len(_KINDS)
        self._marks_spaces = _only_marks_spaces(backend)
        is_kept = state in (b"null", b'{"type":"NFC"}') and _only_splits(_step(backend))
        if (is_kept or self._marks_spaces) and _keeps_all_bytes(backend, set(tokens)):
            self._most = [max(_count(kind, token) for token in tokens) for kind in _KINDS]

    def min_num_tokens(self, text: str) -> int:
        """Tokens that the text has at least; 0 where nothing is known."""
        if self._marks_spaces:
            text = text.replace(SPACE_MARK, " ")
        data = text.encode(errors="replace")
        counts = [_count(kind, data) for kind in _KINDS]
        if self._composes and not self._marks_spaces and not text.isascii():
            # NFC changes an ASCII character only before one that is not ASCII.
            num_others = len(text) - sum(counts[:-1])
            counts[:-1] = [count - num_others for count in counts[:-1]]
            counts[-1] //= _MAX_COMPOSED
        return max(
            -(-count // most) if most else 0 for count, most in zip(counts, self._most, strict=True)
        )


def _count(kind: bytes, data: bytes) -> int:
    return len(data) - len(data.translate(None, kind))


def _keeps_all_bytes(backend: tokenizers.Tokenizer, tokens: set[bytes]) -> bool:
    """Whether every byte of a text is in one of its tokens."""
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    return (
        all(bytes([byte]) in tokens for byte in range(256))
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        # These take any number of spaces into a token.
        and not any(token.lstrip or token.rstrip for token in added)
    )


def _step(backend: tokenizers.Tokenizer) -> JsonValue:
    """What comes before the model, in the form of tokenizer.json."""
    splitter = backend.pre_tokenizer
    step: JsonValue = json.loads(splitter.__getstate__() if splitter else '{"type": "none"}')
    return step


def _only_marks_spaces(backend: tokenizers.Tokenizer) -> bool:
    """Whether nothing but spaces is changed before the model, each into a mark, or a mark added."""
    normalizer, step = backend.normalizer, _step(backend)
    state: JsonValue = json.loads(normalizer.__getstate__()) if normalizer else None
    assert isinstance(step, dict)
    if state is None:
        return step["type"] == "Metaspace" and step.get("replacement") == SPACE_MARK
    return step["type"] == "none" and state == _MARKING


def _only_splits(step: JsonValue) -> bool:
    """Whether a step before the model, in the form of tokenizer.json, drops nothing."""
    assert isinstance(step, dict)
    inner = step.get("pretokenizers", [])
    assert isinstance(inner, list)
    is_known = step["type"] in _KEEPING and step.get("behavior") != "Removed"
    return is_known and all(map(_only_splits, inner))
