"""Structural tags of requests: xgrammar's formats, checked in full before the library sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.grammar.formats import Format, grammar_format, json_of, regex_format
from openspec.grammar.schemas.constraints import Budget
from openspec.grammar.schemas.schema import enforceable

MAX_TAG_DEPTH = 32
MAX_FORMATS = 20_000
"""Of one tag."""
MAX_REPEATS = 1 << 16
"""The largest `min` and `max` of a repeat."""

_KEYS = {
    "const_string": "value",
    "json_schema": "json_schema style excludes",
    "any_text": "excludes",
    "grammar": "grammar",
    "regex": "pattern excludes",
    "sequence": "elements",
    "or": "elements",
    "tag": "begin content end",
    "triggered_tags": "triggers tags excludes at_least_one stop_after_first",
    "tags_with_separator": "tags separator at_least_one stop_after_first",
    "optional": "content",
    "plus": "content",
    "star": "content",
    "repeat": "min max content",
    "dispatch": "rules loop excludes",
}
"""What a format may have beside its type. Others of the library's are refused by name."""
_FLAGS = ("at_least_one", "stop_after_first", "loop")
_OPTIONAL = (*_FLAGS, "excludes")
_MAY_BE_EMPTY = "optional star any_text triggered_tags tags_with_separator dispatch".split()


def structural_tag_format(given: JsonValue, budget: Budget) -> Format:
    """A request's structural tag, of the form with `format` or the older one with `structures`.

    `budget` is what is left for all schemas of the request.

    Raises:
        RequestError: it is none, or one of its schemas or patterns cannot be enforced.
    """
    if not isinstance(given, Mapping):
        raise RequestError("a structural tag must be an object")
    if given.get("type", "structural_tag") != "structural_tag":
        raise RequestError("the type of a structural tag is 'structural_tag'")
    is_old = "structures" in given
    needed = {"structures", "triggers"} if is_old else {"format"}
    if unknown := set(given) - needed - {"type"}:
        raise _unknown("", min(unknown), needed)
    if not needed <= set(given):
        raise RequestError("a structural tag needs format, or structures and triggers")
    checked = _Tag(budget)
    if is_old:
        return checked.format(_of_structures(given), "structures", 0)
    return checked.format(given["format"], "format", 0)


def _of_structures(given: Mapping[str, JsonValue]) -> Format:
    structures = given["structures"]
    if not isinstance(structures, list):
        raise RequestError("structures must be a list")
    tags: list[JsonValue] = []
    for index, one in enumerate(structures):
        if not isinstance(one, Mapping):
            raise RequestError(f"structures[{index}] must be an object")
        if unknown := set(one) - {"begin", "schema", "end"}:
            raise _unknown(f"structures[{index}]", min(unknown), {"begin", "schema", "end"})
        content: Format = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({**{k: one[k] for k in ("begin", "end") if k in one}, "content": content})
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


def _unknown(place: str, key: str, known: set[str]) -> RequestError:
    where = f"{place}: " if place else ""
    return RequestError(f"{where}unknown key {key[:64]!r}; known are {', '.join(sorted(known))}")


