"""Prompts for the embedded model, from which its draft heads learn.

    python -m bench.tiny_model.prompts --texts TEXTS --out .tiny

writes `prompts.jsonl` (what the model is asked while a head learns) and `held_out.jsonl` (what the
head is measured on: GSM8K test, held-out files and plays), in the form that `openspec.adapt` reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from .augment import clean_answer, variant
from .documents import NO_THOUGHT, Document, chat
from .small_talk import small_talk_documents
from .sources import Sources, load_sources
from .tasks import (
    copy_documents,
    function_documents,
    play_documents,
    python_documents,
    scene_documents,
    solved,
)
from .tokenizer import TURN_START

ASSISTANT = f"{TURN_START}assistant\n"

COUNTS = {
    "problems": 17_600,
    "thinking": 8_800,
    "copy": 6_100,
    "functions": 4_800,
    "python": 2_200,
    "scenes": 2_200,
    "talk": 2_200,
}
"""Prompts of each group."""
NUM_HELD_OUT = 9  # of each group


def prompt_of(document: Document, rng: random.Random) -> str:
    """What stands before the answer; of a text without turns, some of its beginning."""
    text = document.text
    if ASSISTANT in text:
        cut = text.rindex(ASSISTANT) + len(ASSISTANT)
        return text[: cut + len(NO_THOUGHT) * text.startswith(NO_THOUGHT, cut)]
    if document.unlearned and document.unlearned[0][0] == 0:
        return text[: document.unlearned[0][1]]
    return text[: rng.randint(40, 700)]


def prompt_groups(sources: Sources, rng: random.Random) -> dict[str, Iterator[str]]:
    """Endless or finite prompts of every group, in random order."""

    def problems(thinking: bool) -> Iterator[str]:
        asked = list(sources.problems)
        rng.shuffle(asked)
        for variants in range(4):  # each problem first as it is, then with other names and numbers
            for question, answer in asked:
                if variants:
                    q, a = variant(question, answer, rng)
                else:
                    q, a = question, clean_answer(answer)
                # Half as plain as a benchmark asks them, never thinking.
                is_plain = rng.random() < 0.5
                document = chat(q, a) if is_plain else solved(q, a, rng, thinking)
                yield prompt_of(document, rng)

    def of(documents: Iterable[Document]) -> Iterator[str]:
        shuffled = list(documents)
        rng.shuffle(shuffled)
        return (prompt_of(document, rng) for document in shuffled)

    return {
        "problems": problems(False),
        "thinking": problems(True),
        "copy": of(copy_documents(sources, 6_000, rng)),
        "functions": of(function_documents(sources, rng)),
        "python": of(python_documents(sources, rng)),
        "scenes": of(itertools.chain(scene_documents(sources, rng), play_documents(sources, rng))),
        "talk": of(small_talk_documents(2_000, rng)),
    }


def held_out_groups(sources: Sources, rng: random.Random) -> dict[str, Iterator[str]]:
    """The same kinds of prompts from held-out text; problems word for word as a benchmark asks."""
    groups = prompt_groups(sources, rng)
    for name, thought in (("problems", None), ("thinking", "...")):
        documents = [chat(q, a, thought) for q, a in sources.problems]
        groups[name] = iter([prompt_of(document, rng) for document in documents])
    return groups


def write(path: Path, groups: dict[str, Iterator[str]], counts: dict[str, int]) -> None:
    """The first prompts of every group, a line each."""
    texts = [
        text for name, found in groups.items() for text in itertools.islice(found, counts[name])
    ]
    lines = [json.dumps({"prompt": text}) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines)} prompts")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=Path, required=True, help="GSM8K and the plays")
    parser.add_argument("--out", type=Path, default=Path(".tiny"))
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    train, held_out = load_sources(args.texts)
    few = dict.fromkeys(COUNTS, NUM_HELD_OUT)
    write(args.out / "held_out.jsonl", held_out_groups(held_out, rng), few)
    write(args.out / "prompts.jsonl", prompt_groups(train, rng), COUNTS)


if __name__ == "__main__":
    main()
