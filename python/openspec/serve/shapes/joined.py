"""Messages that come in parts, each joined once: conversations have as many parts as they like."""

from __future__ import annotations

from dataclasses import dataclass, field

from openspec.serve.shapes.chat import ChatMessage, Role, ToolCall


@dataclass(slots=True)
class Parts:
    """A message that grows."""

    role: Role
    texts: list[str] = field(default_factory=list)
    tool_call_id: str | None = None
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


def joined(parts: list[Parts], separator: str) -> list[ChatMessage]:
    """The messages, with `separator` between the texts of one; an empty one of a user for none.

    Some clients ask with nothing whether the server is there.
    """
    messages = []
    for part in parts or [Parts("user", [""])]:
        message = ChatMessage(role=part.role, tool_call_id=part.tool_call_id)
        if part.texts:
            message.content = separator.join(part.texts)
        if part.thinking:
            message.reasoning_content = "".join(part.thinking)
        if part.calls:
            message.tool_calls = part.calls
        messages.append(message)
    return messages
