"""Which engine gets a request."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from openspec.engine.processes.placement import (
    LOAD_FACTOR,
    OWN_LOAD,
    choose,
    page_keys,
)
from openspec.engine.processes.replica import SentPrefixes
from openspec.messages import EngineRequest
from tests.unit.fake_core import make_request

PAGE = 4


@dataclass
class Engine:
    name: str
    num_sequences: int = 0
    num_placed: int = 0
    prefixes: SentPrefixes = field(default_factory=lambda: SentPrefixes(100))


def keys_of(prompt: list[int], salt: str = "") -> list[int]:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=make_request().sampling,
        cache_salt=salt,
    )
    return page_keys(request, PAGE)


def place(engines: list[Engine], prompt: list[int], num_sequences: int = 1) -> str:
    keys = keys_of(prompt)
    chosen = choose(engines, keys, num_sequences)
    chosen.num_sequences += num_sequences
    chosen.num_placed += 1
    chosen.prefixes.add(keys)
    return chosen.name


LONG = list(range(40))


def test_keys_stand_for_whole_pages_and_everything_before() -> None:
    assert len(keys_of(LONG)) == 9, "the last token is computed in any case"
    assert len(keys_of([*LONG, 1])) == 10 and keys_of([*LONG, 1])[:9] == keys_of(LONG)
    assert keys_of([1, 2, 3, 4]) == [] and len(keys_of([1, 2, 3, 4, 5])) == 1
    other = [99, *LONG[1:]]
    assert not set(keys_of(other)) & set(keys_of(LONG)), "the chain differs to its end"
    assert not set(keys_of(LONG, "salt")) & set(keys_of(LONG))


def test_the_longest_prefix_wins_and_equals_go_to_the_least_loaded() -> None:
    a, b, c = engines = [Engine("a"), Engine("b"), Engine("c")]
    b.prefixes.add(keys_of(LONG[:21]))
    c.prefixes.add(keys_of(LONG[:9]))
    assert place(engines, LONG) == "b"
    assert place(engines, list(range(50, 90))) == "a", "unknown: no load, nothing placed"
    a.num_sequences = b.num_sequences = 0
    c.num_sequences = 1
    for engine in engines:
        engine.prefixes.add(keys_of([7] * 9))
    a.num_placed = 5
    assert place(engines, [7] * 9) == "b", "equal prefixes, equal loads: fewer requests so far"
    assert place(engines, [7] * 9) == "a"


def test_the_bound_on_load_is_tight_for_what_many_begin_with() -> None:
    a, b = engines = [Engine("a"), Engine("b")]
    a.prefixes.add(keys_of(LONG))
    names = [place(engines, [*LONG[:20], *[50 + number] * 9]) for number in range(8)]
    assert names == ["a", "a", "b", "b", "a", "b", "a", "b"], "soon it is everywhere"
    assert not a.prefixes.is_own(keys_of([*LONG[:20], *[99] * 9]))
    b.prefixes.clear()
    question = keys_of([*LONG[:20], *[99] * 9])
    a.num_sequences, b.num_sequences = LOAD_FACTOR * 10 + LOAD_FACTOR - 1, 10
    assert choose(engines, question, 1) is a
    a.num_sequences += 1
    assert choose(engines, question, 1) is b


def test_the_bound_on_load_is_loose_for_a_conversation() -> None:
    a, b = engines = [Engine("a"), Engine("b")]
    a.prefixes.add(keys_of(LONG))
    turn = keys_of([*LONG, *range(60, 90)])
    assert a.prefixes.is_own(turn) and not b.prefixes.is_own(turn)
    a.num_sequences = LOAD_FACTOR - 1 + OWN_LOAD
    assert choose(engines, turn, 1) is a
    a.num_sequences += 1
    assert choose(engines, turn, 1) is b


def test_all_sequences_of_a_request_count() -> None:
    a, b = engines = [Engine("a"), Engine("b")]
    a.prefixes.add(keys_of(LONG))
    assert place(engines, LONG, num_sequences=8) == "a"
    assert place(engines, LONG[:20] + [99] * 9, num_sequences=1) == "b"
    b.prefixes.clear()
    assert choose(engines, keys_of(LONG), 8) is a, "8 more on either: 16 are within the bound"


def test_a_dead_engine_is_no_candidate_and_a_new_one_knows_nothing() -> None:
    a, b = Engine("a"), Engine("b")
    a.prefixes.add(keys_of(LONG))
    assert place([a, b], LONG) == "a"
    assert place([b], LONG) == "b", "a is dead"
    a.prefixes.clear()
    assert place([a, b], LONG) == "b", "a is back: what it had is lost"


def test_what_is_remembered_is_bounded_and_leaves_by_use() -> None:
    prefixes = SentPrefixes(20)
    first, second = keys_of([1] * 41), keys_of([2] * 41)
    prefixes.add(first)
    prefixes.add(second)
    assert len(prefixes) == 20 and prefixes.num_known(first) == prefixes.num_known(second) == 10
    prefixes.add(first[:5])
    prefixes.add(keys_of([3] * 41))
    assert len(prefixes) == 20
    assert prefixes.num_known(first) == 5, "its use is what counts, and its end left first"
    assert prefixes.num_known(second) == 5
    prefixes.add(keys_of([4] * 400))
    assert len(prefixes) == 20 and prefixes.num_known(keys_of([4] * 400)) == 20


def test_conversations_stay_where_they_are() -> None:
    """Twelve at a time on three engines: a turn that ends is followed by another conversation's."""
    draw = random.Random(5)
    engines = {name: Engine(name, prefixes=SentPrefixes(10_000)) for name in "abc"}
    texts = {number: [*[1] * 16, number + 2] for number in range(16)}
    places: dict[int, list[str]] = {number: [] for number in texts}
    running: list[int] = []
    for _ in range(400):
        if len(running) == 12:
            ended = running.pop(draw.randrange(12))
            engines[places[ended][-1]].num_sequences -= 1
        number = draw.choice([number for number in texts if number not in running])
        running.append(number)
        places[number].append(place([*engines.values()], texts[number]))
        texts[number] += draw.choices(range(100), k=30)
    turns = [pair for names in places.values() for pair in itertools.pairwise(names)]
    num_moves = sum(before != after for before, after in turns)
    assert num_moves < 0.05 * len(turns)
    assert {names[-1] for names in places.values()} == set(engines)
