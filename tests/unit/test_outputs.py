from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openspec.messages import (
    EngineOutput,
    EngineRequest,
    SamplingParams,
    SpecDecodeStats,
    StepCounts,
    TokenLogprobs,
)
from openspec.text.logprobs import top_logprobs
from openspec.text.outputs import RequestOutputProcessor, request_output
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
EOS = TOKENIZER.special_tokens["<|im_end|>"]
END = TOKENIZER.special_tokens["<|endoftext|>"]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=True)


def processor(**params: object) -> RequestOutputProcessor:
    sampling = SamplingParams(max_tokens=10_000, **params)  # type: ignore[arg-type]
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=sampling)
    return RequestOutputProcessor(request, TOKENIZER, eos_token_ids=[EOS])


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs([i, 7, i], [-0.5 * n, -0.1, -0.5 * n], 2) for n, i in enumerate(token_ids)
    ]


@dataclass
class Expected:
    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None


def oracle(token_ids: list[int], finish_reason: str | None, params: SamplingParams) -> Expected:
    """One token at a time, everything decoded again for each, stop strings by searching."""

    def decoded(count: int) -> str:
        """The certain text of the first tokens: as bytes, without an unfinished character."""
        data = b"".join(
            TOKENIZER.output_bytes(i, params.skip_special_tokens) for i in token_ids[:count]
        )
        for cut in range(4):
            head = data[: len(data) - cut]
            if cut and head.decode(errors="replace") + "\ufffd" != data.decode(errors="replace"):
                continue
            try:
                data[len(data) - cut :].decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data" and error.start == 0:
                    return head.decode(errors="replace")
        return data.decode(errors="replace")

    def whole(count: int) -> str:
        return TOKENIZER.decode(token_ids[:count], skip_special_tokens=params.skip_special_tokens)

    num = len(token_ids)
    is_silent = finish_reason == "stop" and not params.include_stop_str_in_output
    events = [(count, decoded(count)) for count in range(1, num + 1)]
    if finish_reason == "abort":
        events.append((num, whole(num)))  # comes alone: the last token is not known to be the last
    elif events:
        events[-1] = (num, whole(num - is_silent))
    deaf_chars = 0
    text = ""
    for count, text in events:
        if count <= params.min_tokens:
            deaf_chars = len(text)
            continue
        ends = [
            (end, -len(word), word)
            for word in params.stop
            for end in range(deaf_chars + 1, len(text) + 1)
            if text[:end].endswith(word)
        ]
        if ends:
            end, minus_length, word = min(ends)
            keep = end if params.include_stop_str_in_output else end + minus_length
            return Expected(text[:keep], count, "stop", word)
    stop_reason = None
    if finish_reason == "stop" and token_ids[-1] != EOS:
        stop_reason = token_ids[-1]
    return Expected(text, num, finish_reason, stop_reason)


TEXTS = st.lists(
    st.sampled_from(
        ["a", "b", "ab", "stop", " STOP", "\n\n###", "é", "🙂", "<|im_end|>", " the", "x"]
    ),
    max_size=12,
).map("".join)
RANDOM_IDS = st.lists(st.integers(0, TOKENIZER.num_tokens + 3), max_size=25)
STOPS = st.lists(
    st.sampled_from(
        ["a", "ab", "ba", "aba", "stop", "top", "STOP\n\n", "\n\n###", "é", "🙂", "\ufffd"]
    ),
    max_size=4,
)


