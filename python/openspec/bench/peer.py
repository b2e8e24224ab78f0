"""Other engines' servers: what they take, and what they count of their speculation.

Such a server runs as it was started; a request cannot choose between plain decoding and drafts.
"""

from __future__ import annotations

import re

from openspec.bench.client import Address, ClientError, Connection
from openspec.bench.load import EXTENSIONS, RequestSettings, request_body
from openspec.bench.server import get
from openspec.bench.workloads import Prompt
from openspec.messages import SpecDecodeStats

NAME = "server"
"""What a peer's runs are called if it does not say whose server it is."""
_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total(?:\{([^}]*)\})? (\S+)$", re.M)
_POSITION = re.compile(r'\bposition="(\d+)"')
_NOT_FOR_PEERS = {"speculative"}


def accepted_extensions(address: Address, model: str) -> frozenset[str]:
    """Fields beside OpenAI's own that the server does not refuse; one short request for each.

    Raises:
        ClientError: it refuses a request without any.
    """
    found: set[str] = set()
    for name in (None, *sorted(EXTENSIONS - _NOT_FOR_PEERS)):
        settings = RequestSettings(
            model=model,
            max_tokens=1,
            temperature=0.0,
            seed=0,
            ignore_eos=False,
            extensions=frozenset({name} if name else ()),
        )
        prompt = Prompt(user="Hello", thinking=name != "chat_template_kwargs")
        body = request_body(prompt, 0, settings, speculative=True, cache_salt="probe")
        status, answer = _ask(address, prompt.endpoint(), body)
        if status == 200 and name:
            found.add(name)
        if status != 200 and not name:
            raise ClientError(f"HTTP {status}: {answer[:500].decode(errors='replace')}")
    return frozenset(found)


def _ask(address: Address, path: str, body: bytes) -> tuple[int, bytes]:
    connection = Connection(address)
    try:
        connection.send(path, body)
        while (response := connection.receive()) is None:
            pass
        return response.status, response.body
    finally:
        connection.close()


def counters(address: Address) -> SpecDecodeStats | None:
    """What vLLM's metrics say of speculation so far; None if the server has no such metrics."""
    try:
        text = get(address, "/metrics").decode(errors="replace")
    except OSError:
        return None
    found = SpecDecodeStats()
    matches = _COUNTER.findall(text)
    for name, labels, value in matches:
        number, position = int(float(value)), _POSITION.search(labels)
        if name == "drafts":
            found.num_drafts += number
        elif name == "draft_tokens":
            found.num_draft_tokens += number
        elif name == "accepted_tokens":
            found.num_accepted_tokens += number
        elif name == "accepted_tokens_per_pos" and position is not None:
            per_pos, at = found.num_accepted_tokens_per_pos, int(position[1])
            if at < 1024:
                per_pos.extend([0] * (at + 1 - len(per_pos)))
                per_pos[at] += number
    # Drafts of these engines have the same length at every step.
    found.num_drafts_per_pos = [found.num_drafts] * len(found.num_accepted_tokens_per_pos)
    return found if matches else None
