from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from openspec.child_process import FrameSplitter
from openspec.config import EngineConfig
from openspec.engine.core.fan_out import fan_out
from openspec.engine.processes.child import EngineChild
from openspec.engine.processes.client import EngineClient
from openspec.engine.processes.output_stream import join_outputs
from openspec.engine.processes.protocol import (
    Abort,
    EngineChannel,
    ReadStats,
    Submit,
    frame,
)
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.messages import EngineOutput
from tests.unit.fake_core import expected, make_request

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.unit.fake_engine_process")
SLOW_STEPS = "slow steps"
"""For what must come before a long answer ends: it takes most of a minute."""


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def with_client(
    test: Callable[[EngineClient], Awaitable[None]],
    model: str = "fake",
    max_num_seqs: int = 8,
    watchdog_s: float = 0.0,
) -> None:
    async def main() -> None:
        config = EngineConfig(model=model, max_num_seqs=max_num_seqs)
        client = await EngineClient.start(config, command=COMMAND, watchdog_s=watchdog_s)
        try:
            await test(client)
        finally:
            await client.close()

    asyncio.run(main())


def recorded(client: EngineClient) -> list[object]:
    """What the client sends from here on."""
    sent: list[object] = []
    send = client._send
    client._send = lambda message: (sent.append(message), send(message))[1]  # type: ignore
    return sent


async def collect(client: EngineClient, **request: object) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async for output in client.submit(make_request(**request)):  # type: ignore[arg-type]
        tokens += output.token_ids
        reason = output.finish_reason
    return tokens, reason


def test_many_requests() -> None:
    async def test(client: EngineClient) -> None:
        assert client.info.model == "fake" and client.is_alive
        requests = [make_request(f"r{i}", [i % 50, i % 7], max_tokens=20) for i in range(100)]
        results = await asyncio.gather(
            *(
                collect(client, name=r.request_id, prompt=r.prompt_token_ids, max_tokens=20)
                for r in requests
            )
        )
        for request, result in zip(requests, results, strict=True):
            assert result == expected(request, 1024)
        stats = await client.stats()
        assert stats.num_generation_tokens == 2000 and stats.num_running == 0
        assert stats.num_free_pages == stats.num_pages
        await client.reset_prefix_cache()

    with_client(test)


def test_refused_request() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(make_request(prompt=[99]))
        with pytest.raises(RequestError, match="outside the vocabulary") as caught:
            await stream.__anext__()
        assert caught.value.param == "prompt"
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        assert (await collect(client))[1] == "length", "the id is free again"
        stream = client.submit(make_request())
        with pytest.raises(RequestError, match="in use"):
            client.submit(make_request())
        await stream.aclose()

    with_client(test)


def test_closing_a_stream_aborts_within_a_step() -> None:
    async def test(client: EngineClient) -> None:
        async with aclosing(client.submit(make_request("long", max_tokens=900))) as stream:
            async for _ in stream:
                break
        stats = await client.stats()
        assert stats.num_running == 0 and stats.num_free_pages == stats.num_pages
        assert stats.num_generation_tokens < 900

    with_client(test, SLOW_STEPS)


def test_abort_gives_a_last_output() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(make_request("long", max_tokens=900))
        await stream.__anext__()
        client.abort("long")
        reasons = [output.finish_reason async for output in stream]
        assert reasons[-1] == "abort"

    with_client(test, SLOW_STEPS)


def test_a_cancelled_reader() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(make_request("long", max_tokens=900))

        async def read() -> None:
            async with stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.stats()).num_running == 0

    with_client(test, SLOW_STEPS)


def test_slow_reader_gets_joined_outputs() -> None:
    async def test(client: EngineClient) -> None:
        request = make_request("slow", max_tokens=50, logprobs=1)
        stream = client.submit(request)
        while (await client.stats()).num_generation_tokens < 50:
            await asyncio.sleep(0.01)
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert (outputs[0].token_ids, outputs[0].finish_reason) == expected(request, 1024)
        assert outputs[0].logprobs is not None and len(outputs[0].logprobs) == 50
        assert outputs[0].spec_decode is not None

    with_client(test)


def test_n_sequences_cross_once() -> None:
    async def test(client: EngineClient) -> None:
        sent = recorded(client)
        request = make_request("r", n=3, max_tokens=20)
        seen: dict[str, list[int]] = {}
        async for output in client.submit(request):
            seen.setdefault(output.request_id, []).extend(output.token_ids)
        assert [type(message) for message in sent] == [Submit]
        assert seen == {one.request_id: expected(one, 1024)[0] for one in fan_out(request)}
        assert client.num_unfinished == 0

    with_client(test)


