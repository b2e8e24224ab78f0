"""A process for text that its owner can end: it renders chats, or encodes texts.

No filter of a template, no pattern of a tokenizer and no size of a text escapes its limits.

    python -m openspec.text.worker

A frame is its length (4 bytes, little-endian) and its content. The first one on stdin says what to
do, in JSON. Each after it is a request, answered by a frame on stdout that begins with OK or
REFUSED. The process ends with its input, and by itself where a request takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from openspec.errors import RequestError

RENDER_S = 5.0
ENCODE_S = 60.0
RENDER_BYTES = 1 << 30
"""Address space of a process that renders, of which starting takes 30 MB."""
OK = b"+"
REFUSED = b"-"


def frame(content: bytes) -> bytes:
    """The content with its length before it."""
    return len(content).to_bytes(4, "little") + content


def to_json(value: object) -> bytes:
    """JSON that may hold lone surrogates, as `json.loads` reads it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def main() -> None:
    """Serves until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains, then ends this process
        signal.signal(number, signal.SIG_IGN)
    first = json.loads(_read())
    limit_s = RENDER_S if "templates" in first else ENCODE_S
    work = _renderer(**first["templates"]) if "templates" in first else _encoder(first["folder"])
    while True:
        request = _read()
        # The owner's clock ends it sooner; this one outlives the owner. SIGALRM's default ends C.
        signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
        try:
            reply = OK + work(request)
        except RequestError as error:
            reply = REFUSED + to_json([str(error), error.param, error.code])
        except MemoryError:
            reply = REFUSED + to_json(["the chat is too large for its template", "messages"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(frame(reply))
        sys.stdout.buffer.flush()


def _read() -> bytes:
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
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = RENDER_BYTES if hard == resource.RLIM_INFINITY else min(RENDER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

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
    main()
