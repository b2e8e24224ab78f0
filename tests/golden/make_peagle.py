"""Writes data/peagle.safetensors: what the reference drafts for random P-EAGLE heads.

    python -m tests.golden.make_peagle

The cases are as in `make_eagle3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.heads import seeded

from .make_eagle3 import Case, make
from .peagle_reference import PEagleReference
from .stored_cases import write_cases

DATA = Path(__file__).parent / "data" / "peagle.safetensors"


class ParallelCase(Case):
    """A case of such a head."""

    def reference(self, first: int = 1) -> PEagleReference:
        """The head with its target's embeddings."""
        embedding = self.target[1]["model.embed_tokens.weight"]
        return PEagleReference(*self.head, embedding=embedding, first=first)


def cases() -> Iterator[tuple[str, Case]]:
    """By name: a small random head of each kind."""
    target = seeded.target()
    prompt = [2 + 7 * i % 250 for i in range(20)]
    for kind in seeded.PEAGLE_KINDS:
        yield kind, ParallelCase(target, seeded.peagle(kind), prompt)


def main() -> None:
    """Writes the file."""
    write_cases(DATA, ((name, make(case)) for name, case in cases()))


if __name__ == "__main__":
    main()
