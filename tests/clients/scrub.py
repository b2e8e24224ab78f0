"""Requests of real agents as test data: their form, none of their texts.

Agents are other people's works. What is kept of a request is its shape: keys, types, names, numbers
and the length of each text. `filled` puts text of our own in their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tests.clients.recorder import Exchange

MAX_NAME = 40
"""Longer strings are texts, and so is every string with a space in it."""
BILLING = "x-anthropic-billing-header: "
_LENGTH = re.compile(r"<(\d+) characters>")
_FILLER = "An agent reads files, runs commands and says what it found. "


def scrubbed(value: object) -> object:
    """The same JSON with a length in the place of each text."""
    if isinstance(value, dict):
        return {key: _scrubbed_field(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    if isinstance(value, str) and (len(value) > MAX_NAME or re.search(r"\s", value)):
        if value.startswith(BILLING):
            return f"{BILLING}<{len(value) - len(BILLING)} characters>"
        return f"<{len(value)} characters>"
    return value


def filled(value: object) -> object:
    """The same JSON with texts of those lengths."""
    if isinstance(value, dict):
        return {key: filled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item) for item in value]
    if isinstance(value, str):
        return _LENGTH.sub(lambda match: _text(int(match[1])), value)
    return value


def _scrubbed_field(key: str, value: object) -> object:
    if key == "arguments" and isinstance(value, str):
        return json.dumps(scrubbed(json.loads(value)))  # JSON in a text stays JSON
    return scrubbed(value)


def write_recorded(file: Path, exchanges: Iterable[Exchange]) -> None:
    """Writes the requests that had a body, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    posts = [one for one in exchanges if one.method == "POST"]
    lines = [json.dumps({"path": one.path, "body": scrubbed(one.value)}) for one in posts]
    file.write_text("\n".join(lines) + "\n")


def read_recorded(file: Path) -> list[tuple[str, dict]]:
    """Paths and bodies, with texts in the place of lengths."""
    values = [json.loads(line) for line in file.read_text().splitlines()]
    return [(value["path"], filled(value["body"])) for value in values]


def _text(length: int) -> str:
    return (_FILLER * (length // len(_FILLER) + 1))[:length]
