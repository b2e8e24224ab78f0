"""A model's own chat templates: Jinja in a sandbox, with user text kept apart.

Special tokens such as `<|im_start|>` must only ever come from the template itself. So before it is
rendered, every place in the request's text that could become part of one is replaced by a private
character that occurs nowhere in the request, and put back once the template's tokens are found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import ConfigError, RequestError
from openspec.text.template_sandbox import compile_template

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 24
MAX_RENDER_S = 5.0
TEMPLATE_REFUSES = "template_refuses"
"""Code of the error where a template itself refuses the messages."""
MAX_DEPTH = 64
THINKING_KWARGS = ("enable_thinking", "thinking")
"""What templates call it whether to think."""
EFFORT_KWARG = "reasoning_effort"
"""What templates call it how much to think."""
CHAT_TEMPLATE_KWARGS: Mapping[str, type[bool] | type[str]] = {
    **dict.fromkeys(THINKING_KWARGS, bool),
    "preserve_thinking": bool,
    EFFORT_KWARG: str,
    "tools_in_user_message": bool,
}
"""What a request may set: true or false, or text, which has no special tokens either."""
MAX_KWARG_CHARS = 64
"""Of a text."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered chat: a special token of the template, or text that holds none."""

    text: str
    is_special: bool


class ChatTemplates:
    """The templates of one model. Rendering is thread-safe.

    Length and time are checked wherever a template puts something out. A filter on its way there
    has no limit: that takes a process which can be ended (`openspec.text.worker`).
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Collection[str],
        variables: Mapping[str, str],
        now: datetime | None = None,
    ) -> None:
        """Compiles the templates, of which `tool_use` is for requests with tools.

        `special_tokens` are those that only a template may write; `variables` are the named ones
        (`eos_token`, ...) that it may refer to. `now` is the time it is told (default: this one),
        the same for every chat: a prompt that changed at midnight would find no cached prefix.

        Raises:
            ConfigError: too large, or not a Jinja template.
        """
        self.sources = dict(sources)
        self.special_tokens = list(special_tokens)
        self.variables = dict(variables)
        self.now = now or datetime.now()
        self._special_re = any_of(special_tokens)
        # Two characters are enough to make a special token impossible, wherever the template may
        # cut or join; a single one matters at the end of a text only, where more may follow.
        starts = {token[:2] for token in special_tokens}
        self._risky_re = re.compile(
            "|".join(
                [re.escape(start) for start in sorted(starts)]
                + [re.escape(first) + r"\Z" for first in sorted({start[:1] for start in starts})]
            )
            or "(?!)"
        )
        self._templates = {name: _compiled(source, self.now) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        tools: Sequence[Mapping[str, JsonValue]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, JsonValue],
    ) -> list[Segment]:
        """The chat as text and the template's own special tokens, in order.

        Raises:
            RequestError: no template, one that refuses the messages, or a limit is hit.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "the model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        check_kwargs(kwargs)
        guard = _Guard(self._risky_re, [messages, tools, kwargs, self.sources[name]])
        variables: dict[str, object] = {
            **self.variables,
            **{key: guard.protect(value) for key, value in kwargs.items()},
            "messages": [guard.protect(_plain_message(message)) for message in messages],
            "tools": guard.protect(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        segments: list[Segment] = []
        for text, is_special in split_at(
            self._special_re, _rendered(self._templates[name], variables)
        ):
            segments.append(Segment(text if is_special else guard.restore(text), is_special))
        return segments


def _compiled(source: str, now: datetime) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ConfigError(f"chat template: more than {MAX_TEMPLATE_CHARS} characters")
    try:
        return compile_template(source, now)
    except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        raise ConfigError(f"chat template: does not compile: {error}") from None


def _rendered(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    pieces: list[str] = []
    size, deadline = 0, time.monotonic() + MAX_RENDER_S
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise RequestError(
                    f"the chat is longer than {MAX_RENDERED_CHARS} characters", "messages"
                )
            if time.monotonic() > deadline:
                raise RequestError("the chat template takes too long", "messages")
    except RequestError:
        raise
    except jinja2.TemplateError as error:
        raise RequestError(
            f"chat template: {_one_line(error)}", "messages", TEMPLATE_REFUSES
        ) from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"the chat template cannot render these messages: {_one_line(error)}", "messages"
        ) from None
    except (RecursionError, MemoryError):
        raise RequestError("the chat is too large for its template", "messages") from None
    return "".join(pieces)


def check_kwargs(kwargs: Mapping[str, JsonValue]) -> None:
    """Checks `chat_template_kwargs`, a request's or the server's.

    Raises:
        RequestError: an unknown key, or a value that is not of its type.
    """
    for key, value in kwargs.items():
        kind = CHAT_TEMPLATE_KWARGS.get(key)
        if kind is None:
            allowed = ", ".join(sorted(CHAT_TEMPLATE_KWARGS))
            raise RequestError(
                f"chat_template_kwargs: unknown key {key[:64]!r}; known are {allowed}",
                "chat_template_kwargs",
            )
        if not isinstance(value, kind) or (
            isinstance(value, str) and not 1 <= len(value) <= MAX_KWARG_CHARS
        ):
            wanted = (
                "true or false" if kind is bool else f"text of 1 to {MAX_KWARG_CHARS} characters"
            )
            raise RequestError(
                f"chat_template_kwargs: {key} must be {wanted}", "chat_template_kwargs"
            )


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest one first, as the tokenizer does."""
    longest_first = sorted(
        (token for token in tokens if token), key=lambda token: (-len(token), token)
    )
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def split_at(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """The non-empty pieces of `text`, each with whether it is a match of the pattern."""
    position = 0
    for match in pattern.finditer(text):
        if match.start() > position:
            yield text[position : match.start()], False
        yield match.group(), True
        position = match.end()
    if position < len(text):
        yield text[position:], False


class _Guard:
    """Stand-in characters for the risky places of one request's text."""

    def __init__(self, risky: re.Pattern[str], values: JsonValue) -> None:
        self._risky = risky
        self._originals: dict[str, str] = {}
        self._stand_ins: dict[str, str] = {}
        self._used: set[str] = set()
        self._collect(values, 0)
        # JSON escapes of stand-ins are put back too, so the request must not hold those either.
        self._free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in self._used)

    def protect(self, value: JsonValue) -> JsonValue:
        """A copy of plain data with the risky places of all strings replaced, keys too."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.protect(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The text with its risky places as they were."""
        for stand_in, original in self._originals.items():
            text = text.replace(stand_in, original)
            text = text.replace(_json_escape(stand_in), original)
        return text

    def _protect_text(self, text: str) -> str:
        return self._risky.sub(self._stand_in, text)

    def _stand_in(self, match: re.Match[str]) -> str:
        original = match.group()
        stand_in = self._stand_ins.get(original)
        if stand_in is None:
            stand_in = next(self._free, None)
            if stand_in is None:
                raise RequestError("the messages use too many private characters", "messages")
            self._stand_ins[original] = stand_in
            self._originals[stand_in] = original
        return stand_in

    def _collect(self, value: JsonValue, depth: int) -> None:
        """Notes the private characters in use; checks types and depth on the way."""
        if depth > MAX_DEPTH:
            raise RequestError(f"messages are nested deeper than {MAX_DEPTH} levels", "messages")
        if isinstance(value, str):
            self._used.update(_PRIVATE_RE.findall(value))
            self._used.update(chr(int(code, 16)) for code in _ESCAPED_PRIVATE_RE.findall(value))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(key, depth + 1)
                self._collect(item, depth + 1)
        elif isinstance(value, Sequence):
            for item in value:
                self._collect(item, depth + 1)


_PRIVATE_RE = re.compile("[\ue000-\uf8ff]")
_ESCAPED_PRIVATE_RE = re.compile(r"\\u([ef][0-9a-fA-F]{3})", re.IGNORECASE)


def _json_escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _plain_message(message: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The message with its text parts joined and its reasoning under the name templates read."""
    result = dict(message)
    content = result.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        result["content"] = "\n".join(_part_text(part) for part in content)
    if result.get("reasoning_content") is None:
        for key in REASONING_KEYS:
            if isinstance(result.get(key), str):
                result["reasoning_content"] = result[key]
                break
    return result


def _part_text(part: JsonValue) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise RequestError('a content part must be {"type": "text", "text": "..."}', "messages")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
