"""Grammars: answers equal plain decoding's, and a matcher of its own agrees with each."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest

from openspec import _grammar
from openspec.errors import RequestError
from openspec.messages import EngineRequest
from tests.gates import harness
from tests.gates.conftest import drafter_settings
from tests.gates.grammars import (
    KINDS,
    PERSON_WITH_MOTTO,
    PLAINLY,
    compiled,
    grammar_core,
    grammar_jobs,
    plain,
    plain_core,
    tokens,
    vocabulary,
)
from tests.gates.harness import kv_memory, run, texts
from tests.gates.workload import jobs

jsonschema_rs = harness.imported("jsonschema_rs")


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("grammar", KINDS)
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_grammar(drafter_name: str, grammar: str, kind: str, concurrency: int) -> None:
    batch = grammar_jobs(grammar, kind, max(concurrency, 3))
    settings = drafter_settings(drafter_name)
    core = grammar_core(**settings, max_num_seqs=concurrency)
    assert texts(run(core, batch)) == texts(plain(batch))


@pytest.mark.by_turns
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


CHANGES: dict[str, dict[str, object]] = {
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"logit_bias": {300: 4.0, 301: -100.0}},
    "logprobs": {"logprobs": 5},
    "processed_logprobs": {"logprobs": 20, "logprobs_mode": "processed", "top_p": 0.7},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.mark.by_turns
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
    core = plain_core(None)
    matcher = _grammar.Matcher(vocabulary(), compiled(grammar))
    job = dataclasses.replace(grammar_jobs(grammar, "greedy", 1)[0], arrives_at=0)
    core.add_request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=list(job.prompt),
            sampling=job.sampling,
            speculative=PLAINLY,
            grammar=grammar,
        )
    )
    num_seen = 0
    while core.has_work:
        for output in core.step():
            [token] = output.token_ids
            logits = np.array(core._runner.last_logits()[-1])
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
    ("changes", "num_said"),
    [
        ({"allowed_token_ids": [300, 301]}, 0),  # none of them begins a day
        # "Tues" and what may follow are forbidden one after the other.
        ({"bad_word_ids": [[token] for token in range(4096) if b"y" in tokens()[0][token]]}, None),
    ],
    ids=["allowed_token_ids", "bad_words"],
)
def test_where_nothing_is_left(changes: dict[str, object], num_said: int | None) -> None:
    """It ends with an error of the request's own, and is no answer."""
    job = dataclasses.replace(grammar_jobs("choice", "greedy", 1)[0], arrives_at=0)
    held = dataclasses.replace(job, sampling=msgspec.structs.replace(job.sampling, **changes))
    for settings in (harness.PLAIN, drafter_settings("ngram")):
        core = grammar_core(**settings)
        [result, other] = run(core, [held, job])
        assert result.finish_reason == "error"
        assert result.error is not None
        assert "allowed_token_ids or bad_words forbid every token" in result.error
        assert len(result.token_ids) == num_said or num_said is None
        assert other.text == plain([job])[0].text


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
    core.grammars.drop_grammar("regex")
    core.grammars.drop_grammar("never loaded")
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
    core.grammars.load_grammar("broken", b"{}")
    job = dataclasses.replace(grammar_jobs("broken", "greedy", 1)[0], arrives_at=0)
    [broken, other] = run(core, [job, dataclasses.replace(job, grammar="")])
    assert broken.finish_reason == "error"
    assert broken.error is not None and "not a compiled grammar" in broken.error
    assert other.finish_reason in ("stop", "length")
