"""Streaming to 64 clients costs the server little per chunk."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

NUM_STREAMS = 64
MAX_COST = 10
"""In chunks formatted and sent by hand meanwhile; the server needs 3 to 6."""

CHUNK = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": None}],
}


class ByHand(threading.Thread):
    """Now and then some chunks are formatted, written to a socket and read back.

    Beside the server rather than before it: caches and clocks are what the server finds too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_chunks, self.cpu_s = 0, 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        sender, receiver = socket.socketpair()
        with sender, receiver:
            while not self.is_over.wait(0.005):
                before = time.thread_time()
                for _ in range(5):
                    sender.sendall(b"data: " + json.dumps(CHUNK).encode() + b"\n\n")
                    receiver.recv(65536)
                self.cpu_s += time.thread_time() - before
                self.num_chunks += 5


CLIENT = """
import asyncio, json, sys

async def one(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
    writer.write(head.encode() + b"content-length: %d\\r\\n\\r\\n" % len(body) + body)
    count = 0
    while chunk := await reader.read(65536):
        count += chunk.count(b"data: ")
        if b"[DONE]" in chunk:
            return count

async def main():
    print(sum(await asyncio.gather(*(one(int(sys.argv[1])) for _ in range(int(sys.argv[2]))))))

asyncio.run(main())
"""


@pytest.mark.slow
def test_cpu_time_per_chunk(start_server) -> None:
    server = start_server({"max_num_seqs": NUM_STREAMS, "step_s": 0.01})
    server.complete(prompt="a")
    command = [sys.executable, "-c", CLIENT, str(server.port), str(NUM_STREAMS)]
    before = time.process_time()
    by_hand = ByHand()
    by_hand.start()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    by_hand.is_over.set()
    by_hand.join()
    used = time.process_time() - before - by_hand.cpu_s
    assert done.returncode == 0, done.stderr
    num_chunks = int(done.stdout)
    assert num_chunks > 100 * NUM_STREAMS
    assert used / num_chunks < MAX_COST * by_hand.cpu_s / by_hand.num_chunks
