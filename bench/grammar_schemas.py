"""Schemas of the kinds that people publish: how many are accepted, end in time, and are kept to.

    python -m bench.grammar_schemas [--num 500] [--json FILE]

Each schema of `tests/unit/schema_shapes.py` goes to an `LLM` as `structured_outputs`, once greedily
and once sampled. Every answer that ends is read and validated by the jsonschema library.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import jsonschema
from tests.unit.schema_shapes import schemas

from openspec import LLM, SamplingParams
from openspec.bench.environment import environment
from openspec.errors import RequestError
from openspec.messages import StructuredOutputs
from openspec.text.answer_grammar import content_format
from openspec.text.outputs import RequestOutput

QUESTION = "Give an example of a thing with these fields in JSON: {names}."
KINDS = {"greedy": 0.0, "sampled": 1.0}


def question(schema: dict) -> str:
    """About the fields at the schema's top."""
    names = schema.get("properties") or {"value": None}
    return QUESTION.format(names=", ".join(names))


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
                content_format(wanted, "json")
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
                outputs: list[RequestOutput] = llm.generate(
                    [question(schema) for _, schema, _ in part], sampling, use_tqdm=False
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
        names = ("num", "max_tokens", "frequency_penalty")
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
