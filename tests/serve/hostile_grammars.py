"""Random schemas, patterns, grammars and tags, where requests of each API have them."""

from __future__ import annotations

import random

LETTERS = "abxyz019 -_é\\"
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
HI = [{"role": "user", "content": "hi"}]


def pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(12 if depth else 4)
    inner = depth - 1
    match kind:
        case 0 | 1:
            return "".join(rng.choices("abx19", k=rng.randint(1, 3)))
        case 2:
            return rng.choice(["[a-z]", "[^a]", ".", r"\d", r"\w", r"\s", "[abé]", r"\u0041"])
        case 3:
            return rng.choice(["", "^", "$", r"\b", "(", ")", "[", "*", "{2", "\\", "(?=a)", r"\1"])
        case 4 | 5:
            return f"({pattern(rng, inner)}|{pattern(rng, inner)})"
        case 6 | 7:
            repeat = rng.choice(["*", "+", "?", "{2}", "{0,3}", "{1,}", "{2,1}", "{0,1000}"])
            return f"({pattern(rng, inner)}){repeat}"
        case _:
            return pattern(rng, inner) + pattern(rng, inner)


def schema(rng: random.Random, depth: int = 3) -> object:
    inner = depth - 1
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([{}, True, False, {"type": rng.choice(TYPES)}, {"const": None}])
    result: dict[str, object] = {}
    if rng.random() < 0.8:
        result["type"] = rng.choice([*TYPES, ["string", "null"], "text", 5])
    names = [rng.choice(["a", "b", "c", "é", ""]) for _ in range(rng.randrange(4))]
    keywords = {
        "properties": lambda: {name: schema(rng, inner) for name in names},
        "required": lambda: rng.choice([names, ["a", "a"], "a"]),
        "additionalProperties": lambda: schema(rng, inner),
        "patternProperties": lambda: {pattern(rng, 2): schema(rng, inner)},
        "items": lambda: schema(rng, inner),
        "prefixItems": lambda: [schema(rng, inner) for _ in range(rng.randrange(3))],
        "minItems": lambda: rng.choice([0, 1, 5, -1, 1e3, 10**9]),
        "maxItems": lambda: rng.choice([0, 2, 1e3]),
        "uniqueItems": lambda: True,
        "anyOf": lambda: [schema(rng, inner) for _ in range(rng.randrange(4))],
        "oneOf": lambda: [schema(rng, inner) for _ in range(rng.randrange(4))],
        "allOf": lambda: [schema(rng, inner) for _ in range(rng.randrange(3))],
        "not": lambda: schema(rng, inner),
        "enum": lambda: rng.choices([1, 1.5, "a", None, True, [], {"a": 1}, 10**30], k=3),
        "const": lambda: rng.choice([1, "a", 1e300, {"a": []}, "\u2028"]),
        "pattern": lambda: pattern(rng),
        "minLength": lambda: rng.choice([0, 2, 1000, 10**9]),
        "maxLength": lambda: rng.choice([0, 5, 10**6]),
        "format": lambda: rng.choice(["date", "uuid", "ipv4", "email", "no-such"]),
        "minimum": lambda: rng.choice([0, -1.5, 1e300, 10**25]),
        "maximum": lambda: rng.choice([0, 7, 1e-300]),
        "multipleOf": lambda: rng.choice([1, 0.1, 7, 0, 1021]),
        "minProperties": lambda: rng.choice([0, 1, 9]),
        "$ref": lambda: rng.choice(["#", "#/properties/a", "#/$defs/d", "http://x/y", "#/no"]),
        "$defs": lambda: {"d": schema(rng, inner)},
    }
    for name in rng.sample(sorted(keywords), rng.randint(0, 4)):
        result[name] = keywords[name]()
    return result


def grammar(rng: random.Random) -> str:
    """EBNF of a few rules that name one another, also in circles."""
    names = ["root", "a", "b", "c"][: rng.randint(1, 4)]

    def item(depth: int = 2) -> str:
        kind = rng.randrange(8)
        if kind < 3 or depth == 0:
            return rng.choice(['"x"', '"ab"', '""', "[a-c]", "[^a]", '"', "nobody"])
        if kind < 5:
            return rng.choice(names)
        if kind < 7:
            return f"({item(depth - 1)} | {item(depth - 1)})" + rng.choice(["", "*", "+", "{2,3}"])
        return f"{item(depth - 1)} {item(depth - 1)}"

    return "\n".join(f"{name} ::= {item()} | {item()}" for name in names)


