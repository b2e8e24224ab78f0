"""The choices of a schema: constraints of which a value fits one; and whether listed values do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.constraints import (
    At,
    Budget,
    OneOf,
    Others,
    Parts,
    Plain,
    Unenforceable,
    Unsatisfiable,
    item_parts,
    merged,
    size_of,
)
from openspec.grammar.schemas.disjoint import Disjoint
from openspec.grammar.schemas.keywords import ENFORCED, keywords_of, listed, read_plain
from openspec.grammar.schemas.numbers import admits_number
from openspec.grammar.schemas.texts import TextAutomata
from openspec.grammar.schemas.values import exact, key_of, type_of

MAX_NESTED = 64
"""Schemas within each other that speak of one value."""
MAX_CHOICES = 256
"""Of combinations that multiply."""


class Choices:
    """The choices of all schemas within one, each found once."""

    def __init__(self, root: JsonValue, budget: Budget) -> None:
        self.root = At(root, "")
        self.budget = budget
        self.texts = TextAutomata(budget)
        self.disjoint = Disjoint(self)
        self._known: dict[str, list[Plain]] = {}
        self._all: dict[tuple[str, ...], list[Plain]] = {}
        self._open: dict[str, tuple[int, int]] = {}
        self._num_unions = 0
        self._cut = MAX_NESTED

    def of_all(self, parts: Parts) -> list[Plain]:
        """The choices of several schemas at once; none where nothing fits."""
        key = tuple(part.pointer for part in parts)
        if key not in self._all:
            found = [Plain(key[0] if key else "", is_trivial=True)]
            for part in parts:
                found = self._product(found, self._of(part))
            self._all[key] = found
        return self._all[key]

    def _of(self, at: At) -> list[Plain]:
        at = self._followed(at)
        pointer = at.pointer
        if pointer in self._known:
            return self._known[pointer]
        if pointer in self._open:
            place, num_unions = self._open[pointer]
            if num_unions == self._num_unions:
                raise Unenforceable(pointer, "it refers to itself")
            # A union of itself and others is that of the others.
            self._cut = min(self._cut, place)
            return []
        place = len(self._open)
        if place >= MAX_NESTED:
            raise Unenforceable(pointer, f"nested deeper than {MAX_NESTED}")
        self._open[pointer] = place, self._num_unions
        found = self._combined(at)
        del self._open[pointer]
        if self._cut >= place:  # else it lacks what a schema around it has
            self._known[pointer] = found
            self._cut = MAX_NESTED
        return found

    def _followed(self, at: At) -> At:
        """The schema that one with nothing but a reference stands for."""
        seen = set[str]()
        while isinstance(at.schema, Mapping) and "$ref" in at.schema:
            schema = keywords_of(at)
            self.budget.take(5, at.pointer)
            if ENFORCED & schema.keys() or "$ref" not in schema:
                return at
            if at.pointer in seen:
                raise Unenforceable(at.pointer, "$ref refers to itself")
            seen.add(at.pointer)
            at = target_of(self.root, at)
        return at

    def _combined(self, at: At) -> list[Plain]:
        if isinstance(at.schema, bool):
            return [Plain(at.pointer, is_trivial=True)] if at.schema else []
        schema = keywords_of(at)
        plain = read_plain(at)
        self.budget.take(25 + 3 * size_of(plain), at.pointer)
        found = [plain]
        if "$ref" in schema:
            found = self._product(found, self._of(target_of(self.root, at)))
        for part in listed(at, "allOf"):
            found = self._product(found, self._of(part))
        if "anyOf" in schema:
            self._num_unions += 1
            options = [self._of(part) for part in listed(at, "anyOf")]
            self._num_unions -= 1
            found = self._product(found, _once(itertools.chain.from_iterable(options)))
        if "oneOf" in schema:
            found = self._product(found, self._one_of(at))
        return [_with_unevaluated(at, schema, plain) for plain in found]

    def _one_of(self, at: At) -> list[Plain]:
        options = tuple(self._of(part) for part in listed(at, "oneOf"))
        one_of = OneOf(f"{at.pointer or '#'}/oneOf", options)
        self.budget.take(10 * sum(map(len, options)), at.pointer)
        return [
            replace(plain, is_trivial=False, one_of=(*plain.one_of, (one_of, number)))
            for number, option in enumerate(options)
            for plain in option
        ]

    def _product(self, ones: list[Plain], twos: list[Plain]) -> list[Plain]:
        """What fits one of each."""
        if ones is twos:
            return ones
        for some, others in ((ones, twos), (twos, ones)):
            if len(some) == 1 and some[0].is_trivial:
                return others
        if min(len(ones), len(twos)) > 1 and len(ones) * len(twos) > MAX_CHOICES:
            raise Unenforceable(ones[0].pointer, f"its choices multiply to more than {MAX_CHOICES}")
        result = []
        for one, two in itertools.product(ones, twos):
            self.budget.take(20 + size_of(one) + size_of(two), one.pointer)
            try:
                result.append(merged(one, two))
            except Unsatisfiable:
                continue
        return result

    # ---- What concerns a property

    def applies(self, pattern: At, name: str) -> bool:
        """Whether a pattern may be found in a property's name."""
        self.budget.take(1 + len(name) // 16, pattern.pointer)
        return self.texts.pattern(pattern, is_wide=True).accepts(name)

    def concerns(self, others: Others, name: str) -> bool:
        """Whether a property of this name is one of others."""
        self.budget.take(1 + len(name) // 16 * len(others.patterns), others.schema.pointer)
        return name not in others.names and not any(
            self.texts.pattern(pattern).accepts(name) for pattern in others.patterns
        )

    def value_parts(self, plain: Plain, name: str) -> Parts:
        """What the value of a property must fit."""
        parts = dict.fromkeys(plain.properties.get(name, ()))
        parts |= dict.fromkeys(
            at for pattern, at in plain.by_pattern if self.applies(pattern, name)
        )
        parts |= dict.fromkeys(o.schema for o in plain.others if self.concerns(o, name))
        return tuple(parts)

    # ---- Listed values

    def fits(self, parts: Parts, value: JsonValue) -> bool:
        """Whether a value fits all of some schemas."""
        return any(self.admits(plain, value) for plain in self.of_all(parts))

    def admits(self, plain: Plain, value: JsonValue) -> bool:
        """Whether a value fits constraints."""
        return self.admits_itself(plain, value) and not any(
            self.admits(rival, value)
            for one_of, number in plain.one_of
            for _, rival in self.disjoint.rivals(one_of, number, plain)
        )

    def admits_itself(self, plain: Plain, value: JsonValue) -> bool:
        """Whether a value fits constraints, also where it fits other options of a `oneOf`."""
        self.budget.take(5, plain.pointer)
        if plain.is_trivial:
            return True
        kind = type_of(value)
        if plain.types is not None and not plain.types & {
            kind,
            "number" if kind == "integer" else kind,
        }:
            return False
        if plain.enum is not None and key_of(value) not in plain.enum:
            return False
        if isinstance(value, str):
            return self.texts.admits(plain, value)
        if isinstance(value, Mapping):
            return self._admits_object(plain, value)
        if isinstance(value, (list, tuple)):
            return self._admits_array(plain, value)
        if value is None or isinstance(value, bool):
            return True
        assert isinstance(value, (int, float))
        return admits_number(plain, exact(value))

    def _admits_array(self, plain: Plain, value: Sequence[JsonValue]) -> bool:
        most = plain.max_items
        if len(value) < plain.min_items or (most is not None and len(value) > most):
            return False
        if plain.is_unique and len(set(map(key_of, value))) < len(value):
            return False
        return all(self.fits(item_parts(plain, i), item) for i, item in enumerate(value))

    def _admits_object(self, plain: Plain, value: Mapping[str, JsonValue]) -> bool:
        most = plain.max_properties
        if len(value) < plain.min_properties or (most is not None and len(value) > most):
            return False
        if not plain.required.keys() <= value.keys():
            return False
        return all(
            self.fits(plain.names, name) and self.fits(self.value_parts(plain, name), one)
            for name, one in value.items()
        )


def _once(plains: Iterable[Plain]) -> list[Plain]:
    return list({id(plain): plain for plain in plains}.values())


def _with_unevaluated(at: At, schema: Mapping[str, JsonValue], plain: Plain) -> Plain:
    """With what a schema says of properties and items that no other keyword of it speaks of.

    Where several options of an `anyOf` fit at once more is evaluated, and less is ruled out.
    """
    if "unevaluatedProperties" in schema and not plain.others:
        patterns = tuple(pattern for pattern, _ in plain.by_pattern)
        others = Others(frozenset(plain.properties), patterns, at["unevaluatedProperties"])
        plain = replace(plain, others=(others,))
    if "unevaluatedItems" in schema and not plain.has_rest:
        plain = replace(plain, items=(at["unevaluatedItems"],), has_rest=True)
    return plain


def target_of(root: At, at: At) -> At:
    """What the `$ref` at a place in the schema `root` refers to.

    Raises:
        Unenforceable: nothing, or what is not followed.
    """
    uri = keywords_of(at)["$ref"]
    place = f"{at.pointer or '#'}/$ref"
    if not isinstance(uri, str) or not uri.startswith("#"):
        raise Unenforceable(place, "only references within the schema, '#/...', are followed")
    if uri != "#" and not uri.startswith("#/"):
        raise Unenforceable(place, "anchors are not followed; write '#/$defs/...'")
    if _is_under_id(root, at):
        raise Unenforceable(place, "below an $id of its own it is not followed; leave the $id out")
    found = root
    for step in uri[1:].split("/")[1:]:
        key: str | int = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found.schema, (list, tuple)) and str(key).isdecimal():
            key = int(key)
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise Unenforceable(place, f"{uri[:100]} refers to nothing") from None
    return found


def _is_under_id(root: At, at: At) -> bool:
    """Whether a schema on the way to this place, but for the root, has a base URI of its own."""
    schema = root.schema if isinstance(root.schema, Mapping) else {}
    draft = schema.get("$schema", "draft-04")
    keys = ("$id", "id") if isinstance(draft, str) and "draft-04" in draft else ("$id",)
    inner: JsonValue = schema
    for step in at.pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(inner, (list, tuple)):
            inner = inner[int(key)]
        elif isinstance(inner, Mapping):
            inner = inner[key]
        if isinstance(inner, Mapping):
            ids = [inner.get(key) for key in keys]
            if any(isinstance(one, str) and not one.startswith("#") for one in ids):
                return True
    return False
