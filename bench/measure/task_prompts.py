"""Prompts of seven kinds, from two data sets, from Python's own distribution, and made here.

The data sets are GSM8K (`gsm8k_test.jsonl`: lines of {"question", "answer"}) and MT-bench
(`mt_bench.jsonl`: lines of {"turns": [..]}). What comes from Python depends on its version.
"""

from __future__ import annotations

import inspect
import json
import random
import statistics
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

Turns = list[str]
"""What the user says, turn by turn."""

NAMES = ("Ada Novak", "Bo Lind", "Carla Ruiz", "Dev Patel", "Edith Stone", "Femi Okoro")
CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Turin", "Perth")
THINGS = ("lamps", "chairs", "kettles", "ladders", "mirrors", "blankets")


def gsm8k(data: Path) -> Iterator[Turns]:
    """Word problems."""
    for line in (data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines():
        yield [json.loads(line)["question"]]


def two_turns(data: Path) -> Iterator[Turns]:
    """Conversations whose second turn is about the first answer."""
    for line in (data / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["turns"][:2]


def edit(data: Path) -> Iterator[Turns]:
    """Functions to rename."""
    for module in (statistics, textwrap, random, inspect, json):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            source = inspect.getsource(function)
            if 300 <= len(source) <= 900:
                code = f"```python\n{source}```"
                yield [f"Rename the function `{name}` to `compute`. Write all of it.\n\n{code}"]


def passages() -> Iterator[str]:
    """Paragraphs of prose from Python's own manual."""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            if 400 <= len(text) <= 800 and text.endswith(".") and "::" not in text:
                yield text


def copy(data: Path) -> Iterator[Turns]:
    """Passages to repeat."""
    for text in passages():
        yield [f"Repeat this text word for word.\n\n{text}"]


def quote(data: Path) -> Iterator[Turns]:
    """Passages to summarise with quotes."""
    for text in passages():
        yield [f"{text}\n\nSummarise the text above, and quote its two most important sentences."]


def ask(data: Path) -> Iterator[Turns]:
    """Passages to ask about."""
    for text in passages():
        yield [f"Answer from this text alone.\n\n{text}\n\nWhat is it about, and what does it say?"]


def extract(data: Path) -> Iterator[Turns]:
    """Records to write as JSON."""
    drawn = random.Random(0)
    while True:
        people = drawn.sample(NAMES, 4)
        lines = [
            f"On {drawn.randint(1, 28)} May {name} of {drawn.choice(CITIES)} ordered "
            f"{drawn.randint(2, 90)} {drawn.choice(THINGS)} for {drawn.randint(20, 900)} dollars."
            for name in people
        ]
        fields = "day, name, city, count, thing, dollars"
        wanted = f"Write a JSON list of these orders, each with the fields {fields}."
        yield [f"{wanted}\n\n" + "\n".join(lines)]


KINDS: dict[str, Callable[[Path], Iterator[Turns]]] = {
    kind.__name__: kind for kind in (gsm8k, two_turns, edit, copy, quote, ask, extract)
}
"""What makes the prompts of each kind, given the folder of the data sets."""
