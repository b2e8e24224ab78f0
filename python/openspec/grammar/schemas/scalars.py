"""Numbers and texts of a schema as the library enforces them, and values that it lists."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON
from openspec.grammar.schemas.constraints import At, Plain, Unenforceable, Unsatisfiable
from openspec.grammar.patterns.pattern import ENDLESS, Pattern, PatternError, bounded, render
from openspec.grammar.schemas.values import type_of

MAX_INTEGER = (1 << 53) - 1
MAX_LENGTH = (1 << 31) - 1
MAX_MULTIPLE = 1024
MAX_MULTIPLE_RANGE = 10_000
ENFORCED_FORMATS = {
    # The fewest and the most characters of what the library writes; None: any number.
    "date": (10, 10),
    "time": (9, None),
    "date-time": (20, None),
    "duration": (3, None),
    "email": (3, None),
    "hostname": (1, None),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "uuid": (36, 36),
    "uri": (2, None),
    "uri-reference": (0, None),
    "uri-template": (0, None),
    "json-pointer": (0, None),
    "relative-json-pointer": (1, None),
}
_LABELS = "([a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?\\.){1,2}[a-z]{2,6}"
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
BOUNDED_FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": rf"^[A-Za-z0-9_%+-]{{1,20}}(\.[A-Za-z0-9_%+-]{{1,20}})?@{_LABELS}$",
    "hostname": f"^{_LABELS}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "time": f"^{_TIME}$",
    "uri": rf"^https?://{_LABELS}(/[A-Za-z0-9._~%+-]{{1,32}}){{0,3}}/?$",
    "uuid": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
}
"""The usual forms, each of bounded parts: where the library's own rule cannot be used."""
REFUSED_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
"""Formats of the standard that the library does not know; all others are annotations."""


def admits(plain: Plain, value: JsonValue) -> bool:
    """Whether a listed value fits the other constraints.

    Raises:
        Unenforceable: the value is a container, and there are constraints on those.
    """
    kind = type_of(value)
    kinds = {kind, "number"} if kind == "integer" else {kind}
    if plain.types is not None and not kinds & plain.types:
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        above = plain.low is None or value > plain.low[0] or (value, False) == plain.low
        below = plain.high is None or value < plain.high[0] or (value, False) == plain.high
        fits = plain.multiple_of is None or value % plain.multiple_of == 0
        return above and below and fits
    if isinstance(value, str):
        most = math.inf if plain.max_length is None else plain.max_length
        return plain.min_length <= len(value) <= most and all(
            re.search(pattern, value) for pattern in plain.patterns
        )
    if kind in ("object", "array") and kind in plain.implied:
        raise Unenforceable(plain.pointer, f"enum or const of {kind}s beside other keywords")
    return True


def number_node(plain: Plain, kind: str) -> dict[str, JsonValue]:
    """A number, or a whole one."""
    pointer, multiple = plain.pointer or "#", plain.multiple_of
    if multiple is not None and (kind == "integer" or multiple == int(multiple)):
        kind = "integer"  # those of a whole number are whole
        if multiple != int(multiple):
            multiple = multiple.as_integer_ratio()[0]
        if multiple > MAX_MULTIPLE:
            raise Unenforceable(f"{pointer}/multipleOf", f"only up to {MAX_MULTIPLE}")
    elif multiple is not None:
        raise Unenforceable(f"{pointer}/multipleOf", "only of whole numbers can be enforced")
    for bound, key in ((plain.low, "minimum"), (plain.high, "maximum")):
        if bound is not None and abs(bound[0]) > MAX_INTEGER:
            raise Unenforceable(f"{pointer}/{key}", "only up to 2**53 can be enforced")
    result: dict[str, JsonValue] = {"type": kind}
    if kind == "number":
        if plain.low is not None and plain.high is not None:
            is_open = plain.low[1] or plain.high[1]
            if plain.low[0] > plain.high[0] or (plain.low[0] == plain.high[0] and is_open):
                raise Unsatisfiable
        if plain.low is not None:
            result["exclusiveMinimum" if plain.low[1] else "minimum"] = plain.low[0]
        if plain.high is not None:
            result["exclusiveMaximum" if plain.high[1] else "maximum"] = plain.high[0]
        return result
    low = high = None
    if plain.low is not None:
        low = math.floor(plain.low[0]) + 1 if plain.low[1] else math.ceil(plain.low[0])
        result["minimum"] = low
    if plain.high is not None:
        high = math.ceil(plain.high[0]) - 1 if plain.high[1] else math.floor(plain.high[0])
        result["maximum"] = high
    if low is not None and high is not None and low > high:
        raise Unsatisfiable
    if multiple is not None and multiple != 1:
        whole = int(multiple)
        if (low is None) != (high is None) or (
            low is not None and high is not None and high - low > MAX_MULTIPLE_RANGE
        ):
            raise Unenforceable(
                f"{pointer}/multipleOf",
                f"with a bound it needs both, at most {MAX_MULTIPLE_RANGE} apart",
            )
        if low is not None and high is not None and high // whole * whole < low:
            raise Unsatisfiable
        result["multipleOf"] = whole
    return result


