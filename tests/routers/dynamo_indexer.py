"""Dynamo's KV indexer beside two servers: `dynamo_indexer.py FOLDER-OF-BINARIES`."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import httpx
from tests.routers import fleet

BIN = Path(sys.argv[1])
PAGE_SIZE = 16


def matched(url: str, token_ids: list[int]) -> dict[str, int]:
    """Cached tokens of a prompt by server, as the indexer knows them."""
    body = {"token_ids": token_ids, "model_name": "tiny"}
    scores = httpx.post(f"{url}/query", json=body).json()["scores"]
    return {name: ranks["0"] for name, ranks in scores.items()}


def complete(url: str, token_ids: list[int], **more: object) -> int:
    """Cached tokens of the prompt, as the server counts them."""
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": 1, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=fleet.PATIENCE_S).json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
events["replay_endpoint"] = "tcp://127.0.0.1:*"
chance = random.Random(8)
with fleet.servers(2, "--kv-events-config", json.dumps(events)) as behind:
    port = fleet.free_port()
    url = f"http://127.0.0.1:{port}"
    # Its HTTP side knows no address but every interface.
    with fleet.process(BIN / "python", "-m", "dynamo.indexer", "--port", str(port)):

        def is_up() -> bool:
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.HTTPError:
                return False

        fleet.until(is_up, "the indexer is up")
        early = [chance.randrange(300, 4000) for _ in range(200)]
        complete(behind[0].url, early)
        for number, server in enumerate(behind):
            found = re.search(r"KV events go to (\S+); replays: (\S+)", server.log)
            assert found, server.log
            registered = httpx.post(
                f"{url}/register",
                json={
                    "instance_id": number,
                    "model_name": "tiny",
                    "block_size": PAGE_SIZE,
                    "endpoint": found[1],
                    "replay_endpoint": found[2],
                },
            )
            assert registered.is_success, registered.text

        def knows_replay() -> bool:
            complete(behind[0].url, [chance.randrange(300, 4000) for _ in range(40)])
            return matched(url, early).get("0") == 192

        fleet.until(knows_replay, "a replay tells what was cached before the indexer came")
        print("   replay: what was cached before the indexer came is known")
        prompts = []
        for i in range(40):
            shared = prompts[chance.randrange(len(prompts))] if prompts and i % 2 else []
            cut = shared[: chance.randrange(len(shared) + 1)] if shared else []
            prompts.append(cut + [chance.randrange(300, 4000) for _ in range(150)])
            complete(behind[i % 2].url, prompts[-1])
        for prompt in prompts:
            fleet.until(lambda prompt=prompt: len(matched(url, prompt)) > 0, "events have come")
            known = matched(url, prompt)
            for number, server in enumerate(behind):
                # A server that is asked caches the prompt: the indexer is asked first.
                assert complete(server.url, prompt) == known.get(str(number), 0), known
        print("   40 prompts with shared beginnings: cached tokens equal to the servers' own")
        httpx.post(f"{behind[0].url}/flush_cache")
        fleet.until(lambda: "0" not in matched(url, prompts[0]), "the flush is known")
        assert "1" in matched(url, prompts[0])
        print("   /flush_cache empties one server's entries")
