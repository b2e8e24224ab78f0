"""What tokens that a grammar forces are worth: the same answers with and without them as drafts.

    python -m bench.forced_tokens --model MODEL --runs none eagle3:HEAD:3 --concurrency 1 16 64

Requests ask for records of JSON schemas with long names, as tools have them, and without free
white space (`disable_any_whitespace`), which small models like too much. One side drafts what
the grammar forces, and what its drafter proposes; the other is plain decoding. So many requests
run at any time, each place has four in turn. Sides take turns, texts are compared, and of each side
the best round counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.grammar_overhead import Side, engine_of, prompts_of

from openspec.bench.environment import environment
from openspec.grammar.formats import json_of, rewritten, source_of
from openspec.grammar.json_rules import compile_source

TEXT, NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0}
RECORDS = {
    "order": {
        "customer_identifier": NUMBER,
        "delivery_address": TEXT,
        "number_of_items": NUMBER,
        "payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        "is_express_delivery": {"type": "boolean"},
    },
    "weather": {
        "location_name": TEXT,
        "temperature_in_celsius": {"type": "integer", "minimum": -60, "maximum": 60},
        "weather_condition": {"enum": ["sunny", "partly_cloudy", "raining", "snowing"]},
        "relative_humidity_percent": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "ticket": {
        "ticket_title": TEXT,
        "assigned_department": {"enum": ["engineering", "customer_support", "accounting"]},
        "priority_level": {"enum": ["low", "medium", "high"]},
        "estimated_hours": NUMBER,
        "requires_approval": {"type": "boolean"},
    },
}


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All rounds of one run."""
    core, vocabulary, config = engine_of(name, arguments.model, max(arguments.concurrency))
    for key, fields in RECORDS.items():
        schema = {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
        source = source_of(json_of(rewritten(schema, "schema"), "line"), "schema")
        core.load_grammar(key, compile_source(vocabulary, source))
    side = Side(core, *prompts_of(config, max(arguments.concurrency)), arguments.max_tokens)
    rows: list[dict[str, object]] = []
    for count in arguments.concurrency:
        keys = [list(RECORDS)[index % len(RECORDS)] for index in range(4 * count)]
        best = {"plain": 0.0, "drafted": 0.0}
        said: dict[str, list[list[int]]] = {}
        shares: dict[str, float] = {}
        for _ in range(1 + arguments.repeats):  # the first records graphs and reads the grammars
            for kind in best:
                before = core.stats()
                rate, said[kind] = side.stream(count, keys, is_plain=kind == "plain")
                best[kind] = max(best[kind], rate)
                after, num_tokens = core.stats(), sum(map(len, said[kind]))
                forced = after.num_accepted_forced_tokens - before.num_accepted_forced_tokens
                drafts = after.num_forced_tokens - before.num_forced_tokens
                accepted = after.num_accepted_tokens - before.num_accepted_tokens
                if kind == "drafted":
                    shares = {
                        "tokens_that_were_forced": round(forced / num_tokens, 4),
                        "forced_that_were_accepted": round(forced / max(drafts, 1), 4),
                        "tokens_that_were_drafted": round(accepted / num_tokens, 4),
                    }
        row: dict[str, object] = {"run": name, "concurrency": count}
        row |= {f"{kind}_tokens_per_second": round(rate, 1) for kind, rate in best.items()}
        row |= {"ratio": round(best["drafted"] / best["plain"], 4), **shares}
        row["is_equal"] = said["plain"] == said["drafted"]
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--runs", nargs="+", default=["none"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for name in arguments.runs for row in measure(name, arguments)]
    if arguments.json:
        flags = {"runs": arguments.runs, "max_tokens": arguments.max_tokens}
        report = {"environment": environment(flags, {}), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
