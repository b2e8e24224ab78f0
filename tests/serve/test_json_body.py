"""Bodies that are no JSON, or JSON that means two things."""

from __future__ import annotations

import pytest

from openspec.errors import RequestError
from openspec.serve.generation.body import parse
from openspec.serve.shapes.chat import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate key"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 1}}', "duplicate key"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "x": [-Infinity]}', "-Infinity"),
        (b'{"prompt": "a", "x": 1e400}', "beyond the range"),
        (b'{"prompt": "a", "temperature": -1e400}', "beyond the range"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "over 4300 digits"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"x": "\\uDFFF", "prompt": "a"}', "lone surrogate"),
        (b'{"\\ud800": 1, "prompt": "a"}', "lone surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', "not valid JSON"),
        (b'{"prompt": "a\x00b"}', "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested too deeply"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(20_000)) + b"}", "keys"),
        (b"{}", "prompt: is missing"),
        (b'{"prompt": 1.5}', "prompt must be a string, a list"),
        (b'{"prompt": "a", "speculative": true}', "^speculative: must be an object$"),
        (b'{"prompt": "a", "guided_choice": "a"}', "^guided_choice: must be a list$"),
        (b'{"prompt": "a", "user": 5}', "^user: must be a string$"),
        (b'{"prompt": "a", "stop": 1}', "stop must be a string or a list"),
        (
            b'{"prompt": "a", "stream_options": {"include_usage": 1}}',
            "stream_options.include_usage",
        ),
    ],
)
def test_refused(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse(CompletionRequest, body)


def test_accepted() -> None:
    assert parse(CompletionRequest, b'{"prompt": "\\ud83d\\ude00"}').prompt == "\U0001f600"
    assert parse(CompletionRequest, b' \n{"prompt":"a","temperature":1}').temperature == 1
    assert parse(CompletionRequest, b'{"prompt":"a\\u0000"}').prompt == "a\x00"


def test_the_innermost_mistake_is_named() -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{}]}]}'
    with pytest.raises(RequestError) as caught:
        parse(ChatCompletionRequest, body)
    assert caught.value.param == "messages"
    assert str(caught.value).startswith("messages.1.content.0.type")
