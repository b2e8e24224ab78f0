"""Compiling in processes: shared, bounded in time, memory and bytes, ended with the last wish."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from openspec import _grammar
from openspec.errors import EngineError, RequestError
from openspec.grammar.compiler import GrammarCompiler, GrammarLimits
from openspec.grammar.formats import grammar_format, json_of, source_of, text
from openspec.grammar.json_rules import chars_behind_quote, compile_source
from openspec.grammar.schemas.schema import enforceable
from tests.unit.grammar_walks import STOP, accepts, tokens

LIMITS = GrammarLimits(timeout_s=10.0, memory=4 << 30, cache_bytes=256 << 20)


def compiler(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(tokens(), 4096, [STOP], replace(LIMITS, **limits))


def test_limits_are_shares_of_the_free_memory() -> None:
    limits = GrammarLimits.within(64 << 30, 5.0)
    assert (limits.timeout_s, limits.memory, limits.cache_bytes) == (5.0, 16 << 30, 1 << 30)
    limits = GrammarLimits.within(0)
    assert (limits.memory, limits.cache_bytes) == (1 << 30, 16 << 20)


def slow() -> str:
    """A grammar that takes the library half a minute: it counts to 4000 eight times."""
    pattern = "[^%s\\u{0}-\\u{1f}\\u{22}\\u{5c}]{0,4000}"
    texts = {letter: {"type": "string", "pattern": pattern % letter} for letter in "abcdefgh"}
    return source_of(json_of({"type": "object", "properties": texts}), "x")


def test_results_are_kept_up_to_a_size() -> None:
    forgotten: list[str] = []
    with_room = replace(LIMITS, cache_bytes=4_000)
    one = GrammarCompiler(tokens(), 4096, [STOP], with_room, on_forget=forgotten.append)
    sources = [source_of(text(word), "x") for word in ("yes", "no", "perhaps")]
    grammars = [one.compile(source) for source in sources]
    assert accepts(grammars[0].data, "yes") and not accepts(grammars[0].data, "no")
    assert one.compile(sources[2]) is grammars[2]
    assert one.num_bytes <= 4_000
    assert (
        len(forgotten) == 3 - one.num_kept
        and forgotten == [g.key for g in grammars][: len(forgotten)]
    )
    with pytest.raises(RequestError, match="bytes, more than 1000"):
        one.compile(source_of(json_of({"type": "object", "additionalProperties": True}), "x"))
    one.close()
    with pytest.raises(EngineError):
        one.compile(sources[0])


def test_refusals_carry_the_library_s_words() -> None:
    one = compiler()
    for _ in range(2):
        with pytest.raises(RequestError, match="guided_grammar: the grammar cannot be used: EBNF"):
            one.compile(source_of(grammar_format("start ::= 'x'", "x"), "x"), "guided_grammar")
    assert accepts(one.compile(source_of(text("yes"), "x")).data, "yes")
    one.close()


def test_many_lengths_compile_as_budgets() -> None:
    """The process knows how far a token reaches into a text that it opens."""
    longer = [*tokens()[:4000], b"x" * 64, *tokens()[4001:]]
    text_of = {f"f{i}": {"type": "string", "maxLength": 30 + i} for i in range(12)}
    source = source_of(json_of(enforceable({"type": "object", "properties": text_of})), "x")
    vocabulary = _grammar.Vocabulary(longer, 4096, [STOP])
    one = GrammarCompiler(longer, 4096, [STOP], LIMITS)
    data = one.compile(source).data
    one.close()
    assert data == compile_source(vocabulary, source, chars_behind_quote(longer))
    assert data != compile_source(vocabulary, source)


class Timer:
    """A clock that strikes when the test says so."""

    made: queue.SimpleQueue[Timer]

    def __init__(self, limit_s: float, strike: Callable[[], None]) -> None:
        self.limit_s, self.strike = limit_s, strike

    def start(self) -> None:
        self.made.put(self)

    def cancel(self) -> None:
        pass


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Timer]:
    """The limits of the grammars under way, each from when its process has been started."""
    made = Timer.made = queue.SimpleQueue[Timer]()
    monkeypatch.setattr("openspec.grammar.compiler.threading.Timer", Timer)
    return made


def test_what_takes_too_long_is_ended(timers: queue.SimpleQueue[Timer]) -> None:
    one = compiler(timeout_s=1000)
    ticket = one.submit(slow())
    timer = timers.get()
    assert timer.limit_s == 1000
    assert not ticket.future.done()
    timer.strike()
    with pytest.raises(RequestError, match="longer than 1000 s"):
        ticket.result("x")
    with pytest.raises(RequestError, match="longer than 1000 s"):
        one.compile(slow())
    assert timers.empty(), "it is known by now"
    assert accepts(one.compile(source_of(text("yes"), "x")).data, "yes")
    assert not timers.empty()
    one.close()


def test_too_little_memory_is_a_refusal() -> None:
    one = compiler(memory=1 << 20)
    long = {"type": "string", "pattern": "[a-z]{0,120}"}
    node = {"type": "object", "properties": {f"p{i}": long for i in range(60)}}
    with pytest.raises(RequestError, match="memory"):
        one.compile(source_of(json_of(node), "x"))
    one.close()


def test_equal_requests_share_a_compilation_which_ends_with_the_last(
    timers: queue.SimpleQueue[Timer],
) -> None:
    one = compiler(timeout_s=1000)
    tickets = [one.submit(slow()) for _ in range(3)]
    assert len({id(ticket.future) for ticket in tickets}) == 1
    timers.get()  # it has begun
    for ticket in tickets:
        assert not ticket.future.done()
        ticket.leave()
    assert tickets[0].future.exception() is not None, "it goes on for nobody"
    assert timers.empty()
    one.close()


def test_a_slow_one_does_not_hold_up_others() -> None:
    one = compiler(timeout_s=1000)
    ticket = one.submit(slow())
    assert accepts(one.compile(source_of(text("yes"), "x")).data, "yes")
    assert not ticket.future.done()
    ticket.leave()
    one.close()


def test_sources_are_bounded() -> None:
    with pytest.raises(RequestError, match="larger than"):
        source_of(text("x" * (1 << 20)), "structured_outputs")
    assert json.loads(source_of(text("é"), "x"))["format"]["value"] == "é"
