"""A call in JSON, `{"name": ..., "arguments": {...}}`, read as it comes."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from typing import NoReturn

from openspec.text.parsers.call_parser import MAX_NAME_CHARS, CallParser
from openspec.text.parsers.reader import Steps

_ARGUMENTS = ("arguments", "parameters")
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_INSIDE = re.compile(r'[^"\\\n]+')
_SCALAR = re.compile(r"[^\s,}\]<]+")
_HALF = re.compile("[\ud800-\udfff]")
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class JsonCallParser(CallParser):
    """Reads one call in JSON; where it stands in an answer is up to the class of each form."""

    closing = ""
    """What follows a call, if anything does; it also ends a call that is wrong JSON."""

    def json_call(self, *, known_only: bool = False) -> Steps[bool]:
        """Reads a call. False: it is none, and the text since the mark is content.

        The order of keys is free, and other keys are passed over. With `known_only` the name must
        be one of the request's tools and the arguments an object.
        """
        reader, name, held = self.reader, None, list[str]()
        if not (yield from reader.match("{")):
            return False
        is_first, has_arguments = True, False
        while not reader.is_long():
            yield from reader.spaces()
            if (yield from reader.match("}")):
                break
            if not is_first:
                if not (yield from reader.match(",")):
                    return self._is_in_call
                yield from reader.spaces()
            is_first = False
            key = yield from self._string()
            yield from reader.spaces()
            if key is None or not (yield from reader.match(":")):
                return self._is_in_call
            yield from reader.spaces()
            first = yield from reader.peek()
            if key == "name" and name is None:
                name = yield from self._string()
                if not name or len(name) > MAX_NAME_CHARS:
                    return False
                if known_only and name not in self.tools:
                    return False
                if has_arguments:
                    self.begin(name)
                    self.argue("".join(held))
                    reader.mark()
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                if known_only and first != "{":
                    return False
                if not (yield from self._arguments_value(first, name, held)):
                    return False
                if self._is_in_call:
                    reader.mark()
            elif not (yield from self._value(first, _nowhere)):
                return self._is_in_call
        if reader.is_long():
            return self._is_in_call
        if not self._is_in_call:
            if name is None:
                return False
            self.begin(name)
            self.argue("{}")
        reader.mark()
        return True

    def _arguments_value(self, first: str, name: str | None, held: list[str]) -> Steps[bool]:
        if name is None:
            return (yield from self._value(first, held.append))
        if first in ("{", "[", '"'):
            self.begin(name)
            if first == '"':
                yield from self._text(self.argue)
            else:
                yield from self.nested(self.argue)
            return True
        if not (yield from self._value(first, held.append)):
            return False
        self.begin(name)
        self.argue("".join(held))
        return True

    def _value(self, first: str, emit: Callable[[str], None]) -> Steps[bool]:
        """A value of any kind; false: it is none."""
        if first in ("{", "["):
            yield from self.nested(emit)
            return not self.reader.is_long()
        if first == '"':
            return (yield from self._text(emit))
        scalar = yield from self.reader.run(_SCALAR)
        emit("{}" if scalar == "null" else scalar)
        return is_scalar(scalar)

    def nested(self, emit: Callable[[str], None]) -> Steps[None]:
        """An object or a list as it is written, up to where its brackets are closed.

        Where its JSON is wrong it ends at `closing`, which no text within a value holds: there a
        line end would be escaped.
        """
        reader, depth = self.reader, 0
        while not reader.is_long():
            yield from reader.run(_OUTSIDE, emit)
            character = yield from reader.peek()
            if not character or (yield from self._is_closing(character)):
                return
            yield from reader.match(character)
            emit(character)
            if character == '"':
                if not (yield from self._quoted(emit)):
                    return
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth <= 0:
                    return

    def _quoted(self, emit: Callable[[str], None]) -> Steps[bool]:
        """The rest of a text in quotes, as it is written; false: it has no end."""
        reader = self.reader
        while not reader.is_long():
            yield from reader.run(_INSIDE, emit)
            character = yield from reader.peek()
            if not character or (character == "\n" and (yield from self._is_closing(character))):
                return False
            yield from reader.match(character)
            emit(character)
            if character == '"':
                return True
            if character == "\\":
                escaped = yield from reader.peek()
                yield from reader.match(escaped)
                emit(escaped)
        return False

    def _is_closing(self, character: str) -> Steps[bool]:
        """Whether `closing` is next, perhaps after a line end; it is not read."""
        if not self.closing or character not in ("\n", self.closing[0]):
            return False
        marker = "\n" * (character == "\n") + self.closing
        if not (yield from self.reader.match(marker)):
            return False
        self.reader.back(len(marker))
        return True

    def _string(self) -> Steps[str | None]:
        """A text in quotes; None if it is none, or holds half a character."""
        parts: list[str] = []
        if not (yield from self.reader.match('"')) or not (yield from self._quoted(parts.append)):
            return None
        try:
            value: object = json.loads('"' + "".join(parts))
        except ValueError:
            return None
        return value if isinstance(value, str) and _HALF.search(value) is None else None

    def _text(self, emit: Callable[[str], None]) -> Steps[bool]:
        """A text in quotes without its quotes and escapes; half a character stays an escape."""
        reader = self.reader
        yield from reader.match('"')
        while not reader.is_long():
            yield from reader.run(_INSIDE, emit)
            character = yield from reader.peek()
            if not character or (character == "\n" and (yield from self._is_closing(character))):
                return False
            yield from reader.match(character)
            if character == '"':
                return True
            if character == "\\":
                character = yield from self._escape()
            emit(character)
        return False

    def _escape(self) -> Steps[str]:
        code = yield from self._escaped_unit()
        if _HIGH.fullmatch(code) and (yield from self.reader.match("\\")):
            other = yield from self._escaped_unit()
            if _LOW.fullmatch(other):
                return _unescaped(code + other)
            return code + _unescaped(other)
        return _unescaped(code)

    def _escaped_unit(self) -> Steps[str]:
        """An escape whose backslash is read, as it is written."""
        code = yield from self.reader.peek()
        yield from self.reader.match(code)
        while code[:1] == "u" and len(code) < 5:
            digit = yield from self.reader.peek()
            if not digit or digit not in string.hexdigits:
                break
            yield from self.reader.match(digit)
            code += digit
        return "\\" + code


def _unescaped(code: str) -> str:
    """The character of an escape, or the escape where it is none or half of one."""
    try:
        value: object = json.loads(f'"{code}"')
    except ValueError:
        return code
    return value if isinstance(value, str) and _HALF.search(value) is None else code


def _nowhere(_: str) -> None:
    """Passes over a value."""


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


def is_scalar(text: str) -> bool:
    """Whether a text is a number, true, false or null in JSON; Python reads NaN too."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, (str, dict, list))
