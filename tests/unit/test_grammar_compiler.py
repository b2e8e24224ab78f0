"""Compiling in a process: shared, bounded in processor time, memory and bytes, fair to all."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openspec import _grammar
from openspec.errors import EngineError, RequestError
from openspec.grammar.compiler import MAX_WAITING, GrammarCompiler, GrammarLimits
from openspec.grammar.lanes import MAX_SLOW
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.messages import StructuredOutputs
from openspec.text.grammars.answer_grammar import content_format
from openspec.text.grammars.demand import MAX_DEMAND_BYTES, Demand
from openspec.text.grammars.worker import COMMAND
from tests.unit.grammar_walks import STOP, accepts, tokens

LIMITS = GrammarLimits(timeout_s=10.0, memory=1 << 30, room=256 << 20)
FAKE = (sys.executable, "-m", "tests.unit.fake_grammar_process")

Make = Callable[..., GrammarCompiler]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes compilers of demands in words; `limits` as in `GrammarLimits`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made: list[GrammarCompiler] = []

    def compiler(on_forget: Callable[[str], None] | None = None, **limits: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(FAKE, [b"a"], 1, [0], replace(LIMITS, **limits), on_forget))
        return made[-1]

    yield compiler
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def real() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(COMMAND, tokens(), 4096, [STOP], LIMITS)
    yield compiler
    compiler.close()


def demand(**fields: Any) -> bytes:
    return Demand(content=StructuredOutputs(**fields)).encoded("structured_outputs")


def test_limits_are_shares_of_the_free_memory() -> None:
    limits = GrammarLimits.within(64 << 30, 1 << 30, 5.0)
    assert (limits.timeout_s, limits.memory, limits.room) == (5.0, 8 << 30, 1 << 30)


def test_results_are_kept_up_to_a_size(make: Make) -> None:
    forgotten: list[str] = []
    one = make(forgotten.append, room=1000)
    grammars = [one.compile(b"bytes 250 %d" % number) for number in range(4)]
    assert one.compile(b"bytes 250 0") is grammars[0] and one.num_bytes == 1000
    last = one.compile(b"bytes 250 4")
    assert forgotten == [grammars[1].key] and not one.keeps(grammars[1].key)
    assert one.keeps(last.key) and one.num_kept == 4
    with pytest.raises(RequestError, match="takes 251 bytes, more than 250"):
        one.compile(b"bytes 251")
    one.close()
    with pytest.raises(EngineError, match="closed"):
        one.compile(b"word")


def test_grammars_in_use_count(make: Make) -> None:
    """They stay, whatever else is compiled, and what has no room beside them is refused."""
    forgotten: list[str] = []
    one = make(forgotten.append, room=1000)
    used = [one.compile(b"bytes 250 %d" % number) for number in range(4)]
    for grammar in used:
        one.hold(grammar)
    another = one.compile(b"bytes 250 4")
    assert not forgotten and not one.keeps(another.key)
    with pytest.raises(EngineError) as caught:
        one.hold(another)
    assert caught.value.code == "grammars_full"
    one.release(used[2])
    one.hold(another)
    assert forgotten == [used[2].key] and one.num_bytes == 1000


def test_refusals_name_the_field_that_is_wrong_and_are_known(make: Make) -> None:
    one = make()
    for given, field in ((b"refuse", "guided_json"), (b"refuse tool", "tools")):
        for _ in range(2):
            with pytest.raises(RequestError, match=f"{field}: it is wrong") as caught:
                one.compile(given, "guided_json")
            assert caught.value.param == field


@pytest.mark.parametrize("given", [b"die", b"kill_process"])
def test_what_ended_is_tried_once_more_and_is_nobody_s_fault(
    make: Make, tmp_path: Path, given: bytes
) -> None:
    one, tries = make(), tmp_path / "tries"
    for number in (1, 2):
        with pytest.raises(EngineError, match="the compile process ended") as caught:
            one.compile(given + b" " + os.fsencode(tries))
        assert caught.value.code == "grammar_process_ended"
        assert len(tries.read_text()) == 2 * number
    assert one.compile(b"word").data == b"word"


def test_what_crashes_twice_is_refused(make: Make) -> None:
    one = make()
    with pytest.raises(RequestError, match="x: compiling it breaks off"):
        one.compile(b"crash", "x")
    assert one.compile(b"word").data == b"word"


def test_a_second_try_may_succeed(make: Make, tmp_path: Path) -> None:
    assert make().compile(b"die_once " + os.fsencode(tmp_path / "tries")).num_bytes == 100


def test_a_stopped_process_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.grammar.compiler.SILENCE_S", 1.0)
    one = make()
    one.compile(b"word")
    process = one._process
    assert process is not None and process._popen is not None
    os.kill(process._popen.pid, signal.SIGSTOP)
    assert one.compile(b"another").data == b"another"


def test_processor_time_is_the_limit_and_not_waiting(make: Make) -> None:
    one = make(timeout_s=0.3)
    assert one.compile(b"sleep 1").num_bytes == 100
    for _ in range(2):
        with pytest.raises(RequestError, match=r"longer than 0\.3 s of processor time$"):
            one.compile(b"burn 60")
    assert one.compile(b"word").data == b"word"


def test_too_little_memory_is_a_refusal(make: Make) -> None:
    with pytest.raises(RequestError, match="too much memory"):
        make(memory=64 << 20).compile(b"take 80000000")


def test_what_is_nested_too_deeply_is_a_refusal(make: Make) -> None:
    with pytest.raises(RequestError, match="x: it is nested too deeply"):
        make().compile(b"nest", "x")


def test_equal_requests_share_a_compilation_which_ends_with_the_last(make: Make) -> None:
    one = make()
    tickets = [one.submit(b"sleep 60") for _ in range(3)]
    assert len({id(ticket.future) for ticket in tickets}) == 1
    for ticket in tickets:
        assert len(one._jobs) == 1
        ticket.leave()
    assert not one._jobs and not one._by_key
    # A newer one of the same key is another job.
    again = one.submit(b"sleep 60")
    tickets[0].leave()
    assert again.future is not tickets[0].future and len(one._jobs) == 1


def test_too_many_are_turned_away(make: Make) -> None:
    one = make()
    tickets = [one.submit(b"sleep %d" % (60 + number)) for number in range(MAX_WAITING)]
    with pytest.raises(EngineError) as caught:
        one.submit(b"word")
    assert caught.value.code == "grammars_waiting"
    tickets[0].leave()
    one.submit(b"word")


def processor_s(process: Any) -> float:
    """That all children of a compile process have taken, and itself."""
    fields = Path(f"/proc/{process._popen.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def test_an_innocent_one_waits_little_behind_many_slow_ones(make: Make) -> None:
    """In processor time: two run at a time, and others may have the machine."""
    one = make(timeout_s=20.0)
    one.compile(b"word")
    before = processor_s(one._process)
    for number in range(MAX_WAITING - 1):
        one.submit(b"burn 60 %d" % number)
    ticket = one.submit(b"burn 0.1")
    assert ticket.result("x").data == b"burn 0.1"
    # Of children that have ended; one may be under way, in the slow lane.
    assert processor_s(one._process) - before < 2 * 2.0


@pytest.mark.full
def test_who_is_slow_keeps_no_place_of_a_newcomer_s(make: Make) -> None:
    one = make(timeout_s=400.0)
    waiting = {one.submit(b"burn 60 %d" % number).future for number in range(MAX_SLOW + 4)}
    refused, _ = wait(waiting, return_when=FIRST_COMPLETED)
    assert "longer than 0.25 s" in str(refused.pop().exception())
    assert not one._refused


def test_hanging_up_costs_the_next_nothing(make: Make) -> None:
    """One process serves them all, however many leave in the middle."""
    one = make()
    one.compile(b"word")
    process = one._process
    for number in range(50):
        ticket = one.submit(b"burn 60 %d" % number)
        if number % 3 == 0:
            time.sleep(0.02)
        ticket.leave()
    assert one.compile(b"burn 0.05").num_bytes == 100
    assert one._process is process


def test_a_slow_one_in_a_crowd_is_refused_and_not_remembered(make: Make) -> None:
    one = make(timeout_s=1.0)
    tickets = [one.submit(b"burn 60 %d" % number) for number in range(5)]
    with pytest.raises(RequestError, match="the limit while others wait"):
        tickets[0].result("x")
    assert not one._refused


def test_pipes_are_closed_at_once(make: Make) -> None:
    one = make(timeout_s=0.2)
    one.compile(b"word")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(4):
        with suppress(RequestError):
            one.compile(b"burn 60 %d" % number)
    process = one._process
    assert process is not None
    for _ in range(3):
        process.end()
        one.compile(b"word")
        one.compile(b"bytes 10 %d" % time.monotonic_ns())
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_process_ends_with_its_owner(make: Make) -> None:
    one = make()
    one.submit(b"burn 60")
    one.compile(b"word")
    process = one._process
    assert process is not None and process._popen is not None
    one.close()
    process._popen.wait(10)


def test_demands_are_compiled(real: GrammarCompiler) -> None:
    data = real.compile(demand(choice=["yes", "perhaps"])).data
    assert accepts(data, "yes") and not accepts(data, "no")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grammar": "start ::= 'x'"}, "no valid EBNF at line 1, column"),
        ({"grammar": "root ::= other"}, "the rule other is not defined"),
        ({"json": {"enum": ["a" * 40 + "b"], "pattern": "(a+)+$"}}, "no value fits"),
        ({"json": '{"const": 1e400}'}, "beyond the range"),
        ({"json": '{"const": NaN}'}, "NaN is not a JSON value"),
        ({"json": '{"const": "\\ud800"}'}, "lone surrogate"),
        ({"json": '{"a": 1, "a": 2}'}, "json has a duplicate key"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"structural_tag": '{"format": '}, "structural_tag is not valid JSON"),
    ],
    ids=str,
)
def test_refusals_are_in_our_own_words(
    real: GrammarCompiler, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=f"^guided_x: .*{words}") as caught:
        real.compile(demand(**fields), "guided_x")
    assert caught.value.param == "guided_x" and "xgrammar" not in str(caught.value).lower()


def test_many_lengths_compile_as_budgets() -> None:
    """The process knows how far a token reaches into a text that it opens."""
    longer = [*tokens()[:4000], b"x" * 64, *tokens()[4001:]]
    text_of = {f"f{i}": {"type": "string", "maxLength": 30 + i} for i in range(12)}
    wanted = StructuredOutputs(json={"type": "object", "properties": text_of})
    vocabulary = _grammar.Vocabulary(longer, 4096, [STOP])
    one = GrammarCompiler(COMMAND, longer, 4096, [STOP], LIMITS)
    data = one.compile(Demand(content=wanted).encoded("x")).data
    one.close()
    format = content_format(wanted)
    assert data == compile_format(vocabulary, format, chars_behind_quote(longer))
    assert data != compile_format(vocabulary, format)


def test_demands_are_bounded() -> None:
    with pytest.raises(RequestError, match="json_x: what it demands has"):
        Demand(content=StructuredOutputs(regex="x" * MAX_DEMAND_BYTES)).encoded("json_x")
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        Demand(content=StructuredOutputs(json=deep)).encoded("x")