@pytest.mark.slow
@examples(1500)
@given(
    st.one_of(TEXTS.map(encode), RANDOM_IDS),
    st.sampled_from(["stop", "length", "abort"]),
    STOPS,
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.lists(st.integers(1, 7), max_size=25),
    st.booleans(),
)
def test_any_grouping_gives_the_oracles_result(
    token_ids: list[int],
    finish_reason: str,
    stop: list[str],
    include: bool,
    skip: bool,
    min_tokens: int,
    run_lengths: list[int],
    is_late: bool,
) -> None:
    sampling = SamplingParams(
        max_tokens=10_000,
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
        logprobs=1,
    )
    if finish_reason == "stop":
        token_ids = [*token_ids, EOS if is_late else END]
    expected = oracle(token_ids, finish_reason, sampling)
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=sampling)
    subject = RequestOutputProcessor(request, TOKENIZER, eos_token_ids=[EOS])

    runs: list[list[int]] = []
    rest = token_ids
    for length in run_lengths:
        runs.append(rest[:length])
        rest = rest[length:]
    runs = [run for run in [*runs, rest] if run]
    if finish_reason == "abort" or not runs:
        runs.append([])  # an abort brings no tokens
    streamed = ""
    num_streamed = num_aborts = 0
    all_logprobs = logprobs_of(token_ids)
    for index, run in enumerate(runs):
        is_last = index == len(runs) - 1
        begin = sum(map(len, runs[:index]))
        delta = subject.process(
            EngineOutput(
                request_id="r",
                token_ids=run,
                logprobs=all_logprobs[begin : begin + len(run)],
                finish_reason=finish_reason if is_last else None,
            )
        )
        streamed += delta.text
        num_streamed += len(delta.token_ids)
        num_aborts += delta.abort
        assert len(delta.logprobs or []) == len(delta.token_ids) == len(delta.text_offsets)
        assert expected.text.startswith(streamed)  # never a part of a stop string
        if delta.finished:
            assert delta.finish_reason == expected.finish_reason
            assert delta.stop_reason == expected.stop_reason
            assert delta.abort == (not is_last)
    result = subject.output()
    assert streamed == result.text == expected.text
    assert result.token_ids == token_ids[: expected.num_tokens]
    assert num_streamed == subject.num_output_tokens == expected.num_tokens
    assert (result.finish_reason, result.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    assert result.logprobs is not None
    assert [next(iter(entry)) for entry in result.logprobs] == result.token_ids
    assert result.cumulative_logprob == pytest.approx(
        sum(entry.logprobs[0] for entry in all_logprobs[: expected.num_tokens])
    )
    assert all(a <= b for a, b in pairwise(result.text_offsets))
    assert num_aborts <= 1


def test_nothing_of_a_stop_string_is_streamed() -> None:
    subject = processor(stop=["\n\n### User:"])
    texts = []
    for token_id in encode("hello\n\n### Use it\n\n### User: more"):
        delta = subject.process(EngineOutput(request_id="r", token_ids=[token_id]))
        texts.append(delta.text)
        if delta.finished:
            break
    assert delta.abort
    assert "".join(texts) == "hello\n\n### Use it"
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "\n\n### User:")
    late = subject.process(
        EngineOutput(
            request_id="r",
            token_ids=[1, 2],
            finish_reason="abort",
            spec_decode=SpecDecodeStats(num_drafts=3),
            step_counts=[StepCounts(2, 4, 2, 4)],
        )
    )
    assert (late.text, list(late.token_ids), late.finished) == ("", [], False)
    assert subject.output().text == "hello\n\n### Use it"
    assert subject.output().metrics.spec_decode == SpecDecodeStats()


def test_steps_count_up_to_a_stop_string() -> None:
    """Also where several steps arrive as one output."""
    ids = encode("one stop two and three")
    subject = processor(stop=["stop"])
    counts = [StepCounts(1, 0, 0, 8), StepCounts(len(ids) - 1, 9, len(ids) - 2, 8, 1, 1)]
    subject.process(EngineOutput(request_id="r", token_ids=ids, step_counts=[*counts, counts[0]]))
    kept, stats = subject.num_output_tokens, subject.output().metrics.spec_decode
    assert stats is not None and 1 < kept < len(ids)
    assert (stats.num_steps, stats.num_drafts, stats.num_draft_tokens) == (2, 1, 9)
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) == kept - 1
    assert (stats.num_forced_tokens, stats.num_accepted_forced_tokens) == (1, 1)
    assert subject.output().metrics.mean_acceptance_length == kept - 1, "tokens of that step"


def test_a_stop_string_in_the_run_that_ends_the_request() -> None:
    ids = encode("one stop two")
    for finish_reason in ("length", "stop"):
        subject = processor(stop=["stop"])
        delta = subject.process(
            EngineOutput(request_id="r", token_ids=[*ids, EOS], finish_reason=finish_reason)
        )
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one ", "stop", "stop")
        assert not delta.abort
        assert len(delta.token_ids) < len(ids)


