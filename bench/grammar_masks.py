"""What masks of grammars cost: filling one, advancing by a token, compiling.

    python -m bench.grammar_masks --vocabulary qwen.tiktoken --vocab-size 151936 [--json FILE]

The vocabulary is a file of tiktoken's kind, a token in base64 and its id on each line, such as the
one in the wheel of `dashscope`. Grammars are compiled as the server compiles them. Times are of
this thread's processor, so that other work on the machine does not count; each row is timed alone,
with the copy of its mask to Python.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from openspec import _grammar
from openspec.bench.environment import environment
from openspec.grammar.formats import source_of
from openspec.grammar.json_rules import chars_behind_quote, compile_source
from openspec.messages import StructuredOutputs
from openspec.text.answer_grammar import content_format

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "mail": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
    },
    "required": ["name", "age", "address"],
}
PERSON_TEXT = (
    '{"name": "Ada Lovelace, Countess", "age": 36, "address": {"street": "12 St James\'s Square", '
    '"zip": "SW1Y 4JH"}, "tags": ["mathematics", "analytical engine"], "mail": "ada@engine.org"}'
)
ORDERS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            f"field_{i}": {"type": "integer", "minimum": 0, "maximum": 1000 + i} for i in range(12)
        },
        "additionalProperties": False,
    },
}
ORDERS_TEXT = json.dumps([{f"field_{i}": 37 * i % 1000 for i in range(12)}] * 4)
TOOL = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "begin": '<tool_call>{"name": "find", "arguments": ',
                "content": {"type": "json_schema", "json_schema": PERSON},
                "end": "}</tool_call>",
            }
        ],
    },
}
TOOL_TEXT = (
    "Let me look that person up in the register before I answer. "
    f'<tool_call>{{"name": "find", "arguments": {PERSON_TEXT}}}</tool_call> Done.'
)
SHORT = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 60}, "done": {"type": "boolean"}},
    "required": ["title", "done"],
    "additionalProperties": False,
}
LONG = {
    **SHORT,
    "properties": {**SHORT["properties"], "title": {"type": "string", "maxLength": 2000}},
}
TITLED = '{"title": "Minutes of the harbour board, third session", "done": true}'
MANY = {
    **SHORT,
    "properties": {f"f{i}": {"type": "string", "maxLength": 60 + 9 * i} for i in range(8)},
    "required": [f"f{i}" for i in range(8)],
}
MANY_TEXT = json.dumps({f"f{i}": "The third session of the harbour board" for i in range(8)})
FULL = {**SHORT, "properties": {"title": {"type": "string", "maxLength": 200}}, "required": []}
FULL_TEXT = json.dumps({"title": ("Minutes of the harbour board, third session. " * 5)[:200]})
DATED = "The fleet left the harbour in good time on 2026-11-25."
COUNTED = "Monday Morning The Fleet Left Harbour On Time 2026-11-25."
CASES: dict[str, tuple[StructuredOutputs, str]] = {
    "json_schema": (StructuredOutputs(json=PERSON), PERSON_TEXT),
    "json_schema of integers": (StructuredOutputs(json=ORDERS), ORDERS_TEXT),
    "json_schema of a long text": (StructuredOutputs(json=LONG), TITLED),
    "json_object": (StructuredOutputs(json_object=True), PERSON_TEXT),
    "regex": (StructuredOutputs(regex=r"[A-Z][a-z ]+ on \d{4}-\d{2}-\d{2}\."), DATED),
    "choice": (StructuredOutputs(choice=["positive", "negative"]), "negative"),
    "structural_tag": (StructuredOutputs(structural_tag=TOOL), TOOL_TEXT),
    "short length": (StructuredOutputs(json=SHORT), TITLED),
    "many lengths": (StructuredOutputs(json=MANY), MANY_TEXT),
    "end of a length": (StructuredOutputs(json=FULL), FULL_TEXT),
    "counted groups": (
        StructuredOutputs(regex=r"([A-Z][a-z]+ ){3,20}\d{4}-\d{2}-\d{2}\."),
        COUNTED,
    ),
}
HARD = ("short length", "many lengths", "end of a length", "counted groups")
"""Left out of the figures of all: in each state the library goes through the vocabulary."""


def read_vocabulary(path: Path, vocab_size: int) -> tuple[_grammar.Vocabulary, int]:
    """The file's tokens, then one that ends an answer; the rest has no bytes.

    With the most characters of a token behind its first quote.
    """
    tokens = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]
    vocabulary = _grammar.Vocabulary([*tokens, b""], vocab_size, [len(tokens)])
    return vocabulary, chars_behind_quote(tokens)


def microseconds(work: Callable[[], object]) -> float:
    """Of this thread."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1000


def walk(vocabulary: _grammar.Vocabulary, data: bytes, text: str) -> Iterator[tuple[float, float]]:
    """Microseconds of each mask along the text, and of the token behind it."""
    matcher = _grammar.Matcher(vocabulary, data)
    for token in vocabulary.tokenize(text.encode(), 10_000):
        fill = microseconds(matcher.bitmask)
        accepted = []
        advance = microseconds(lambda: accepted.append(matcher.accept(token)))  # noqa: B023
        assert accepted == [True], f"{text!r} is not of its grammar"
        yield fill, advance


def summary(values: list[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and largest."""
    ordered = sorted(values)
    return {
        "mean": round(sum(ordered) / len(ordered), 2),
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        "max": round(ordered[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vocabulary, behind_quote = read_vocabulary(arguments.vocabulary, arguments.vocab_size)
    flags = {"vocabulary": arguments.vocabulary.name, "vocab_size": arguments.vocab_size}
    report: dict[str, object] = {"environment": environment(flags, {})}
    all_fills: list[float] = []
    all_advances: list[float] = []
    cases = {}
    for name, (wanted, text) in CASES.items():
        start = time.thread_time()
        source = source_of(content_format(wanted, name), name)
        data = compile_source(vocabulary, source, behind_quote)
        compile_ms = 1000 * (time.thread_time() - start)
        rows = [row for _ in range(arguments.repeats) for row in walk(vocabulary, data, text)]
        fills, advances = [row[0] for row in rows], [row[1] for row in rows]
        if name not in HARD:
            all_fills += fills
            all_advances += advances
        cases[name] = {
            "num_rows": len(rows),
            "fill_us": summary(fills),
            "advance_us": summary(advances),
            "compile_ms": round(compile_ms, 1),
            "num_bytes": len(data),
        }
        print(f"{name:26} {cases[name]}")
    report |= {"cases": cases, "fill_us": summary(all_fills), "advance_us": summary(all_advances)}
    for what in ("fill_us", "advance_us"):
        print(f"all but {', '.join(HARD)}: {what} {report[what]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
