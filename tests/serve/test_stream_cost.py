"""Streaming to 64 clients costs the server little per chunk."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

NUM_STREAMS = 64
MAX_CPU_S_PER_CHUNK = 200e-6
"""Several times what an idle machine needs: a busy one counts slower."""

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
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = time.process_time() - before
    num_chunks = int(done.stdout)
    assert num_chunks > 100 * NUM_STREAMS
    assert used / num_chunks < MAX_CPU_S_PER_CHUNK
