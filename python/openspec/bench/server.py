"""A server of its own for the time of a benchmark or demo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openspec.errors import ConfigError
from openspec.settings import ENV_PREFIX, Raw

READY_TIMEOUT_S = 300.0
DEFAULT_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class ServerUnderTest:
    """Where a server listens and what it says about itself."""

    host: str
    port: int
    model: str
    info: dict[str, object]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    @property
    def vocab_size(self) -> int:
        """Token ids that a prompt may hold, if the server tells."""
        size = self.info.get("num_token_ids", self.info.get("vocab_size"))
        return size if isinstance(size, int) else DEFAULT_VOCAB_SIZE


@contextlib.contextmanager
def started_server(settings: Mapping[str, Raw]) -> Iterator[ServerUnderTest]:
    """Run `python -m openspec.serve` with some settings on a free port; stopped on leaving.

    Raises:
        ConfigError: it did not come up; the message holds the end of its log.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="openspec-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_bytes(msgspec.json.encode({**settings, "host": "127.0.0.1", "port": port}))
        command = [sys.executable, "-m", "openspec.serve", "--config", str(config)]
        log = Path(folder) / "server.log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command, stdout=log_file, stderr=log_file, env=_without(settings)
            )
        try:
            _wait_until_ready(port, process, log)
            yield describe("127.0.0.1", port)
        finally:
            _stop(process)


def leave_on_sigterm() -> None:
    """Lets SIGTERM end this process as Ctrl-C does: with the server that it started."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _without(settings: Mapping[str, Raw]) -> dict[str, str]:
    """The environment less variables of the settings, which would win over the file."""
    taken = {ENV_PREFIX + name.upper() for name in (*settings, "host", "port", "uds", "config")}
    return {name: value for name, value in os.environ.items() if name not in taken}


def describe(host: str, port: int) -> ServerUnderTest:
    """Ask a running server for its model and engine.

    Raises:
        ConfigError: nothing there answers as an OpenAI server does.
    """
    base = f"http://{host}:{port}"
    try:
        models = msgspec.json.decode(_get(f"{base}/v1/models"), type=_Models)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"no OpenAI server at {base}: {error}") from error
    if not models.data:
        raise ConfigError(f"{base} serves no model")
    info: dict[str, object] = {}
    for path in ("/model_info", "/server_info"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            info |= msgspec.json.decode(_get(base + path), type=dict[str, object])
    return ServerUnderTest(host, port, models.data[0].id, info)


def free_port() -> int:
    """A loopback TCP port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _get(url: str) -> bytes:
    # A proxy configured for the outside is no way to a server on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with status {process.returncode}:\n{_tail(log)}")
        with contextlib.suppress(OSError, urllib.error.URLError):
            _get(f"http://127.0.0.1:{port}/ready")
            return
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready within {READY_TIMEOUT_S:g} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
