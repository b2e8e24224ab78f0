"""A process that waits to become an engine."""

from __future__ import annotations

import asyncio
import os
import signal
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
            await standby.close()

    asyncio.run(main())


def test_it_becomes_the_next_engine() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        await asyncio.sleep(0)
        standby.prepare()
        child = await standby.take()
        other = await standby.take()
        assert child.process.pid != other.process.pid, "there was one, for the first"
        await other.close()
        config = EngineConfig(model="fake", max_num_seqs=4)
        client = await EngineClient.start(config, child=child)
        assert client.pid == child.process.pid
        assert (await collect(client, max_tokens=3))[1] == "length"
        await client.close()
        assert child.process.returncode == 0

    run(test)


def test_one_that_died_is_not_given_out() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        assert standby._starting is not None
        dead = (await standby._starting).process
        os.kill(dead.pid, signal.SIGKILL)
        await dead.wait()
        child = await standby.take()
        assert child.is_running and child.process.pid != dead.pid
        standby.prepare()
        ready = (await standby._starting).process
        os.kill(ready.pid, signal.SIGKILL)
        await ready.wait()
        standby.prepare()  # one that died is no reason not to
        again = await standby.take()
        assert again.is_running and again.process.pid not in (dead.pid, ready.pid)
        await again.close()
        await child.close()

    run(test)


def test_closing_ends_it() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        starting = standby._starting
        assert starting is not None
        await standby.close()  # while it is started
        assert not starting.result().is_running
        standby.prepare()
        assert standby._starting is None
        child = await standby.take()
        await child.close()
        assert not child.is_running

    run(test)


def test_its_environment_comes_with_its_settings() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        with pytest.raises(EngineError, match="four"):
            await EngineClient.start(
                EngineConfig(), child=await standby.take(), environ={"TOLD": "four"}
            )

    run(test, (sys.executable, "-c", ENVIRONMENT))


def test_a_process_that_cannot_be_started_is_an_engine_error() -> None:
    async def test(standby: Standby) -> None:
        standby.prepare()
        with pytest.raises(EngineError, match="no process for an engine can be started"):
            await standby.take()

    run(test, ("/there/is/no/such/program",))
