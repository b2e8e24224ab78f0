"""A process for text that its owner can end: it renders chats, or encodes texts.

No filter of a template, no pattern of a tokenizer and no size of a text escapes its limits.

    python -m openspec.text.worker

Its first frame says what to do, in JSON; a refusal is the fields of a RequestError in JSON
(`grammar/child_process.py`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from openspec.errors import RequestError
from openspec.grammar.child_process import Refusal, limit_memory, serve

RENDER_S = 5.0
ENCODE_S = 60.0
RENDER_BYTES = 1 << 30
"""Address space of a process that renders, of which starting takes 30 MB."""


def to_json(value: object) -> bytes:
    """JSON that may hold lone surrogates, as `json.loads` reads it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _begin(first: bytes) -> tuple[Callable[[bytes], bytes], float]:
    given = json.loads(first)
    is_renderer = "templates" in given
    work = _renderer(**given["templates"]) if is_renderer else _encoder(given["folder"])

    def answer(request: bytes) -> bytes:
        try:
            return work(request)
        except RequestError as error:
            raise Refusal(to_json([str(error), error.param, error.code])) from None
        except MemoryError:
            raise Refusal(to_json(["the chat is too large for its template", "messages"])) from None

    return answer, RENDER_S if is_renderer else ENCODE_S


def _renderer(
    sources: Mapping[str, str],
    special_tokens: Sequence[str],
    variables: Mapping[str, str],
    now: str,
) -> Callable[[bytes], bytes]:
    from openspec.text.chat_template import ChatTemplates

    templates = ChatTemplates(sources, special_tokens, variables, datetime.fromisoformat(now))
    limit_memory(RENDER_BYTES)

    def render(request: bytes) -> bytes:
        segments = templates.render(**json.loads(request))
        return to_json([[segment.text, segment.is_special] for segment in segments])

    return render


def _encoder(folder: str) -> Callable[[bytes], bytes]:
    from openspec.text.chat_template import Segment
    from openspec.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)

    def encode(request: bytes) -> bytes:
        """For each text its number of tokens and their ids."""
        numbers = array("I")
        for segments in json.loads(request):
            ids = tokenizer.segment_ids([Segment(*segment) for segment in segments])
            numbers.append(len(ids))
            numbers.extend(ids)
        return numbers.tobytes()

    return encode


if __name__ == "__main__":
    serve(_begin)
