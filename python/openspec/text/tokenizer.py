"""Text to token ids and back, for BPE checkpoints (`tokenizer.json`), and chats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import tokenizers

from openspec.checkpoint.folder import find_file, open_folder
from openspec.checkpoint.strict_json import JsonValue, read_json_object
from openspec.errors import ConfigError, RequestError
from openspec.text.chat_template import ChatTemplates, Segment, any_of, split_at
from openspec.text.length_bound import LengthBound
from openspec.text.tokenizer_config import (
    apply_config,
    mark_control_tokens,
    read_templates,
    tokenizer_file,
)
from openspec.text.vocabulary import drops_first_space, spelling_of, surrounding_ids, within_text

MAX_TEXT_CHARS = 1 << 24


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
        now: datetime | None = None,
    ) -> None:
        """Takes over `backend`; `config` is the content of tokenizer_config.json.

        `now` is the time that templates are told; default: that of this call.

        Raises:
            ConfigError: a vocabulary of another kind, or tokens that contradict each other.
        """
        self._spelling = spelling_of(backend)
        self._drops_first_space = drops_first_space(backend)
        named = apply_config(backend, config or {})
        visible = mark_control_tokens(backend)
        backend.no_truncation()
        backend.no_padding()
        # Special tokens are cut out here, and only where they are asked for.
        backend.encode_special_tokens = True
        self._backend = backend
        self._inner_backend = within_text(backend)
        added = backend.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """Tokens that no text of a user becomes, and their ids."""
        self.added_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items()
        }
        """Tokens beside the vocabulary of text, special or not, and their ids."""
        self._special_ids = frozenset(self.special_tokens.values()) - visible
        self._added_re = any_of([token.content for token in added.values()])
        self.num_tokens = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """Ids below this are tokens; the model's embedding may have more rows."""
        self.eos_token_id = self.special_tokens.get(named.get("eos_token", ""))
        self.bos_token_id = self.special_tokens.get(named.get("bos_token", ""))
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._prefix, self._suffix = surrounding_ids(backend)
        self.class_name = str((config or {}).get("tokenizer_class") or "PreTrainedTokenizerFast")
        """The class that transformers would read it with."""
        self.chat_templates = ChatTemplates(chat_templates or {}, self.special_tokens, named, now)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        chat_template: Path | None = None,
        now: datetime | None = None,
    ) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja.

        `chat_template` is a file that takes the place of the folder's templates.

        Raises:
            ConfigError: a file that is absent or cannot be used, with the remedy.
        """
        root = open_folder(folder)
        file = tokenizer_file(root)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{file}: not a tokenizer: {error}") from None
        config_file = find_file(root, "tokenizer_config.json")
        config = read_json_object(config_file) if config_file else {}
        return cls(backend, config, read_templates(root, config, chat_template), now)

    @property
    def adds_bos(self) -> bool:
        """Whether a text gets the beginning-of-sequence token."""
        return self.bos_token_id is not None and self.bos_token_id in self._prefix

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
        the tokenizer puts around a text: nothing for Qwen, a BOS for Llama and Mistral.

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
        is_start = True
        for segment in segments:
            if segment.is_special:
                ids.append(self.special_tokens[segment.text])
            else:
                ids += self._encode_plain(segment.text, is_start)
            is_start = is_start and not segment.text
        return ids

    def with_surroundings(self, ids: list[int]) -> list[int]:
        """What the tokenizer puts around the ids of a text, and they within it."""
        return [*self.with_prefix(ids), *self._suffix] if self._prefix or self._suffix else ids

    def with_prefix(self, ids: list[int]) -> list[int]:
        """The ids after what the tokenizer puts before a text, unless they begin with that.

        A chat gets no more: its template writes the BOS, which a model is to see exactly once.
        """
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def min_num_tokens(self, text: str) -> int:
        """Tokens that a text has at least, by its length alone; see `LengthBound`."""
        return self._length_bound.min_num_tokens(text)

    @cached_property
    def _length_bound(self) -> LengthBound:
        added = self._backend.get_added_tokens_decoder().values()
        tokens = [self._spelling(token) for token in self._backend.get_vocab()]
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
        """The whole text of tokens; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        data = b"".join(self.output_bytes(token_id, skip_special_tokens) for token_id in token_ids)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._drops_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's exact bytes, which need not be whole characters; empty for unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            known = 0 <= token_id < self.num_tokens
            token = self._backend.id_to_token(token_id) if known else None
            data = b"" if token is None else self._spelling(token)
            if known:
                self._bytes[token_id] = data
        return data

    def grammar_tokens(self, spelled_ids: Collection[int]) -> list[bytes]:
        """The bytes of each id, by which grammars choose tokens.

        Added tokens have none, so that no grammar spells them, but for those of `spelled_ids`.
        """
        hidden = frozenset(self.added_tokens.values()) - frozenset(spelled_ids)
        return [
            b"" if token_id in hidden else self.token_bytes(token_id)
            for token_id in range(self.num_tokens)
        ]

    def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to a decoded text."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        return self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone as text, U+FFFD for what is no whole character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.token_bytes(token_id).decode("utf-8", errors="replace")
            if token_id in self._bytes:
                self._texts[token_id] = text
        return text

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
        `apply_chat_template`, after a BOS where only the tokenizer brings one.

        Raises:
            RequestError: no template, messages that it refuses, unknown kwargs, or a limit.
        """
        segments = self.chat_templates.render(
            messages, tools, add_generation_prompt, chat_template_kwargs or {}
        )
        text = "".join(segment.text for segment in segments)
        return ChatPrompt(text, self.with_prefix(self.segment_ids(segments)))

    def _encode_plain(self, text: str, is_start: bool) -> list[int]:
        if not text:
            return []
        if len(text) > MAX_TEXT_CHARS:
            raise RequestError(f"the text is longer than {MAX_TEXT_CHARS} characters")
        try:
            # The batch form lets other threads run meanwhile; `encode` does not.
            backend = self._backend if is_start else self._inner_backend
            batch = backend.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = batch[0].ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text holds lone surrogates, which no text has") from None
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, such as a pattern that gives up
            raise RequestError(f"the tokenizer fails on this text: {error}") from None
        return ids
