"""Stage 1 of the EAGLE-3 head: prompts for the target, and some documents of its own training.

    python -m bench.tiny_model.eagle3.prompts --texts TEXTS --out .tiny/eagle3

writes `prompts.npz` (what the target is asked while the head learns), `held_out.npz` (what the
head is measured on: GSM8K test, held-out files and plays) and `documents.npz` (texts as the target
saw them). All are corpora in the layout of data.py, encoded with the shipped tokenizer.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..augment import clean_answer, variant
from ..data import UNLEARNED, encode
from ..documents import NO_THOUGHT, Document, chat
from ..small_talk import small_talk_documents
from ..sources import Sources, load_sources
from ..tasks import (
    copy_documents,
    function_documents,
    play_documents,
    problem_documents,
    python_documents,
    scene_documents,
    solved,
)
from ..tokenizer import TURN_START

MODEL = Path(__file__).parents[3] / "python" / "openspec" / "models" / "tiny"
ASSISTANT = f"{TURN_START}assistant\n"
MAX_PROMPT_TOKENS = 448

# New tokens per prompt; an answer that ends earlier is shorter.
LIMITS = {
    "problems": 288,
    "thinking": 352,
    "copy": 448,
    "functions": 288,
    "python": 224,
    "scenes": 192,
    "talk": 96,
}
GROUPS = tuple(LIMITS)


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


def training_documents(sources: Sources, rng: random.Random) -> Iterator[Document]:
    """A little of everything that the target was trained on."""
    kinds: list[Iterator[Document]] = [
        problem_documents(sources, 0, rng),
        python_documents(sources, rng),
        function_documents(sources, rng),
        play_documents(sources, rng),
        copy_documents(sources, 1_000, rng),
    ]
    for kind in kinds:
        documents = list(kind)
        yield from rng.sample(documents, min(len(documents), 1_000))


def save_corpus(path: Path, documents: list[list[int]], groups: list[int]) -> None:
    """Token lists and their groups, as Corpus reads them."""
    lengths = np.array([len(ids) for ids in documents])
    np.savez_compressed(
        path,
        tokens=np.concatenate([np.array(ids, dtype=np.uint16) for ids in documents]),
        starts=(np.cumsum(lengths) - lengths).astype(np.uint32),
        groups=np.array(groups, dtype=np.uint8),
    )
    print(f"{path}: {len(documents)} documents, {lengths.sum()} tokens, "
          f"{path.stat().st_size / 1e6:.1f} MB")  # fmt: skip


def write_prompts(
    path: Path, groups: dict[str, Iterator[str]], tokenizer: Tokenizer, counts: dict[str, int]
) -> None:
    """The first prompts of every group that are short enough."""
    documents, kinds = [], []
    for kind, (name, texts) in enumerate(groups.items()):
        for text in itertools.islice(texts, counts[name]):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= MAX_PROMPT_TOKENS:
                documents.append(ids)
                kinds.append(kind)
    save_corpus(path, documents, kinds)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=Path, required=True, help="GSM8K and the plays")
    parser.add_argument("--out", type=Path, default=Path(".tiny/eagle3"))
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    train, held_out = load_sources(args.texts)
    counts = dict.fromkeys(GROUPS, 256)
    write_prompts(args.out / "held_out.npz", held_out_groups(held_out, rng), tokenizer, counts)
    counts = {"problems": 15_000, "thinking": 9_000, "copy": 6_000, "functions": 5_000,
              "python": 4_000, "scenes": 3_000, "talk": 2_000}  # fmt: skip
    write_prompts(args.out / "prompts.npz", prompt_groups(train, rng), tokenizer, counts)
    documents = [encode(document, tokenizer) for document in training_documents(train, rng)]
    assert all(0 <= token < 2 * UNLEARNED for ids in documents[:10] for token in ids)
    save_corpus(args.out / "documents.npz", documents, [0] * len(documents))


if __name__ == "__main__":
    main()