def string_node(plain: Plain) -> dict[str, JsonValue]:
    """A text: of a pattern, of a format, or of some length."""
    pointer, low, high = plain.pointer or "#", plain.min_length, plain.max_length
    if high is not None and low > high:
        raise Unsatisfiable
    formats = []
    for name in plain.formats:
        if name in REFUSED_FORMATS:
            raise Unenforceable(f"{pointer}/format", f"{name} cannot be enforced; leave it out")
        formats += [name] if name in ENFORCED_FORMATS else []
    if len(formats) + len(plain.patterns) > 1:
        what = "pattern beside format" if formats else "two patterns at once"
        raise Unenforceable(f"{pointer}/pattern", f"{what} cannot be enforced")
    pattern = plain.patterns[0] if plain.patterns else None
    if formats:
        fewest, most = ENFORCED_FORMATS[formats[0]]
        if low <= fewest and (high is None or (most is not None and most <= high)):
            return {"type": "string", "format": formats[0]}
        pattern = BOUNDED_FORMATS.get(formats[0])
        if pattern is None:
            raise Unenforceable(f"{pointer}/format", "it stands beside a length; leave one out")
    if pattern is not None:
        key = f"{pointer}/{'format' if formats else 'pattern'}"
        return {"type": "string", "pattern": whole_pattern(pattern, key, low, high)}
    if low == 0 and high is None:
        return {"type": "string"}
    if (high is not None and high > MAX_LENGTH) or low > MAX_LENGTH:
        raise Unenforceable(f"{pointer}/maxLength", f"lengths go up to {MAX_LENGTH}")
    if high == 0:
        return {"enum": [""]}
    result: dict[str, JsonValue] = {"type": "string"}
    if low:
        result["minLength"] = low
    if high is not None:
        result["maxLength"] = high
    return result


def bounds_of_length(node: Mapping[str, JsonValue]) -> tuple[int, int]:
    """The fewest and the most characters of a text that `string_node` has returned."""
    low, high = node.get("minLength", 0), node.get("maxLength", ENDLESS)
    assert isinstance(low, int)
    assert isinstance(high, int)
    return low, high


def whole_pattern(source: str, place: str, low: int = 0, high: int | None = None) -> str:
    """A schema's pattern as one of whole texts, of so many characters.

    Raises:
        Unenforceable: naming `place`.
    """
    try:
        choice = Pattern(source).whole(is_anchored=False)
        if low > 0 or high is not None:
            choice = bounded(choice, low, ENDLESS if high is None else high)
        return render(choice, ESCAPED_IN_JSON)
    except PatternError as error:
        raise Unenforceable(place, f"{source[:100]!r} cannot be enforced: {error}") from None


def is_found(pattern: str, name: str, at: At) -> bool:
    """Whether a pattern is found in a property's name."""
    try:
        Pattern(pattern)  # of bounded size, so that searching is
        return re.search(pattern, name) is not None
    except (PatternError, re.error) as error:
        raise Unenforceable(at.pointer, f"{pattern[:100]!r} cannot be enforced: {error}") from None
