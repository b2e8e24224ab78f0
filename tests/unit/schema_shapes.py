"""Schemas of the kinds that people publish: written anew for each seed, from shapes and words.

The kinds and the share of each follow JSONSchemaBench (arXiv 2501.10868): arguments of functions,
records of APIs, Kubernetes-like specifications, configuration files, events with fixed fields, and
schemas with combinations and references.
"""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = (
    "id name title description type status kind owner email phone url path size count total price "
    "currency amount quantity created_at updated_at start end duration latitude longitude address "
    "street city country zip tags labels metadata version enabled timeout retries host port user "
    "password role level score rating comment author language locale format source target data "
    "items options settings query filter limit offset sort page width height color unit value key "
    "secret token region zone image replicas command args env volume mount selector namespace"
).split()
WORDS = "active pending failed done low medium high red green blue GET POST daily weekly".split()
PATTERNS = (
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    "^[A-Z]{2}[0-9]{4}$",
    "^\\d{4}-\\d{2}-\\d{2}$",
    "^#[0-9a-fA-F]{6}$",
    "^[^\\s@]+@[^\\s@]+$",
    "^v?\\d+\\.\\d+\\.\\d+$",
    "[A-Za-z_]\\w*",
    "^(https?|ftp)://",
    "^\\+?[0-9]{7,15}$",
)
FORMATS = ("date", "date-time", "email", "uri", "uuid", "ipv4", "hostname", "int32", "password")
DRAFTS = (
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2020-12/schema",
)
Schema = dict[str, object]


