"""How tokens spell bytes: byte-level vocabularies, and SentencePiece's with a token for each byte.

The first kind is Qwen's, Llama 3's and Mistral Nemo's; the second is Mistral 7B's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import ConfigError

SPACE_MARK = "\u2581"
_BYTES_AND_MARKS = ["Replace", "ByteFallback", "Fuse"]
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def spelling_of(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """The bytes of a token by its entry in the vocabulary.

    Raises:
        ConfigError: a kind of vocabulary other than the two.
    """
    model, decoder = backend.model, backend.decoder
    if isinstance(model, models.BPE) and model.dropout:
        raise ConfigError("tokenizer.json: dropout must be null, or the same text has many ids")
    if isinstance(model, models.BPE) and isinstance(decoder, decoders.ByteLevel):
        return _decode_byte_level
    if isinstance(model, models.BPE) and model.byte_fallback and _marks_spaces(decoder):
        return _decode_space_marks
    raise ConfigError(
        "tokenizer.json: expected a BPE model with a ByteLevel decoder (Qwen, Llama 3), or with "
        f"byte_fallback and its decoder (Mistral 7B), found {type(model).__name__} with "
        f"{type(decoder).__name__}"
    )


def within_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for text that does not begin the whole text: where no space is put first."""
    step = backend.pre_tokenizer
    state: JsonValue = json.loads(step.__getstate__()) if step else None
    if not isinstance(state, dict) or state.get("prepend_scheme") != "first":
        return backend
    inner = json.loads(backend.to_str())
    inner["pre_tokenizer"]["prepend_scheme"] = "never"
    result = tokenizers.Tokenizer.from_str(json.dumps(inner))
    result.encode_special_tokens = True
    return result


def surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text.

    Raises:
        ConfigError: it changes the text's own tokens.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ConfigError("tokenizer.json: the post_processor changes the text's own tokens")


def drops_first_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether a whole text loses the space that its first token begins with."""
    return any(step.get("type") == "Strip" for step in _steps(backend.decoder))


def _marks_spaces(decoder: decoders.Decoder | None) -> bool:
    """Whether the decoder turns marks into spaces and byte tokens into bytes, and no more.

    It may also drop a space at the start of the whole text.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    return kinds in (_BYTES_AND_MARKS, [*_BYTES_AND_MARKS, "Strip"]) and (
        steps[0].get("pattern") == {"String": SPACE_MARK} and steps[0].get("content") == " "
    )


def _steps(decoder: decoders.Decoder | None) -> list[dict[str, JsonValue]]:
    """Those of a decoder that is a sequence."""
    state: JsonValue = json.loads(decoder.__getstate__()) if decoder else None
    steps = state.get("decoders") if isinstance(state, dict) else None
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: characters that print are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _decode_byte_level(token: str) -> bytes:
    """The bytes of a token, as the ByteLevel decoder gives them.

    A token with a character outside the alphabet is plain text.
    """
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _decode_space_marks(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
