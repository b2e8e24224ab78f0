"""Drafts under a grammar: where thoughts and answers end, what is refused, what is forced."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from openspec import _C
from openspec.messages import SamplingParams
from tests.gates import harness
from tests.gates.grammars import (
    PLAINLY,
    ebnf,
    grammar_core,
    grammar_jobs,
    plain,
    plain_core,
    prompts,
    tokens,
)
from tests.gates.harness import Job, run, run_alone, texts
from tests.gates.workload import sampling


class Script(_C.Drafter):
    """Drafts the answers it was given, with trees of a wrong sibling before each right token."""

    def __init__(self, answers: list[list[int]], has_siblings: bool) -> None:
        super().__init__()
        self.answers = answers
        self.has_siblings = has_siblings

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[tuple[int, int]]:
        for answer in self.answers:
            if len(answer) > len(token_ids) and answer[: len(token_ids)] == token_ids:
                nodes: list[tuple[int, int]] = []
                parent = -1
                for token in answer[len(token_ids) :]:
                    if self.has_siblings:
                        nodes.append(((token + 1) % 4000, parent))
                    nodes.append((token, parent))
                    parent = len(nodes) - 1
                return nodes[:num_wanted]
        return []


@pytest.mark.parametrize("has_siblings", [False, True], ids=["chain", "tree"])
def test_reasoning_ends_inside_a_drafted_run(has_siblings: bool) -> None:
    """The rows behind `</think>` know that it is among the drafts before them."""
    end_of_thoughts = tokens()[0].index(b"</think>")
    # The bias brings the end of thoughts about: by itself the model thinks too long for a test.
    job = Job(
        prompt=prompts()[4],
        sampling=SamplingParams(
            temperature=0.0, seed=1, max_tokens=60, logit_bias={end_of_thoughts: 12.0}
        ),
        grammar="structural_tag",
    )
    [expected] = plain([job])
    assert end_of_thoughts in expected.token_ids[:-8], "thoughts that never end show nothing"
    answers = [[*job.prompt, *expected.token_ids]]
    for num_drafts in (3, 7, 15):
        core = grammar_core(
            method="ngram",
            num_speculative_tokens=num_drafts,
            drafter=Script(answers, has_siblings),
            adaptive_speculation=False,
        )
        assert run(core, [job])[0].text == expected.text
        stats = core.stats()
        assert stats.num_accepted_tokens > len(expected.token_ids) // 3


def test_refused_drafts_are_counted() -> None:
    """Drafts that the grammar refuses have no rows, and are drafted and not accepted."""

    class Garbage(_C.Drafter):
        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            return [tokens()[0].index(b"}")] * num_wanted

    job = dataclasses.replace(grammar_jobs("choice", "greedy", 1)[0], arrives_at=0)
    core = grammar_core(
        method="ngram", num_speculative_tokens=4, drafter=Garbage(), adaptive_speculation=False
    )
    assert texts(run(core, [job])) == texts(plain([job]))
    stats = core.stats()
    assert stats.num_draft_tokens - stats.num_forced_tokens >= 4
    assert stats.num_accepted_tokens == stats.num_accepted_forced_tokens


@pytest.mark.parametrize("grammar", ["choice", "json_schema"])
@pytest.mark.parametrize("has_siblings", [False, True], ids=["chain", "tree"])
def test_nothing_is_read_behind_the_end(grammar: str, has_siblings: bool) -> None:
    """Drafts go on behind the end of an answer: no row is theirs, and the answer ends there."""
    [end] = tokens()[2]
    batch = [
        dataclasses.replace(job, grammar=grammar, arrives_at=0)
        for job in grammar_jobs(grammar, "mixed", 4, max_tokens=120)
    ]
    expected = plain(batch)
    assert any(result.finish_reason == "stop" for result in expected)
    for behind in ([end] * 8, [300, end, 301, 302, 303, 304, 305, 306]):
        answers = [
            [*job.prompt, *result.token_ids, *behind]
            for job, result in zip(batch, expected, strict=True)
        ]
        core = grammar_core(
            method="ngram",
            num_speculative_tokens=15,
            drafter=Script(answers, has_siblings),
            adaptive_speculation=False,
        )
        results = run(core, batch)
        assert texts(results) == texts(expected)
        for result in results:
            assert end not in result.token_ids[:-1]
        core.check_integrity()
        # The engine serves others with the same grammar as it did.
        assert texts(run(core, batch)) == texts(expected)


class Silent(_C.Drafter):
    """Never drafts."""


SENTENCE = 'root ::= "The answer to the question is " [0-9]{1,3} ", and nothing else."'


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "always"])
@pytest.mark.parametrize("method", ["none", "silent", "ngram"])
def test_forced_tokens_are_drafts(method: str, adaptive: bool) -> None:
    """What the grammar leaves no choice of is drafted without any drafter, and counted apart."""
    data = ebnf(SENTENCE)
    for kind in ("greedy", "sampled"):
        job = Job(prompts()[2], sampling(kind, 0, 40), grammar="sentence")
        without_drafts = plain_core(harness.MODEL)
        without_drafts.grammars.load_grammar("sentence", data)
        settings: dict[str, object] = {"method": "none"}
        if method != "none":
            settings = {"method": "ngram", "num_speculative_tokens": 4}
        core = grammar_core(
            **settings,
            drafter=Silent() if method == "silent" else None,
            adaptive_speculation=adaptive,
        )
        core.grammars.load_grammar("sentence", data)
        [result] = run(core, [job])
        [expected] = run_alone(without_drafts, [dataclasses.replace(job, speculative=PLAINLY)])
        assert result.text == expected.text
        assert result.finish_reason == "stop"
        stats = core.stats()
        assert stats.num_accepted_forced_tokens <= stats.num_forced_tokens > 0
        if method != "ngram":
            assert stats.num_draft_tokens == stats.num_forced_tokens
            assert stats.num_accepted_tokens == stats.num_accepted_forced_tokens
        if not adaptive:
            assert stats.num_accepted_forced_tokens >= 8
            assert len(result.token_ids) > stats.num_steps + 6


def test_a_drafter_goes_on_after_what_a_grammar_offers() -> None:
    job = Job(prompts()[2], sampling("greedy", 0, 40), grammar="sentence")
    core = plain_core(harness.MODEL)
    data = ebnf(SENTENCE)
    core.grammars.load_grammar("sentence", data)
    [expected] = run(core, [job])
    knowing = grammar_core(
        method="ngram",
        num_speculative_tokens=15,
        drafter=Script([[*job.prompt, *expected.token_ids]], has_siblings=False),
        adaptive_speculation=False,
    )
    knowing.grammars.load_grammar("sentence", data)
    # The first answer shows how the model spells what the grammar offers.
    assert run(knowing, [job])[0].text == expected.text
    before = copy.deepcopy(knowing.stats())
    assert run(knowing, [job])[0].text == expected.text
    after = knowing.stats()
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    num_of_grammar = after.num_accepted_forced_tokens - before.num_accepted_forced_tokens
    assert num_accepted > num_of_grammar > 0
    assert num_accepted > len(expected.token_ids) // 2


def test_a_grammar_refuses_all_that_could_be_copied() -> None:
    """The text goes on as it did before, but for a sign that the answer may not have."""
    five, sign = tokens()[0].index(b"5"), tokens()[0].index(b";")
    often = SamplingParams(temperature=0.0, seed=1, max_tokens=12, logit_bias={five: 100.0})
    job = Job((*[five] * 16, sign), often, grammar="digits")
    data = ebnf("root ::= [56]{30}")
    answers = []
    for settings in (harness.PLAIN, {"method": "eagle3", "copied_drafts": True}):
        core = grammar_core(**settings, adaptive_speculation=False)
        core.grammars.load_grammar("digits", data)
        answers.append(texts(run(core, [job])))
    assert answers[0] == answers[1]
