"""The server as users start it: `python -m openspec.serve` in a process of its own."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import openai

import openspec
from tests.serve.waiting import PATIENCE_S

PACKAGE_ROOT = str(Path(openspec.__file__).parent.parent)
TIMED = {"OPENSPEC_ADAPTIVE_SPECULATION": "true"}
"""Variables of a server that times its steps before it is ready. Others, where a test does not need
that, are ready half a second earlier."""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENSPEC_")}
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, kept.get("PYTHONPATH")]))
    untimed = dict.fromkeys(TIMED, "false")
    return {**kept, "PYTHONPATH": path, **untimed, **variables}


def command(arguments: Sequence[str], constants: Mapping[str, int] | None = None) -> list[str]:
    """`constants` are set, by their dotted names, in the server's process alone."""
    start = ["-m", "openspec.serve"]
    if constants:
        lines = ["import sys", "from openspec.serve.__main__ import main"]
        for name, value in constants.items():
            lines += [f"import {name.rpartition('.')[0]}", f"{name} = {value}"]
        start = ["-c", "\n".join([*lines, "sys.exit(main())"])]
    return [sys.executable, *start, *arguments]


def run_to_its_end(line: list[str], **variables: str) -> tuple[int, str, float]:
    """Status, errors and processor time, which neither other work nor a slow network lengthens."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=2 * PATIENCE_S,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done.returncode, done.stderr, seconds


@cache
def import_cpu_s() -> float:
    status, errors, seconds = run_to_its_end(
        [command([])[0], "-c", "import openspec.serve.server.run"]
    )
    assert status == 0, errors
    return seconds


@dataclass
class RealServer:
    """A running server."""

    process: subprocess.Popen
    url: str
    log_file: Path
    seconds_to_ready: float
    cpu_s_to_ready: float
    """Processor time, of which a busy machine takes hardly more."""

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    @property
    def engine_pid(self) -> int:
        return engine_of(self.process.pid)

    @property
    def end_s(self) -> float:
        """What an end that waits for nobody may take: a slow machine takes longer to start too."""
        return 4 + self.seconds_to_ready

    def metric(self, name: str) -> float:
        text = self.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def engine_of(pid: int) -> int:
    return children_of(pid, "openspec.engine.processes.process")[0]


def children_of(pid: int, module: str) -> list[int]:
    """The processes that it started and that run this module."""
    return [child for child in all_children_of(pid) if module in _arguments(child)]


def all_children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for one in tasks for child in (one / "children").read_text().split())


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@contextmanager
def real_server(
    *arguments: str, constants: Mapping[str, int] | None = None, **variables: str
) -> Iterator[RealServer]:
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        started = time.monotonic()
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command(["--port", "0", *arguments], constants),
                stdout=log,
                stderr=log,
                env=environment(**variables),
            )
        try:
            address = None
            while address is None:
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() - started < 3 * PATIENCE_S, log_file.read_text()
                address = re.search(r" on (http://\S+?),? ready after", log_file.read_text())
                time.sleep(0.01)
            seconds = time.monotonic() - started
            cpu = cpu_s(process.pid) + cpu_s(engine_of(process.pid))
            yield RealServer(process, address[1], log_file, seconds, cpu)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)
