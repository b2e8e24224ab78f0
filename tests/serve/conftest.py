"""Servers to test against: the real HTTP stack in a thread, over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig
from openspec.engine.processes.replicas import Replicas
from openspec.serve.config import ServeConfig
from openspec.serve.generation.context import ServerContext
from openspec.serve.server.run import http_server, read_tokenizer
from openspec.text.pool import TextPool
from tests.serve.fake_engine import FakeEngineClient
from tests.serve.fake_model import write_fake_model
from tests.serve.waiting import PATIENCE_S

MODEL_NAME = "fake"


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    url: str
    context: ServerContext
    engines: list[FakeEngineClient]
    """All that were started."""
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    @property
    def engine(self) -> FakeEngineClient:
        return self.engines[0]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, function: Callable[[], object]) -> object:
        """Runs a function in the server's event loop."""

        async def run() -> object:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def complete(self, **body: object) -> dict:
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **body: object) -> dict:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, status: int = 400, **body: object) -> dict:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def ids(self, text: str) -> list[int]:
        return self.context.tokenizer.encode(text, parse_special=True)


@contextmanager
def run_fake_server(
    model: Path,
    engine_options: dict | None = None,
    num_engines: int = 1,
    max_restarts: int = 0,
    **config: object,
) -> Iterator[RunningServer]:
    # As `bound_socket` does it.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    started: dict[str, object] = {}
    is_started = threading.Event()

    async def main() -> None:
        engines: list[FakeEngineClient] = []

        async def start_engine() -> FakeEngineClient:
            engines.append(FakeEngineClient(model, **(engine_options or {})))
            return engines[-1]

        replicas = Replicas([start_engine] * num_engines, max_restarts)
        await replicas.start()
        settings = ServeConfig(**config)
        tokenizer = read_tokenizer(model, settings)
        context = ServerContext(
            config=settings,
            engine_config=EngineConfig(model=str(model)),
            engine=replicas,
            model=ModelConfig.from_folder(model),
            tokenizer=tokenizer,
            model_names=list(settings.served_model_name or [MODEL_NAME]),
            text_pool=TextPool(tokenizer, model),
        )
        server = http_server(context)
        started.update(engines=engines, context=context, server=server)
        started["loop"] = asyncio.get_running_loop()
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        is_started.set()
        await serving
        context.close()
        await replicas.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert is_started.wait(PATIENCE_S)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield RunningServer(url, started["context"], started["engines"], started["loop"], client)
    started["server"].should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture
def start_server(fake_model: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with settings of their own."""
    with ExitStack() as stack:

        def start(engine_options: dict | None = None, **settings: object) -> RunningServer:
            return stack.enter_context(run_fake_server(fake_model, engine_options, **settings))

        yield start


@pytest.fixture(scope="module")
def shared_server(fake_model: Path) -> Iterator[RunningServer]:
    with run_fake_server(fake_model) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """A server with default settings; its engine answers as if new."""
    shared_server.call(shared_server.engine.forget)
    return shared_server
