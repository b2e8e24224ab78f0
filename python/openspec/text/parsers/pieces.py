"""What an answer consists of. Every API format is written from these pieces, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is neither thinking nor a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. No other piece comes between its arguments and its end."""

    index: int
    """Calls of a message count from 0."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments.

    All of them together are JSON text if the model wrote JSON; what it cut short or got wrong
    stays so, for the caller to see.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or the answer ended within it."""

    index: int
    is_cut: bool = False
    """Whether a limit ended it, or what the client names to stop at."""


Piece: TypeAlias = Reasoning | Content | CallStart | CallArguments | CallEnd