class _Tag:
    """One tag that is being checked."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._num_formats = 0

    def format(self, given: JsonValue, place: str, depth: int) -> Format:
        """A format and all within it."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise RequestError(f"a structural tag holds at most {MAX_FORMATS} formats")
        if not isinstance(given, Mapping) or depth > MAX_TAG_DEPTH:
            raise RequestError(f"{place} must be a format, nested at most {MAX_TAG_DEPTH} deep")
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            shown = repr(kind[:64]) if isinstance(kind, str) else "of another kind than a text"
            raise RequestError(f"{place}: type {shown} is not supported; known are {known}")
        keys = _KEYS[kind].split()
        if unknown := set(given) - {*keys, "type"}:
            raise _unknown(f"{place}: {kind}", min(unknown), set(keys))
        if kind == "json_schema":
            return _json_schema(given, place, self._budget)
        if kind == "regex":
            return _regex(given, place)
        parts: Format = {
            key: self._part(key, given.get(key), f"{place}.{key}", depth + 1)
            for key in keys
            if key in given or key not in _OPTIONAL
        }
        if kind == "grammar":
            return _placed(place, lambda: grammar_format(parts["grammar"]))
        if kind in ("star", "plus", "repeat") and _may_be_empty(parts["content"]):
            raise RequestError(f"{place}.content may be empty, so it cannot be repeated")
        if kind == "repeat" and parts["max"] != -1 and parts["min"] > parts["max"]:
            raise RequestError(f"{place}: min is larger than max")
        return {"type": kind, **parts}

    def _part(self, key: str, given: JsonValue, place: str, depth: int) -> object:
        """What stands at one key of a format."""
        if key == "content":
            return self.format(given, place, depth)
        if key in ("elements", "tags", "rules"):
            places = [(item, f"{place}[{i}]") for i, item in enumerate(_list(given, place))]
            if key == "rules":
                return [self._rule(item, where, depth) for item, where in places]
            return [self.format(_typed(item, key), where, depth) for item, where in places]
        if key in _FLAGS:
            if not isinstance(given, bool):
                raise RequestError(f"{place} must be true or false")
            return given
        if key in ("min", "max"):
            return _count(given, place, -1 if key == "max" else 0)
        if key in ("triggers", "excludes") or (key == "end" and isinstance(given, list)):
            texts = _list(given, place, may_be_empty=key == "excludes")
            shortest = 0 if key == "end" else 1
            return [_text(text, f"{place}[{i}]", shortest) for i, text in enumerate(texts)]
        return _text(given, place, fewest=1 if key == "grammar" else 0)

    def _rule(self, given: JsonValue, place: str, depth: int) -> list[object]:
        if not isinstance(given, list) or len(given) != 2:
            raise RequestError(f"{place} must be a pair of a text and a format")
        return [_text(given[0], place, fewest=1), self.format(given[1], place, depth)]


def _typed(item: JsonValue, key: str) -> JsonValue:
    """An item of a list; in a list of tags one without a type is a tag."""
    if key != "tags" or not isinstance(item, Mapping):
        return item
    if item.get("type", "tag") != "tag":
        raise RequestError("tags must hold formats of the type tag")
    return {"type": "tag", **item}


def _list(given: JsonValue, place: str, *, may_be_empty: bool = False) -> list[JsonValue]:
    if not isinstance(given, list) or not (given or may_be_empty):
        raise RequestError(f"{place} must be a list{'' if may_be_empty else ' that is not empty'}")
    return given


def _text(given: JsonValue, place: str, fewest: int = 0) -> str:
    if not isinstance(given, str) or len(given) < fewest:
        raise RequestError(f"{place} must be a text{' that is not empty' if fewest else ''}")
    return given


def _count(given: JsonValue, place: str, least: int) -> int:
    is_whole = isinstance(given, int) and not isinstance(given, bool)
    if not is_whole or not least <= given <= MAX_REPEATS:  # type: ignore[operator]
        none = ", or -1 for any number" if least < 0 else ""
        raise RequestError(f"{place} must be a number from 0 to {MAX_REPEATS}{none}")
    return given  # type: ignore[return-value]


def _json_schema(given: Mapping[str, JsonValue], place: str, budget: Budget) -> Format:
    if given.get("style", "json") != "json" or given.get("excludes"):
        raise RequestError(f"{place}: only JSON without excludes is supported")
    if "json_schema" not in given:
        raise RequestError(f"{place}: json_schema is missing")
    return _placed(place, lambda: json_of(enforceable(given["json_schema"], budget)))


def _regex(given: Mapping[str, JsonValue], place: str) -> Format:
    if given.get("excludes"):
        raise RequestError(f"{place}: excludes are not supported")
    source = _text(given.get("pattern"), f"{place}.pattern", fewest=1)
    return _placed(place, lambda: regex_format(source))


def _placed(place: str, make: Callable[[], Format]) -> Format:
    try:
        return make()
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


def _may_be_empty(given: JsonValue) -> bool:
    """Whether a checked format allows the empty text, as far as formats tell."""
    if not isinstance(given, Mapping):
        return False
    kind = given["type"]
    if kind in _MAY_BE_EMPTY:
        return not given.get("at_least_one")
    if kind == "const_string":
        return not given["value"]
    if kind == "repeat":
        return given["min"] == 0
    elements = given.get("elements")
    if isinstance(elements, list):
        return (all if kind == "sequence" else any)(map(_may_be_empty, elements))
    return False
