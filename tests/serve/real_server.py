"""The server as users start it: `python -m openspec.serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

import openspec

PACKAGE_ROOT = str(Path(openspec.__file__).parent.parent)


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENSPEC_")}
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **variables}


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "openspec.serve", *arguments]


@dataclass
class RealServer:
    """A running server."""

    process: subprocess.Popen
    url: str
    log_file: Path
    seconds_to_ready: float

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def metric(self, name: str) -> float:
        text = self.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@contextmanager
def real_server(*arguments: str, **variables: str) -> Iterator[RealServer]:
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        started = time.monotonic()
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command(["--port", "0", *arguments]),
                stdout=log,
                stderr=log,
                env=environment(**variables),
            )
        try:
            address = None
            while address is None:
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() - started < 60, log_file.read_text()
                address = re.search(r" on (http://\S+?),? ready after", log_file.read_text())
                time.sleep(0.01)
            yield RealServer(process, address[1], log_file, time.monotonic() - started)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
