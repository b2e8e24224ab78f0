"""Qwen3-Coder's calls: `<tool_call><function=f><parameter=key>value</parameter></function>...`.

Values are bare text. Their type is the one that the tool's JSON schema gives them.
"""

from __future__ import annotations

import json
import re

from openspec.text.parsers.call_parser import MAX_NAME_CHARS, CallParser
from openspec.text.parsers.reader import Steps
from openspec.text.parsers.value_types import TEXT, ValueTypes, kind_of

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# A value's own line ends are kept but for one after its tag and one before the next. A model that
# forgets the closing tag goes on with another one at the start of a line.
VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")
_TAG_NAME = re.compile(r"[^>\n<]+")


def is_tag_name(name: str) -> bool:
    """Whether the parser reads it as the name in a tag."""
    return len(name) <= MAX_NAME_CHARS and _TAG_NAME.fullmatch(name) is not None


def is_function_name(name: str) -> bool:
    """Whether the parser reads it as a function's name."""
    return is_tag_name(name) and name == name.strip()


class XmlParser(CallParser):
    """Texts go out as they come; other values once they are whole."""

    needs_types = True

    def parse(self) -> Steps[None]:
        """The outer tag may be missing, as models sometimes leave it out."""
        reader = self.reader
        while marker := (yield from reader.until((_CALL, _FUNCTION), self.say)):
            reader.mark(len(marker))
            if marker == _CALL:
                yield from reader.spaces()
                if not (yield from reader.match(_FUNCTION)):
                    self.say_marked()
                    continue
            name = (yield from self._tag_name()).strip()
            yield from reader.spaces()
            if not name or not (yield from self._goes_on()):
                self.say_marked()
                continue
            self.begin(name)
            yield from self._parameters(self.tools.get(name, {}))
            self.end()
            yield from reader.spaces()
            if (yield from reader.match(_CALL_END)):
                reader.unmark()
            else:
                self.say_marked()

    def _tag_name(self) -> Steps[str]:
        """The rest of a tag; nothing where it is none."""
        name = yield from self.reader.run(_TAG_NAME)
        is_tag = not self.reader.is_long() and (yield from self.reader.match(">"))
        return name if is_tag and is_tag_name(name) else ""

    def _goes_on(self) -> Steps[bool]:
        """Whether a parameter is next, or the end; nothing is read."""
        for marker in (_PARAMETER, _FUNCTION_END):
            if (yield from self.reader.match(marker)):
                self.reader.back(len(marker))
                return True
        return False

    def _parameters(self, types: ValueTypes) -> Steps[None]:
        """The parameters as a JSON object; leaves a mark after what was read of it."""
        reader, separator = self.reader, "{"
        while True:
            reader.mark()
            yield from reader.spaces()
            if not (yield from reader.match(_PARAMETER)):
                break
            key = yield from self._tag_name()
            if not key:
                break
            reader.unmark()
            yield from reader.match("\n")
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._value(types.get(key, TEXT))):
                return
        is_whole = yield from reader.match(_FUNCTION_END)
        if is_whole:
            reader.mark()
        # An answer that was cut short is no whole object, for the caller to see.
        if is_whole or not reader.ran_out:
            self.argue(("{" if separator == "{" else "") + "}")

    def _value(self, types: frozenset[str]) -> Steps[bool]:
        """One value; false: the answer ended within it."""
        reader = self.reader
        if types == TEXT:
            self.argue('"')
            marker = yield from reader.until(VALUE_ENDS, self._argue_quoted)
            if marker:
                self.argue('"')
        else:
            parts: list[str] = []
            marker = yield from reader.until(VALUE_ENDS, parts.append)
            text = "".join(parts)
            self.argue(_typed(text, types) if marker else json.dumps(text, ensure_ascii=False)[:-1])
        if marker in VALUE_ENDS[2:]:
            reader.back(len(marker))
        return bool(marker)

    def _argue_quoted(self, text: str) -> None:
        self.argue(json.dumps(text, ensure_ascii=False)[1:-1])


def _typed(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of the types, as it is spelled; text where it is of none."""
    spelled = text.strip()
    if "string" not in types or spelled == "null":
        lowered = spelled.lower()
        spelled = lowered if lowered in ("true", "false", "null") else spelled
        try:
            found: object = json.loads(spelled)
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            found = text
        kind = kind_of(found)
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return spelled
    return json.dumps(text, ensure_ascii=False)
