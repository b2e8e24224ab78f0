"""Where calls in JSON stand in the answers of Qwen, Llama and Mistral."""

from __future__ import annotations

import json
import re
import secrets
import string

from openspec.text.parsers.call_parser import MAX_NAME_CHARS
from openspec.text.parsers.json_calls import JsonCallParser, is_scalar
from openspec.text.parsers.reader import Steps

_BETWEEN = re.compile(r"[\s;,]+")
_TOOL_NAME = re.compile(r"[^\s\[\]{}\"]+")
_NAME = re.compile(r"[\w.\-]+")
_LITERAL = re.compile(r"[\w.+\-]+")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]+") for quote in ('"', "'")}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "\n": ""}


def is_tool_name(name: str) -> bool:
    """Whether Mistral's parser reads it as the name before arguments."""
    return len(name) <= MAX_NAME_CHARS and _TOOL_NAME.fullmatch(name) is not None


class HermesParser(JsonCallParser):
    """`<tool_call>{...}</tool_call>`, of Qwen and others."""

    opening, closing = "<tool_call>", "</tool_call>"

    def parse(self) -> Steps[None]:
        """Calls between tags. After one, its closing tag may follow other text, or be missing."""
        reader, is_open = self.reader, False
        while True:
            markers = (self.opening, self.closing) if is_open else (self.opening,)
            marker = yield from reader.until(markers, self.say)
            if not marker:
                return
            if marker == self.closing:
                is_open = False
                continue
            reader.mark(len(marker))
            yield from reader.spaces()
            if not (yield from self.json_call()):
                self.say_marked()
                continue
            self.end()
            yield from reader.spaces()
            is_open = not (yield from reader.match(self.closing))
            if is_open:
                self.say_marked()
            else:
                reader.unmark()


class LlamaParser(JsonCallParser):
    """Llama 3's: bare JSON as the whole message, or `<|python_tag|>` before it or `f.call(...)`."""

    tag = "<|python_tag|>"

    def parse(self) -> Steps[None]:
        """Decides at the first character of the message, and again after each tag."""
        reader = self.reader
        reader.mark()
        yield from reader.spaces()
        if (yield from reader.peek()) == "{":
            yield from self._calls(known_only=True)
        else:
            self.say_marked()
        while (yield from reader.until((self.tag,), self.say)):
            reader.mark(len(self.tag))
            yield from reader.spaces()
            if (yield from reader.peek()) == "{":
                yield from self._calls(known_only=False)
            elif not (yield from self._built_in_call()):
                self.say_marked()

    def _calls(self, known_only: bool) -> Steps[None]:
        """One call or several, with semicolons between them."""
        while (yield from self.json_call(known_only=known_only)):
            self.end()
            yield from self.reader.run(_BETWEEN)
            if (yield from self.reader.peek()) != "{":
                self.say_marked()
                return
        if known_only:  # JSON that begins a message without a tag may be its content
            self.say(self.reader.unmark())
        else:
            self.say_marked()

    def _built_in_call(self) -> Steps[bool]:
        """`name.call(key="text", other=1)`, which goes out once it is whole."""
        reader = self.reader
        name = yield from reader.run(_NAME)
        if not name.endswith(".call") or not (yield from reader.match("(")):
            return False
        arguments: list[str] = []
        while not (yield from reader.match(")")):
            if arguments and not (yield from reader.match(",")):
                return False
            yield from reader.spaces()
            key = yield from reader.run(_NAME)
            yield from reader.spaces()
            if not key or reader.is_long() or not (yield from reader.match("=")):
                return False
            yield from reader.spaces()
            value = yield from self._literal()
            if value is None or reader.is_long():
                return False
            arguments.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
            yield from reader.spaces()
        self.begin(name.removesuffix(".call"))
        self.argue("{" + ", ".join(arguments) + "}")
        self.end()
        return True

    def _literal(self) -> Steps[str | None]:
        """A text, a number, True, False or None as JSON; None for anything else."""
        quote = yield from self.reader.peek()
        if quote not in ('"', "'"):
            word = yield from self.reader.run(_LITERAL)
            word = _CONSTANTS.get(word, word)
            return word if is_scalar(word) else None
        yield from self.reader.match(quote)
        parts: list[str] = []
        pattern = _QUOTED[quote]
        while not self.reader.is_long():
            yield from self.reader.run(pattern, parts.append)
            character = yield from self.reader.peek()
            yield from self.reader.match(character)
            if character == quote:
                return json.dumps("".join(parts), ensure_ascii=False)
            if character != "\\":
                return None
            escaped = yield from self.reader.peek()
            yield from self.reader.match(escaped)
            parts.append(_ESCAPES.get(escaped, "\\" + escaped))
        return None


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS]` before a list of calls in JSON, or before `name[ARGS]{...}`."""

    tag, id_tag, arguments_tag = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

    def new_id(self) -> str:
        """Nine letters and digits, which Mistral's templates insist on."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def parse(self) -> Steps[None]:
        """Decides at the first character after each tag."""
        reader = self.reader
        while (yield from reader.until((self.tag,), self.say)):
            reader.mark(len(self.tag))
            yield from reader.spaces()
            first = yield from reader.peek()
            if (yield from reader.match(self.tag)):
                reader.back(len(self.tag))
            elif first == "[":
                yield from self._list()
            elif first == "{":
                yield from self.json_call()
            else:
                yield from self._named()
            self.end()
            self.say_marked()

    def _list(self) -> Steps[None]:
        reader = self.reader
        yield from reader.match("[")
        while True:
            yield from reader.spaces()
            if not (yield from self.json_call()):
                return
            self.end()
            yield from reader.spaces()
            if (yield from reader.match("]")):
                reader.mark()
                return
            if not (yield from reader.match(",")):
                return

    def _named(self) -> Steps[None]:
        reader = self.reader
        name = yield from reader.run(_TOOL_NAME)
        if not is_tool_name(name):
            return
        if (yield from reader.match(self.id_tag)):
            yield from reader.run(_NAME)
        yield from reader.match(self.arguments_tag)
        yield from reader.spaces()
        if reader.is_long() or (yield from reader.peek()) != "{":
            return
        self.begin(name)
        yield from self.nested(self.argue)
        if not reader.ran_out:
            reader.mark()
