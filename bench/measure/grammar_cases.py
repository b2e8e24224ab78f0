"""Cases of grammars: what their masks cost, and what the tokens that they force bring."""

from __future__ import annotations

import argparse
import base64
import json
import time
from pathlib import Path

from bench.measure.server_cases import Report, spread

from openspec import LLM, SamplingParams, _grammar
from openspec.config import EMBEDDED_MODEL
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.messages import SpeculativeOptions, StructuredOutputs
from openspec.settings.setting import Raw
from openspec.text.grammars.answer_grammar import content_format
from openspec.text.tokenizer import Tokenizer


def record(**properties: object) -> dict[str, object]:
    """The schema of an object with just these fields."""
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


TEXT, NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0}
PAYMENTS = ["credit_card", "bank_transfer", "cash_on_delivery"]
ORDER = record(
    customer_identifier=NUMBER,
    delivery_address=TEXT,
    payment_method={"enum": PAYMENTS},
    is_express_delivery={"type": "boolean"},
)
ORDER_TEXT = (
    '{"customer_identifier": 36, "delivery_address": "12 St James\'s Square", '
    '"payment_method": "bank_transfer", "is_express_delivery": true}'
)
CALL = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": ORDER}, "end": "!"}
TAGS = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}
LENGTHS = {f"f{i}": {"type": "string", "maxLength": 60 + 9 * i} for i in range(8)}
MASKS: dict[str, tuple[StructuredOutputs, str]] = {
    "json_schema": (StructuredOutputs(json=ORDER), ORDER_TEXT),
    "json_object": (StructuredOutputs(json_object=True), ORDER_TEXT),
    "choice": (StructuredOutputs(choice=PAYMENTS), PAYMENTS[1]),
    "structural_tag": (
        StructuredOutputs(structural_tag={"type": "structural_tag", "format": TAGS}),
        f"Let me order that first. <call>{ORDER_TEXT}! Done.",
    ),
    "lengths": (
        StructuredOutputs(json=record(**LENGTHS)),
        json.dumps(dict.fromkeys(LENGTHS, "The third session of the harbour board")),
    ),
    "counted groups": (
        StructuredOutputs(regex=r"([A-Z][a-z]+ ){3,20}\d{4}-\d{2}-\d{2}\."),
        "Monday Morning The Fleet Left Harbour On Time 2026-11-25.",
    ),
}
"""What is asked for, and a text of it. In each state of the last two the library goes through the
whole vocabulary."""


def masks(args: argparse.Namespace) -> Report:
    """Microseconds of this thread's processor to fill a row's mask and to advance by a token.

    Grammars are compiled as the server compiles them. A row is timed alone, with the copy of its
    mask to Python.
    """
    tokens = tokens_of(args.vocabulary)
    size = max(args.vocab_size, len(tokens) + 1)
    vocabulary = _grammar.Vocabulary([*tokens, b""], size, [len(tokens)])
    report: Report = {}
    for name, (wanted, text) in MASKS.items():
        format = content_format(wanted)
        start = time.thread_time_ns()
        data = compile_format(vocabulary, format, chars_behind_quote(tokens))
        compile_ms = (time.thread_time_ns() - start) / 1e6
        fills: list[float] = []
        advances: list[float] = []
        for _ in range(args.turns):
            matcher = _grammar.Matcher(vocabulary, data)
            for token in vocabulary.tokenize(text.encode(), 10_000):
                begin = time.thread_time_ns()
                matcher.bitmask()
                filled = time.thread_time_ns()
                is_accepted = matcher.accept(token)
                advances.append((time.thread_time_ns() - filled) / 1e3)
                fills.append((filled - begin) / 1e3)
                assert is_accepted, f"{text!r} is not of its grammar"
        figures = {"fill_us": spread(fills, 2), "advance_us": spread(advances, 2)}
        report[name] = {"rows": len(fills), **figures, "compile_ms": round(compile_ms, 1)}
    return report


def tokens_of(vocabulary: Path | None) -> list[bytes]:
    """Of a checkpoint's folder, or of a file of tiktoken's kind: on each line base64 and an id."""
    if vocabulary is None or vocabulary.is_dir():
        return Tokenizer.from_folder(vocabulary or EMBEDDED_MODEL).grammar_tokens(())
    return [base64.b64decode(line.split()[0]) for line in vocabulary.read_bytes().splitlines()]


def forced(args: argparse.Namespace) -> Report:
    """Tokens per second of JSON with drafts, those that the grammar forces among them, and without.

    Schemas have long names, as tools have them, and no free white space, which small models like
    too much. Sides take turns, and of each the best turn counts.
    """
    report: Report = {}
    for run in args.runs:
        method, _, head = run.partition(":")
        settings: dict[str, Raw] = {"method": method, **({"draft_model": head} if head else {})}
        settings |= {"max_num_seqs": max(args.concurrency), "enable_prefix_caching": False}
        with LLM(args.model, **settings) as llm:
            for count in args.concurrency:
                report[f"{run}, {count} requests"] = one_forced(llm, count, args)
    return report


def one_forced(llm: LLM, count: int, args: argparse.Namespace) -> Report:
    """So many requests at once."""
    prompts = [f"Give an example of order {n} in JSON." for n in range(count)]
    wanted = StructuredOutputs(json=ORDER, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, structured_outputs=wanted)
    best = {"plain": 0.0, "drafted": 0.0}
    said: dict[str, list[list[int]]] = {}
    num_forced = 0
    for _ in range(args.turns + 1):  # the first one records graphs and reads the grammars
        for name in best:
            options = SpeculativeOptions(enabled=name == "drafted")
            before, start = llm.stats().num_accepted_forced_tokens, time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False, speculative=options)
            seconds = time.perf_counter() - start
            said[name] = [list(output.outputs[0].token_ids) for output in outputs]
            best[name] = max(best[name], sum(map(len, said[name])) / seconds)
            num_forced = llm.stats().num_accepted_forced_tokens - before
    return {
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in best.items()},
        "ratio": round(best["drafted"] / best["plain"], 4),
        "share_of_forced_tokens": round(num_forced / sum(map(len, said["drafted"])), 4),
        "is_equal": said["plain"] == said["drafted"],
    }
