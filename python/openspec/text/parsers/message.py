"""Follows one answer of a chat, in the form that its model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openspec.checkpoint.strict_json import JsonValue
from openspec.text.parsers.call_parser import CallParser, ToolTypes
from openspec.text.parsers.json_forms import HermesParser, LlamaParser, MistralParser
from openspec.text.parsers.pieces import (
    THINK_CLOSE,
    THINK_OPEN,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from openspec.text.parsers.reasoning import ReasoningSplitter, ThinkingSpan, ThinkingTokens
from openspec.text.parsers.value_types import NO_TYPES, types_of_tools
from openspec.text.parsers.xml_calls import XmlParser
from openspec.text.tokenizer import Tokenizer

CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
    "qwen3_coder": XmlParser,
}
"""By vLLM's names."""
CUT_REASONS = ("length", "abort")
"""Finish reasons of answers that the model would have gone on with."""
_TAGS = ("<tool_call>", "</tool_call>")
MARKERS = {
    "hermes": _TAGS,
    "qwen3_coder": _TAGS,
    "llama3_json": (LlamaParser.tag,),
    "mistral": (MistralParser.tag, MistralParser.id_tag, MistralParser.arguments_tag),
}
"""Tokens that are part of a form of calls; some checkpoints call them special."""
# What a template with tools writes of past calls. The first that is there decides.
_SIGNS = (
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3_json"),
)
_DEEPSEEK = "<\uff5cAssistant\uff5c>"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model writes calls and thinking."""

    calls: str
    """A key of CALL_PARSERS."""
    reasoning: str
    """`qwen3`: thinking is between tags; `deepseek_r1`: its first tag may be missing."""
    marker_ids: frozenset[int]
    """Special tokens that an answer with tools shows, since the calls' form has them."""
    tag_ids: frozenset[int]
    """Special tokens that every answer shows, since they enclose thinking."""
    tags: Mapping[str, int] = field(default_factory=dict)
    """Tokens of both kinds by their texts, special or not: those that a grammar may name."""
    names_calls: bool = True
    """Whether calls begin with their names, where a form knows another way."""
    may_think: bool = False
    """Whether the template knows of thinking."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, calls: str, reasoning: str) -> AnswerForm:
        """The form by its names; `auto` reads it from the model's chat template."""
        templates = "".join(tokenizer.chat_templates.sources.values())
        if calls == "auto":
            calls = next((name for sign, name in _SIGNS if sign in templates), "hermes")
        if reasoning == "auto":
            is_deepseek = _DEEPSEEK in templates and "</think>" in templates
            reasoning = "deepseek_r1" if is_deepseek else "qwen3"
        special = tokenizer.special_tokens
        markers = [special[text] for text in MARKERS[calls] if text in special]
        tags = [special[text] for text in (THINK_OPEN, THINK_CLOSE) if text in special]
        known = (*MARKERS[calls], THINK_OPEN, THINK_CLOSE)
        added = tokenizer.added_tokens
        return cls(
            calls,
            reasoning,
            frozenset(markers),
            frozenset(tags),
            tags={text: added[text] for text in known if text in added},
            names_calls=MistralParser.arguments_tag in templates,
            may_think=THINK_CLOSE in templates,
        )

    @property
    def spelled_ids(self) -> frozenset[int]:
        """The ids of `tags`."""
        return frozenset(self.tags.values())

    def shown_ids(self, thinking: bool | None, has_calls: bool) -> frozenset[int]:
        """Special tokens that the parser of an answer must see; arguments as of `MessageParser`."""
        tags = frozenset[int]() if thinking is None else self.tag_ids
        return tags | self.marker_ids if has_calls else tags

    def span(self, thinking: bool | None) -> ThinkingSpan:
        """The thinking of one answer; `thinking` as in `MessageParser`."""
        return ThinkingSpan(thinking, self.reasoning == "deepseek_r1")

    def tool_types(self, schemas: Mapping[str, JsonValue]) -> ToolTypes:
        """Of a request's tools, with their parameters' schemas by name, what parsers need."""
        if CALL_PARSERS[self.calls].needs_types:
            return types_of_tools(schemas)
        return dict.fromkeys(schemas, NO_TYPES)


class MessageParser:
    """Takes one choice apart as it comes: thinking, content and calls, in the model's order.

    The pieces, joined, depend on the text alone and not on how it was cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: AnswerForm,
        *,
        thinking: bool | None,
        tools: ToolTypes | None,
        max_calls: int | None,
    ) -> None:
        """`thinking`: whether the prompt opened a thinking block; None if there can be none.

        Without `tools` there are no calls.
        """
        is_assumed = form.reasoning == "deepseek_r1"
        self._splitter: ReasoningSplitter | None = None
        if thinking is not None:
            self._splitter = ReasoningSplitter(is_open=thinking, is_assumed=is_assumed)
        self._calls = CALL_PARSERS[form.calls](tools) if tools is not None else None
        self._max_calls = max_calls
        self._arguments: list[str] = []
        self._is_stopped = False
        """Within the last call."""
        self._tokens = ThinkingTokens(tokenizer, thinking, is_assumed)
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thinking block, its tags included."""
        return self._tokens.count

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        is_last: bool = False,
        finish_reason: str | None = None,
        stop: int | str | None = None,
    ) -> list[Piece]:
        """The pieces that the next text of the answer, spelt by `token_ids`, completes.

        What is left of a tag is text, unless `finish_reason` says that a limit cut the answer.
        `stop`: what of the client's ended it, perhaps within a call. What that leaves of a call
        without a name is no text either.
        """
        is_cut = finish_reason in CUT_REASONS
        self._tokens.push(token_ids)
        pieces: list[Piece] = []
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text, is_last, is_cut)
            if reasoning:
                pieces.append(Reasoning(reasoning))
        if self._calls is None:
            return [*pieces, Content(text)] if text else pieces
        if text or is_last:
            found = self._calls.push(text, is_last, is_cut, is_last and stop is not None)
            pieces += filter(self._is_wanted, found)
        for at, piece in enumerate(pieces):
            if isinstance(piece, CallStart):
                self._arguments.clear()
            elif isinstance(piece, CallArguments):
                self._arguments.append(piece.text)
            elif isinstance(piece, CallEnd) and is_last and stop is not None:
                self._is_stopped = not _is_json("".join(self._arguments))
                pieces[at] = CallEnd(piece.index, self._is_stopped)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason, which is the calls where there are some and the last one is whole."""
        has_calls = self.num_calls > 0 and not self._is_stopped
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _is_wanted(self, piece: Piece) -> bool:
        if not isinstance(piece, (CallStart, CallArguments, CallEnd)):
            return True
        if self._max_calls is not None and piece.index >= self._max_calls:
            return False
        self.num_calls = max(self.num_calls, piece.index + 1)
        return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
