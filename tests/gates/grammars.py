"""Grammars for the gates, plain answers under them, and what a matcher of its own says of one."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import tokenizers

from openspec import _grammar
from openspec.config import EMBEDDED_MODEL
from openspec.engine.core.engine_core import EngineCore
from openspec.grammar.formats import grammar_format, json_of, pattern
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.schemas.schema import enforceable
from openspec.messages import SpeculativeOptions
from openspec.text.vocabulary import spelling_of
from tests.gates import harness
from tests.gates.harness import Job, Result, chat_prompt, make_core, run_alone, tokenizer
from tests.gates.workload import sampling

END = "<|im_end|>"
SPELLED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Special tokens that a grammar may ask for."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_WITH_MOTTO = PERSON | {
    "properties": PERSON["properties"] | {"motto": {"type": "string", "maxLength": 60}},
    "required": ["name", "age", "motto"],
}
"""Its longest text is counted by the budget of a rule, and the shorter one by an automaton."""
EXPRESSION = """
root ::= term (" " [-+*] " " term)*
term ::= [0-9]{1,3} | "(" root ")"
"""
THOUGHTS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {
                "type": "tag",
                "begin": "<think>",
                "content": {"type": "any_text"},
                "end": "</think>",
            },
            {"type": "json_schema", "json_schema": PERSON},
        ],
    },
}
KINDS = ("json_schema", "regex", "choice", "ebnf", "structural_tag")


@cache
def tokens() -> tuple[list[bytes], int, list[int]]:
    """What `set_vocabulary` takes: bytes by id, the model's vocabulary size, ends of answers."""
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    spell = spelling_of(backend)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    special = {int(index): one.content for index, one in backend.get_added_tokens_decoder().items()}
    by_id = [b""] * config["vocab_size"]
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index in special:
            by_id[index] = token.encode() if token in SPELLED else b""
        else:
            by_id[index] = spell(token)
    end = backend.token_to_id(END)
    assert end is not None
    return by_id, config["vocab_size"], [end]


@cache
def vocabulary() -> _grammar.Vocabulary:
    return _grammar.Vocabulary(*tokens())


def ebnf(rules: str) -> bytes:
    return compile_format(vocabulary(), grammar_format(rules))


@cache
def compiled(kind: str) -> bytes:
    if kind == "json_schema":
        return compile_format(vocabulary(), json_of(enforceable(PERSON_WITH_MOTTO), "line"))
    if kind == "regex":
        words = pattern("[A-Z][a-z]{3,8}( [a-z]{2,6}){2,5}[.!]")
        return compile_format(vocabulary(), words)
    if kind == "choice":
        days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Monday evening")
        return ebnf("root ::= " + " | ".join(map(json.dumps, days)))
    if kind == "ebnf":
        return ebnf(EXPRESSION)
    return _grammar.compile_structural_tag(vocabulary(), json.dumps(THOUGHTS))


def grammar_core(**settings: object) -> EngineCore:
    """An engine that knows every kind, by its name."""
    core = make_core(**settings)  # type: ignore[arg-type]
    core.grammars.set_vocabulary(*tokens())
    for kind in KINDS:
        core.grammars.load_grammar(kind, compiled(kind))
    return core


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Questions, the last with thoughts, so that some answers are forced into their form."""
    questions = (
        "Describe a person in JSON with name, age and pets.",
        "What comes after Tuesday?",
        "A farmer has 12 cows and 37 sheep. How many animals does he have?",
        "Repeat the following text exactly:\n\nNow is the winter of our discontent.",
    )
    thinking = tokenizer().render_chat([{"role": "user", "content": questions[2]}])
    return (*map(chat_prompt, questions), tuple(thinking.token_ids))


def check_answer(job: Job, result: Result) -> None:
    """Every token is one that a matcher of its own allows, and only a whole answer has ended."""
    matcher = _grammar.Matcher(vocabulary(), compiled(job.grammar))
    for place, token in enumerate(result.token_ids):
        assert not matcher.is_terminated, "tokens after the end"
        assert token in matcher.allowed(), (job.grammar, place, token)
        assert matcher.accept(token)
    assert result.finish_reason in ("stop", "length"), result
    assert matcher.is_terminated == (result.finish_reason == "stop")


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
def plain_core(model: str | None) -> EngineCore:
    """An engine without drafts, that knows every kind."""
    return grammar_core(**harness.PLAIN)


_ANSWERS: dict[tuple[str | None, str], Result] = {}


def plain(batch: list[Job]) -> list[Result]:
    """Plain decoding's answers, one request at a time; each is checked by itself."""
    core = plain_core(harness.MODEL)
    results = []
    for job in batch:
        # Without drafts of any kind, tokens that the grammar forces included.
        same = dataclasses.replace(
            job, arrives_at=0, abort_after=None, priority=0, speculative=PLAINLY
        )
        key = (harness.MODEL, repr(same))
        if key not in _ANSWERS:
            [_ANSWERS[key]] = run_alone(core, [same])
            if job.grammar:
                check_answer(job, _ANSWERS[key])
        results.append(_ANSWERS[key])
    return results
