"""Servers of several builds, flags and commands on one machine; each ends with whoever uses it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openspec.bench.client import Address
from openspec.bench.server import ServerUnderTest, describe, free_port, get, inherited
from openspec.errors import ConfigError

READY_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 600.0, 30.0, 0.01
ORIGIN = "import importlib.util as u; print(u.find_spec('openspec').origin)"


@dataclass(frozen=True)
class Side:
    """A server to be, without host and port."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    about: ServerUnderTest
    pid: int
    ready_s: float
    """From starting its process to the first 200 of /ready."""


def sides_of(
    builds: Sequence[str], flags: Sequence[str], commands: Sequence[str], python: str
) -> list[Side]:
    """Every build with every set of flags, then the commands; all are given as NAME=VALUE.

    Without builds and commands this program's own openspec is the build.

    Raises:
        ConfigError: a place has no openspec, or its Python would import another one.
    """
    places = [named(text) for text in builds]
    if not (builds or commands):
        places = [("this", "")]
    found = []
    for name, place in places:
        interpreter, environment = build_at(Path(place), python) if place else (python, {})
        for of, values in [named(text) for text in flags] or [("", "")]:
            command = (interpreter, "-m", "openspec.serve", *shlex.split(values))
            found.append(Side(f"{name} {of}".strip(), command, environment))
    for name, text in map(named, commands):
        words = shlex.split(text)
        start = next((i for i, word in enumerate(words) if "=" not in word), len(words))
        own = dict(word.split("=", 1) for word in words[:start])
        found.append(Side(name, tuple(words[start:]), own))
    if len({side.name for side in found}) < len(found):
        raise ConfigError("two sides have the same name")
    return found


def named(text: str) -> tuple[str, str]:
    """The parts of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def build_at(place: Path, python: str) -> tuple[str, dict[str, str]]:
    """The interpreter and environment that run a build.

    A place is a checkout with its own `.venv`, a virtual environment, or a folder that PYTHONPATH
    may name: a checkout whose extension is built, or what `pip install --target` has filled.
    """
    place = place.resolve()
    own = next((p for p in (place / ".venv/bin/python", place / "bin/python") if p.exists()), None)
    if own is not None:
        return str(own), {"PYTHONPATH": ""}
    folder = place / "python" if (place / "python" / "openspec").is_dir() else place
    rest = os.environ.get("PYTHONPATH")
    environment = {"PYTHONPATH": f"{folder}:{rest}" if rest else str(folder)}
    told = subprocess.run(
        [python, "-c", ORIGIN], env={**os.environ, **environment}, capture_output=True, text=True
    )
    origin = Path(told.stdout.strip() or "/").resolve()
    if place not in origin.parents:
        raise ConfigError(f"{place}: {python} finds openspec at {origin}; {told.stderr[-300:]}")
    return python, environment


@contextlib.contextmanager
def started(side: Side) -> Iterator[Running]:
    """A side's server on a free port; it and all of its processes have ended on leaving.

    Raises:
        ConfigError: it did not come up; the message holds the end of its log.
    """
    port = free_port()
    address = Address("127.0.0.1", port)
    command = [*side.command, "--host", address.host, "--port", str(port)]
    environment = {**inherited({}), **side.environment}
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            while not answers(address):
                if process.poll() is not None or time.monotonic() > start + READY_TIMEOUT_S:
                    log.seek(0)
                    tail = "\n".join(log.read().decode(errors="replace").splitlines()[-15:])
                    raise ConfigError(f"{side.name}: not ready, {process.returncode=}:\n{tail}")
                time.sleep(POLL_S)
            ready_s = time.monotonic() - start
            yield Running(describe(address), process.pid, ready_s)
        finally:
            stop(process)


def answers(address: Address) -> bool:
    """Whether a server is ready."""
    with contextlib.suppress(OSError):
        get(address, "/ready")
        return True
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process as a user would, and whatever is left of its group by force."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processor_s(pid: int) -> float:
    """Used by the threads of a process and its children, all that are alive."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    used_ns = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    return used_ns / 1e9 + sum(processor_s(int(child)) for child in children)
