"""Schemas of the kinds that people publish: how many are accepted, end in time, and are kept to.

    python -m bench.grammar_schemas [--num 500] [--json FILE]

Each schema of `tests/unit/schema_shapes.py` goes to an `LLM` as `structured_outputs`, once greedily
and once sampled. Every answer that ends is read and validated by the jsonschema library. The prompt
shows an example, because the embedded model copies well and invents badly: with `--no-example` it
often writes the same letter until `max_tokens`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from tests.unit.schema_shapes import PATTERNS, schemas

from openspec import LLM, SamplingParams
from openspec.bench.environment import environment
from openspec.errors import RequestError
from openspec.messages import StructuredOutputs
from openspec.text.grammars.answer_grammar import content_format
from openspec.text.outputs import RequestOutput

try:
    import jsonschema
except ModuleNotFoundError as error:
    raise SystemExit(f"needs jsonschema: pip install jsonschema ({error})") from None

QUESTION = "Give an example of a thing with these fields in JSON: {names}."
COPY = "Repeat the following text exactly:\n\n{example}"
KINDS = {"greedy": 0.0, "sampled": 1.0}
TEXTS = dict(
    zip(
        PATTERNS,
        "blue AB1234 2026-01-02 #00ff00 ann@site.org 1.2.3 blue http://site.org 5551234567".split(),
        strict=True,
    )
) | {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "email": "ann@site.org",
    "uri": "http://site.org/a",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "10.0.0.1",
    "hostname": "site.org",
    "int32": "7",
}
"""Of patterns and formats."""
MOST_DEPTH, DEPTH_OF_OPTIONAL = 6, 2


def prompt_of(schema: dict, has_example: bool) -> str:
    """To copy an example, or to fill the fields at the schema's top."""
    if has_example:
        return COPY.format(example=json.dumps(example(schema, schema)))
    names = schema.get("properties") or {"value": None}
    return QUESTION.format(names=", ".join(names))


def example(schema: object, root: dict, depth: int = 0) -> object:
    """A value of a schema's shape; it may break what `TEXTS` and bounds of lists do not know."""
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if "$ref" in schema:
        node = root
        for key in schema["$ref"].split("/")[1:]:
            node = node[key]
        return example(node, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            rest = {name: value for name, value in schema.items() if name != key}
            parts = [example({**rest, **one}, root, depth + 1) for one in schema[key]]
            is_merged = key == "allOf" and all(isinstance(part, dict) for part in parts)
            return {k: v for part in parts for k, v in part.items()} if is_merged else parts[0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {
            name: example(one, root, depth + 1)
            for name, one in schema.get("properties", {}).items()
            if depth < DEPTH_OF_OPTIONAL or name in schema.get("required", ())
        }
    if kind == "array":
        item = example(schema.get("items", {}), root, depth + 1)
        return [item] * max(1, schema.get("minItems", 0))
    if kind in ("integer", "number"):
        return max(int(schema.get("minimum", 0)), min(7, int(schema.get("maximum", 7))))
    if kind in ("boolean", "null"):
        return True if kind == "boolean" else None
    text = TEXTS.get(schema.get("pattern", schema.get("format")), "blue")
    return (text * (1 + schema.get("minLength", 0)))[: max(len(text), schema.get("minLength", 0))][
        : schema.get("maxLength")
    ]


def is_valid(schema: dict, text: str) -> bool:
    """Whether a whole answer is JSON of the schema."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--no-example", action="store_true")
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--show", type=int, default=0, help="print so many cut answers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    given = schemas(arguments.num)
    refusals: Counter[str] = Counter()
    counts = {kind: Counter[str]() for kind in KINDS}
    lengths: dict[str, list[int]] = {kind: [] for kind in KINDS}
    start = time.monotonic()
    with LLM(arguments.model, stats_interval_s=0.0) as llm:
        accepted = []
        for index, schema in enumerate(given):
            wanted = StructuredOutputs(json=schema)
            try:
                content_format(wanted)
            except RequestError as error:
                refusals[str(error).split(": ")[-2].rpartition("/")[2]] += 1
                continue
            accepted.append((index, schema, wanted))
        print(f"{len(accepted)} of {len(given)} accepted, {time.monotonic() - start:.0f} s")
        print(dict(refusals))
        for first in range(0, len(accepted), arguments.batch):
            part = accepted[first : first + arguments.batch]
            for kind, temperature in KINDS.items():
                sampling = [
                    SamplingParams(
                        temperature=temperature,
                        seed=index,
                        frequency_penalty=arguments.frequency_penalty,
                        max_tokens=arguments.max_tokens,
                        structured_outputs=wanted,
                    )
                    for index, _, wanted in part
                ]
                outputs: list[RequestOutput] = llm.chat(
                    [
                        [{"role": "user", "content": prompt_of(schema, not arguments.no_example)}]
                        for _, schema, _ in part
                    ],
                    sampling,
                    use_tqdm=False,
                    chat_template_kwargs={"enable_thinking": False},
                )
                for (_, schema, _), output in zip(part, outputs, strict=True):
                    answer = output.outputs[0]
                    lengths[kind].append(len(answer.token_ids))
                    if answer.finish_reason != "stop":
                        counts[kind][str(answer.finish_reason)] += 1
                        if counts[kind]["length"] <= arguments.show:
                            print(kind, json.dumps(schema)[:1500], "\n ->", answer.text)
                    else:
                        counts[kind]["finished"] += 1
                        valid = is_valid(schema, answer.text)
                        counts[kind]["valid" if valid else "invalid"] += 1
                        if not valid:
                            print("INVALID", kind, json.dumps(schema), answer.text)
            elapsed = time.monotonic() - start
            print({k: dict(v) for k, v in counts.items()}, f"{elapsed:.0f} s", flush=True)
    if arguments.json:
        names = ("num", "max_tokens", "frequency_penalty", "no_example")
        flags = {name: getattr(arguments, name) for name in names}
        report = {
            "environment": environment(flags, {}),
            "num_accepted": len(accepted),
            "refused_for": dict(refusals),
            "answers": {kind: dict(counts[kind]) for kind in KINDS},
            "mean_tokens": {kind: round(sum(n) / len(n), 1) for kind, n in lengths.items()},
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
