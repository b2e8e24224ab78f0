"""Text to token ids and back, for byte-level BPE checkpoints (`tokenizer.json`), and chats."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from openspec.checkpoint.folder import find_file, open_folder
from openspec.checkpoint.strict_json import JsonValue, describe_value, read_json_object
from openspec.errors import ConfigError, RequestError
from openspec.text.chat_template import ChatTemplates, Segment, any_of, split_at
from openspec.text.length_bound import LengthBound

logger = logging.getLogger(__name__)

MAX_TEXT_CHARS = 1 << 24
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat."""

    text: str
    token_ids: list[int]


class Tokenizer:
    """One checkpoint's tokenizer. All methods are thread-safe; the encoder releases the GIL."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, JsonValue] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Takes over `backend`; `config` is the content of tokenizer_config.json.

        Raises:
            ConfigError: not byte-level BPE, or tokens that contradict each other.
        """
        _check_backend(backend)
        named = _apply_config(backend, config or {})
        backend.no_truncation()
        backend.no_padding()
        # Special tokens are cut out here, and only where they are asked for.
        backend.encode_special_tokens = True
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """Special tokens, which `skip_special_tokens` leaves out, and their ids."""
        self._special_ids = frozenset(self.special_tokens.values())
        self._added_re = any_of([token.content for token in added.values()])
        self.num_tokens = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """Ids below this are tokens; the model's embedding may have more rows."""
        self.eos_token_id = self.special_tokens.get(named.get("eos_token", ""))
        self.bos_token_id = self.special_tokens.get(named.get("bos_token", ""))
        self._bytes: dict[int, bytes] = {}
        self._prefix, self._suffix = _surrounding_ids(backend)
        self.chat_templates = ChatTemplates(chat_templates or {}, self.special_tokens, named)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises:
            ConfigError: a file that is absent or cannot be used, with the remedy.
        """
        root = open_folder(folder)
        file = find_file(root, "tokenizer.json")
        if file is None:
            raise ConfigError(
                f"{root} has no tokenizer.json; save it with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{file}: not a tokenizer: {error}") from None
        config_file = find_file(root, "tokenizer_config.json")
        config = read_json_object(config_file) if config_file else {}
        return cls(backend, config, _read_templates(root, config))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self.chat_templates.sources)

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Text that spells a special token is ordinary text, unless `parse_special`: that is for
        prompts written by hand, never for what users say in a chat. `add_special_tokens` adds what
        the tokenizer puts around a text (nothing, for Qwen3).

        Raises:
            RequestError: too long, or not Unicode text.
        """
        segments = self.segments(text) if parse_special else [Segment(text, False)]
        ids = self.segment_ids(segments)
        return self.with_surroundings(ids) if add_special_tokens else ids

    def segments(self, text: str) -> list[Segment]:
        """A text written by hand, cut at its special tokens."""
        segments: list[Segment] = []
        plain = ""
        for piece, is_added in split_at(self._added_re, text):
            if is_added and piece in self.special_tokens:
                segments += [Segment(plain, False), Segment(piece, True)]
                plain = ""
            else:
                plain += piece
        return [*segments, Segment(plain, False)]

    def segment_ids(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a text in segments, of which only the special ones are special tokens.

        Raises:
            RequestError: too long, or not Unicode text.
        """
        ids: list[int] = []
        for segment in segments:
            if segment.is_special:
                ids.append(self.special_tokens[segment.text])
            else:
                ids += self._encode_plain(segment.text)
        return ids

    def with_surroundings(self, ids: list[int]) -> list[int]:
        """What the tokenizer puts around the ids of a text, and they within it."""
        return [*self._prefix, *ids, *self._suffix] if self._prefix or self._suffix else ids

    def min_num_tokens(self, text: str) -> int:
        """Tokens that a text has at least, by its length alone; see `LengthBound`."""
        return self._length_bound.min_num_tokens(text)

    @cached_property
    def _length_bound(self) -> LengthBound:
        added = self._backend.get_added_tokens_decoder().values()
        tokens = [_decode_byte_level(token) for token in self._backend.get_vocab()]
        tokens += [token.content.encode() for token in added]
        return LengthBound(self._backend, tokens)

    def ids_of_bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Token ids of each word inside another, and with a space before it as a word's start.

        The second where it has another first token and as many: vLLM's rule. A word has more than
        spaces.
        """
        result: list[list[int]] = []
        for word in words:
            inside, start = self.encode(word.lstrip()), self.encode(" " + word.lstrip())
            result.append(inside)
            if start[0] != inside[0] and len(start) == len(inside):
                result.append(start)
        return result

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        data = b"".join(self.output_bytes(token_id, skip_special_tokens) for token_id in token_ids)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """A token's exact bytes, which need not be whole characters; empty for unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            known = 0 <= token_id < self.num_tokens
            token = self._backend.id_to_token(token_id) if known else None
            data = b"" if token is None else _decode_byte_level(token)
            if known:
                self._bytes[token_id] = data
        return data

    def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to a decoded text."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        return self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone as text, U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def check_token_ids(self, token_ids: Iterable[int], param: str = "prompt") -> None:
        """Refuses ids from outside that belong to no token, so that they never reach the model.

        Raises:
            RequestError: with the id and the range.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.num_tokens:
                shown = token_id if token_id.bit_length() <= 64 else "a huge integer"
                raise RequestError(
                    f"token id {shown} is outside the tokenizer's range [0, {self.num_tokens})",
                    param,
                )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> ChatPrompt:
        """A chat through the model's own template, as text and ids.

        Only the template itself can produce special tokens; where messages or tools spell one, it
        is encoded as ordinary text. For messages that spell none, the ids are transformers'
        `apply_chat_template`.

        Raises:
            RequestError: no template, messages that it refuses, unknown kwargs, or a limit.
        """
        segments = self.chat_templates.render(
            messages, tools, add_generation_prompt, chat_template_kwargs or {}
        )
        text = "".join(segment.text for segment in segments)
        return ChatPrompt(text, self.segment_ids(segments))

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if len(text) > MAX_TEXT_CHARS:
            raise RequestError(f"the text is longer than {MAX_TEXT_CHARS} characters")
        try:
            # The batch form lets other threads run meanwhile; `encode` does not.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = batch[0].ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text holds lone surrogates, which no text has") from None
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, such as a pattern that gives up
            raise RequestError(f"the tokenizer fails on this text: {error}") from None
        return ids


def _check_backend(backend: tokenizers.Tokenizer) -> None:
    model = backend.model
    if not isinstance(model, models.BPE) or not isinstance(backend.decoder, decoders.ByteLevel):
        raise ConfigError(
            "tokenizer.json: expected a BPE model with a ByteLevel decoder, as Qwen3 has, found "
            f"{type(model).__name__} with {type(backend.decoder).__name__}"
        )
    if model.dropout:
        raise ConfigError("tokenizer.json: dropout must be null, or the same text has many ids")


def _apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, JsonValue]) -> dict[str, str]:
    """Brings the added tokens in line with tokenizer_config.json; returns the named tokens."""
    source = "tokenizer_config.json"
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or len(entries) > 1 << 16:
        raise ConfigError(f"{source}: added_tokens_decoder: expected an object of tokens")
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(content, str) or not content:
            raise ConfigError(
                f"{source}: added_tokens_decoder: {key[:32]}: expected an object with content, "
                f"found {describe_value(entry)}"
            )
        token = tokenizers.AddedToken(content, normalized=entry.get("normalized") is True)
        if entry.get("special") is True:
            backend.add_special_tokens([token])
        elif backend.token_to_id(content) is None:
            backend.add_tokens([token])
        if str(backend.token_to_id(content)) != key:
            raise ConfigError(
                f"{source}: {content!r} has id {key[:32]}, but {backend.token_to_id(content)} "
                "by tokenizer.json; take both files from the same checkpoint"
            )
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        content = _token_content(config.get(name), f"{source}: {name}")
        if content is not None:
            named[name] = content
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    items = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(items, list):
        raise ConfigError(f"{source}: additional_special_tokens: expected a list of tokens")
    contents = [_token_content(item, f"{source}: additional_special_tokens") for item in items]
    special = [content for content in (*named.values(), *contents) if content]
    for content in special:
        if backend.token_to_id(content) is None:
            raise ConfigError(
                f"{source}: names the special token {content[:64]!r}, which tokenizer.json lacks"
            )
    backend.add_special_tokens(
        [tokenizers.AddedToken(content, normalized=False) for content in special]
    )
    for token in backend.get_added_tokens_decoder().values():
        if token.special and (token.lstrip or token.rstrip or token.single_word):
            raise ConfigError(
                f"tokenizer.json: the special token {token.content!r} has lstrip, rstrip or "
                "single_word set; no Qwen3 tokenizer has"
            )
    return named


def _token_content(value: JsonValue, where: str) -> str | None:
    """A token that is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise ConfigError(f"{where}: expected a token, found {describe_value(value)}")


def _read_templates(root: Path, config: Mapping[str, JsonValue]) -> dict[str, str]:
    """Templates by name; chat_template.jinja wins over tokenizer_config.json."""
    file = find_file(root, "chat_template.jinja")
    if file is not None:
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(
                "tokenizer_config.json: chat_template: expected a text or a list of "
                f"{{name, template}}, found {describe_value(value)}"
            )
        templates[name] = text
    return templates


def _surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ConfigError("tokenizer.json: the post_processor changes the text's own tokens")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: characters that print are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _decode_byte_level(token: str) -> bytes:
    """As the ByteLevel decoder: a token with a character outside the alphabet is plain text."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
