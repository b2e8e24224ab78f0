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

from openspec.bench.client import Address
from openspec.errors import ConfigError, check_is_built
from openspec.settings.setting import ENV_PREFIX, Raw
from openspec.settings.spellings import SPELLINGS

READY_TIMEOUT_S = 300.0
DEFAULT_VOCAB_SIZE = 4096
_OWNER = "openspec"
"""Whose our models are, in the list of models."""


@dataclass(frozen=True)
class ServerUnderTest:
    """Where a server listens and what it says about itself."""

    address: Address
    model: str
    info: dict[str, object]
    owner: str = ""
    """Whose server it is, by its list of models: openspec, vllm, ..."""

    @property
    def is_openspec(self) -> bool:
        """Whether a request can choose between plain decoding and the server's method."""
        return self.owner == _OWNER

    @property
    def method(self) -> str | None:
        """The method that an openspec server runs."""
        method = self.info.get("method")
        return method if self.is_openspec and isinstance(method, str) else None

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
    check_is_built()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="openspec-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_bytes(msgspec.json.encode({**settings, "host": "127.0.0.1", "port": port}))
        command = [sys.executable, "-m", "openspec.serve", "--config", str(config)]
        log = Path(folder) / "server.log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command, stdout=log_file, stderr=log_file, env=inherited(settings)
            )
        try:
            _wait_until_ready(port, process, log)
            yield describe(Address("127.0.0.1", port))
        finally:
            _stop(process)


def leave_on_sigterm() -> None:
    """Lets SIGTERM end this process as Ctrl-C does: with the server that it started."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def inherited(settings: Mapping[str, Raw]) -> dict[str, str]:
    """The environment less variables of the settings, which would win over the file.

    A key in it is meant for other servers.
    """
    others = ("host", "port", "uds", "config", "api_key")
    spelled = [name for spelling in SPELLINGS for name in spelling.names]
    taken = {ENV_PREFIX + name.upper() for name in (*settings, *others, *spelled)}
    return {name: value for name, value in os.environ.items() if name not in taken}


def describe(address: Address, model: str | None = None) -> ServerUnderTest:
    """Ask a running server for its model and engine.

    `model` is one of those it serves, or None: the first. Other engines' lists may be incomplete,
    so they are asked for any model that is given.

    Raises:
        ConfigError: nothing there answers as an OpenAI server does, or it has no such model.
    """
    try:
        models = msgspec.json.decode(get(address, "/v1/models"), type=_Models).data
    except urllib.error.HTTPError as error:
        key = "; --api-key has the key to send" if error.code in {401, 403} else ""
        raise ConfigError(f"no OpenAI server at {address.url}: {error}{key}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"no OpenAI server at {address.url}: {error}") from error
    chosen = next((entry for entry in models if model in (None, entry.id)), None)
    if chosen is None and model is not None and not any(map(_is_openspecs, models)):
        chosen = _Model(model)
    if chosen is None:
        names = ", ".join(entry.id for entry in models) or "no model"
        given = "" if model is None else f"--model {model}: "
        raise ConfigError(f"{given}{address.url} serves {names}")
    owner = chosen.owned_by or ""
    info: dict[str, object] = {}
    if _is_openspecs(chosen):
        for path in ("/model_info", "/server_info"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                info |= msgspec.json.decode(get(address, path), type=dict[str, object])
    else:
        info = {"model": chosen.id, "owned_by": owner}
    return ServerUnderTest(address, chosen.id, info, owner)


def free_port() -> int:
    """A loopback TCP port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None


def _is_openspecs(model: _Model) -> bool:
    return model.owned_by == _OWNER


class _Models(msgspec.Struct):
    data: list[_Model]


def get(address: Address, path: str) -> bytes:
    """The body at a path.

    Raises:
        OSError: there is none.
    """
    # A proxy configured for the outside is no way to a server on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(address.url + path, headers=address.headers())
    with opener.open(request, timeout=10) as response:
        body: bytes = response.read()
        return body


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with status {process.returncode}:\n{_tail(log)}")
        with contextlib.suppress(OSError, urllib.error.URLError):
            get(Address("127.0.0.1", port), "/ready")
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
