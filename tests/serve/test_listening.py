from __future__ import annotations

import asyncio
import socket

from openspec.serve.listening import bound_socket
from openspec.serve.serve_config import ServeConfig


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
