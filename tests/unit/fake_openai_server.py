"""A server that speaks just enough OpenAI for the benchmark: canned answers at a fixed pace."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class FakeServer:
    """What it does with the next requests; `bodies` keeps what came."""

    port: int = 0
    step_s: float = 0.0005
    span: int = 4
    """Tokens per chunk of a speculative answer; a plain one has one."""
    wrong_from: int | None = None
    """Position from which speculative answers are wrong."""
    drops_last_token: bool = False
    error_status: int | None = None
    owner: str | None = "openspec"
    """Whose server it claims to be; another's counts tokens in `usage` alone, and always drafts."""
    refuses: tuple[str, ...] = ()
    """Fields of a body that it answers with 400."""
    is_plain_http: bool = False
    """No chunks and no length: a stream ends with its connection, its lines with CR and LF."""
    closes: bool = False
    """Whether it ends a connection after each answer, and says so."""
    has_metrics: bool = False
    """Whether it counts speculation for Prometheus, as vLLM does."""
    api_key: str | None = None
    prefix: str = ""
    num_drafts: int = 0
    num_accepted: int = 0
    split_writes: bool = False
    bodies: list[dict] = field(default_factory=list)
    clock_s: float = 0.0
    """Goes on by a step with every step: the time on a machine that does nothing else."""

    def answer(self, body: dict) -> list[int]:
        key = json.dumps(body.get("prompt", body.get("messages"))) + str(body["seed"])
        start = zlib.crc32(key.encode()) % 1000
        length = body["max_tokens"] - (0 if body.get("ignore_eos") else start % 3)
        return [(start + i) % 1000 for i in range(max(1, length))]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = 0
                for line in head.split("\r\n"):
                    if line.lower().startswith("content-length:"):
                        length = int(line.split(":")[1])
                payload = await reader.readexactly(length)
                path = head.split(" ")[1]
                has_key = f"authorization: bearer {self.api_key}".lower() in head.lower()
                if not path.startswith(self.prefix) or (self.api_key and not has_key):
                    self.json(writer, 401 if self.api_key else 404, {"error": {"message": "no"}})
                    continue
                await self.respond(path.removeprefix(self.prefix), payload, writer)
                if payload and (self.closes or self.is_plain_http):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, path: str, payload: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            models = [{"id": name, "owned_by": self.owner} for name in ("fake", "other")]
            return self.json(writer, 200, {"data": models})
        if path == "/server_info" and self.owner == "openspec":
            return self.json(writer, 200, {"vocab_size": 1000, "method": "ngram"})
        if path == "/metrics" and self.has_metrics:
            return self.text(writer, self.metrics())
        if not payload:
            return self.json(writer, 404, {"error": {"message": "no"}})
        body = json.loads(payload)
        self.bodies.append(body)
        if refused := [name for name in self.refuses if name in body]:
            message = f"Unrecognized request argument supplied: {refused[0]}"
            return self.json(writer, 400, {"error": {"message": message}})
        if self.error_status is not None:
            return self.json(writer, self.error_status, {"error": {"message": "no"}})
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        if not self.is_plain_http:
            head += "Transfer-Encoding: Chunked\r\n"
        if self.closes:
            head += "Connection: Close\r\n"
        writer.write(head.encode() + b"\r\n")
        is_plain = not body.get("speculative", {}).get("enabled", True)
        tokens = self.answer(body)
        if not is_plain and self.wrong_from is not None:
            tokens = [t + (i >= self.wrong_from) for i, t in enumerate(tokens)]
        if not is_plain and self.drops_last_token:
            tokens.pop()
        span, drafts, accepted, at = (1 if is_plain else self.span), 0, 0, 0
        while at < len(tokens):
            await asyncio.sleep(self.step_s)
            self.clock_s += self.step_s
            piece = tokens[at : at + span]
            at += len(piece)
            drafts += not is_plain
            accepted += len(piece) - 1
            await self.event(writer, body, piece, "length" if at >= len(tokens) else None)
        self.num_drafts += drafts
        self.num_accepted += accepted
        if self.owner != "openspec":
            last = {"choices": [], "usage": {"completion_tokens": len(tokens)}}
            await self.write(writer, self.chunk(f"data: {json.dumps(last)}\n\n"))
            await self.write(writer, self.chunk("data: [DONE]\n\n") + self.end())
            return None
        stats = {
            "method": "fake",
            "num_drafts": drafts,
            "num_draft_tokens": drafts * (self.span - 1),
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": [] if is_plain else [drafts] * (self.span - 1),
            "num_drafts_per_pos": [] if is_plain else [drafts] * (self.span - 1),
        }
        last = {"choices": [], "metrics": {"speculative_decoding": stats}}
        await self.write(writer, self.chunk(f"data: {json.dumps(last)}\n\n"))
        await self.write(writer, self.chunk(": keep-alive\n\ndata: [DONE]\n\n") + self.end())
        return None

    def metrics(self) -> str:
        labels = 'engine="0",model_name="fake"'
        lines = [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {self.num_drafts}.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {self.num_drafts * 3}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {self.num_accepted}.0",
            "vllm:num_requests_running 3",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} '
            f"{self.num_drafts - at}.0"
            for at in range(3)
        ]
        return "\n".join(lines) + "\n"

    @staticmethod
    def text(writer: asyncio.StreamWriter, content: str) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write((head + content).encode())

    async def event(
        self, writer: asyncio.StreamWriter, body: dict, piece: list[int], finish: str | None
    ) -> None:
        text = "".join(f" {token}" for token in piece)
        choice: dict = {"index": 0, "finish_reason": finish}
        if self.owner == "openspec":
            choice["token_ids"] = piece
        if "messages" in body:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        message = {"choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": None}
        await self.write(writer, self.chunk(f"data: {json.dumps(message)}\n\n"))

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self.split_writes:
            writer.write(data)
            return
        for at in range(0, len(data), 7):
            writer.write(data[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0)

    def end(self) -> bytes:
        return b"" if self.is_plain_http else b"0\r\n\r\n"

    def chunk(self, text: str) -> bytes:
        if self.is_plain_http:
            return text.replace("data: ", "event: message\ndata:").replace("\n", "\r\n").encode()
        data = text.encode()
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"

    @staticmethod
    def json(writer: asyncio.StreamWriter, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\nconnection: keep-alive\r\n"
        writer.write(head.encode() + b"\r\n" + data)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Serve from a thread of its own."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    started.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
