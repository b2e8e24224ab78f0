"""The address of a server, had before anything that takes time."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig


@contextlib.contextmanager
def bound_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """A socket with the configured address. It does not listen yet, so nobody can connect.

    Raises:
        ConfigError: the address cannot be had.
    """
    if config.uds is not None:
        with _unix_socket(config.uds) as sock:
            yield sock
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only where it is; without that, the
    # second write of a stream waits for the client's delayed acknowledgement, 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        allow_reuse(sock, True)
        try:
            sock.bind((config.host, config.port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: {reason}; choose another --port or "
                "--host"
            ) from None
        # Sockets that all allow it share an address until one of them listens: a second server
        # would find out once its model is loaded.
        allow_reuse(sock, False)
        yield sock


@contextlib.contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _remove_stale(path)
        try:
            sock.bind(path)
            os.chmod(path, 0o660)
            own = os.stat(path)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(own, os.stat(path)):  # else another server has it by now
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """Removes the socket of a server that is gone, and nothing else."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)  # a server too busy to accept is there all the same
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        return


def allow_reuse(sock: socket.socket, is_allowed: bool) -> None:
    """Whether the address may be had while connections of an earlier server still time out."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_allowed)


def address_of(sock: socket.socket, config: ServeConfig) -> str:
    """What to type into a client."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
