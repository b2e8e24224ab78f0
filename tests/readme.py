"""The README's console blocks: `$ ` lines are run, and the lines after them are what comes out.

Numbers may differ, and `...` stands for anything. `python3 -m tests.readme` prints the first
command; given a file, it fails unless that holds the output that the README shows for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def console_commands() -> Iterator[tuple[str, str]]:
    """(command, expected output) in their order."""
    for block in re.findall(r"^```console\n(.*?)^```$", README.read_text(), re.M | re.S):
        yield from re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)


COMMANDS = dict(console_commands())


def shows(expected: str, output: str) -> bool:
    """Whether the output is what the README shows."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(re.sub(r"\d+", r"\\d+", pattern), output.strip(), re.S) is not None


if __name__ == "__main__":
    command, expected_output = next(iter(COMMANDS.items()))
    if len(sys.argv) == 1:
        print(command)
    elif not shows(expected_output, Path(sys.argv[1]).read_text()):
        sys.exit(f"README.md shows another output than {sys.argv[1]}")
