"""Structural tags of requests: xgrammar's formats, checked in full before the library sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.grammar.formats import Format, grammar_format, json_of, regex_format, rewritten
from openspec.grammar.schemas.constraints import Budget

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
        keys = set(_KEYS[kind].split())
        if unknown := set(given) - keys - {"type"}:
            raise _unknown(f"{place}: {kind}", min(unknown), keys)
        if kind == "json_schema":
            return _json_schema(given, place, self._budget)
        check = _CHECKS.get(kind)
        if check is not None:
            return check(given, place)
        return {"type": kind, **self._parts(given, kind, place, depth + 1)}

    def _parts(
        self, given: Mapping[str, JsonValue], kind: str, place: str, depth: int
    ) -> dict[str, JsonValue]:
        parts: dict[str, JsonValue] = {}
        keys = _KEYS[kind].split()
        if "content" in keys:
            content = self.format(given.get("content"), f"{place}.content", depth)
            if kind in ("star", "plus", "repeat") and _may_be_empty(content):
                raise RequestError(f"{place}.content may be empty, so it cannot be repeated")
            parts["content"] = content
        for key in ("elements", "tags"):
            if key in keys:
                parts[key] = [
                    self.format(_typed(item, key), f"{place}.{key}[{index}]", depth)
                    for index, item in enumerate(_list(given, key, place))
                ]
        if "rules" in keys:
            parts["rules"] = self._rules(given, place, depth)
        if "triggers" in keys:
            parts["triggers"] = _texts(given, "triggers", place, fewest=1)
        for key in ("begin", "separator"):
            if key in keys:
                parts[key] = _text(given.get(key), f"{place}.{key}")
        if "end" in keys:
            end = given.get("end")
            is_list = isinstance(end, list)
            parts["end"] = (
                _texts(given, "end", place, 1, 0) if is_list else _text(end, f"{place}.end")
            )
        if kind == "repeat":
            parts |= _counts(given, place)
        return parts | _options(given, place)

    def _rules(self, given: Mapping[str, JsonValue], place: str, depth: int) -> JsonValue:
        rules: list[JsonValue] = []
        for index, rule in enumerate(_list(given, "rules", place)):
            where = f"{place}.rules[{index}]"
            if not isinstance(rule, list) or len(rule) != 2:
                raise RequestError(f"{where} must be a pair of a text and a format")
            rules.append([_text(rule[0], where, fewest=1), self.format(rule[1], where, depth)])
        return rules


def _typed(item: JsonValue, key: str) -> JsonValue:
    """An item of a list; in a list of tags one without a type is a tag."""
    if key != "tags" or not isinstance(item, Mapping):
        return item
    if item.get("type", "tag") != "tag":
        raise RequestError("tags must hold formats of the type tag")
    return {"type": "tag", **item}


def _list(given: Mapping[str, JsonValue], key: str, place: str) -> list[JsonValue]:
    items = given.get(key)
    if not isinstance(items, list) or not items:
        raise RequestError(f"{place}.{key} must be a list that is not empty")
    return items


def _text(given: JsonValue, place: str, fewest: int = 0) -> str:
    if not isinstance(given, str) or len(given) < fewest:
        raise RequestError(f"{place} must be a text{' that is not empty' if fewest else ''}")
    return given


def _texts(
    given: Mapping[str, JsonValue], key: str, place: str, fewest: int = 0, shortest: int = 1
) -> list[JsonValue]:
    items = given.get(key)
    if not isinstance(items, list) or len(items) < fewest:
        kind = "a list that is not empty" if fewest else "a list"
        raise RequestError(f"{place}.{key} must be {kind}")
    return [_text(item, f"{place}.{key}[{i}]", shortest) for i, item in enumerate(items)]


def _counts(given: Mapping[str, JsonValue], place: str) -> dict[str, JsonValue]:
    low, high = given.get("min"), given.get("max")
    for name, value, least in (("min", low, 0), ("max", high, -1)):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= MAX_REPEATS:  # type: ignore[operator]
            none = ", or -1 for any number" if least < 0 else ""
            raise RequestError(f"{place}.{name} must be a number from 0 to {MAX_REPEATS}{none}")
    if high != -1 and low > high:  # type: ignore[operator]
        raise RequestError(f"{place}: min is larger than max")
    return {"min": low, "max": high}


def _options(given: Mapping[str, JsonValue], place: str) -> dict[str, JsonValue]:
    options: dict[str, JsonValue] = {}
    for key in ("at_least_one", "stop_after_first", "loop"):
        if key in given:
            if not isinstance(given[key], bool):
                raise RequestError(f"{place}.{key} must be true or false")
            options[key] = given[key]
    if "excludes" in given:
        options["excludes"] = _texts(given, "excludes", place)
    return options


def _json_schema(given: Mapping[str, JsonValue], place: str, budget: Budget) -> Format:
    if given.get("style", "json") != "json" or given.get("excludes"):
        raise RequestError(f"{place}: only JSON without excludes is supported")
    if "json_schema" not in given:
        raise RequestError(f"{place}: json_schema is missing")
    return _placed(place, lambda: json_of(rewritten(given["json_schema"], budget)))


def _regex(given: Mapping[str, JsonValue], place: str) -> Format:
    if given.get("excludes"):
        raise RequestError(f"{place}: excludes are not supported")
    source = _text(given.get("pattern"), f"{place}.pattern", fewest=1)
    return _placed(place, lambda: regex_format(source))


def _grammar(given: Mapping[str, JsonValue], place: str) -> Format:
    source = _text(given.get("grammar"), f"{place}.grammar", fewest=1)
    return _placed(place, lambda: grammar_format(source))


def _const_string(given: Mapping[str, JsonValue], place: str) -> Format:
    return {"type": "const_string", "value": _text(given.get("value"), f"{place}.value")}


def _placed(place: str, make: Callable[[], Format]) -> Format:
    try:
        return make()
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


_CHECKS: dict[str, Callable[[Mapping[str, JsonValue], str], Format]] = {
    "regex": _regex,
    "grammar": _grammar,
    "const_string": _const_string,
}


def _may_be_empty(given: JsonValue) -> bool:
    """Whether a checked format allows the empty text, as far as formats tell."""
    if not isinstance(given, Mapping):
        return False
    kind = given["type"]
    if kind in ("optional", "star", "any_text", "triggered_tags", "dispatch"):
        return not given.get("at_least_one")
    if kind == "const_string":
        return not given["value"]
    if kind == "repeat":
        return given["min"] == 0
    if kind == "tags_with_separator":
        return not given.get("at_least_one")
    elements = given.get("elements")
    if isinstance(elements, list):
        return (all if kind == "sequence" else any)(map(_may_be_empty, elements))
    return False
