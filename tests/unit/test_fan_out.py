from __future__ import annotations

import pytest

from openspec.engine.core.fan_out import engine_request, fan_out, sequence_ids
from openspec.errors import RequestError
from openspec.messages import SamplingParams, SpeculativeOptions


def test_n_sequences() -> None:
    sampling = SamplingParams(n=3, seed=5, stop_token_ids=[8], prompt_logprobs=1)
    request = engine_request(
        "r", [1, 2], sampling, (7, 8), bad_word_ids=[], priority=2, cache_salt="s"
    )
    sequences = fan_out(request)
    assert [one.request_id for one in sequences] == sequence_ids(request) == ["r-0", "r-1", "r-2"]
    assert [one.sampling.seed for one in sequences] == [5, 6, 7]
    assert [one.sampling.prompt_logprobs for one in sequences] == [1, None, None]
    for one in sequences:
        assert one.prompt_token_ids is request.prompt_token_ids
        assert one.sampling.n == 1 and one.sampling.stop_token_ids == [8, 7]
        assert (one.priority, one.cache_salt) == (2, "s")
        assert one.speculative == SpeculativeOptions()
        one.sampling.check(100)


def test_seeds() -> None:
    def seeds(seed: int | None, default: int | None = None) -> list[int | None]:
        sampling = SamplingParams(n=2, seed=seed)
        request = engine_request("r", [1], sampling, (), bad_word_ids=[], default_seed=default)
        return [one.sampling.seed for one in fan_out(request)]

    assert seeds(None) != seeds(None)
    assert seeds(None, 3) == [3, 4] and seeds(1, 3) == [1, 2]
    assert seeds(2**63 - 1) == [2**63 - 1, -(2**63)], "wraps within 64 bits"
    for _ in range(100):
        assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds(None))


def test_ignore_eos() -> None:
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=[8])
    request = engine_request("r", [1], sampling, (7,), bad_word_ids=[])
    assert request.sampling.stop_token_ids == [8]


def test_what_is_sent_with_every_completion_has_a_limit() -> None:
    SamplingParams(n=128, allowed_token_ids=[0] * (1 << 14)).check(1)
    with pytest.raises(RequestError, match="at most 2097152 allowed_token_ids"):
        SamplingParams(n=128, allowed_token_ids=[0] * ((1 << 14) + 1)).check(1)


def test_bad_words_join_those_in_ids() -> None:
    sampling = SamplingParams(bad_words=["no"], bad_word_ids=[[7]])
    request = engine_request("r", [1], sampling, (), bad_word_ids=[[1, 2], [3, 2]])
    assert request.sampling.bad_word_ids == [[7], [1, 2], [3, 2]]


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [""]},
        {"bad_words": ["  "]},
        {"bad_words": ["x" * 1025]},
        {"bad_words": ["x"] * 1025},
        {"bad_word_ids": [[]]},
        {"bad_word_ids": [[100]]},
        {"bad_word_ids": [[1, -1]]},
    ],
)
def test_bad_words_that_cannot_be(fields: dict[str, list[str]]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**fields).check(100)  # type: ignore[arg-type]