def test_stop_ids() -> None:
    for token_id, reason in ((EOS, None), (END, END)):
        for include, skip, text in (
            (False, True, "hi"),
            (False, False, "hi"),
            (True, True, "hi"),
            (True, False, "hi" + TOKENIZER.token_text(token_id)),
        ):
            subject = processor(include_stop_str_in_output=include, skip_special_tokens=skip)
            ids = [*encode("hi"), token_id]
            delta = subject.process(
                EngineOutput(request_id="r", token_ids=ids, finish_reason="stop")
            )
            assert (delta.text, delta.stop_reason) == (text, reason)
            assert list(delta.token_ids) == ids  # it counts, and its log-probability is given


def test_held_text_comes_out_at_the_end() -> None:
    subject = processor(stop=["abc"])
    delta = subject.process(EngineOutput(request_id="r", token_ids=encode("xab")))
    assert delta.text == "x"
    delta = subject.process(EngineOutput(request_id="r", finish_reason="abort"))
    assert (delta.text, delta.finish_reason) == ("ab", "abort")


def test_errors_pass() -> None:
    delta = processor().process(
        EngineOutput(request_id="r", finish_reason="error", error="step failed")
    )
    assert (delta.finish_reason, delta.error) == ("error", "step failed")


def test_logprobs() -> None:
    subject = processor(logprobs=2, prompt_logprobs=1)
    first_byte = TOKENIZER.encode("🙂")[0]
    subject.process(
        EngineOutput(
            request_id="r",
            token_ids=[first_byte],
            logprobs=[TokenLogprobs([first_byte, 5, first_byte], [-1.5, -0.25, -1.5], 2)],
            prompt_logprobs=[TokenLogprobs([2, 9], [-3.0, -0.5], 4)],
            num_cached_tokens=1,
        )
    )
    output = subject.output()
    assert output.logprobs is not None
    (entry,) = output.logprobs
    assert list(entry) == [first_byte, 5]
    assert (entry[first_byte].logprob, entry[first_byte].rank) == (-1.5, 2)
    assert entry[first_byte].decoded_token == "\ufffd"
    assert entry[first_byte].token_bytes == TOKENIZER.token_bytes(first_byte)
    assert [token_id for token_id, _ in top_logprobs(entry, 2)] == [5, first_byte]
    assert output.cumulative_logprob == -1.5
    assert subject.prompt_logprobs is not None
    assert subject.prompt_logprobs[0] is None
    assert subject.prompt_logprobs[1] is not None
    assert list(subject.prompt_logprobs[1]) == [2, 9]
    assert subject.num_cached_tokens == 1
    assert processor().output().logprobs is None
    assert processor().output().cumulative_logprob is None


def test_request_output_of_several_sequences() -> None:
    times = iter(range(100))
    request = EngineRequest(
        request_id="r-0", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=9)
    )
    parts = [
        RequestOutputProcessor(
            request, TOKENIZER, index=i, arrival_time=-1.0, clock=lambda: next(times)
        )
        for i in range(2)
    ]
    assert not request_output("r", "p", parts).finished
    for count, part in enumerate(parts, 1):
        part.process(EngineOutput(request_id="r", token_ids=encode("hello"), num_cached_tokens=2))
        stats = SpecDecodeStats(
            num_drafts=count,
            num_draft_tokens=8,
            num_accepted_tokens=4,
            num_accepted_tokens_per_pos=[2] * (count + 1),
            num_steps=5,
        )
        part.process(EngineOutput(request_id="r", finish_reason="length", spec_decode=stats))
    result = request_output("r", "p", parts)
    assert (result.request_id, result.prompt, result.prompt_token_ids) == ("r", "p", [1, 2, 3])
    assert [(o.index, o.text, o.finished) for o in result.outputs] == [
        (0, "hello", True),
        (1, "hello", True),
    ]
    assert result.finished
    assert result.num_cached_tokens == 2
    metrics = result.metrics
    assert metrics.spec_decode == SpecDecodeStats(
        num_drafts=3,
        num_draft_tokens=16,
        num_accepted_tokens=8,
        num_accepted_tokens_per_pos=[4, 4, 2],
        num_steps=10,
    )
    assert metrics.mean_acceptance_length == pytest.approx(1 + 8 / 3)
    assert metrics.acceptance_rate == 0.5
    assert (metrics.arrival_time, metrics.first_token_time) == (-1.0, 0)
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.finished_time >= metrics.last_token_time
    fresh = processor().output().metrics
    assert (fresh.mean_acceptance_length, fresh.acceptance_rate) == (1.0, 0.0)
