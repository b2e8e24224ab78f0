"""JSON Schema's official test suite through compiled grammars: no invalid instance may be allowed.

    pip download --no-deps --no-binary jsonschema jsonschema && tar xzf jsonschema-*.tar.gz
    python -m bench.schema_suite jsonschema-*/json/tests [--json FILE]

The suite comes with the source distribution of the package jsonschema. Each schema of drafts 4 to
2020-12 that is accepted is compiled for the embedded model's vocabulary, and the text of each of
its instances is fed to the grammar. Valid instances may be refused: an answer has its properties in
the schema's order, for example. The exit status is 1 where an invalid one is allowed that
`ANNOTATIONS` does not name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openspec import _grammar
from openspec.config import EMBEDDED_MODEL
from openspec.grammar.formats import json_of
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.schema import enforceable
from openspec.grammar.schemas.values import SpelledNumber, json_text
from openspec.text.tokenizer import Tokenizer

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
ANNOTATIONS = {
    "draft7/optional/content.json": "contentMediaType and contentEncoding only describe a text",
}
"""Files whose invalid instances may be allowed, each with the reason."""


def groups(tests: Path) -> Iterator[tuple[str, dict]]:
    """Schemas with their instances, each with the name of its file."""
    for draft in DRAFTS:
        for path in sorted((tests / draft).rglob("*.json")):
            read = json.loads(path.read_text(), parse_float=SpelledNumber)
            yield from ((str(path.relative_to(tests)), group) for group in read)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "tests", type=Path, help="the suite's folder with one folder for each draft"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = Tokenizer.from_folder(EMBEDDED_MODEL).grammar_tokens(())
    vocabulary = _grammar.Vocabulary([*tokens, b""], len(tokens) + 1, [len(tokens)])
    behind_quote = chars_behind_quote(tokens)

    def allows(data: bytes, text: str) -> bool:
        matcher = _grammar.Matcher(vocabulary, data)
        ids = vocabulary.tokenize(text.encode(), len(text) * 4 + 1)
        return all(map(matcher.accept, ids)) and matcher.accept(len(tokens))

    counts, reasons = Counter[str](), Counter[str]()
    wrong, slowest = [], 0.0
    for name, group in groups(arguments.tests):
        counts["schemas"] += 1
        counts["instances invalid"] += sum(not test["valid"] for test in group["tests"])
        start = time.process_time()
        try:
            data = compile_format(vocabulary, json_of(enforceable(group["schema"])), behind_quote)
        except Unenforceable as error:
            reasons[str(error).partition(": ")[2]] += 1
            continue
        slowest = max(slowest, time.process_time() - start)
        counts["schemas accepted"] += 1
        for test in group["tests"]:
            is_allowed = allows(data, json_text(test["data"]))
            counts[f"valid {'allowed' if is_allowed else 'not allowed'}"] += test["valid"]
            if is_allowed and not test["valid"]:
                counts["invalid allowed"] += 1
                if name not in ANNOTATIONS:
                    wrong.append(f"{name}: {group['description']}: {test['description']}")
    report = {
        **counts,
        "invalid allowed without a reason": len(wrong),
        "slowest_s": round(slowest, 2),
    }
    print(json.dumps(report, indent=1), *wrong, sep="\n")
    for reason, num in reasons.most_common(20):
        print(f"{num:4} {reason[:100]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
