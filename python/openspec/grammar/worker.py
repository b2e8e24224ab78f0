"""A process that compiles grammars and that its owner can end.

    python -m openspec.grammar.worker

Its first frame (`child_process.py`) is a `Start` in msgpack. Each after it is a grammar's source,
answered by the compiled grammar or by the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from openspec.grammar.child_process import Refusal, limit_memory, serve


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What all grammars are compiled for, and within which limits."""

    tokens: list[bytes]
    vocab_size: int
    stop_ids: list[int]
    limit_s: float
    memory: int
    """Bytes of address space."""


def _begin(first: bytes) -> tuple[Callable[[bytes], bytes], float]:
    from openspec import _grammar
    from openspec.grammar.json_lengths import chars_behind_quote
    from openspec.grammar.json_rules import compile_source

    start = msgspec.msgpack.decode(first, type=Start)
    limit_memory(start.memory)
    vocabulary = _grammar.Vocabulary(start.tokens, start.vocab_size, start.stop_ids)
    behind_quote = chars_behind_quote(start.tokens)

    def compiled(source: bytes) -> bytes:
        try:
            return compile_source(vocabulary, source.decode(), behind_quote)
        except MemoryError:
            raise Refusal(b"it takes too much memory") from None
        except UnicodeDecodeError as error:  # of a message that quotes half a character
            raise Refusal(error.object) from None
        except (ValueError, RuntimeError) as error:
            raise Refusal(str(error).encode("utf-8", "replace")) from None

    return compiled, start.limit_s


if __name__ == "__main__":
    serve(_begin)
