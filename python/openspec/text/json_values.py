"""What came out of a JSON parser, typed and bounded in depth."""

from __future__ import annotations

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.text.chat_template import MAX_DEPTH


def plain_json(value: object, param: str = "messages", depth: int = 0) -> JsonValue:
    """The value as JSON.

    Raises:
        RequestError: nested too deeply, or no JSON.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"The request is nested deeper than {MAX_DEPTH} levels.", param)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain_json(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item, param, depth + 1) for item in value]
    raise RequestError("The request holds something that is not JSON.")
