"""Answers that a grammar allows, drawn at random: no model is needed to see what it enforces."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

from openspec import _grammar
from openspec.config import EMBEDDED_MODEL
from openspec.grammar.formats import Format, json_of
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.grammar.schemas.schema import enforceable
from openspec.text.parsers.message import AnswerForm
from openspec.text.tokenizer import Tokenizer

STOP = 4074
CLOSERS = (b'"', b"}", b"]", b"\n", b"<")


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(EMBEDDED_MODEL)


@lru_cache
def tokens() -> list[bytes]:
    spelled = AnswerForm.of(tokenizer(), "auto", "auto").spelled_ids
    return tokenizer().grammar_tokens(spelled)


@lru_cache
def vocabulary() -> _grammar.Vocabulary:
    return _grammar.Vocabulary(tokens(), 4096, [STOP])


def compiled(format: Format) -> bytes:
    return compile_format(vocabulary(), format, chars_behind_quote(tokens()))


def compiled_schema(schema: object) -> bytes:
    return compiled(json_of(enforceable(schema)))


@lru_cache
def closers() -> list[int]:
    return [one for one, spelled in enumerate(tokens()) if spelled[:1] in CLOSERS]


def drawn(mask: bytes, ids: Sequence[int], rng: random.Random) -> int | None:
    """One of the ids whose bit is set, if there is one."""
    for _ in range(32):
        one = rng.choice(ids)
        if mask[one >> 3] >> (one & 7) & 1:
            return one
    found = [one for one in ids if mask[one >> 3] >> (one & 7) & 1]
    return rng.choice(found) if found else None


def walk(data: bytes, rng: random.Random, most: int = 600) -> str | None:
    """One answer, or None where it did not end; after a while it prefers what closes something."""
    matcher = _grammar.Matcher(vocabulary(), data)
    out: list[bytes] = []
    spelling = tokens()
    while len(out) < most:
        mask = matcher.bitmask()
        assert any(mask), f"no way on after {b''.join(out)[-200:]!r}"
        others = bytearray(mask)
        others[STOP >> 3] &= ~(1 << (STOP & 7))
        if others != mask and (not any(others) or rng.random() < 0.6):
            assert matcher.accept(STOP)
            assert matcher.is_terminated
            return b"".join(out).decode(errors="replace")
        token = None
        if len(out) > 40 and rng.random() < 0.85:
            token = drawn(others, closers(), rng)
        if token is None:
            token = drawn(others, range(4096), rng)
        assert token is not None
        assert matcher.accept(token), (b"".join(out)[-200:], spelling[token])
        out.append(spelling[token])
    return None


def answers(data: bytes, num: int, seed: int = 0) -> list[str]:
    """Finished answers; most of `num` walks end."""
    rng = random.Random(seed)
    found = [walk(data, rng) for _ in range(num)]
    return [text for text in found if text is not None]


def accepts(data: bytes, text: str) -> bool:
    """Whether a whole text, in single bytes and tokens, is an answer."""
    matcher = _grammar.Matcher(vocabulary(), data)
    return all(map(matcher.accept, tokenizer().encode(text))) and matcher.accept(STOP)


def values(schema: Mapping[str, object] | bool, num: int, seed: int = 0) -> list[object]:
    return [json.loads(text) for text in answers(compiled_schema(schema), num, seed)]