def test_what_waits_to_cross_is_overtaken_and_can_be_dropped() -> None:
    async def test(client: EngineClient) -> None:
        sent = recorded(client)
        client.pause_writing()
        gone = client.submit(make_request("gone", n=2))
        late, early = (client.submit(make_request(f"p{p}", priority=p)) for p in (1, -1))
        half = client.submit(make_request("half", n=2, priority=2))
        assert client.num_unfinished == 6
        client.abort("gone-0", "half-1")
        assert (await gone.__anext__()).finish_reason == "abort"
        assert (await client.stats()).num_steps == 0, "it is answered at once"
        await gone.aclose()
        assert client.num_unfinished == 3
        client.resume_writing()
        for stream in (late, early, half):
            reasons = {one.request_id: one.finish_reason async for one in stream}
            assert set(reasons.values()) <= {"length", "abort"}
        assert reasons == {"half-0": "length", "half-1": "abort"}
        crossed = [message.request.request_id for message in sent if isinstance(message, Submit)]
        assert crossed == ["p-1", "p1", "half"]
        assert [message.request_ids for message in sent if isinstance(message, Abort)] == [
            ["half-1"]
        ]

    with_client(test)


@pytest.mark.parametrize("wait", [False, True])
def test_the_engine_reads_more_than_a_buffer_but_not_for_ever(wait: bool) -> None:
    own, other = socket.socketpair()
    with own, other:
        channel = EngineChannel(own)
        data = frame(Submit(make_request(prompt=list(range(1000)) * 500)))
        assert len(data) > 1_000_000

        def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other.sendall(data)

        sender = threading.Thread(target=send)
        sender.start()
        num_seen = 0
        while num_seen < 3:
            messages = channel.receive(wait)
            assert len(messages) < 100
            num_seen += len(messages)
        own.shutdown(socket.SHUT_RDWR)
        sender.join()


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("bad config", ConfigError, "^max_model_len 5 exceeds 4; lower --max-model-len$"),
        ("bad start", EngineError, "^no such luck$"),
    ],
)
def test_start_errors(model: str, kind: type[Exception], message: str) -> None:
    async def main() -> None:
        await EngineClient.start(EngineConfig(model=model), command=COMMAND)

    with pytest.raises(kind, match=message):
        asyncio.run(main())


def test_start_timeout() -> None:
    async def main() -> None:
        await EngineClient.start(EngineConfig(model="slow start"), 0.5, COMMAND)

    with pytest.raises(EngineError, match=r"not ready after 0.5 s"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("dies", r"the engine process died \(exit status 3\)"),
        ("broken", "the engine failed: page 3 is held twice"),
    ],
)
def test_death_fails_everything_pending(model: str, message: str) -> None:
    async def test(client: EngineClient) -> None:
        streams = [client.submit(make_request(f"r{i}", max_tokens=900)) for i in range(20)]
        for stream in streams:
            with pytest.raises(EngineError, match=message):
                async for _ in stream:
                    pass
        assert not client.is_alive
        with pytest.raises(EngineError, match=message):
            client.submit(make_request())
        with pytest.raises(EngineError, match=message):
            await client.stats()
        if model == "broken":  # it could tell before it ended
            assert client.last_stats is not None and client.last_stats.num_step_failures == 2
            assert client.last_stats.num_generation_tokens > 0

    with_client(test, model)


