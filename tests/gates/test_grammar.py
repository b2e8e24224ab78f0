"""Grammars: answers equal plain decoding's, and a matcher of its own agrees with each."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import jsonschema_rs
import msgspec
import numpy as np
import pytest

from openspec import _C, _grammar
from openspec.errors import RequestError
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions
from tests.gates import harness
from tests.gates.conftest import drafter_settings
from tests.gates.grammars import (
    KINDS,
    PERSON_WITH_MOTTO,
    check_answer,
    compiled,
    grammar_core,
    prompts,
    tokens,
    vocabulary,
)
from tests.gates.harness import Job, Result, kv_memory, run, run_alone, texts
from tests.gates.workload import jobs, sampling

PLAINLY = SpeculativeOptions(enabled=False)


def grammar_jobs(grammar: str, kind: str, num_jobs: int, max_tokens: int = 48) -> list[Job]:
    """Requests of one grammar; every third has none."""
    return [
        Job(
            prompt=prompts()[index % len(prompts())],
            sampling=sampling(kind, index, max_tokens - index % 7),
            arrives_at=(index * 3) % 11,
            grammar="" if index % 3 == 2 else grammar,
        )
        for index in range(num_jobs)
    ]


@cache
def _plain_core(model: str | None) -> object:
    return grammar_core(**harness.PLAIN)


_ANSWERS: dict[tuple[str | None, str], Result] = {}


def plain(batch: list[Job]) -> list[Result]:
    """Plain decoding's answers, one request at a time; each is checked by itself."""
    core = _plain_core(harness.MODEL)
    results = []
    for job in batch:
        # Without drafts of any kind, tokens that the grammar forces included.
        same = dataclasses.replace(
            job, arrives_at=0, abort_after=None, priority=0, speculative=PLAINLY
        )
        key = (harness.MODEL, repr(same))
        if key not in _ANSWERS:
            [_ANSWERS[key]] = run_alone(core, [same])  # type: ignore[arg-type]
            if job.grammar:
                check_answer(job, _ANSWERS[key])
        results.append(_ANSWERS[key])
    return results


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("grammar", KINDS)
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_grammar(drafter_name: str, grammar: str, kind: str, concurrency: int) -> None:
    batch = grammar_jobs(grammar, kind, max(concurrency, 3))
    settings = drafter_settings(drafter_name)
    core = grammar_core(**settings, max_num_seqs=concurrency)
    assert texts(run(core, batch)) == texts(plain(batch))


@pytest.mark.parametrize("grammar", ["json_schema", "structural_tag"])
def test_preemption_and_prefix_hits(drafter_name: str, grammar: str) -> None:
    """State is made anew where a request resumes, and where its prompt is found in the cache."""
    batch = grammar_jobs(grammar, "mixed", 12)
    settings = drafter_settings(drafter_name)
    core = grammar_core(
        **settings, kv_cache_memory=kv_memory(16, **settings), max_model_len=160, page_size=16
    )
    assert texts(run(core, batch)) == texts(plain(batch))
    assert texts(run(core, batch)) == texts(plain(batch))
    assert core.stats().prefix_cache_hits > 0


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


class Silent(_C.Drafter):
    """Never drafts."""


SENTENCE = 'root ::= "The answer to the question is " [0-9]{1,3} ", and nothing else."'


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "always"])
@pytest.mark.parametrize("method", ["none", "silent", "ngram"])
def test_forced_tokens_are_drafts(method: str, adaptive: bool) -> None:
    """What the grammar leaves no choice of is drafted without any drafter, and counted apart."""
    data = _grammar.compile_ebnf(vocabulary(), SENTENCE)
    for kind in ("greedy", "sampled"):
        job = Job(prompts()[2], sampling(kind, 0, 40), grammar="sentence")
        plain_core = _plain_core(harness.MODEL)
        plain_core.load_grammar("sentence", data)  # type: ignore[attr-defined]
        settings: dict[str, object] = {"method": "none"}
        if method != "none":
            settings = {"method": "ngram", "num_speculative_tokens": 4}
        core = grammar_core(
            **settings,
            drafter=Silent() if method == "silent" else None,
            adaptive_speculation=adaptive,
        )
        core.load_grammar("sentence", data)
        [result] = run(core, [job])
        [expected] = run_alone(plain_core, [dataclasses.replace(job, speculative=PLAINLY)])  # type: ignore[arg-type]
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


