"""Structural tags: checked in full, and refused in words that name the place."""

from __future__ import annotations

from typing import Any

import pytest

from openspec.errors import RequestError
from openspec.grammar.schemas.constraints import Budget
from openspec.grammar.tags import structural_tag_format
from tests.unit.grammar_walks import accepts, compiled

A = {"type": "const_string", "value": "a"}
TAG = {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [TAG]}


def checked(format: Any) -> dict[str, Any]:
    return structural_tag_format({"format": format}, Budget())


@pytest.mark.parametrize(
    ("format", "fits", "not_"),
    [
        (A, "a", "b"),
        ({"type": "sequence", "elements": [A, A]}, "aa", "a"),
        ({"type": "or", "elements": [A, {"type": "const_string", "value": "b"}]}, "b", "ab"),
        ({"type": "tag", **TAG}, "<f>12</f>", "<f>x</f>"),
        ({"type": "tag", **TAG, "end": ["</f>", "</g>"]}, "<f>12</g>", "<f>12"),
        (TRIGGERED, "text <f>12</f> more", "text <f>x</f>"),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, "<f>1</f>", "text"),
        ({**TRIGGERED, "excludes": ["no"]}, "yes", "no"),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": ", "},
            "<f>1</f>, <f>2</f>",
            "<f>1</f> <f>2</f>",
        ),
        ({"type": "optional", "content": A}, "", "aa"),
        ({"type": "star", "content": A}, "aaa", "b"),
        ({"type": "plus", "content": A}, "aaa", "b"),
        ({"type": "repeat", "min": 2, "max": 3, "content": A}, "aaa", "a"),
        ({"type": "repeat", "min": 2, "max": -1, "content": A}, "aaaaa", "a"),
        ({"type": "dispatch", "rules": [["<f>", A]], "loop": False}, "x <f>a", "x <f>b"),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, "b", "c"),
        ({"type": "json_schema", "json_schema": {"type": "boolean"}}, "true", "1"),
        ({"type": "any_text", "excludes": ["b"]}, "a", "b"),
    ],
    ids=str,
)
def test_each_format(format: dict[str, Any], fits: str, not_: str) -> None:
    data = compiled(checked(format))
    assert accepts(data, fits) and not accepts(data, not_)


def test_the_older_form() -> None:
    given = {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    data = compiled(structural_tag_format(given, Budget()))
    assert accepts(data, "x <f>5</f>") and not accepts(data, "x <f>y</f>")


def nested(depth: int) -> dict[str, Any]:
    format: dict[str, Any] = A
    for _ in range(depth):
        format = {"type": "optional", "content": format}
    return format


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({"type": ["sequence"]}, "format: type of another kind than a text"),
        ({"type": {"a": 1}}, "format: type of another kind than a text"),
        ({"type": "token", "token": 5}, "format: type 'token' is not supported"),
        ({}, "is not supported"),
        ({**A, "extra": 1}, "format: const_string: unknown key 'extra'; known are value"),
        ({"type": "const_string"}, "format.value must be a text"),
        ({"type": "any_text", "max_tokens": 5}, "unknown key 'max_tokens'"),
        ({"type": "any_text", "excludes": [""]}, r"format.excludes\[0\] must be a text that is"),
        ({"type": "star", "content": {**A, "value": ""}}, "format.content may be empty"),
        ({"type": "plus", "content": {"type": "optional", "content": A}}, "may be empty"),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": {"type": "star", "content": A}},
            "may be empty",
        ),
        ({"type": "repeat", "min": 3, "max": 2, "content": A}, "min is larger than max"),
        ({"type": "repeat", "min": -1, "max": 2, "content": A}, "format.min must be a number"),
        ({"type": "repeat", "min": 0.5, "max": 2, "content": A}, "format.min must be a number"),
        ({"type": "repeat", "min": True, "max": 2, "content": A}, "format.min must be a number"),
        ({"type": "repeat", "min": 1, "max": 10**9, "content": A}, "format.max must be a number"),
        ({"type": "repeat", "max": 2, "content": A}, "format.min must be a number"),
        ({"type": "sequence", "elements": []}, "format.elements must be a list that is not empty"),
        ({"type": "or"}, "format.elements must be a list"),
        ({**TRIGGERED, "triggers": []}, "format.triggers must be a list that is not empty"),
        ({**TRIGGERED, "triggers": [""]}, "must be a text that is not empty"),
        ({**TRIGGERED, "tags": [A]}, "tags must hold formats of the type tag"),
        ({**TRIGGERED, "at_least_one": 1}, "format.at_least_one must be true or false"),
        ({"type": "tag", "content": A, "end": ""}, "format.begin must be a text"),
        ({"type": "tag", "begin": "", "content": A, "end": []}, "format.end must be a list that"),
        ({"type": "dispatch", "rules": [["a"]]}, r"format.rules\[0\] must be a pair"),
        ({"type": "dispatch", "rules": [["", A]]}, r"format.rules\[0\] must be a text that is"),
        ({"type": "regex", "pattern": "(?=a)"}, "format: .* cannot be enforced: lookaheads"),
        ({"type": "regex", "pattern": 5}, "format.pattern must be a text"),
        ({"type": "grammar", "grammar": ""}, "format.grammar must be a text that is not empty"),
        ({"type": "json_schema"}, "format: json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "format: #/not"),
        ({"type": "sequence", "elements": [A, {**A, "x": 1}]}, r"format.elements\[1\]: const_str"),
        (nested(40), "nested at most 32 deep"),
        ({"type": "or", "elements": [A] * 30_000}, "holds at most 20000 formats"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_name_the_place(format: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        checked(format)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "must be an object"),
        ({}, "needs format, or structures and triggers"),
        ({"format": A, "type": "other"}, "the type of a structural tag"),
        ({"format": A, "triggers": ["a"]}, "unknown key 'triggers'; known are format"),
        ({"structures": [], "triggers": ["a"]}, "structures.tags must be a list that is not empty"),
        ({"structures": [{"begn": ""}], "triggers": ["a"]}, r"structures\[0\]: unknown key 'begn'"),
        ({"structures": 5, "triggers": ["a"]}, "structures must be a list"),
    ],
    ids=str,
)
def test_whole_tags(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        structural_tag_format(given, Budget())
