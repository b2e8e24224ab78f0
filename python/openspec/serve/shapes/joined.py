"""Messages that come in parts, each joined once: conversations have as many parts as they like."""

from __future__ import annotations

from dataclasses import dataclass, field

from openspec.serve.shapes.chat import ChatMessage, Role, ToolCall


@dataclass(slots=True)
class _Parts:
    role: Role
    tool_call_id: str | None
    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class JoinedMessages:
    """A conversation that grows at its end."""

    def __init__(self, separator: str) -> None:
        """`separator` is between the texts of one message."""
        self._separator = separator
        self._parts: list[_Parts] = []

    @property
    def role(self) -> Role | None:
        """That of the last message."""
        return self._parts[-1].role if self._parts else None

    @property
    def has_text(self) -> bool:
        """Whether the last message has any."""
        return any(self._parts[-1].texts)

    @property
    def has_calls(self) -> bool:
        """Whether the last message has any."""
        return bool(self._parts[-1].calls)

    def add(self, role: Role, text: str | None = None, tool_call_id: str | None = None) -> None:
        """Another message."""
        self._parts.append(_Parts(role, tool_call_id, [] if text is None else [text]))

    def put(self, text: str) -> None:
        """The text of the last message, which has none."""
        self._parts[-1].texts = [text]

    def more(self, text: str) -> None:
        """More text of the last message."""
        self._parts[-1].texts.append(text)

    def think(self, text: str) -> None:
        """More thinking of the last message."""
        self._parts[-1].thinking.append(text)

    def call(self, call: ToolCall) -> None:
        """Another call of the last message."""
        self._parts[-1].calls.append(call)

    def messages(self) -> list[ChatMessage]:
        """All of them."""
        return [self._message(part) for part in self._parts]

    def _message(self, part: _Parts) -> ChatMessage:
        message = ChatMessage(role=part.role, tool_call_id=part.tool_call_id)
        if part.texts:
            message.content = self._separator.join(part.texts)
        if part.thinking:
            message.reasoning_content = "".join(part.thinking)
        if part.calls:
            message.tool_calls = part.calls
        return message