def test_a_draft_that_has_the_forced_tokens_stays_the_drafters() -> None:
    job = Job(prompts()[2], sampling("greedy", 0, 40), grammar="sentence")
    core = _plain_core(harness.MODEL)
    data = _grammar.compile_ebnf(vocabulary(), SENTENCE)
    core.load_grammar("sentence", data)  # type: ignore[attr-defined]
    [expected] = run(core, [job])  # type: ignore[arg-type]
    knowing = grammar_core(
        method="ngram",
        num_speculative_tokens=4,
        drafter=Script([[*job.prompt, *expected.token_ids]], has_siblings=False),
        adaptive_speculation=False,
    )
    knowing.load_grammar("sentence", data)
    assert run(knowing, [job])[0].text == expected.text
    stats = knowing.stats()
    # All but the last drafts of the answer are the drafter's. On CUDA they have to go on behind
    # what is forced, for which there is no room here.
    if harness.DEVICE == "cpu":
        assert stats.num_forced_tokens <= 4
    assert stats.num_accepted_tokens > len(expected.token_ids) // 2


CHANGES: dict[str, dict[str, object]] = {
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"logit_bias": {300: 4.0, 301: -100.0}},
    "min_tokens": {"min_tokens": 20},
    "logprobs": {"logprobs": 5},
    "processed_logprobs": {"logprobs": 20, "logprobs_mode": "processed", "top_p": 0.7},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_with_other_parameters(drafter_name: str, kind: str) -> None:
    """Each set of parameters, by turns under each kind of grammar."""
    batch = [
        dataclasses.replace(
            job,
            sampling=msgspec.structs.replace(job.sampling, **changes),
            grammar=KINDS[index % len(KINDS)],
        )
        for index, (job, changes) in enumerate(
            zip(grammar_jobs("", kind, len(CHANGES)), CHANGES.values(), strict=True)
        )
    ]
    results = run(grammar_core(**drafter_settings(drafter_name)), batch)
    expected = plain(batch)
    assert texts(results) == texts(expected)
    assert [one.logprobs for one in results] == [one.logprobs for one in expected]


def test_rejection_judges_grammars_by_match() -> None:
    """With rejection sampling a request with a grammar has plain decoding's text still."""
    batch = grammar_jobs("json_schema", "sampled", 6)
    settings = {**drafter_settings("eagle3"), "acceptance": "rejection"}
    results = run(grammar_core(**settings), batch)
    for job, result, expected in zip(batch, results, plain(batch), strict=True):
        if job.grammar:
            assert result.text == expected.text


@pytest.mark.parametrize("grammar", KINDS)
def test_choice_is_the_best_that_a_matcher_allows(grammar: str) -> None:
    """Plain decoding beside argmax over the model's logits with a mask made here."""
    if harness.DEVICE != "cpu":
        pytest.skip("logits of a step are read where steps end at once")
    core = _plain_core(None)
    matcher = _grammar.Matcher(vocabulary(), compiled(grammar))
    job = dataclasses.replace(grammar_jobs(grammar, "greedy", 1)[0], arrives_at=0)
    core.add_request(  # type: ignore[attr-defined]
        EngineRequest(
            request_id="r",
            prompt_token_ids=list(job.prompt),
            sampling=job.sampling,
            speculative=PLAINLY,
            grammar=grammar,
        )
    )
    num_seen = 0
    while core.has_work:  # type: ignore[attr-defined]
        for output in core.step():  # type: ignore[attr-defined]
            [token] = output.token_ids
            logits = np.array(core._runner.last_logits()[-1])  # type: ignore[attr-defined]
            allowed = np.unpackbits(
                np.frombuffer(matcher.bitmask(), dtype=np.uint8), bitorder="little"
            )[: len(logits)].astype(bool)
            assert token == int(np.argmax(np.where(allowed, logits, -np.inf)))
            assert matcher.accept(token)
            num_seen += 1
    assert num_seen > 0


