"""Stage 1: sources -> tokenizer, training and held-out corpora.

    python -m bench.tiny_model.data --texts FOLDER --out .tiny

writes `tokenizer/` (the files that go into the model folder), `train.npz` and `held_out.npz`. A
corpus is one stream of 16-bit tokens with the start of every document and its group; the top bit
marks tokens that are read but not learned.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .augment import clean_answer
from .documents import Document, chat
from .small_talk import small_talk_documents
from .sources import Sources, load_sources
from .tasks import (
    copy_documents,
    function_documents,
    passages,
    play_documents,
    problem_documents,
    python_documents,
    repeat_task,
    scene_documents,
)
from .tokenizer import save_tokenizer, train_tokenizer

UNLEARNED = 1 << 15
GROUPS = ("problems", "python", "functions", "plays", "scenes", "copy", "talk")


def training_groups(sources: Sources, rng: random.Random) -> dict[str, Iterable[Document]]:
    """Documents of every group of the training mixture."""
    return {
        "problems": problem_documents(sources, variants=4, rng=rng),
        "python": python_documents(sources, rng),
        "functions": repeated(lambda: function_documents(sources, rng), 2),
        "plays": repeated(lambda: play_documents(sources, rng), 2),
        "scenes": repeated(lambda: scene_documents(sources, rng), 3),
        "copy": copy_documents(sources, 20_000, rng),
        "talk": small_talk_documents(4_000, rng),
    }


def held_out_groups(sources: Sources, rng: random.Random) -> dict[str, Iterable[Document]]:
    """Documents to measure with: the answers of test problems, raw files, raw plays, repeats."""
    stream = passages(sources, rng)
    repeats = [repeat_task(next(stream)[1], rng) for _ in range(200)]
    return {
        "problems": [chat(q, clean_answer(a)) for q, a in sources.problems],
        "python": python_documents(sources, rng),
        "plays": play_documents(sources, rng),
        "copy": [chat(user, answer) for user, answer, _ in repeats],
    }


def repeated(make: object, times: int) -> Iterator[Document]:
    """The documents of `times` calls of `make`, which cut or word them differently each time."""
    assert callable(make)
    for _ in range(times):
        yield from make()


def encode(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a document, unlearned ones marked in the top bit."""
    encoding = tokenizer.encode(document.text, add_special_tokens=False)
    ranges, at = document.unlearned, 0
    ids = []
    for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        hidden = at < len(ranges) and ranges[at][0] <= start
        ids.append(token | UNLEARNED if hidden else token)
    return ids


def write_corpus(path: Path, groups: dict[str, Iterable[Document]], tokenizer: Tokenizer) -> None:
    """Encode all groups into one .npz file and print their sizes."""
    tokens: list[np.ndarray] = []
    starts, group_ids, total = [], [], 0
    for name, documents in groups.items():
        count, learned, first = 0, 0, total
        for document in documents:
            ids = np.array(encode(document, tokenizer), dtype=np.uint16)
            tokens.append(ids)
            starts.append(total)
            group_ids.append(GROUPS.index(name))
            total += len(ids)
            count += 1
            learned += int((ids < UNLEARNED).sum())
        print(f"{path.name}: {name:10} {count:6} documents {total - first:9} tokens "
              f"({learned} learned)")  # fmt: skip
    np.savez_compressed(
        path,
        tokens=np.concatenate(tokens),
        starts=np.array(starts, dtype=np.uint32),
        groups=np.array(group_ids, dtype=np.uint8),
    )


def tokenizer_texts(sources: Sources, rng: random.Random) -> Iterator[str]:
    """What the merges are learned from: all sources, none so large that it rules the rest."""
    for question, answer in sources.problems:
        yield f"{question}\n{clean_answer(answer)}"
    yield from [sources.plays] * 2
    yield from rng.sample(sources.python_files, len(sources.python_files) // 2)
    for document in small_talk_documents(500, rng):
        yield document.text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=Path, required=True, help="GSM8K and the plays")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, instead of a new one")
    parser.add_argument("--out", type=Path, default=Path(".tiny"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    train, held_out = load_sources(args.texts)
    print(f"files of the standard library: {len(train.python_files)} to train on, "
          f"{len(held_out.python_files)} held out")  # fmt: skip
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer(tokenizer_texts(train, rng))
        save_tokenizer(tokenizer, args.out / "tokenizer")
    write_corpus(args.out / "held_out.npz", held_out_groups(held_out, rng), tokenizer)
    write_corpus(args.out / "train.npz", training_groups(train, rng), tokenizer)


if __name__ == "__main__":
    main()
