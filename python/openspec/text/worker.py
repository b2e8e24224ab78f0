"""A process for text that its owner can end: it renders chats, or encodes texts.

No filter of a template, no pattern of a tokenizer and no size of a text escapes its limits.

    python -m openspec.text.worker

Its first frame (`openspec.child_process`) says what to do, in JSON. Each after it is a request,
answered by a frame that begins with OK or REFUSED; a refusal is the fields of a RequestError in
JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from openspec.child_process import (
    die_with_owner,
    frame,
    limit_memory,
    outlive_signals,
    write_all,
)
from openspec.errors import RequestError

STDOUT = 1
OK = b"+"
REFUSED = b"-"
RENDER_S = 5.0
ENCODE_S = 60.0
MORE_S = 1.0
"""The owner's clock ends the process sooner; its own one outlives the owner."""
RENDER_BYTES = 1 << 30
"""Address space of a process that renders, of which starting takes 30 MB."""


def to_json(value: object) -> bytes:
    """JSON that may hold lone surrogates, as `json.loads` reads it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def serve() -> None:
    """Answers until the input ends, or an answer takes too long."""
    die_with_owner()
    outlive_signals()
    given = json.loads(_read())
    is_renderer = "templates" in given
    work = _renderer(**given["templates"]) if is_renderer else _encoder(given["folder"])
    limit_s = (RENDER_S if is_renderer else ENCODE_S) + MORE_S
    while True:
        request = _read()
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM's default ends C++ too
        try:
            reply = OK + work(request)
        except RequestError as error:
            reply = REFUSED + to_json([str(error), error.param, error.code])
        except MemoryError:
            reply = REFUSED + to_json(["the chat is too large for its template", "messages"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_all(STDOUT, frame(reply))


def _read() -> bytes:
    """The content of the next frame; ends the process where there is none."""
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    content = sys.stdin.buffer.read(size)
    if not content or len(content) < size:
        sys.exit()
    return content


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
    serve()