class Shapes:
    """One schema after another."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self) -> Schema:
        kinds: list[tuple[Callable[[], Schema], int]] = [
            (self.function, 20),
            (self.record, 25),
            (self.specification, 15),
            (self.configuration, 15),
            (self.event, 10),
            (self.combined, 10),
            (self.recursive, 5),
        ]
        makers, weights = zip(*kinds, strict=True)
        schema = self.rng.choices(makers, weights)[0]()
        if self.rng.random() < 0.4:
            schema = {"$schema": self.rng.choice(DRAFTS), "title": "A thing", **schema}
        return schema

    def names(self, low: int, high: int) -> list[str]:
        return self.rng.sample(NAMES, self.rng.randint(low, high))

    def text(self) -> Schema:
        rng, schema = self.rng, {"type": "string"}
        kind = rng.random()
        if kind < 0.15:
            return {**schema, "enum": rng.sample(WORDS, rng.randint(2, 5))}
        if kind < 0.25:
            return {**schema, "format": rng.choice(FORMATS)}
        if kind < 0.35:
            schema["pattern"] = rng.choice(PATTERNS)
        elif kind < 0.45:
            low = rng.choice([0, 1, 1, 3])
            schema |= {"minLength": low, "maxLength": rng.choice([8, 32, 63, 100, 255, 1024])}
        elif kind < 0.5:
            schema["minLength"] = 1
        if rng.random() < 0.5:
            schema["description"] = "What it is, and where it comes from."
        return schema

    def number(self) -> Schema:
        rng = self.rng
        schema: Schema = {"type": rng.choice(["integer", "integer", "number"])}
        if rng.random() < 0.3:
            schema["minimum"] = rng.choice([0, 0, 1, -90, 0.5])
        if rng.random() < 0.2:
            schema["maximum"] = rng.choice([10, 100, 65535, 180])
        if rng.random() < 0.005:
            schema = {"type": "number", "multipleOf": 0.01}
        if rng.random() < 0.1:
            schema["default"] = 1
        return schema

    def scalar(self) -> Schema:
        kind = self.rng.random()
        if kind < 0.55:
            schema = self.text()
        elif kind < 0.85:
            schema = self.number()
        else:
            schema = {"type": "boolean"}
        if self.rng.random() < 0.08 and "enum" not in schema:
            schema["type"] = [schema["type"], "null"]
        return schema

    def value(self, depth: int) -> Schema:
        kind = self.rng.random()
        if depth == 0 or kind < 0.7:
            return self.scalar()
        if kind < 0.85:
            return self.items(depth - 1)
        return self.object(depth - 1, 1, 5)

    def items(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self.value(depth)}
        if self.rng.random() < 0.3:
            schema["minItems"] = self.rng.randint(0, 2)
        if self.rng.random() < 0.2:
            schema["maxItems"] = self.rng.randint(3, 8)
        if self.rng.random() < 0.01:
            schema["uniqueItems"] = True
        return schema

    def object(self, depth: int, low: int, high: int) -> Schema:
        names = self.names(low, high)
        schema: Schema = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
        }
        if required := [name for name in names if self.rng.random() < 0.55]:
            schema["required"] = required
        kind = self.rng.random()
        if kind < 0.4:
            schema["additionalProperties"] = False
        elif kind < 0.45:
            schema["additionalProperties"] = {"type": "string"}
        elif kind < 0.5:
            schema["additionalProperties"] = True
        return schema

    def function(self) -> Schema:
        return self.object(1, 1, 5)

    def record(self) -> Schema:
        return self.object(2, 4, 12)

    def specification(self) -> Schema:
        labels = {"type": "object", "additionalProperties": {"type": "string"}}
        container = self.object(1, 3, 8)
        spec = self.object(1, 2, 6)
        properties = spec["properties"]
        assert isinstance(properties, dict)
        properties["containers"] = {"type": "array", "minItems": 1, "items": container}
        return {
            "description": "A workload.",
            "type": "object",
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string", "enum": ["Deployment"]},
                "metadata": {
                    "type": ["object", "null"],
                    "properties": {"name": {"type": "string"}, "labels": labels},
                },
                "spec": spec,
            },
            "required": ["kind", "spec"],
        }

    def configuration(self) -> Schema:
        schema = self.object(2, 5, 10)
        if self.rng.random() < 0.3:
            schema["patternProperties"] = {"^x-": {"type": "string"}}
            schema["additionalProperties"] = False
        if self.rng.random() < 0.1:
            schema["dependencies"] = {"port": ["host"]}
        return schema

    def event(self) -> Schema:
        names = self.names(4, 10)
        properties = {name: self.scalar() for name in names}
        return {
            "type": "object",
            "properties": {"event": {"const": self.rng.choice(WORDS)}, **properties},
            "required": ["event", *names],
            "additionalProperties": False,
        }

    def combined(self) -> Schema:
        kinds = self.rng.sample(WORDS, 3)
        options = [self.object(1, 1, 4) for _ in kinds]
        for kind, option in zip(kinds, options, strict=True):
            properties, required = option["properties"], option.get("required", [])
            assert isinstance(properties, dict)
            assert isinstance(required, list)
            option["properties"] = {"kind": {"const": kind}, **properties}
            option["required"] = ["kind", *(name for name in required if name != "kind")]
        defs = {"base": self.object(0, 2, 4)}
        choice = {self.rng.choice(["oneOf", "anyOf"]): options}
        extended = {"allOf": [{"$ref": "#/definitions/base"}, self.object(0, 1, 3)]}
        return {
            "definitions": defs,
            "type": "object",
            "properties": {
                "choice": choice,
                "extended": extended if self.rng.random() < 0.6 else {"$ref": "#/definitions/base"},
                "maybe": {"anyOf": [{"$ref": "#/definitions/base"}, {"type": "null"}]},
            },
            "required": ["choice"],
        }

    def recursive(self) -> Schema:
        return {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "name": self.text(),
                        "value": self.scalar(),
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["name"],
                }
            },
        }


def schemas(num: int, seed: int = 0) -> list[Schema]:
    """So many schemas, always the same ones."""
    shapes = Shapes(seed)
    return [shapes.schema() for _ in range(num)]
