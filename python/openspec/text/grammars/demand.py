"""What a request demands of the form of its answer, as values: all that the front has to know.

Nothing of a schema, a pattern, a grammar or a tag is looked into here. The compile process makes a
grammar of a demand, in `answer_grammar.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from openspec.errors import RequestError
from openspec.grammar.json_text import raw_number
from openspec.messages import StructuredOutputs

if TYPE_CHECKING:
    from openspec.text.parsers.message import AnswerForm

MAX_DEMAND_BYTES = 1 << 20
"""Of a request, all its schemas together."""


class ToolDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that may be called."""

    name: str
    parameters: object = None
    """A JSON schema; None: it takes none."""
    strict: bool = False
    """The schema must keep the rules of strict ones."""
    free: bool = False
    """Arguments are any object, whatever the schema says."""
    lenient: bool = False
    """Arguments are any object where the schema cannot be enforced."""


class CallDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that the answer may or must hold."""

    tools: list[ToolDemand]
    must_come: bool
    """False: there may be text instead, or content before which they may stand."""
    parallel: bool
    """Whether there may be several."""
    closed: bool = False
    """Whether the prompt shows tools beside these, which the answer may not call."""


class Demand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the compile process gets."""

    content: StructuredOutputs | None = None
    """Of the text beside thinking and calls; None: free."""
    strict: bool = False
    """The schema of the content must keep the rules of strict ones."""
    calls: CallDemand | None = None
    thinking: bool | None = None
    """As in `MessageParser`; None where the answer cannot think."""
    form: str = ""
    """How the model writes calls: a key of `CALL_PARSERS`."""
    names_calls: bool = True
    reasoning: str = ""
    may_think: bool = False
    tags: Mapping[str, int] = {}
    """These as in `AnswerForm`."""

    def encoded(self, param: str) -> bytes:
        """What the compiler takes; equal demands are equal bytes.

        Raises:
            RequestError: too large or too deep, naming `param`, or `tools` where there are calls.
        """
        field = param if self.calls is None else "tools"
        try:
            data = msgspec.json.encode(self, enc_hook=raw_number)
        except RecursionError:
            raise RequestError(f"{field}: nested too deeply", field) from None
        except UnicodeEncodeError:
            raise RequestError(f"{field}: a string has a lone surrogate", field) from None
        if len(data) > MAX_DEMAND_BYTES:
            raise RequestError(
                f"{field}: what it demands has {len(data)} bytes, more than {MAX_DEMAND_BYTES}; "
                "send a smaller schema or fewer tools",
                field,
            )
        return data


def chat_demand(
    form: AnswerForm,
    thinking: bool | None,
    content: StructuredOutputs | None,
    calls: CallDemand | None,
    strict: bool = False,
) -> Demand | None:
    """The demand of a chat; None where its answer is free. `strict` is of the content's schema."""
    if calls is not None and content is None:
        has_strict = any(tool.strict for tool in calls.tools)
        has_rules = calls.must_come or calls.closed or has_strict
        calls = calls if has_rules else None
    if content is None and calls is None:
        return None
    return Demand(
        content=content,
        strict=strict,
        calls=calls,
        thinking=thinking,
        form=form.calls,
        names_calls=form.names_calls,
        reasoning=form.reasoning,
        may_think=form.may_think,
        tags=form.tags,
    )
