"""Work beside a server: what waits for its requests, how long, and what its errors mean."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from torch import nn

import openspec
from openspec import LLM, SamplingParams
from openspec.adapt import loop, replay
from openspec.adapt.__main__ import main
from openspec.adapt.cycle import duty, run, server, shadow
from openspec.adapt.cycle.duty import BesideConfig, BusyServerError, Duty
from openspec.adapt.cycle.server import Server
from openspec.adapt.decide import Measured
from openspec.adapt.heads.parts import Lesson
from openspec.adapt.loop import Schedule, Trainer
from openspec.adapt.replay import Replay
from openspec.adapt.scoring import TIMED_LOOPS, Price, StepPrices, Tally, step_prices
from openspec.adapt.texts import Text
from openspec.config import config_from_settings
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import ConfigError
from tests.serve.real_server import real_server

SHIPPED = Path(openspec.__file__).parent / "models" / "tiny" / "eagle3"
QUESTIONS = [f"Tom has {n} apples and buys {n + 2} more. How many has he?" for n in range(16)]
SMALL: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "max_model_len": 160}
TEXTS = (
    "--method eagle3 --num-threads 1 --max-model-len 160 --max-num-seqs 8 --text-length 128 "
    "--answer-tokens 24"
).split()
RUN = ["run", *TEXTS, "--batch-rows", "1", "--answer-share", "0"]


class Clock:
    """Time that passes only while someone sleeps or works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.passes)

    def passes(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


# ---- Shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_share_of_the_time_while_there_are_requests(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with requests until second 10, and pieces of 30 ms."""
    clock = Clock(monkeypatch)
    beside = Duty(share, lambda: int(clock.now < 110.0))
    worked = 0.0
    while clock.now < 110.0:
        with beside.piece():
            worked += 0.03 if clock.now < 110.0 else 0.0
            clock.passes(0.03)
    assert worked == pytest.approx(10.0 * share, rel=0.01, abs=0.03)
    if share == 0.0:  # the first piece began when there had been no request for long enough
        most = duty.IDLE_S + duty.ASKED_EVERY_S
        assert 110.0 + duty.IDLE_S - duty.ASKED_EVERY_S <= clock.now - 0.03 <= 110.0 + most
    begin = clock.now
    for _ in range(10):
        with beside.piece():
            clock.passes(0.03)
    assert clock.now - begin < 0.3 + 2 * duty.IDLE_S
    assert beside.clock() - 100.0 == pytest.approx(worked + 0.3 + 0.03 * (share == 0), abs=0.04)


def test_a_request_waits_for_one_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    arrives, begun = 103.333, list[float]()
    beside = Duty(0.0, lambda: int(arrives <= clock.now < 105.0))
    while clock.now < 106.0:
        with beside.piece():
            begun.append(clock.now)
            clock.passes(0.02)
    assert not [
        at for at in begun if arrives + duty.ANSWER_HOLDS_S < at < 105.0 + duty.IDLE_S - 0.05
    ]
    assert sum(at < arrives for at in begun) > 100
    assert begun[0] >= 100.0 + duty.IDLE_S  # nobody knows what was before


def test_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that has requests, and beside pieces of a millisecond."""
    clock = Clock(monkeypatch)
    asked = list[float]()
    beside = Duty(0.0, lambda: asked.append(clock.now) or int(clock.now < 110.0))  # type: ignore[func-returns-value]
    while clock.now < 111.0:
        with beside.piece():
            clock.passes(0.001)
    assert sum(at < 110.0 for at in asked) <= 10.0 / duty.ASKED_EVERY_S + 1
    assert sum(at >= 110.5 for at in asked) <= 0.5 / duty.ANSWER_HOLDS_S + 1


def test_threads_share_one_share() -> None:
    """Two threads whose pieces would overlap, beside a server that always has requests."""
    share, lasts = 0.25, 1.2
    beside, inside, spans = Duty(share, lambda: 1), threading.Lock(), list[float]()
    ends = time.monotonic() + lasts

    def work() -> None:
        while time.monotonic() < ends:
            with beside.piece():
                assert inside.acquire(blocking=False), "two pieces at once"
                begin = time.monotonic()
                time.sleep(0.01)
                spans.append(time.monotonic() - begin)
                inside.release()

    failures = list[BaseException]()
    threads = [threading.Thread(target=_caught, args=(work, failures)) for _ in range(2)]
    begin = time.monotonic()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures, failures[0]
    assert len(spans) > 4
    found = sum(spans) / (time.monotonic() - begin)
    assert 0.2 * share < found < 1.15 * share


def _caught(work: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failures.append(error)


def test_what_a_piece_began_on_the_device_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.passes(0.09))
    beside, begin = Duty(0.5, lambda: 1, is_cuda=True), clock.now
    for _ in range(10):
        with beside.piece():
            clock.passes(0.01)
    assert clock.now - begin == pytest.approx(10 * 0.1 + 9 * 0.1)


def test_a_piece_that_fails_was_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beside = Duty(0.5, lambda: 1)
    with pytest.raises(ValueError, match="no"), beside.piece():
        clock.passes(1.0)
        raise ValueError("no")
    begin = clock.now
    with beside.piece():
        assert clock.now - begin == pytest.approx(1.0)


# ---- Ends of waiting -----------------------------------------------------------------------------


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """At its time, where nothing is left to it; a share has its turn, and so has an idle server."""
    caplog.set_level(logging.INFO)
    clock = Clock(monkeypatch)
    beside = Duty(0.0, lambda: int(clock.now < 200.0), until=160.0)
    with pytest.raises(BusyServerError, match=r"--duty 0\.2"), beside.piece():
        pytest.fail("began")
    assert 160.0 <= clock.now <= 160.1
    assert caplog.text.count("waiting: the server has requests") == 1
    clock.now = 201.0
    with beside.piece():
        clock.passes(0.1)
    shared = Duty(0.2, lambda: 1, until=160.0)
    for _ in range(3):
        with shared.piece():
            clock.passes(0.1)


def interrupted(work: Callable[[], object], after_s: float = 0.3) -> float:
    """Seconds until Ctrl-C, which another thread sends, has ended the work of this one."""
    begin, before = time.monotonic(), signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    return time.monotonic() - begin


def test_ctrl_c_ends_waiting() -> None:
    """Once is enough, also where an engine lets no step be cut in two; nothing is held after it."""
    busy = 1
    beside = Duty(0.0, lambda: busy, until=time.monotonic() + 20.0)
    with LLM(**SMALL) as llm:
        llm.around_step = beside.piece

        def piece() -> None:
            with beside.piece():
                pytest.fail("began")

        def generate() -> Any:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            return llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)

        assert interrupted(piece) < 5.0
        assert interrupted(generate) < 5.0
        assert not llm.engine.has_work
        busy = 0
        thread = threading.Thread(target=generate)  # another thread has its turn
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()
        assert len(generate()[0].outputs[0].token_ids) == 8
        llm.engine.check_integrity()


# ---- What a server answers -----------------------------------------------------------------------


@dataclasses.dataclass
class Fake:
    """A server that has `requests()` requests, or answers as it is told to."""

    requests: Callable[[], object] = lambda: 0
    status: int = 200
    body: bytes | None = None
    seconds: float = 0.0
    method: str = "eagle3"
    url: str = ""
    keys: list[str | None] = dataclasses.field(default_factory=list)


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.keys.append(self.headers["Authorization"])
            time.sleep(fake.seconds)
            body = json.dumps({"server_load": fake.requests()}).encode()
            body = body if fake.body is None else fake.body
            if self.path != "/load":
                counters = {"num_drafts": 0}
                said = {"version": 1, "folder": str(SHIPPED), "counters": counters}
                said["method"] = fake.method
                body = json.dumps(said).encode()
            try:
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # nobody waits any more

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        fake.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield fake
        finally:
            http.shutdown()


def test_numbers_of_requests() -> None:
    with serving(Fake(lambda: 3)) as fake:
        assert Server(fake.url + "/", "secret").num_requests() == 3
        assert fake.keys == ["Bearer secret"]
        asked = Server(fake.url, None)
        assert asked.num_requests() == 3
    assert asked.num_requests() == 0  # it was stopped


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b'{"error": {"message": "wrong key"}}', "/load answers 401: wrong key"),
        (403, b"", "/load answers 403"),
        (404, b"", "/load answers 404"),
        (503, b"", "/load answers 503"),
        (200, b"<html>", "does not answer /load"),
        (200, b"[3]", "no JSON object"),
        (200, b'{"load": 3}', "server_load"),
        (200, b'{"server_load": null}', "NoneType"),
        (200, b'{"server_load": "many"}', "many"),
    ],
)
def test_answers_that_are_no_number(status: int, body: bytes, says: str) -> None:
    with serving(Fake(status=status, body=body)) as fake:
        beside = Duty(0.0, Server(fake.url, None).num_requests)
        with pytest.raises(ConfigError, match=says) as error, beside.piece():
            pytest.fail("began")
        assert "is it openspec, and --server-admin-key its key" in str(error.value)
        fake.status, fake.body = 200, None
        asked = Server(fake.url, None)
        assert asked.num_requests() == 0
        fake.status, fake.body = status, body  # a moment later, after hours of work
        assert asked.num_requests() == 1


def test_no_answer_in_time_is_no_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a request, as often as it comes."""
    assert server.LOAD_TIMEOUT_S <= 2.0
    with serving(Fake()) as fake:
        asked = Server(fake.url, None)
        assert asked.num_requests() == 0
        monkeypatch.setattr(server, "LOAD_TIMEOUT_S", 0.05)
        fake.seconds = 0.3
        assert [asked.num_requests() for _ in range(3)] == [1, 1, 1]
        with pytest.raises(BusyServerError), Duty(0.0, asked.num_requests, until=0.0).piece():
            pytest.fail("began")
        monkeypatch.setattr(server, "LOAD_TIMEOUT_S", 5.0)
        fake.seconds = 0.0
        assert asked.num_requests() == 0


def test_a_server_that_cannot_be_found() -> None:
    for url in ("http://no-such-host.invalid", "127.0.0.1:8000", "http://127.0.0.1:9"):
        with pytest.raises(ConfigError, match="is it openspec"):
            Server(url, None).num_requests()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{",
        b"HTTP/1.1 502 No\r\nContent-Length: 20\r\n\r\n{",
    ],
)
def test_a_connection_that_is_cut_is_no_leave(answer: bytes) -> None:
    good = b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"server_load":0}'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers() -> None:
            for one in (good, answer):
                with listening.accept()[0] as link:
                    link.recv(1 << 16)
                    link.sendall(one)

        thread = threading.Thread(target=answers)
        thread.start()
        asked = Server(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        assert [asked.num_requests() for _ in range(2)] == [0, 1]
        thread.join()


@pytest.mark.parametrize(("seconds", "least"), [(0.001, 0.98), (0.1, 0.9), (2.0, 0.9)])
def test_slow_answers_take_no_share(
    seconds: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, worked = Clock(monkeypatch), 0.0
    beside = Duty(0.2, lambda: clock.passes(seconds) or 1)  # type: ignore[func-returns-value]
    while clock.now < 300.0:
        with beside.piece():
            worked += 0.01
            clock.passes(0.01)
    assert least * 40.0 < worked < 40.1


# ---- What is a piece -----------------------------------------------------------------------------


def test_without_a_server_nothing_is_divided() -> None:
    """Nor where all of the time is the work's."""
    with LLM(**SMALL) as llm:
        undivided = llm.around_step
        for config in (BesideConfig(), BesideConfig(server="http://127.0.0.1:9", duty=1.0)):
            config.beside(llm)
            assert llm.around_step is undivided
        BesideConfig(server="http://127.0.0.1:9").beside(llm)
        assert llm.around_step is not undivided


def test_a_server_that_drafts_by_another_method(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused before there is any work."""
    with serving(Fake(method="ngram")) as fake:
        more = ["--prompts", str(prompts), "--out", str(tmp_path / "head"), "--server", fake.url]
        assert main([*RUN, *more]) == 2
    said = capsys.readouterr().err
    assert "has --method ngram: it cannot take a head of --method eagle3" in said


class Watched:
    """Pieces: how deep, by which thread; and what was computed, each time within just one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.depth, self.threads = monkeypatch, 0, set[int]()
        self.seen, self.num_pieces = dict[str, int](), 0
        self.schedules = list[Schedule]()
        own, own_init, watched = Duty.piece, Trainer.__init__, self

        def init(trainer: Trainer, head: Any, ends: Any, schedule: Schedule, *more: Any) -> None:
            watched.schedules.append(schedule)
            own_init(trainer, head, ends, schedule, *more)

        monkeypatch.setattr(Trainer, "__init__", init)

        @contextmanager
        def piece(beside: Duty, check: Callable[[], None] = lambda: None) -> Iterator[None]:
            with own(beside, check):
                watched.num_pieces += 1
                watched.depth += 1
                watched.threads.add(threading.get_ident())
                assert watched.depth == 1, "a piece within a piece"
                try:
                    yield
                finally:
                    watched.depth -= 1

        monkeypatch.setattr(Duty, "piece", piece)
        self.within(EngineCore, "step")
        self.within(replay._Step, "__enter__")
        self.within(loop, "mixed_precision")  # of a row
        self.within(torch.nn.utils, "clip_grad_norm_")  # of a step
        self.within(shadow, "tallies")
        self.within(run, "with_vocabulary")
        self.within(self, "prices")  # test_times_are_taken_in_pieces has the own ones
        for module in (run, shadow):
            monkeypatch.setattr(module, "step_prices", self.priced)

    def priced(self, *given: Any) -> StepPrices:
        with given[-1]():
            return self.prices()

    def prices(self) -> StepPrices:
        return StepPrices(Price(1.0), Price(2.0))

    def within(self, owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def called(*arguments: Any, **more: Any) -> Any:
            assert self.depth == 1, f"{name} outside of a piece"
            self.seen[name] = self.seen.get(name, 0) + 1
            return own(*arguments, **more)

        self.patch.setattr(owner, name, called)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"question": one}) for one in QUESTIONS))
    return path


