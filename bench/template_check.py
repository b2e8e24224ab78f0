"""Renders conversations through published chat templates, with transformers and with openspec.

    python -m bench.template_check FOLDER

FOLDER holds *.jinja files, such as llama.cpp's models/templates or vLLM's examples. For each it
says how many conversations render to the same text, and how many both refuse. Exit status 1: some
differ. The templates belong to their models' authors; none is part of this repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from openspec.errors import ConfigError, RequestError
from openspec.text.chat_template import ChatTemplates

Message = Mapping[str, Any]
TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
_SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>|<\uff5c[^\uff5c]{1,40}\uff5c>|\[/?[A-Z_]{3,40}\]")


@dataclass(frozen=True)
class Conversation:
    """What is rendered."""

    name: str
    messages: list[Message]
    tools: list[Message] | None = None
    adds_prompt: bool = True
    kwargs: dict[str, bool] = field(default_factory=dict)


def conversations() -> list[Conversation]:
    """Everything that requests have: systems, turns, tools, calls, results, thinking, markup."""
    tools: list[Message] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Makes a {name}; \"quoted\" <b> & 'é' 😀",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "place": {"type": "string", "description": "Where", "enum": ["a", "b"]},
                        "size": {"type": ["integer", "null"], "default": 3, "minimum": 0},
                        "more": {"type": "object", "properties": {"x-y": {"type": "array"}}},
                    },
                    "required": ["place"],
                },
            },
        }
        for name in ("chart", "get_table")
    ]
    system: Message = {"role": "system", "content": "  Be brief.\nAlways. "}
    user: Message = {"role": "user", "content": " What is 1 < 2 & \"3\"? <tool_call> 'é' 😀\n"}
    again: Message = {"role": "user", "content": "And <|this|>?"}
    answer: Message = {"role": "assistant", "content": "It is so.\n"}
    thinking: Message = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    apart: Message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, well."}

    def call(number: int, **arguments: object) -> Message:
        function = {"name": "chart", "arguments": arguments}
        return {"id": f"call{number:05d}", "type": "function", "function": function}

    def calls(*made: Message, content: str = "") -> Message:
        return {"role": "assistant", "content": content, "tool_calls": list(made)}

    def result(number: int, content: str) -> Message:
        identity = {"tool_call_id": f"call{number:05d}", "name": "chart"}
        return {"role": "tool", "content": content, **identity}

    one = [user, calls(call(1, place="a", size=3, more={"x-y": ["é", None]}))]
    told = [*one, result(1, '{"done": true, "text": "é <x>"}')]
    two = [user, calls(call(1, place="a"), call(2, place="b"), content="I look.")]
    both = [*two, result(1, "first"), result(2, "second")]
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    system_tools = {"tools_in_user_message": False}
    return [
        Conversation("a question", [user]),
        Conversation("with a system", [system, user]),
        Conversation("turns", [system, user, answer, again]),
        Conversation("an answer in the end", [user, answer], adds_prompt=False),
        Conversation("turns without prompt", [user, answer, again], adds_prompt=False),
        Conversation("thinking in content", [user, thinking, again]),
        Conversation("thinking apart", [user, apart, again]),
        Conversation("thinking in the end", [user, apart], adds_prompt=False),
        Conversation("thinking off", [user], kwargs=off),
        Conversation("thinking on", [user], kwargs=on),
        Conversation("tools", [user], tools),
        Conversation("tools and system", [system, user, answer, again], tools),
        Conversation("tools in the system", [system, user], tools, kwargs=system_tools),
        Conversation("one tool", [user], tools[:1], kwargs=off),
        Conversation("a call", one, tools, adds_prompt=False),
        Conversation("a result", told, tools),
        Conversation("a result without tools", told),
        Conversation("an answer to a result", [*told, answer, again], tools),
        Conversation("two calls", both, tools),
        Conversation("an answer to two calls", [*both, answer, again], tools),
        Conversation("a wrong order", [answer, answer, system, user]),
        Conversation("an unknown role", [{"role": "wizard", "content": "x"}]),
        Conversation("nothing", []),
    ]


@dataclass
class Outcome:
    """Of one template."""

    num_equal: int = 0
    num_refused: int = 0
    different: list[str] = field(default_factory=list)


def compare(source: str, cases: Sequence[Conversation]) -> Outcome:
    """Both renderings of each conversation.

    Raises:
        ConfigError: openspec cannot compile the template.
    """
    outcome = Outcome()
    now = datetime.now()
    special = [*TOKENS.values(), *_SPECIAL.findall(source)]
    templates = ChatTemplates({"default": source}, sorted(set(special)), TOKENS, now)
    for case in cases:
        expected = rendered_by_transformers(source, case)
        try:
            segments = templates.render(case.messages, case.tools, case.adds_prompt, case.kwargs)
            found: str | None = "".join(segment.text for segment in segments)
        except RequestError:
            found = None
        if found != expected:
            outcome.different.append(case.name)
        elif found is None:
            outcome.num_refused += 1
        else:
            outcome.num_equal += 1
    return outcome


def rendered_by_transformers(source: str, case: Conversation) -> str | None:
    """The text; None where the template raises."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ModuleNotFoundError as error:
        raise SystemExit(f"needs transformers: pip install transformers ({error})") from None

    try:
        texts, _ = render_jinja_template(
            conversations=[list(case.messages)],
            tools=None if case.tools is None else list(case.tools),
            chat_template=source,
            add_generation_prompt=case.adds_prompt,
            **TOKENS,
            **case.kwargs,
        )
    except Exception:  # whatever a template may raise
        return None
    return str(texts[0])


def main() -> int:
    """Returns the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    files = sorted(Path(sys.argv[1]).glob("*.jinja"))
    if not files:
        sys.stderr.write(f"{sys.argv[1]}: no *.jinja there\n")
        return 2
    num_wrong = 0
    for file in files:
        try:
            outcome = compare(file.read_text(encoding="utf-8"), conversations())
        except ConfigError as error:
            num_wrong += 1
            sys.stdout.write(f"{file.name}: {error}\n")
            continue
        num_wrong += bool(outcome.different)
        line = f"{file.name}: {outcome.num_equal} equal, {outcome.num_refused} refused by both"
        if outcome.different:
            line += f", DIFFERENT: {', '.join(outcome.different)}"
        sys.stdout.write(line + "\n")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
