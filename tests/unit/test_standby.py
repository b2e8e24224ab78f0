"""A process that waits to become an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from openspec.config import EngineConfig
from openspec.engine.processes.client import EngineClient
from openspec.engine.processes.standby import Standby
from openspec.errors import EngineError
from tests.unit.test_engine_client import COMMAND, collect

ENVIRONMENT = (
    "import os, sys\n"
    "from openspec.engine.processes import process\n"
    "from tests.unit.fake_engine_process import load\n"
    "def told(config, share):\n"
    "    raise RuntimeError(os.environ['TOLD'])\n"
    "sys.exit(process.main(told))\n"
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])


def run(test: Callable[[Standby], Awaitable[None]], command: tuple[str, ...] = COMMAND) -> None:
    async def main() -> None:
        standby = Standby(command)
        try:
            await test(standby)
        finally:
            standby.close()

    asyncio.run(main())


def test_it_becomes_the_next_engine() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        standby.prepare()
        child = standby.take()
        other = standby.take()
        assert child.process.pid != other.process.pid, "there was one, for the first"
        other.close()
        config = EngineConfig(model="fake", max_num_seqs=4)
        client = await EngineClient.start(config, child=child)
        assert client.pid == child.process.pid
        assert (await collect(client, max_tokens=3))[1] == "length"
        await client.close()
        assert child.process.returncode == 0

    run(test)


def test_one_that_died_is_not_given_out() -> None:
    standby = Standby(COMMAND)
    standby.prepare()
    assert standby._child is not None
    dead = standby._child.process
    dead.kill()
    dead.wait()
    child = standby.take()
    assert child.is_running and child.process.pid != dead.pid
    standby.prepare()
    ready = standby._child.process
    ready.kill()
    ready.wait()
    standby.prepare()  # one that died is no reason not to
    again = standby.take()
    assert again.is_running and again.process.pid not in (dead.pid, ready.pid)
    again.close()
    child.close()


def test_closing_ends_it() -> None:
    standby = Standby(COMMAND)
    standby.prepare()
    waiting = standby._child
    assert waiting is not None
    standby.close()
    assert not waiting.is_running
    standby.prepare()
    assert standby._child is None
    child = standby.take()
    child.close()
    assert not child.is_running


def test_its_environment_comes_with_its_settings() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        with pytest.raises(EngineError, match="four"):
            await EngineClient.start(EngineConfig(), child=standby.take(), environ={"TOLD": "four"})

    run(test, (sys.executable, "-c", ENVIRONMENT))


def test_a_process_that_cannot_be_started_is_an_engine_error() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        with pytest.raises(EngineError, match="no process for an engine can be started"):
            standby.take()

    run(test, ("/there/is/no/such/program",))