class Toy(nn.Module):
    """A head whose loss is a mean over what it learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(6.0).reshape(2, 3) / 7)

    def loss(self, lesson: Lesson, _ends: object, _random: object) -> torch.Tensor:
        counted, errors = lesson.learned, (lesson.last @ self.matrix.T).square().sum(-1)
        return (errors * counted).sum() / counted.sum().clamp(min=1)


def test_a_training_step_in_parts_learns_the_same() -> None:
    """Row by row where pieces wait; a row counts as much as it has tokens to learn from."""
    random = torch.Generator().manual_seed(3)
    generated = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    last = torch.randn(3, 5, 3, generator=random)
    lesson = Lesson(torch.ones(3, 5), torch.arange(5).repeat(3, 1), generated, last, last)
    num_pieces, found = 0, list[torch.Tensor]()

    @contextmanager
    def counting() -> Iterator[None]:
        nonlocal num_pieces
        num_pieces += 1
        yield

    for piece in (nullcontext, counting):
        schedule = Schedule(seconds=1.0, max_steps=2, rate=0.1, measure_every=None, piece=piece)
        toy, ends = Toy(), SimpleNamespace(embedding=last)
        trainer = Trainer(cast(Any, toy), cast(Any, ends), schedule, None, 0)
        found += [trainer._step(lesson, 0.5), toy.matrix.detach()]
    assert num_pieces == 4  # three rows, and what is made of them
    assert torch.allclose(found[0], found[2]) and torch.allclose(found[1], found[3], atol=1e-6)
    assert not torch.equal(found[1], Toy().matrix)


def test_all_work_of_a_turn_is_in_pieces(
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Answers, replay, vocabulary, steps and scores; by one thread, none within another."""
    watched = Watched(monkeypatch)
    monkeypatch.setattr(loop, "ahead", lambda _: pytest.fail("a thread that computes beside"))
    monkeypatch.setattr(run, "AT_HOME", 99.0)  # a trial of two steps decides nothing then
    out = tmp_path / "head"
    with serving(Fake()) as fake:
        more = ["--prompts", str(prompts), "--base", str(prompts), "--out", str(out)]
        more += ["--minutes", "0.2", "--max-steps", "2", "--force", "--duty", "0"]
        assert main([*RUN, *more, "--server", fake.url]) == 0
        assert "the server drafts with it as version 1" in capsys.readouterr().out
        assert (out / "model.safetensors").is_file()
        training = {"mixed_precision", "clip_grad_norm_"}
        others = {"step", "__enter__", "tallies", "with_vocabulary", "prices"}
        assert watched.seen.keys() == training | others
        assert watched.seen["clip_grad_norm_"] >= 2
        # A text is a piece, a row of a lesson, a step of the engine: no piece is several of them.
        assert watched.num_pieces == sum(watched.seen.values())
        watched.seen.clear()
        more = f"--heads {SHIPPED},{out} --prompts {prompts} --server {fake.url}".split()
        assert main(["decide", *TEXTS, *more]) == 0
        assert watched.seen.keys() == {"step", "__enter__", "tallies", "prices"}
        assert len(watched.threads) == 1
    clocks = [getattr(one.clock, "__func__", one.clock) for one in watched.schedules]
    assert clocks == [Duty.clock, time.monotonic]  # of the trial, and of --minutes


