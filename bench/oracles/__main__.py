"""Runs the oracles and writes what they found: `python -m bench.oracles --help`."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
from pathlib import Path

import bench.oracles
from bench.oracles.case import AbsentError, Case, DiffersError, Sources

RESULTS = Path(__file__).resolve().parents[1] / "results" / "oracles.json"


def all_cases() -> list[tuple[str, Case]]:
    """Every module's cases, in alphabetical order of the modules."""
    cases = []
    for module in sorted(info.name for info in pkgutil.iter_modules(bench.oracles.__path__)):
        if module != "__main__":
            loaded = importlib.import_module(f"bench.oracles.{module}")
            cases += [(module, case) for case in getattr(loaded, "CASES", ())]
    return cases


def run_case(case: Case, sources: Sources) -> tuple[str, bool]:
    """The result in words, and whether it is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case.run(Path(folder), sources), True
        except DiffersError as error:
            return f"differs: {error}", False


def main() -> int:
    """Returns 1 if a case differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.oracles", description=__doc__)
    parser.add_argument("--only", default="", help="a word of the module's name or the format")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    named = [item.partition("=") for item in arguments.source]
    sources = Sources({name: Path(folder) for name, _, folder in named})
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
    by_format = {(row["kind"], row["format"]): row for row in rows}
    are_equal, word = True, arguments.only.lower()
    for module, case in all_cases():
        if word not in module and word not in case.format.lower():
            continue
        try:
            result, is_equal = run_case(case, sources)
        except (AbsentError, ImportError) as error:
            print(f"{case.format}: skipped: {error}")
            continue
        are_equal &= is_equal
        print(f"{case.format}: {case.reading}: {result}", flush=True)
        by_format[case.kind, case.format] = {
            "kind": case.kind,
            "format": case.format,
            "reading": case.reading,
            "oracle": case.shown_oracle(),
            "result": result,
        }
    known = [(case.kind, case.format) for _, case in all_cases()]
    document = {"rows": [by_format[key] for key in known if key in by_format]}
    arguments.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
