"""A JSON schema rewritten into the part of JSON Schema that the library enforces in full.

Every value that the result allows fits the schema. It may allow fewer: properties come in the
schema's order, an object has no properties that the schema does not speak of (unless it says so),
and a text with a length or a pattern holds no character that JSON writes as an escape.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias
from urllib.parse import unquote

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON
from openspec.grammar.schemas.constraints import (
    ALL_TYPES,
    TYPES,
    At,
    Parts,
    Plain,
    Unenforceable,
    Unsatisfiable,
    merged,
    read_plain,
)
from openspec.grammar.schemas.definitions import check_productive, shared
from openspec.grammar.schemas.disjoint import are_disjoint
from openspec.grammar.patterns.pattern import PatternError, of_length, other_than, render
from openspec.grammar.schemas.scalars import (
    admits,
    bounds_of_length,
    is_found,
    number_node,
    string_node,
    whole_pattern,
)

Node: TypeAlias = dict[str, JsonValue]

MAX_DEPTH = 64
MAX_CHOICES = 256
MAX_NODES = 20_000
MAX_NAMES_BESIDE_OTHERS = 16
"""Above it an object has only those that are named: others would have to differ from all."""


def enforceable(schema: JsonValue) -> Node:
    """The schema as the library enforces it.

    Raises:
        Unenforceable: with the place and the reason.
    """
    return _Rewriter(schema).whole()


class _Rewriter:
    def __init__(self, root: JsonValue) -> None:
        self._root = At(root, "")
        self._names: dict[tuple[str, ...], str] = {}
        self._defs: Node = {}
        self._empty: set[str] = set()
        self._used: set[str] = set()
        self._num_nodes = 0

    def whole(self) -> Node:
        try:
            node = self._node((self._root,), 0)
        except Unsatisfiable:
            raise Unenforceable("", "no value fits this schema") from None
        check_productive(node, self._defs)
        if self._defs:
            node = {**node, "$defs": self._defs}
        return shared(node)

    # ---- Choices

    def _choices(self, at: At, seen: frozenset[str] = frozenset()) -> list[Plain]:
        """A schema as constraints of which a value fits one; none where nothing fits."""
        if at.schema is True:
            return [Plain(at.pointer)]
        if at.schema is False:
            return []
        found = [read_plain(at)]
        schema = at.schema
        assert isinstance(schema, Mapping)
        if "$ref" in schema:
            target = _target_of(self._root, at)
            if target.pointer in seen:
                raise Unenforceable(at.pointer, "$ref refers to itself")
            found = _product(found, self._choices(target, seen | {target.pointer}))
        for part in _listed(at, "allOf"):
            found = _product(found, self._choices(part, seen))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                options = [self._choices(part, seen) for part in _listed(at, key)]
                if key == "oneOf":
                    self._check_disjoint(at, options)
                found = _product(found, [plain for option in options for plain in option])
        return found

    def _check_disjoint(self, at: At, options: list[list[Plain]]) -> None:
        def conjoined(parts: Parts) -> list[Plain]:
            found = [Plain("")]
            for part in parts:
                found = _product(found, self._choices(part))
            return found

        for one, two in itertools.combinations(range(len(options)), 2):
            for a, b in itertools.product(options[one], options[two]):
                if not are_disjoint(a, b, conjoined):
                    raise Unenforceable(
                        f"{at.pointer or '#'}/oneOf",
                        f"a value may fit both option {one} and option {two}; write anyOf, or give "
                        "each option a required property with a const of its own",
                    )

    def _node(self, parts: Parts, depth: int) -> Node:
        """What fits all the parts, named where it may contain itself."""
        self._num_nodes += 1
        pointer = max((part.pointer for part in parts), key=len, default="")
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise Unenforceable(pointer, f"nested deeper than {MAX_DEPTH}, or too large")
        followed = tuple(dict.fromkeys(map(self._followed, parts)))
        is_shared = followed != parts
        parts, key = followed, tuple(sorted(part.pointer for part in followed))
        if key in self._names:
            if self._names[key] in self._empty:
                raise Unsatisfiable
            self._used.add(self._names[key])
            return {"$ref": f"#/$defs/{self._names[key]}"}
        if all(part.schema in (True, {}) for part in parts):
            return {}
        name = self._names[key] = f"r{self._num_nodes}"
        try:
            node = self._unnamed(parts, depth)
        except Unsatisfiable:
            self._empty.add(name)
            raise
        is_small = node.keys() <= {"type", "format", "enum"}
        if (not is_shared or is_small) and name not in self._used:
            del self._names[key]
            return node
        self._defs[name] = node
        return {"$ref": f"#/$defs/{name}"}

    def _followed(self, at: At) -> At:
        """The schema that one with nothing but a reference stands for."""
        for _ in range(MAX_DEPTH):
            schema = at.schema
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return at
            if read_plain(at) != Plain(at.pointer) or {"allOf", "anyOf", "oneOf"} & schema.keys():
                return at
            at = _target_of(self._root, at)
        raise Unenforceable(at.pointer, "$ref refers to itself")

    def _unnamed(self, parts: Parts, depth: int) -> Node:
        if len(parts) == 1 and isinstance(parts[0].schema, Mapping):
            at, schema = parts[0], parts[0].schema
            keys = [key for key in ("anyOf", "oneOf") if key in schema]
            alone = not {"$ref", "allOf"} & schema.keys() and len(keys) == 1
            if alone and read_plain(at) == Plain(at.pointer):
                # Options stay whole, so that they may refer to what contains them.
                if keys == ["oneOf"]:
                    self._choices(at)
                return self._any_of(
                    [partial(self._node, (part,), depth + 1) for part in _listed(at, keys[0])]
                )
        choices = [Plain(parts[0].pointer)]
        for part in parts:
            choices = _product(choices, self._choices(part))
        return self._any_of([partial(self._plain, plain, depth) for plain in choices])

    def _any_of(self, makers: Sequence[Callable[[], Node]]) -> Node:
        nodes: list[Node] = []
        for make in makers:
            try:
                node = make()
            except Unsatisfiable:
                continue
            if node not in nodes:
                nodes.append(node)
        if not nodes:
            raise Unsatisfiable
        return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    # ---- One kind of value

    def _plain(self, plain: Plain, depth: int) -> Node:
        if plain.enum is not None:
            values = [value for value in plain.enum if admits(plain, value)]
            if not values:
                raise Unsatisfiable
            return {"enum": values}
        if plain.types is None and not plain.implied:
            return {}
        types = plain.possible_types
        if "number" in types:
            types -= {"integer"}
        if types == ALL_TYPES - {"integer"} and not plain.implied:
            return {}
        return self._any_of(
            [partial(self._typed, kind, plain, depth) for kind in TYPES if kind in types]
        )

    def _typed(self, kind: str, plain: Plain, depth: int) -> Node:
        if kind == "integer" or kind == "number":
            return number_node(plain, kind)
        if kind == "string":
            return string_node(plain)
        if kind == "array":
            return self._array(plain, depth)
        return self._object(plain, depth) if kind == "object" else {"type": kind}

    def _array(self, plain: Plain, depth: int) -> Node:
        most = plain.max_items
        if plain.is_unique and (most is None or most > 1):
            raise Unenforceable(
                f"{plain.pointer or '#'}/uniqueItems",
                "uniqueItems cannot be enforced above one item; leave it out",
            )
        prefix: list[JsonValue] = []
        for parts in plain.prefix[:most]:
            try:
                prefix.append(self._node(parts, depth + 1))
            except Unsatisfiable:
                most = len(prefix)
                break
        items: Node | None = None
        if most is None or most > len(prefix):
            try:
                items = self._node(plain.items, depth + 1)
            except Unsatisfiable:
                most = len(prefix)
        if most is not None and most < plain.min_items:
            raise Unsatisfiable
        result: Node = {"type": "array"}
        if prefix:
            result |= {"prefixItems": prefix, "items": False if items is None else items}
            if plain.min_items:
                result["minItems"] = plain.min_items
            if most is not None and items is not None:
                result["maxItems"] = most
            return result
        if items is None:
            return {"type": "array", "maxItems": 0}
        result["items"] = items
        if plain.min_items:
            result["minItems"] = plain.min_items
        if most is not None:
            result["maxItems"] = most
        return result

    def _object(self, plain: Plain, depth: int) -> Node:
        properties = dict(plain.properties)
        for name in plain.required:
            properties.setdefault(name, ())
        nodes: Node = {}
        for name, parts in properties.items():
            more = [o.schema for o in plain.others if o.concerns(name)]
            more += [at for pattern, at in plain.by_pattern if is_found(pattern, name, at)]
            try:
                for part in plain.names:
                    self._check_name(part, name)
                nodes[name] = self._node((*parts, *more), depth + 1)
            except Unsatisfiable:
                if name in plain.required:
                    raise
        result: Node = {"type": "object"}
        others = self._others(plain, depth)
        if others is not None and others[0] is None and len(properties) > MAX_NAMES_BESIDE_OTHERS:
            others = None
        if nodes:
            result["properties"] = nodes
        required = [name for name in nodes if name in plain.required]
        if required:
            result["required"] = required
        result["additionalProperties"] = False
        if others is not None:
            keys, value = others
            keys = (
                keys if keys is not None else render(other_than(list(properties)), ESCAPED_IN_JSON)
                if properties else None
            )  # fmt: skip
            if keys is None:
                result["additionalProperties"] = value or True
            else:
                result["patternProperties"] = {keys: value}
        fewest, most = plain.min_properties, plain.max_properties
        if fewest > len(required):
            if others is not None and fewest > 1:
                raise Unenforceable(
                    f"{plain.pointer or '#'}/minProperties",
                    "more than one cannot be enforced where properties are not named",
                )
            if others is None and fewest > len(nodes):
                raise Unsatisfiable
            result["minProperties"] = fewest
        if most is not None and (others is not None or most < len(nodes)):
            if most < len(required):
                raise Unsatisfiable
            result["maxProperties"] = most
        return result

    def _others(self, plain: Plain, depth: int) -> tuple[str | None, Node] | None:
        """Properties without a name in the schema: a pattern of names (None: any), and a value."""
        schemas = tuple(other.schema for other in plain.others)
        names: str | None = None
        if plain.by_pattern:
            if len(plain.by_pattern) > 1 or any(s.schema is not False for s in schemas):
                raise Unenforceable(
                    f"{plain.pointer or '#'}/patternProperties",
                    "only one pattern, without other additional properties, can be enforced",
                )
            pattern, at = plain.by_pattern[0]
            place = f"{plain.pointer or '#'}/patternProperties"
            if any(is_found(pattern, name, at) for name in plain.properties):
                return None  # names that are in the schema are enough
            names, schemas = whole_pattern(pattern, place), (at,)
        elif any(s.schema is False for s in schemas) or (plain.properties and not schemas):
            return None
        if plain.names:
            if names is not None or len(plain.names) > 1:
                raise Unenforceable(
                    f"{plain.pointer or '#'}/propertyNames", "it stands beside another pattern"
                )
            if plain.properties:
                return None
            node = self._node((_as_text(plain.names[0]),), depth + 1)
            found = node.get("pattern")
            if set(node) == {"enum"}:
                texts = [re.escape(str(text)) for text in node["enum"]]  # type: ignore[union-attr]
                found = whole_pattern(f"^({'|'.join(texts)})$", plain.names[0].pointer)
            elif set(node) == {"type"}:
                found = None
            elif node.keys() <= {"type", "minLength", "maxLength"}:
                try:
                    found = render(of_length(*bounds_of_length(node)), ESCAPED_IN_JSON)
                except PatternError as error:
                    raise Unenforceable(plain.names[0].pointer, f"lengths: {error}") from None
            elif not isinstance(found, str):
                raise Unenforceable(
                    plain.names[0].pointer, "only pattern, lengths and enum can be enforced"
                )
            names = found
        try:
            return names, self._node(schemas, depth + 1)
        except Unsatisfiable:
            return None

    def _check_name(self, part: At, name: str) -> None:
        named = At({"const": name}, part.pointer)
        self._unnamed((named, part), 0)


def _as_text(at: At) -> At:
    schema = at.schema if isinstance(at.schema, Mapping) else {}
    return At({**schema, "type": "string"}, at.pointer)


def _listed(at: At, key: str) -> Iterator[At]:
    assert isinstance(at.schema, Mapping)
    given = at.schema.get(key, ())
    if not isinstance(given, (list, tuple)) or (key in at.schema and not given):
        raise Unenforceable(f"{at.pointer or '#'}/{key}", f"{key} must be a list of schemas")
    for index in range(len(given)):
        yield at[key][index]


def _product(ones: list[Plain], twos: list[Plain]) -> list[Plain]:
    if len(ones) * len(twos) > MAX_CHOICES:
        raise Unenforceable(ones[0].pointer, f"its choices multiply to more than {MAX_CHOICES}")
    result = []
    for one, two in itertools.product(ones, twos):
        try:
            result.append(merged(one, two))
        except Unsatisfiable:
            continue
    return result


def _target_of(root: At, at: At) -> At:
    """What the `$ref` at a place in the schema `root` refers to.

    Raises:
        Unenforceable: nothing, or what is not followed.
    """
    assert isinstance(at.schema, Mapping)
    uri = at.schema["$ref"]
    place = f"{at.pointer or '#'}/$ref"
    if not isinstance(uri, str) or not uri.startswith("#"):
        raise Unenforceable(place, "only references within the schema, '#/...', are followed")
    found = root
    for step in uri[1:].split("/")[1:]:
        key: str | int = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found.schema, (list, tuple)) and str(key).isdecimal():
            key = int(key)
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise Unenforceable(place, f"{uri[:100]} refers to nothing") from None
    if uri not in ("#", "#/") and not uri.startswith("#/"):
        raise Unenforceable(place, "anchors are not followed; write '#/$defs/...'")
    return found