def test_times_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece loads the engine, and each loop is one; between two the engine does nothing."""
    depth, num_pieces, own = 0, 0, EngineCore.step

    @contextmanager
    def piece() -> Iterator[None]:
        nonlocal depth, num_pieces
        depth, num_pieces = depth + 1, num_pieces + 1
        yield
        depth -= 1

    def step(core: EngineCore) -> Any:
        assert depth == 1
        return own(core)

    monkeypatch.setattr(EngineCore, "step", step)
    config = config_from_settings({"method": "eagle3", "num_threads": 1, "max_model_len": 200})
    texts = [Text(list(range(60)), 20), Text(list(range(80)), 40)]
    step_prices(config.with_folders(), Path(SHIPPED), 3, texts, 1, piece)
    assert num_pieces == 1 + 2 * TIMED_LOOPS


def test_a_trial_lasts_as_long_beside_a_busy_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its seconds none are waited away, so that it says the same."""
    clock = Clock(monkeypatch)
    beside = Duty(0.2, lambda: 1)
    schedule = Schedule(
        seconds=1.0, max_steps=None, rate=1e-3, measure_every=1 << 40,
        clock=beside.clock, piece=beside.piece,
    )  # fmt: skip
    ends = SimpleNamespace(embedding=torch.zeros(1))
    trainer = Trainer(cast(Any, torch.nn.Linear(2, 2)), cast(Any, ends), schedule, None, 1)
    trainer.at.curve.append({})

    def step(*_: object) -> torch.Tensor:
        for _ in range(4):
            with schedule.piece():
                clock.passes(0.025)
        return torch.zeros(())

    monkeypatch.setattr(trainer, "_step", step)
    begin = clock.now
    trainer.run(lambda _: iter([cast(Any, None)] * 99), lambda: (1.0, {}), lambda: None)
    assert trainer.at.step in (10, 11)
    assert clock.now - begin == pytest.approx(5.0, abs=0.6)


