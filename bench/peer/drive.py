"""A neutral load client for OpenAI servers: standard library only, the same bytes to every server.

    drive.py --url http://127.0.0.1:8011 --tag vllm/plain --dataset gsm8k_test.jsonl

A closed loop of c workers over max(16, 4 c) questions, each asked once, greedy, streamed; a JSON
line per level. While streams run the client only notes when bytes came, and takes them apart later.
Every server gets the same questions. None of the warm-up's is measured, so no prefix cache knows
them. The chat form is written here and sent to /v1/completions: every token comes back as text.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import gc
import hashlib
import json
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

FIRST_QUESTION = {1: 0, 4: 16, 8: 32, 16: 64, 32: 128, 64: 256}
FIRST_WARM_UP = 1200
COUNTERS = {"drafts": "spec_decode_num_drafts", "accepted": "spec_decode_num_accepted_tokens"}


class Exchange(asyncio.Protocol):
    """One request on a connection of its own; done at [DONE]."""

    def __init__(self, payload: bytes, done: asyncio.Future[None]) -> None:
        self.payload, self.done = payload, done
        self.pieces: list[bytes] = []
        self.times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.payload)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)
        if b"[DONE]" in b"".join(self.pieces[-2:])[-40:] and not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            head = b"".join(self.pieces)[:1500]
            self.done.set_exception(RuntimeError(f"ended without [DONE]: {error!r} {head!r}"))


def chunks(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(where it ends in `raw`, content) of each chunk of a chunked body, or of the whole body."""
    head, _, _ = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(raw[:2000].decode(errors="replace"))
    at = len(head) + 4
    if b"chunked" not in head.lower():
        yield len(raw), raw[at:]
        return
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        if size == 0:
            return
        at = line + 2 + size + 2
        yield at - 2, raw[line + 2 : at - 2]


def events(pieces: Sequence[bytes], times: Sequence[float]) -> Iterator[tuple[float, dict]]:
    """(when it was complete, JSON) of each server-sent event."""
    received, total = [], 0
    for piece in pieces:
        total += len(piece)
        received.append(total)
    rest = b""
    for end, content in chunks(b"".join(pieces)):
        *blocks, rest = re.split(rb"\r?\n\r?\n", rest + content)
        for block in blocks:
            data = block.removeprefix(b"data:").strip()
            if block.startswith(b"data:") and data != b"[DONE]":
                yield times[bisect.bisect_left(received, end)], json.loads(data)


@dataclass(frozen=True)
class Answer:
    """Times in seconds of the client's clock; `at` holds one per chunk with text."""

    index: int
    begun: float
    at: list[float]
    end: float
    num_tokens: int
    digest: str


def read_answer(index: int, begun: float, pieces: list[bytes], times: list[float]) -> Answer:
    text, at, end, num_tokens = "", [], times[-1], 0
    for when, event in events(pieces, times):
        if "error" in event:
            raise RuntimeError(json.dumps(event))
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices") or []:
            text += choice.get("text") or ""
            if choice.get("text"):
                at.append(when)
            if choice.get("finish_reason"):
                end = when  # the end-of-text token has no text, but took a step
    return Answer(
        index, begun, at or [end], end, num_tokens, hashlib.sha256(text.encode()).hexdigest()
    )


class Load:
    """A server, the questions, and what is sent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.url = args, urlsplit(args.url)
        with open(args.dataset, encoding="utf-8") as lines:
            self.questions = [json.loads(line)["question"] for line in lines]
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.args.url.rstrip("/") + path, timeout=30) as answer:
            return answer.read().decode()

    def counters(self) -> dict[str, float]:
        found = dict.fromkeys(COUNTERS, 0.0)
        for name, value in re.findall(
            r"^vllm:(\w+)_total(?:\{[^}]*\})? (\S+)$", self.get("/metrics"), re.M
        ):
            for key, counter in COUNTERS.items():
                found[key] += float(value) * (name == counter)
        return found

    def payload(self, index: int) -> bytes:
        question = self.questions[index % len(self.questions)]
        body = {
            "model": self.model,
            "prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
            "max_tokens": self.args.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            "Accept: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + data

    async def ask(self, index: int) -> tuple[int, float, list[bytes], list[float]]:
        loop = asyncio.get_running_loop()
        done, payload = loop.create_future(), self.payload(index)
        begun = time.perf_counter()
        _, exchange = await loop.create_connection(
            lambda: Exchange(payload, done), self.url.hostname, self.url.port or 80
        )
        await asyncio.wait_for(done, 240)
        return index, begun, exchange.pieces, exchange.times

    async def closed_loop(self, indices: range, concurrency: int) -> list[Answer]:
        queue, raw = iter(indices), []

        async def worker() -> None:
            for index in queue:
                raw.append(await self.ask(index))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return sorted((read_answer(*answer) for answer in raw), key=lambda answer: answer.index)

    async def level(self, concurrency: int) -> dict:
        first, num = FIRST_QUESTION[concurrency], max(16, 4 * concurrency)
        before = self.counters()
        gc.collect()
        gc.disable()
        begun = time.perf_counter()
        answers = await self.closed_loop(range(first, first + num), concurrency)
        wall = max(answer.end for answer in answers) - begun
        gc.enable()
        await asyncio.sleep(0.3)
        moved = {key: value - before[key] for key, value in self.counters().items()}
        tokens = sum(answer.num_tokens for answer in answers)
        ttft = [1000 * (answer.at[0] - answer.begun) for answer in answers]
        tpot = [1000 * (a.end - a.at[0]) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1]
        return {
            "tag": self.args.tag,
            "c": concurrency,
            "n": num,
            "wall_s": round(wall, 4),
            "tok_s": round(tokens / wall, 1),
            "ttft_med_ms": round(statistics.median(ttft), 2),
            "tpot_med_ms": round(statistics.median(tpot), 4),
            "accept_len": round(1 + moved["accepted"] / moved["drafts"], 3)
            if moved["drafts"]
            else None,
            "tokens": tokens,
            "prompts": [
                [answer.index, answer.num_tokens, answer.digest[:16]] for answer in answers
            ],
        }

    async def run(self) -> None:
        levels = [int(level) for level in self.args.levels.split(",")]
        await self.closed_loop(range(FIRST_WARM_UP, FIRST_WARM_UP + 2 * max(levels)), max(levels))
        for concurrency in levels:
            row = await self.level(concurrency)
            with open(self.args.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print({key: value for key, value in row.items() if key != "prompts"}, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A neutral load client for OpenAI servers.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--tag", required=True, help="vllm/ or openspec/ and plain or a method")
    parser.add_argument("--dataset", required=True, help="JSON lines with `question`")
    parser.add_argument("--out", default="side.jsonl")
    parser.add_argument("--levels", default="1,4,16,32", help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=128)
    asyncio.run(Load(parser.parse_args()).run())


if __name__ == "__main__":
    main()
