from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig
from openspec.serve.server.listening import allow_reuse, bound_socket


def test_connections_do_not_wait_for_acknowledgements() -> None:
    async def nodelay_of_a_connection() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            seen.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bound_socket(ServeConfig(port=0)) as sock:
            server = await asyncio.start_server(handle, sock=sock)
            _, writer = await asyncio.open_connection(*sock.getsockname())
            nodelay = await seen
            writer.close()
            server.close()
            return nodelay

    assert asyncio.run(nodelay_of_a_connection())


def test_an_address_is_taken_before_anybody_listens() -> None:
    with bound_socket(ServeConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"), bound_socket(ServeConfig(port=port)):
            pass


def test_a_restart_gets_the_address_of_old_connections() -> None:
    with bound_socket(ServeConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        allow_reuse(sock, True)  # as HttpServer.startup does
        sock.listen()
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = sock.accept()
        connection.close()  # the side that closes first keeps the address in TIME_WAIT
        client.close()
    with bound_socket(ServeConfig(port=port)) as sock:
        allow_reuse(sock, True)
        sock.listen()


def test_a_unix_socket_is_removed_by_its_owner_alone(tmp_path: Path) -> None:
    config = ServeConfig(uds=str(tmp_path / "sock"))
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(bound_socket(config))
        # Nobody listens yet: to the second server it looks like one that is gone.
        second.enter_context(bound_socket(config)).listen()
        first.close()
        assert Path(config.uds).is_socket()
        second.close()
        assert not Path(config.uds).exists()
