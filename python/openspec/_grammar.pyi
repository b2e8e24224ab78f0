"""Grammars: compiled for a vocabulary, and matched. Loads without torch."""

from collections.abc import Sequence
from typing import final

class Complaint(ValueError):
    """What the library says of a grammar, in words about its own insides."""

@final
class Vocabulary:
    """The bytes of each token id, as grammars see them.

    Ids with no bytes, and those from `len(tokens)` to `vocab_size`, no grammar can produce.
    `stop_ids` end an answer. Raises ValueError where sizes or ids do not fit.
    """

    def __init__(
        self, tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
    ) -> None: ...
    @property
    def max_token_chars(self) -> int:
        """Code points of the longest token."""

    def tokenize(self, text: bytes, most: int) -> list[int]:
        """The bytes as tokens, the longest that fits first; at most `most`."""

def compile_structural_tag(vocabulary: Vocabulary, json: str) -> bytes:
    """Returns what the engine loads and `Matcher` takes; releases the GIL.

    Raises Complaint where the library refuses the grammar, and ValueError where this package does.
    """

def lark_as_ebnf(lark: str) -> str:
    """A grammar in Lark as one in EBNF, whose rule `root` is Lark's `start`.

    Raises Complaint where the library refuses it.
    """

@final
class Matcher:
    """Where one text stands in a grammar, for tests."""

    def __init__(self, vocabulary: Vocabulary, data: bytes) -> None: ...
    def accept(self, token_id: int) -> bool:
        """Whether the token may be next; if so the matcher is past it."""

    def rollback(self, num_tokens: int) -> None: ...
    @property
    def is_terminated(self) -> bool:
        """Whether the token that ends the answer is out."""

    def bitmask(self) -> bytes:
        """32-bit words, bit i for token i; all ones where nothing is masked or the text ended."""

    def allowed(self) -> list[int]:
        """The ids that may be next; all where nothing is masked."""

    def offer(self, most: int) -> list[int]:
        """At most `most` tokens that the grammar leaves no choice of, spelled as long tokens."""