# ---- Turns beside a busy server ------------------------------------------------------------------


def test_a_turn_without_time(
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends when --minutes are over, and computes nothing."""
    steps = list[int]()
    own = EngineCore.step

    def step(core: EngineCore) -> Any:
        steps.append(1)
        return own(core)

    monkeypatch.setattr(EngineCore, "step", step)
    begin = time.monotonic()
    with serving(Fake(lambda: int(time.monotonic() < begin + 20.0))) as fake:
        more = ["--prompts", str(prompts), "--out", str(tmp_path / "head"), "--minutes", "0.03"]
        assert main([*RUN, *more, "--server", fake.url]) == 2
    assert "no time is left: the server has requests" in capsys.readouterr().err
    assert len(steps) <= 1  # that gives the requests up
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("measure_every", [None, 1 << 40])
@pytest.mark.parametrize("has_better", [True, False])
def test_what_was_found_before_the_time_was_over(
    monkeypatch: pytest.MonkeyPatch, measure_every: int | None, has_better: bool
) -> None:
    """A training that is cut off is judged by the best it had; a trial has told nothing."""

    class Cut(Trainer):
        def run(self, lessons: Any, measure: Any, keep_best: Any) -> None:
            measure()
            if has_better:
                keep_best()
            raise BusyServerError("no time")

    monkeypatch.setattr(run, "Trainer", Cut)
    before, better = (Measured([Tally(10, n)] * 20, [], {}, Price(1.0)) for n in (20, 22))
    ends = SimpleNamespace(embedding=torch.zeros(1))
    lesson = SimpleNamespace(ends=ends, measured=lambda _: better)
    turn = object.__new__(run.Turn)
    turn.own, turn.begin, turn.notes = run.RunConfig(), 0.0, []
    schedule = Schedule(seconds=1.0, max_steps=None, rate=1.0, measure_every=measure_every)
    head = cast(Any, torch.nn.Linear(2, 2))

    def trained() -> tuple[Any, Measured, int]:
        return turn._trained(cast(Any, lesson), before, head, before, schedule)

    if has_better and measure_every is None:
        kept, best, _ = trained()
        assert kept is not head and best is better
        assert "what was best by then is judged" in turn.notes[0]
    else:
        with pytest.raises(BusyServerError):
            trained()


# ---- Beside a server as users start it -----------------------------------------------------------


def test_replay_beside_a_real_server() -> None:
    """At duty 0 no piece begins while a stream runs, at 0.5 some do; its key is asked for."""
    arguments = "--num-threads 1 --max-num-seqs 2 --max-model-len 2048 --api-key a".split()
    with real_server(*arguments, "--admin-api-key", "secret") as real:
        with pytest.raises(ConfigError, match="answers 401: Incorrect API key"):
            Server(real.url, None).num_requests()
        assert Server(real.url, "secret").num_requests() == 0
        for share in (0.0, 0.5):
            begun, stream = replayed_beside(real.url, share)
            assert stream.num_tokens > 50 and len(begun) == 4
            num_during = sum(at < stream.ended_at for at in begun)
            assert num_during > 0 if share else num_during == 0


def replayed_beside(url: str, share: float) -> tuple[list[float], Stream]:
    """When its four pieces began, and the stream beside them."""
    begun = list[float]()
    with LLM(**SMALL, max_num_batched_tokens=20) as llm, streaming(url) as stream:
        BesideConfig(server=url, server_admin_key="secret", duty=share).beside(llm)
        own = llm.around_step

        @contextmanager
        def piece(*check: Any) -> Iterator[None]:
            with own(*check):
                begun.append(time.monotonic())
                yield

        llm.around_step = piece
        assert Replay(llm, [0]).texts([list(range(10, 90))])[0].shape[0] == 80
    return begun, stream


@dataclasses.dataclass
class Stream:
    """One answer on its way."""

    num_tokens: int = 0
    ended_at: float = 0.0


@contextmanager
def streaming(url: str) -> Iterator[Stream]:
    """Within it an answer is streamed, from its first token on."""
    found, has_begun = Stream(), threading.Event()
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer a"}

    def read() -> None:
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found.num_tokens += 1
                    found.ended_at = time.monotonic()
                    has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(60)
    yield found
    thread.join()
