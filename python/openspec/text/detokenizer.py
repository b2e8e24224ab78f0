"""Text from tokens as they come."""

from __future__ import annotations

from collections.abc import Collection
from encodings.utf_8 import IncrementalDecoder

from openspec.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns token ids into text, one at a time.

    The pieces in a row are exactly the text that decoding all tokens at once gives: bytes of an
    unfinished character are held back until they are a character or cannot become one. The cost of
    a token is the length of its text, however long the output.
    """

    __slots__ = ("_decoder", "_shown_token_ids", "_skip_special_tokens", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
    ) -> None:
        """Starts at the beginning of a text, of which `shown_token_ids` are part in any case."""
        self._tokenizer = tokenizer
        self._shown_token_ids = frozenset(shown_token_ids)
        self._skip_special_tokens = skip_special_tokens
        self._decoder = IncrementalDecoder(errors="replace")

    def append(self, token_id: int) -> str:
        """The text that is certain after one more token."""
        skip = self._skip_special_tokens and token_id not in self._shown_token_ids
        data = self._tokenizer.output_bytes(token_id, skip)
        if data.isascii() and not self._decoder.buffer:  # most tokens, and twice as fast
            return data.decode("ascii")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)