def test_a_broken_engine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that it ends, and something in its process holds that up."""
    monkeypatch.setattr("openspec.engine.processes.client.CLOSE_TIMEOUT_S", 0.5)

    async def test(client: EngineClient) -> None:
        assert "page 3" in await error_of(client, "r", max_tokens=900)
        assert not client.is_alive and client._child is not None and client._child.is_running
        await asyncio.wait_for(client.ended(), 30)
        assert not client._child.is_running

    with_client(test, "broken and stays")


def test_a_child_that_talks_nonsense() -> None:
    code = "import socket, sys, time; other = socket.socket(fileno=int(sys.argv[1])); "
    code += "other.send(b'\\xff' * 8); time.sleep(600)"

    async def main() -> None:
        await EngineClient.start(EngineConfig(), command=(sys.executable, "-c", code))

    with pytest.raises(EngineError, match="cannot be read: a frame of"):
        asyncio.run(main())


def test_no_descriptors_for_another_engine_is_an_engine_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", none_left)
    with pytest.raises(EngineError, match=r"can be started: .*Too many open files"):
        EngineChild.start(COMMAND)


async def error_of(client: EngineClient, name: str, **sampling: object) -> str:
    """How a request that does not end well ends."""
    try:
        async for output in client.submit(make_request(name, **sampling)):
            if output.finish_reason == "error":
                return output.error or ""
    except EngineError as error:
        return str(error)
    raise AssertionError("it ended well")


@pytest.fixture
def is_watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.engine.processes.client.WATCH_S", 0.05)


@pytest.mark.usefixtures("is_watched_closely")
def test_a_hung_engine_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: EngineClient) -> None:
        pid = client.pid
        assert "the engine hung and was ended" in await error_of(client, "r", max_tokens=900)
        assert client.failure == "engine_hung" and not client.is_alive
        await client.ended()
        assert pid is not None and not Path(f"/proc/{pid}").exists()
        assert "1 sequences fail: r" in caplog.text

    with_client(test, "hangs", watchdog_s=0.3)


@pytest.mark.usefixtures("is_watched_closely")
def test_an_engine_is_late_until_it_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openspec.engine.processes.client.LATE_S", 0.3)

    async def becomes(client: EngineClient, is_late: bool) -> None:
        while client.is_late != is_late:
            await asyncio.sleep(0.01)

    async def test(client: EngineClient) -> None:
        assert not client.is_late and client.pid is not None
        await asyncio.sleep(1.5)  # an idle loop beats once a second, and is not late between
        assert "late" not in caplog.text
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.wait_for(becomes(client, True), 30)
        assert client.is_alive
        os.kill(client.pid, signal.SIGCONT)
        await asyncio.wait_for(becomes(client, False), 30)
        assert "is heard of again" in caplog.text
        assert (await collect(client, max_tokens=5))[1] == "length"

    with_client(test)


@pytest.mark.usefixtures("is_watched_closely")
def test_a_late_engine_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.engine.processes.client.LATE_S", 0.1)

    async def test(client: EngineClient) -> None:
        os.kill(client.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(1.5)  # its last beat is overdue by then
        while not client.is_late:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("openspec.engine.processes.client.CLOSE_TIMEOUT_S", 600.0)
        await asyncio.wait_for(client.close(), 30)

    with_client(test)


@pytest.mark.usefixtures("is_watched_closely")
def test_a_stop_within_the_limit_is_no_hang() -> None:
    async def test(client: EngineClient) -> None:
        assert client.pid is not None
        for _ in range(2):
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)  # in which the client looks more than once
            os.kill(client.pid, signal.SIGCONT)
        assert (await collect(client, max_tokens=5))[1] == "length"

    with_client(test, watchdog_s=30.0)


def test_a_device_that_takes_nobody_ends_the_engine() -> None:
    async def test(client: EngineClient) -> None:
        errors = [await error_of(client, f"r{number}") for number in range(3)]
        assert ["could not be admitted" in error for error in errors] == [True] * 3
        assert ["failures in a row" in error for error in errors] == [False, False, True]
        assert not client.is_alive

    with_client(test, "refuses")


def test_a_killed_child() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(make_request(max_tokens=900))
        await stream.__anext__()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by signal 9"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="killed by signal 9"):
            await client.reset_prefix_cache()

    with_client(test, SLOW_STEPS)


def test_close_fails_open_streams() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.submit(make_request(max_tokens=900))
        pid = client.pid
        await client.close()
        assert not client.is_alive
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    with_client(test)


def test_signals_leave_the_child_alone() -> None:
    async def test(client: EngineClient) -> None:
        os.kill(client.pid or 0, signal.SIGINT)
        os.kill(client.pid or 0, signal.SIGTERM)
        assert (await collect(client))[1] == "length"

    with_client(test)


def test_child_ends_with_its_parent() -> None:
    script = f"""
        import asyncio
        from openspec.config import EngineConfig
        from openspec.engine.processes.client import EngineClient
        from tests.unit.fake_core import make_request

        async def main():
            client = await EngineClient.start(EngineConfig(model="fake"), command={COMMAND!r})
            client.submit(make_request(max_tokens=900))
            print(client.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        end = select.poll()
        end.register(os.pidfd_open(int(parent.stdout.readline())), select.POLLIN)
        parent.kill()
    # It is over for poll also where nobody reaps an orphan, as in some containers.
    end.poll()


def test_idle_child_does_not_spin() -> None:
    async def test(client: EngineClient) -> None:
        await collect(client)

        def cpu_ticks() -> int:
            fields = Path(f"/proc/{client.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        await client.stats()  # the last step is behind it
        before = cpu_ticks()
        await asyncio.sleep(0.5)
        assert cpu_ticks() - before <= 2

    with_client(test)


def test_join_outputs() -> None:
    joined = join_outputs(
        [
            EngineOutput(request_id="r", token_ids=[1, 2], num_cached_tokens=3),
            EngineOutput(request_id="r", token_ids=[3], finish_reason="stop", num_cached_tokens=3),
        ]
    )
    assert joined == EngineOutput(
        request_id="r", token_ids=[1, 2, 3], finish_reason="stop", num_cached_tokens=3
    )


def test_frames_survive_any_cut() -> None:
    stream = b"".join(frame(ReadStats()) for _ in range(5))
    for size in range(1, len(stream) + 1):
        splitter = FrameSplitter()
        bodies = [
            body
            for begin in range(0, len(stream), size)
            for body in splitter.feed(stream[begin : begin + size])
        ]
        assert len(bodies) == 5 and len(set(bodies)) == 1
    with pytest.raises(EngineError, match="frame of"):
        FrameSplitter().feed(b"\xff\xff\xff\xff")


def test_the_parent_imports_neither_torch_nor_the_core() -> None:
    code = (
        "import sys, openspec.engine.processes.client, openspec.llm, openspec.config; "
        "print([m for m in sys.modules if m.split('.')[0] == 'torch' or m == 'openspec._C'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
