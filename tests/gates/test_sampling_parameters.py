"""Every sampling parameter acts the same with speculation: tokens, log-probabilities, ends."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import msgspec
import pytest

from openspec.messages import SamplingParams
from tests.gates.conftest import Reference, drafter_settings
from tests.gates.harness import Job, make_core, run, run_alone, texts, tokenizer
from tests.gates.workload import jobs


def frequent_ids() -> list[int]:
    """Ids that the answers are full of, so that touching them matters."""
    return [
        token_id
        for text in (" the", ",", "\n", " =", " value", "    ", ".", " in")
        for token_id in tokenizer().encode(text)[:1]
    ]


def parameters() -> dict[str, dict[str, object]]:
    common = frequent_ids()
    return {
        "temperature": {"temperature": 1.7},
        "top_k": {"temperature": 1.0, "top_k": 3},
        "top_k_1": {"temperature": 1.0, "top_k": 1},
        "top_p": {"temperature": 1.0, "top_p": 0.3},
        "min_p": {"temperature": 1.0, "min_p": 0.2},
        "all_filters": {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
        "presence_penalty": {"presence_penalty": 1.3},
        "frequency_penalty": {"frequency_penalty": 0.8},
        "negative_penalties": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "all_penalties": {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
        },
        "logit_bias": {"logit_bias": {common[0]: -100.0, common[1]: 4.0, common[3]: -3.5}},
        "allowed_token_ids": {"allowed_token_ids": sorted({*common, *range(300, 700)})},
        "bad_words": {"bad_word_ids": [*([one, other] for one in common for other in common[:4])]},
        "bad_words_of_one_token": {"bad_word_ids": [[token_id] for token_id in common[::2]]},
        "min_tokens": {"min_tokens": 25, "stop_token_ids": common},
        "stop_token_ids": {"stop_token_ids": common},
        "ignore_eos": {"ignore_eos": True, "max_tokens": 90},
        "logprobs": {"logprobs": 5},
        "logprobs_of_the_chosen_only": {"logprobs": 0},
        "processed_logprobs": {"logprobs": 20, "logprobs_mode": "processed", "top_p": 0.7},
        "prompt_logprobs": {"prompt_logprobs": 3, "logprobs": 1},
    }


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", [pytest.param("greedy", marks=pytest.mark.full), "sampled"])
@pytest.mark.parametrize("name", parameters())
def test_parameter(drafter_name: str, name: str, kind: str, reference: Reference) -> None:
    changes = parameters()[name]
    batch = [
        dataclasses.replace(job, sampling=msgspec.structs.replace(job.sampling, **changes))
        for job in jobs(kind, 8)
    ]
    core = make_core(**drafter_settings(drafter_name))
    results, expected = run(core, batch), reference(batch)
    assert texts(results) == texts(expected)
    # Bit for bit, as floats.
    assert [one.logprobs for one in results] == [one.logprobs for one in expected]
    assert [one.prompt_logprobs for one in results] == [one.prompt_logprobs for one in expected]
    for result in results:
        for entry in result.prompt_logprobs:
            assert list(entry.logprobs[1:]) == sorted(entry.logprobs[1:], reverse=True)
            assert len({*entry.token_ids[1:]}) == changes.get("prompt_logprobs")


def test_every_parameter_matters(reference: Reference) -> None:
    """The table above would show nothing if a parameter did not change some answer."""
    unchanged = {"logprobs", "logprobs_of_the_chosen_only", "prompt_logprobs"}
    for name, changes in parameters().items():
        for kind in ("sampled", "greedy"):
            before = jobs(kind, 8)
            after = [
                dataclasses.replace(job, sampling=msgspec.structs.replace(job.sampling, **changes))
                for job in before
            ]
            if texts(reference(after)) != texts(reference(before)):
                break
        else:
            assert name in unchanged, f"{name} changes nothing"


@pytest.mark.by_turns
def test_all_parameters_in_one_batch(drafter_name: str, reference: Reference) -> None:
    batch = []
    for i, changes in enumerate(parameters().values()):
        job = jobs("mixed", 16)[i % 16]
        batch.append(
            dataclasses.replace(job, sampling=msgspec.structs.replace(job.sampling, **changes))
        )
    results = run(make_core(**drafter_settings(drafter_name)), batch)
    expected = reference(batch)
    assert texts(results) == texts(expected)
    assert [one.logprobs for one in results] == [one.logprobs for one in expected]
    assert [one.prompt_logprobs for one in results] == [one.prompt_logprobs for one in expected]


@pytest.mark.by_turns
def test_bad_words_are_never_said(drafter_name: str, reference: Reference) -> None:
    """What each answer says most, two tokens after each other, is forbidden it."""
    before = jobs("mixed", 8)
    after: list[Job] = []
    for job, said in zip(before, reference(before), strict=True):
        pairs = Counter(itertools.pairwise([job.prompt[-1], *said.token_ids]))
        words = [list(pair) for pair, _ in pairs.most_common(5)]
        sampling = msgspec.structs.replace(job.sampling, bad_word_ids=words)
        after.append(dataclasses.replace(job, sampling=sampling))
    results = run(make_core(**drafter_settings(drafter_name)), after)
    assert texts(results) == texts(reference(after))
    for job, result in zip(after, results, strict=True):
        pairs = Counter(itertools.pairwise([job.prompt[-1], *result.token_ids]))
        assert not any(pairs[one, other] for one, other in job.sampling.bad_word_ids)


@pytest.mark.by_turns
def test_nothing_left_to_say(drafter_name: str, reference: Reference) -> None:
    """After one of three tokens nothing may follow, or only an end that comes too early."""
    batch = []
    for index, job in enumerate(jobs("mixed", 8)):
        limits: dict[str, object] = {
            "allowed_token_ids": [300, 301, 302],
            "bad_word_ids": [[301, other] for other in (300, 301, 302)],
        }
        if index % 3 == 0:
            limits |= {"stop_token_ids": [302], "min_tokens": 30}
        sampling = msgspec.structs.replace(job.sampling, **limits)
        batch.append(dataclasses.replace(job, sampling=sampling))
    results = run(make_core(**drafter_settings(drafter_name)), batch)
    assert texts(results) == texts(reference(batch))
    assert {300, 301, 302}.issuperset(itertools.chain(*(one.token_ids for one in results)))
    for result in results:
        assert (result.finish_reason == "error") == (result.token_ids[-1:] == [301])
        assert (result.error is not None) == (result.finish_reason == "error")
    assert any(result.error for result in results)


@pytest.mark.by_turns
def test_seed_alone_decides(drafter_name: str) -> None:
    """The same seed gives the same text in any company; another seed gives another text."""
    prompt = jobs("sampled", 9)[8].prompt
    core = make_core(**drafter_settings(drafter_name))

    def sample(seed: int, company: int) -> list[int]:
        job = Job(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=30))
        return run(core, [job, *jobs("sampled", company)])[0].token_ids

    assert sample(1, 0) == sample(1, 5) == sample(1, 12)
    assert sample(1, 0) != sample(2, 0)


def test_logprobs_are_log_probabilities(reference: Reference) -> None:
    """Raw ones come from the model, processed ones from what the token was drawn from."""
    job = jobs("sampled", 9)[8]
    base = SamplingParams(temperature=0.7, top_k=4, seed=3, max_tokens=20, logprobs=20)
    raw = reference([dataclasses.replace(job, sampling=base)])[0]
    drawn = reference(
        [
            dataclasses.replace(
                job, sampling=msgspec.structs.replace(base, logprobs_mode="processed")
            )
        ]
    )[0]
    assert raw.token_ids == drawn.token_ids
    for token_id, of_model, of_draw in zip(
        raw.token_ids, raw.logprobs, drawn.logprobs, strict=True
    ):
        assert of_model.token_ids[0] == of_draw.token_ids[0] == token_id
        assert of_model.rank <= 4
        assert list(of_model.logprobs[1:]) == sorted(of_model.logprobs[1:], reverse=True)
        # The chosen one's value is the very one it has among the best.
        at = of_model.token_ids.index(token_id, 1)
        assert of_model.logprobs[at] == of_model.logprobs[0]
        # Four tokens are left after top_k: their probabilities make one.
        kept = [value for value in of_draw.logprobs[1:] if value > -1e30]
        assert len(kept) == 4
        assert abs(sum(2.718281828459045**value for value in kept) - 1.0) < 1e-5


def test_alone_equals_reference_core(reference: Reference) -> None:
    """The reference itself: two plain engines agree."""
    batch = jobs("mixed", 4)
    assert texts(run_alone(make_core(method="none"), batch)) == texts(reference(batch))