def tag(rng: random.Random, depth: int = 2) -> object:
    kinds = ["any_text", "const_string", "json_schema", "regex", "sequence", "or", "tag"]
    kinds += ["triggered_tags", "tags_with_separator", "star", "plus", "repeat", "no_such"]
    kind = rng.choice(kinds) if depth else rng.choice(kinds[:4])
    result: dict[str, object] = {"type": rng.choice([kind] * 9 + [[], 5])}
    fields = {
        "value": lambda: "v",
        "json_schema": lambda: schema(rng, 2),
        "pattern": lambda: pattern(rng, 2),
        "elements": lambda: [tag(rng, depth - 1) for _ in range(rng.randrange(3))],
        "begin": lambda: rng.choice(["<a>", ""]),
        "content": lambda: tag(rng, depth - 1),
        "end": lambda: rng.choice(["</a>", "", ["</a>", "</b>"]]),
        "triggers": lambda: rng.choice([["<a"], [], [""]]),
        "tags": lambda: [{"begin": "<a>", "content": tag(rng, depth - 1), "end": "</a>"}],
        "separator": lambda: ",",
        "min": lambda: rng.choice([0, 3, 10**9]),
        "max": lambda: rng.choice([1, 2, -1]),
        "excludes": lambda: rng.choice([[], [""], ["x"]]),
    }
    wanted = {
        "const_string": ["value"],
        "json_schema": ["json_schema"],
        "regex": ["pattern"],
        "sequence": ["elements"],
        "or": ["elements"],
        "tag": ["begin", "content", "end"],
        "triggered_tags": ["triggers", "tags"],
        "tags_with_separator": ["tags", "separator"],
        "star": ["content"],
        "plus": ["content"],
        "repeat": ["content", "min", "max"],
    }.get(kind, [])
    for name in wanted + rng.sample(sorted(fields), rng.choice([0, 0, 0, 1])):
        result[name] = fields[name]() if depth else "x"
    return result


def constrained(rng: random.Random, path: str) -> dict[str, object]:
    """A body of this path that says what its answer must be."""
    root = {"type": "object", "properties": {"a": schema(rng)}, "required": ["a"]}
    given = rng.choice([root, schema(rng)])
    if path == "/v1/messages":
        body: dict[str, object] = {"messages": HI, "max_tokens": 8}
        tool = {"name": "f", "input_schema": given, "strict": rng.choice([True, False, None])}
        if rng.random() < 0.5:
            return {**body, "output_config": {"format": {"type": "json_schema", "schema": given}}}
        return {**body, "tools": [tool], "tool_choice": {"type": rng.choice(["any", "auto"])}}
    if path == "/v1/responses":
        body = {"input": "hi", "max_output_tokens": 8}
        tool = {"type": "function", "name": "f", "parameters": given, "strict": True}
        if rng.random() < 0.5:
            form = {"type": "json_schema", "name": "f", "schema": given}
            return {**body, "text": {"format": form}}
        return {**body, "tools": [tool], "tool_choice": rng.choice(["required", "auto"])}
    content = rng.choice(
        [
            {"structured_outputs": {"json": given}},
            {"structured_outputs": {"regex": pattern(rng)}},
            {"structured_outputs": {"grammar": grammar(rng)}},
            {"structured_outputs": {"choice": rng.choice([["a", "b"], [""], [], ["a"] * 3])}},
            {"structural_tag": {"type": "structural_tag", "format": tag(rng)}},
            {"guided_json": rng.choice(['{"type":"integer"}', "{", "[]", "x"])},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": given}}},
        ]
    )
    if path == "/v1/completions":
        return {"prompt": "hi", "max_tokens": 8, **content}
    if rng.random() < 0.4:
        function = {"name": "f", "parameters": given, "strict": rng.random() < 0.5}
        tools = {"tools": [{"type": "function", "function": function}]}
        content = {**tools, "tool_choice": rng.choice(["required", "auto"])}
    return {"messages": HI, "max_tokens": 8, **content}
