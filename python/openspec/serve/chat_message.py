"""A chat answer taken apart as it comes: thinking, text, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openspec.serve.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningSplitter
from openspec.serve.tool_calls import ParsedCall, ToolCallParser
from openspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MessagePieces:
    """What became certain."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


class MessageParser:
    """Follows one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool | None,
        has_tools: bool,
        max_calls: int | None,
    ) -> None:
        """`thinking`: whether the prompt opened a thinking block; None if there can be none."""
        self._splitter = None if thinking is None else ReasoningSplitter(is_open=thinking)
        self._tools = ToolCallParser() if has_tools else None
        self._max_calls = max_calls
        self._tokens = _ThinkingTokens(tokenizer, thinking)
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thinking block, its tags included."""
        return self._tokens.count

    def push(self, text: str, token_ids: Sequence[int], is_last: bool = False) -> MessagePieces:
        """Takes the next piece of the answer."""
        self._tokens.push(token_ids)
        reasoning, content = "", text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, is_last)
        calls: list[ParsedCall] = []
        if self._tools is not None:
            content, calls = self._tools.push(content, is_last)
            if self._max_calls is not None:
                calls = calls[: self._max_calls - self.num_calls]
            self.num_calls += len(calls)
        return MessagePieces(reasoning, content, calls)

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason, which is the calls where there are some."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


class _ThinkingTokens:
    """Counts the tokens of a thinking block by its tags' ids."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None) -> None:
        self._open = tokenizer.encode(THINK_OPEN)
        self._close = tokenizer.encode(THINK_CLOSE)
        has_tags = len(self._open) == 1 and len(self._close) == 1
        self._is_thinking = bool(thinking) and has_tags
        self._may_start = thinking is False and has_tags
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        if self._may_start and token_ids:
            self._is_thinking = token_ids[0] == self._open[0]
            self._may_start = False
        if not self._is_thinking:
            return
        for number, token_id in enumerate(token_ids, start=1):
            if token_id == self._close[0]:
                self.count += number
                self._is_thinking = False
                return
        self.count += len(token_ids)