def test_answers_validate() -> None:
    """Finished answers of the schema, as another validator reads them."""
    batch = [
        dataclasses.replace(job, grammar="json_schema")
        for job in grammar_jobs("json_schema", "sampled", 10, max_tokens=90)
    ]
    num_finished = 0
    for result in plain(batch):
        if result.finish_reason == "stop":
            text = b"".join(tokens()[0][token] for token in result.token_ids[:-1])
            assert jsonschema_rs.is_valid(PERSON_WITH_MOTTO, json.loads(text)), text
            num_finished += 1
    assert num_finished >= 8


@pytest.mark.parametrize(
    ("changes", "said", "finish"),
    [
        # The grammar is done before min_tokens: it wins.
        ({"min_tokens": 30}, None, "stop"),
        # No token is left that both allow: the answer ends there, by its end token.
        ({"allowed_token_ids": [300, 301]}, [], "stop"),
    ],
    ids=["min_tokens", "allowed_token_ids"],
)
def test_where_nothing_is_left(
    changes: dict[str, object], said: list[int] | None, finish: str
) -> None:
    job = dataclasses.replace(grammar_jobs("choice", "greedy", 1)[0], arrives_at=0)
    sampling = msgspec.structs.replace(job.sampling, **changes)
    for settings in (harness.PLAIN, drafter_settings("ngram")):
        core = grammar_core(**settings)
        [result] = run(core, [dataclasses.replace(job, sampling=sampling)])
        assert result.finish_reason == finish
        assert result.token_ids[-1] == tokens()[2][0]
        if said is not None:
            assert result.token_ids[:-1] == said


@pytest.mark.parametrize("drafter", ["none", "eagle3 tree"])
def test_cancellation(drafter: str) -> None:
    """Requests that are called off leave others, and their grammar, alone."""
    batch = [
        dataclasses.replace(job, abort_after=1 + index if index % 2 else None)
        for index, job in enumerate(grammar_jobs("json_schema", "mixed", 8))
    ]
    results = run(grammar_core(**drafter_settings(drafter)), batch)
    for result, expected in zip(results, plain(batch), strict=True):
        if result.finish_reason == "abort":
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            assert result.text == expected.text


def test_grammars_by_key() -> None:
    """A dropped grammar serves those that have it, and nobody after them."""
    core = grammar_core(**harness.PLAIN)
    job = dataclasses.replace(grammar_jobs("regex", "greedy", 1)[0], arrives_at=0)
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=list(job.prompt),
        sampling=job.sampling,
        grammar="regex",
    )
    core.add_request(request)
    core.drop_grammar("regex")
    core.drop_grammar("never loaded")
    said: list[int] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None
            said += output.token_ids
    assert said == plain([job])[0].token_ids
    with pytest.raises(RequestError, match="grammar 'regex' is not loaded"):
        core.add_request(msgspec.structs.replace(request, request_id="s"))
    assert texts(run(core, list(jobs("mixed", 2)))) == texts(run(core, list(jobs("mixed", 2))))


def test_a_grammar_that_cannot_be_read_ends_its_requests() -> None:
    core = grammar_core(**harness.PLAIN)
    core.load_grammar("broken", b"{}")
    job = dataclasses.replace(grammar_jobs("broken", "greedy", 1)[0], arrives_at=0)
    [broken, other] = run(core, [job, dataclasses.replace(job, grammar="")])
    assert broken.finish_reason == "error"
    assert broken.error is not None and "not a compiled grammar" in broken.error
    assert other.finish_reason in ("stop", "length")
