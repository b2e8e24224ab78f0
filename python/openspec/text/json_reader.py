"""The one reader of JSON that a client wrote: strict, and of bounded size."""

from __future__ import annotations

import json
import re
import sys
from typing import NoReturn

from openspec.errors import RequestError
from openspec.grammar.json_text import spelled

MAX_OBJECT_KEYS = 16384
MAX_VALUES = 300_000
"""In one request: the parser lets nothing else run meanwhile."""
CONTAINER_COST = 16
"""An object or a list takes about as long as so many numbers."""
TOO_MANY_VALUES = (
    f"over {MAX_VALUES} values, of which an object or a list counts as {CONTAINER_COST}"
)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class NotJson(RequestError):
    """No JSON, or none that text can hold: half a character, which only an escape can spell.

    Other faults make JSON that two readers understand differently.
    """


def read_json(data: bytes, what: str, param: str | None = None) -> object:
    """The value that `data` holds; `what` names it in messages, and `param` its field.

    Numbers that `float` would respell are `SpelledNumber`s.

    Python's parser rather than a faster one, because it lets duplicate keys be refused: two readers
    of one text that pick different duplicates are a way around checks.

    Raises:
        NotJson: not UTF-8, not JSON, or half a character.
        RequestError: a key twice, NaN or infinity, too deep, or too many keys or digits.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(pairs) > MAX_OBJECT_KEYS:
            raise RequestError(f"{what} has an object with over {MAX_OBJECT_KEYS} keys.", param)
        result = dict(pairs)
        if len(result) != len(pairs):
            raise RequestError(f"{what} has a duplicate key.", param)
        return result

    def no_constant(name: str) -> NoReturn:
        raise RequestError(f"{what} is not valid JSON: {name} is not a JSON value.", param)

    def number(text: str) -> float:
        try:
            return spelled(text)
        except ValueError:
            raise RequestError(f"{what} has a number beyond the range of floats.", param) from None

    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=no_constant,
            parse_float=number,
        )
        if _SURROGATE_ESCAPE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RequestError:
        raise
    except UnicodeDecodeError:
        raise NotJson(f"{what} is not valid UTF-8.", param) from None
    except UnicodeEncodeError:
        raise NotJson(f"{what} has a lone surrogate in a string.", param) from None
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply.", param) from None
    except json.JSONDecodeError as exc:
        detail = f"{exc.msg} at character {exc.pos}"
        raise NotJson(f"{what} is not valid JSON: {detail}.", param) from None
    except ValueError:  # of `int`, which reads so many digits and no more
        most = sys.get_int_max_str_digits()
        raise RequestError(f"{what} has an integer of over {most} digits.", param) from None
    return value


def num_values(data: bytes) -> int:
    """How many values JSON has, a container as CONTAINER_COST, counted by its punctuation."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    num = unescaped.count(b'"') // 2
    if num <= MAX_VALUES:
        outside = b"".join(unescaped.split(b'"')[::2])
        num_containers = outside.count(b"[") + outside.count(b"{")
        num = outside.count(b",") + CONTAINER_COST * num_containers
    return num
