"""Schemas that packages publish: which are accepted, why others are not, and what compiling takes.

    python -m venv V && V/bin/pip install "githubkit<0.15" "hishel<1" openai mcp anthropic \\
        fhir.resources kubernetes-validate
    npm pack nx turbo @biomejs/biome ...                    # in the folder N
    V/bin/python bench/real_schemas.py collect LIST.json --npm N
    python -m bench.real_schemas compile LIST.json [--vocabulary FILE --vocab-size 151936]
        [--before REPORT.json] [--json REPORT.json]

`collect` writes the list, with versions: models of pydantic in the Python packages, evenly spaced
among all by name; definitions of Kubernetes; files of npm packages that name JSON Schema. It needs
nothing of openspec. `compile` says for each whether it is accepted, the processor time of rewriting
and compiling, and the compiled bytes. The exit status is 1 where one is refused that an earlier
report (`--before`) accepts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import sys
import tarfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "githubkit": ("githubkit.versions.latest.models", "githubkit.versions.latest.webhooks", 140),
    "openai": ("openai.types", 78),
    "mcp": ("mcp_types", "mcp", 60),
    "anthropic": ("anthropic.types", 50),
    "fhir.resources": ("fhir.resources", 40),
}
"""Modules that hold models, and how many of these are taken."""
NUM_DEFINITIONS = 120
MAX_FILES = 8
"""Of one npm package."""
SLOW_S = 10.0
"""Processor time after which the server refuses a grammar."""


def modules(name: str) -> Iterator[object]:
    """A module and all that it holds, but for those that need what is not installed."""
    waiting = [name]
    while waiting:
        try:
            module = importlib.import_module(waiting.pop())
        except Exception:
            continue
        yield module
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            waiting.append(f"{module.__name__}.{found.name}")


def of_models(names: tuple[str, ...], num: int) -> Iterator[tuple[str, object]]:
    from pydantic import BaseModel

    tops, models = {name.partition(".")[0] for name in names}, {}
    for module in (module for name in names for module in modules(name)):
        for value in (getattr(module, name, None) for name in dir(module)):
            if inspect.isclass(value) and issubclass(value, BaseModel):
                models[f"{value.__module__}.{value.__qualname__}"] = value
    ordered = sorted((name, one) for name, one in models.items() if name.partition(".")[0] in tops)
    for place in range(num):
        name, model = ordered[place * len(ordered) // num]
        try:
            yield name, model.model_json_schema()
        except Exception as error:  # models of fields that have no schema
            print(f"{name}: {type(error).__name__}")


def of_kubernetes() -> Iterator[tuple[str, object]]:
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    versions = {path: path.name[1:-6].split(".") for path in folder.glob("v*-local")}
    latest = max(versions, key=lambda path: [int(number) for number in versions[path]])
    definitions = json.loads((latest / "_definitions.json").read_text())["$defs"]
    names = sorted(definitions)
    for name in (names[i * len(names) // NUM_DEFINITIONS] for i in range(NUM_DEFINITIONS)):
        needed, waiting = set[str](), [name]
        while waiting:
            one = waiting.pop()
            if one not in needed:
                needed.add(one)
                text = json.dumps(definitions[one])
                waiting += [part.partition('"')[0] for part in text.split("#/$defs/")[1:]]
        held = {one: definitions[one] for one in sorted(needed)}
        yield f"{latest.name}/{name}", {"$ref": f"#/$defs/{name}", "$defs": held}


def of_npm(folder: Path) -> Iterator[tuple[str, object]]:
    for path in sorted(folder.glob("*.tgz")):
        seen = set[str]()
        with tarfile.open(path) as package:
            for member in sorted(package.getmembers(), key=lambda one: one.name):
                if not member.name.endswith(".json") or len(seen) == MAX_FILES:
                    continue
                file = package.extractfile(member)
                try:
                    schema = json.loads(file.read() if file else b"")
                except ValueError:
                    continue
                uri = schema.get("$schema") if isinstance(schema, dict) else None
                is_schema = isinstance(uri, str) and "json-schema.org" in uri
                text = json.dumps(schema)
                if is_schema and "/json-schema-20" not in member.name and text not in seen:
                    seen.add(text)
                    yield f"{path.stem}/{member.name.partition('/')[2]}", schema


def collect(arguments: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    found = []
    for package, (*names, num) in PACKAGES.items():
        version = importlib.metadata.version(package)
        for name, schema in of_models(tuple(names), num):
            found.append({"source": f"{package} {version}", "name": name, "schema": schema})
    version = importlib.metadata.version("kubernetes-validate")
    for name, schema in of_kubernetes():
        found.append({"source": f"kubernetes-validate {version}", "name": name, "schema": schema})
    for name, schema in of_npm(arguments.npm) if arguments.npm else ():
        found.append({"source": "npm", "name": name, "schema": schema})
    arguments.list.write_text(json.dumps(found))
    print(Counter(one["source"] for one in found))
    return 0


def tried(schema: object, compile_tree: object) -> dict[str, object]:
    from openspec.grammar.schemas.constraints import Unenforceable
    from openspec.grammar.schemas.schema import enforceable

    start = time.process_time()
    result: dict[str, object] = {"json_bytes": len(json.dumps(schema))}
    try:
        tree = enforceable(schema)
        result["rewriting_s"] = round(time.process_time() - start, 3)
        result["compiled_bytes"] = len(compile_tree(tree))  # type: ignore[operator]
    except (Unenforceable, ValueError, MemoryError) as error:
        result["refused"] = str(error)[-200:]
    result["total_s"] = round(time.process_time() - start, 3)
    return result


def compile_all(arguments: argparse.Namespace) -> int:
    from bench.measure.grammar_cases import tokens_of

    from openspec import _grammar
    from openspec.grammar.formats import json_of
    from openspec.grammar.rules.json_rules import compile_format
    from openspec.grammar.rules.lengths import chars_behind_quote

    tokens = tokens_of(arguments.vocabulary)
    size = max(arguments.vocab_size, len(tokens) + 1)
    vocabulary = _grammar.Vocabulary([*tokens, b""], size, [len(tokens)])
    behind_quote = chars_behind_quote(tokens)
    report = {}
    for one in json.loads(arguments.list.read_text()):
        result = tried(
            one["schema"], lambda tree: compile_format(vocabulary, json_of(tree), behind_quote)
        )
        report[one["name"]] = {"source": one["source"], **result}
        if arguments.verbose:
            print(one["name"], result, flush=True)
    slow = [name for name, one in report.items() if one["total_s"] > SLOW_S]
    refused = {name: one["refused"] for name, one in report.items() if "refused" in one}
    for reason, num in Counter(
        reason.partition(": ")[2][:90] for reason in refused.values()
    ).most_common(25):
        print(f"{num:4} {reason}")
    print(
        f"{len(report) - len(refused)} of {len(report)} accepted, {len(slow)} take over {SLOW_S} s"
    )
    times = sorted(one["total_s"] for one in report.values())
    print(
        f"processor time: median {times[len(times) // 2]} s, 99 % {times[len(times) * 99 // 100]} s"
    )
    lost = []
    if arguments.before:
        before = json.loads(arguments.before.read_text())
        lost = [name for name in refused if "refused" not in before.get(name, {"refused": ""})]
        for name in lost:
            print(f"accepted before: {name}: {refused[name]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    collecting, compiling = parts.add_parser("collect"), parts.add_parser("compile")
    for part in (collecting, compiling):
        part.add_argument("list", type=Path)
    collecting.add_argument("--npm", type=Path, help="a folder of packages as npm packs them")
    compiling.add_argument("--vocabulary", type=Path, help="checkpoint, or file of tiktoken's")
    compiling.add_argument("--vocab-size", type=int, default=0)
    compiling.add_argument("--before", type=Path)
    compiling.add_argument("--json", type=Path)
    compiling.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    return collect(arguments) if arguments.part == "collect" else compile_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
