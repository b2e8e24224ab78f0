"""Structured output through `LLM` and `SamplingParams`: valid by other readers, and plain's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import jsonschema_rs
import pytest

from openspec.drafters import plain_method
from openspec.errors import RequestError
from openspec.llm import LLM
from openspec.messages import SamplingParams, SpeculativeOptions, StructuredOutputs
from openspec.text.outputs import RequestOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<age>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}},
        "end": "</age>",
    },
}

TAKEN = {
    "type": "structural_tag",
    "format": {"type": "grammar", "grammar": "root ::= text_of_length\ntext_of_length ::= [a]*"},
}


def fits_schema(text: str) -> bool:
    return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


ASKED: dict[str, tuple[StructuredOutputs, Callable[[str], bool]]] = {
    "json": (StructuredOutputs(json=SCHEMA), fits_schema),
    "json as text": (StructuredOutputs(json=json.dumps(SCHEMA)), fits_schema),
    "json on a line": (
        StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        lambda text: fits_schema(text) and "\n" not in text,
    ),
    "json_object": (
        StructuredOutputs(json_object=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (
        StructuredOutputs(regex="[A-Z][a-z]{2,9} [0-9]{4}"),
        matches("[A-Z][a-z]{2,9} \\d{4}"),
    ),
    "choice": (StructuredOutputs(choice=["yes", "no", "yes and no"]), matches("yes|no|yes and no")),
    "grammar": (
        StructuredOutputs(grammar='root ::= n ("+" n)*\nn ::= [0-9]{1,2}'),
        matches("\\d{1,2}(\\+\\d{1,2})*"),
    ),
    "structural_tag": (StructuredOutputs(structural_tag=TAG), matches("<age>-?\\d+</age>")),
}
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2},
]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(method=plain_method(), max_num_seqs=16, max_model_len=512) as llm:
        yield llm


def asked() -> tuple[list[str], list[SamplingParams]]:
    """Each demand by each kind of parameters, and as many requests without a demand."""
    prompts, params = [], []
    for wanted in (*(outputs for outputs, _ in ASKED.values()), None):
        for seed, kind in enumerate(KINDS):
            prompts.append("Tell me of a person, with name and age.")
            params.append(
                SamplingParams(seed=seed, max_tokens=250, structured_outputs=wanted, **kind)  # type: ignore[arg-type]
            )
    return prompts, params


def essence(outputs: list[RequestOutput]) -> list[list[tuple[object, ...]]]:
    return [
        [(one.text, one.token_ids, one.finish_reason, one.logprobs) for one in output.outputs]
        for output in outputs
    ]


def test_answers_are_what_was_asked_for_with_drafts_and_without(plain: LLM) -> None:
    prompts, params = asked()
    expected = plain.generate(prompts, params, use_tqdm=False)
    num_whole = 0
    demands = [check for _, check in ASKED.values() for _ in KINDS]
    for check, output in zip(demands, expected, strict=False):
        for one in output.outputs:
            # What max_tokens cuts is not whole; everything else is.
            if one.finish_reason == "stop":
                assert check(one.text), one.text
                num_whole += 1
    assert num_whole >= 0.8 * sum(len(output.outputs) for output in expected[: len(demands)])
    limits = {"max_num_seqs": 5, "max_model_len": 512, "page_size": 8}
    with LLM(method="ngram", adaptive_speculation=False, **limits) as llm:
        assert essence(llm.generate(prompts, params, use_tqdm=False)) == essence(expected)
        assert llm.stats().num_accepted_forced_tokens > 0
        llm.engine.check_integrity()


def test_forced_drafts_reach_their_positions() -> None:
    """Chains of a grammar, without a drafter: every draft token has a position of its own."""
    form = StructuredOutputs(regex="The answer to your question is [0-9], and no more\\.")
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=form)
    with LLM(method=plain_method(), adaptive_speculation=False, max_model_len=512) as llm:
        for detailed in (False, True):
            options = SpeculativeOptions(detailed=detailed)
            [answer] = llm.generate("Six by 7?", params, use_tqdm=False, speculative=options)
            stats = answer.metrics.spec_decode
            assert stats is not None and stats.num_drafts_per_pos[0] == stats.num_drafts
            assert sum(stats.num_drafts_per_pos) == stats.num_draft_tokens > stats.num_drafts > 0


def test_chats_think_first(plain: LLM) -> None:
    """Thoughts are free; with thinking turned off the content begins at once."""
    wanted = StructuredOutputs(choice=["Tom", "Ann"])
    params = SamplingParams(temperature=0.0, max_tokens=300, structured_outputs=wanted)
    chat = [{"role": "user", "content": "Who is taller? Tom is 3 feet, Ann is 4 feet."}]
    off = {"enable_thinking": False}
    [answer] = plain.chat(chat, params, use_tqdm=False, chat_template_kwargs=off)
    assert answer.outputs[0].text in ("Tom", "Ann")
    [answer] = plain.chat(chat, params, use_tqdm=False)
    thoughts, end, content = answer.outputs[0].text.rpartition("</think>")
    assert answer.outputs[0].finish_reason == "stop"
    assert thoughts and end and content.strip() in ("Tom", "Ann")


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        ({"json": {"type": "object", "not": {}}}, {}, "#/not"),
        ({"json": '{"type": '}, {}, "JSON"),
        ({"regex": "(?=a)b"}, {}, "lookahead"),
        ({"grammar": "root ::= other"}, {}, "other"),
        ({"grammar": "root ::= text_of_length_0\ntext_of_length_0 ::= [a]*"}, {}, "is taken"),
        ({"structural_tag": TAKEN}, {}, "is taken"),
        ({"choice": []}, {}, "choice"),
        ({}, {}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, {}, "exactly one"),
        ({"choice": ["a"]}, {"ignore_eos": True}, "ignore_eos"),
        ({"choice": ["a"]}, {"min_tokens": 2}, "min_tokens"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    plain: LLM, wanted: dict[str, object], changes: dict[str, object], message: str
) -> None:
    outputs = StructuredOutputs(**wanted)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=outputs, **changes)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        plain.generate("a", params, use_tqdm=False)
    assert not plain.engine.has_work
