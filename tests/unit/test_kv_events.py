"""Events of the prefix cache: what a subscriber can rebuild from them, and how they travel.

`BATCH` was encoded by vLLM 0.33's own `kv_events.py`.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from openspec.config import config_from_settings, parse_engine_args
from openspec.engine.core.kv_events import (
    END_OF_REPLAY,
    EventBatch,
    KVEventPublisher,
    KVEventsConfig,
    endpoint_of_rank,
    is_bound,
    is_open_to_others,
    wire_event,
)
from openspec.errors import ConfigError
from openspec.llm import LLM
from openspec.messages import EngineRequest, SamplingParams
from tests.gates import harness, hybrid_target

if TYPE_CHECKING:
    from openspec._C import PageEvent

BATCH = bytes.fromhex(
    "93cb3ff80000000000009481a474797065b0416c6c426c6f636b73436c6561726564de000ba474797065ab426c6f63"
    "6b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff07b1706172656e745f626c6f636b5f6861"
    "7368c0a9746f6b656e5f696473940102cd012cce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d"
    "656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a674656e616e74c0a967726f7570"
    "5f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ede000ba474797065"
    "ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f6861736807a9"
    "746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f"
    "72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f"
    "6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861"
    "73686573920709a66d656469756da3475055a967726f75705f6964780000"
)
PAGE_SIZE = 16
WAIT_MS = 20_000


@dataclass
class Event:
    kind: str
    hashes: list[int] = field(default_factory=list)
    parent: int | None = None
    token_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b""


STORED = Event("stored", [(1 << 64) - 1, 7], None, [1, 2, 300, 70000], b"tenant")


def test_batches_are_vllms() -> None:
    events: list[PageEvent] = [
        Event("cleared"),
        STORED,
        Event("stored", [9], 7, [5, 6]),
        Event("removed", [7, 9]),
    ]
    batch = EventBatch(1.5, [wire_event(event, 2) for event in events], 0)
    # As text, for the order of keys; of a map's length msgpack has several forms.
    ours, theirs = (msgspec.msgpack.decode(one) for one in (msgspec.msgpack.encode(batch), BATCH))
    assert repr(ours) == repr(theirs)


# ---- What a subscriber rebuilds -----------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    parent: int | None
    tokens: tuple[int, ...]
    salt: str | None


class Follower:
    """A subscriber, which knows batches and nothing else. Stands in for the sockets, too."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.num_events = dict.fromkeys(("BlockStored", "BlockRemoved", "AllBlocksCleared"), 0)

    def publish(self, events: Sequence[PageEvent]) -> None:
        batch = EventBatch(0.0, [wire_event(event, PAGE_SIZE) for event in events], 0)
        self.apply(msgspec.msgpack.encode(batch))

    def apply(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self.num_events[event["type"]] += 1
            if event["type"] == "AllBlocksCleared":
                self.pages.clear()
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.pages[block_hash]
            else:
                self.store(event)

    def store(self, event: dict[str, Any]) -> None:
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert event["block_size"] == PAGE_SIZE and len(tokens) == PAGE_SIZE * len(hashes)
        parent = event["parent_block_hash"]
        for i, block_hash in enumerate(hashes):
            assert block_hash not in self.pages
            salt = event["extra_keys"][i]
            assert salt is None or (i == 0 and event["parent_block_hash"] is None)
            own = tuple(tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE])
            self.pages[block_hash] = Page(parent, own, salt and salt[0])
            parent = block_hash

    def num_cached(self, prompt: Sequence[int], salt: str) -> int:
        """Tokens of a prompt that the engine should find, by contents alone."""
        by_place = {(page.parent, page.tokens, page.salt): key for key, page in self.pages.items()}
        parent: int | None = None
        for begin in range(0, len(prompt) - PAGE_SIZE, PAGE_SIZE):
            own = tuple(prompt[begin : begin + PAGE_SIZE])
            parent = by_place.get((parent, own, salt or None if begin == 0 else None))
            if parent is None:
                return begin
        return (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE


def request(number: int, chance: random.Random) -> EngineRequest:
    """One of few beginnings, then something of its own."""
    begin = chance.randrange(3)
    shared = [300 + begin * 7 + place for place in range(chance.randrange(70))]
    own = [chance.randrange(300, 4000) for _ in range(chance.randrange(1, 40))]
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=shared + own,
        sampling=SamplingParams(temperature=0.0, seed=number, max_tokens=chance.randrange(1, 90)),
        cache_salt=chance.choice(["", "", "tenant"]),
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 9))]
)
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3"])
def test_events_rebuild_the_cache(method: str, seed: int) -> None:
    """Random requests on few pages: preempted, aborted, sharing prefixes; the cache is reset."""
    chance = random.Random(f"{method} {seed}")
    core = harness.make_core(
        method=method,
        max_num_seqs=8,
        max_model_len=256,
        kv_cache_memory=harness.kv_memory(22, method=method),
    )
    follower = Follower()
    core._runner.record_page_events()
    core._kv_events = follower
    number, running = 0, set[str]()
    for step in range(250):
        if chance.random() < 0.4:
            core.add_request(request(number, chance))
            running.add(str(number))
            number += 1
        if running and chance.random() < 0.05:
            core.abort(chance.choice(sorted(running)))
        if step % 100 == 60:
            core.reset_prefix_cache()
        for output in core.step():
            if output.finish_reason is not None:
                running.discard(output.request_id)
        assert set(follower.pages) == set(core._runner.published_hashes()), step
    for request_id in running:
        core.abort(request_id)
    while core.has_work:
        core.step()
    assert min(follower.num_events.values()) > 0, "a load that misses a kind of event shows little"
    assert core.stats().num_preemptions > 0
    for _ in range(20):
        asked = request(number, chance)
        number += 1
        expected = follower.num_cached(asked.prompt_token_ids, asked.cache_salt)
        core.add_request(asked)
        found = []
        while core.has_work:
            found += [output.num_cached_tokens for output in core.step() if output.token_ids]
        # A drafter with a cache of its own runs the last token of the prefix again.
        assert found[0] in (expected, max(0, expected - 1))
    assert core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
@pytest.mark.parametrize("num_pages", [16, 200])
def test_pages_count_up_to_the_last_snapshot(
    num_pages: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target with a running state: no page is told of that no sequence can begin with."""
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder()))
    chance = random.Random(f"hybrid {seed}")
    plan = harness.make_core(method="none").info.memory_plan
    num_base_pages = (plan["sequence_bytes"] - plan["state_bytes"] // 16) // plan["page_bytes"]
    core = harness.make_core(
        method="none",
        max_num_seqs=4,
        max_model_len=160,
        kv_cache_memory=(num_pages + 3 * num_base_pages) * plan["page_bytes"],
    )
    follower = Follower()
    core._runner.record_page_events()
    core._kv_events = follower
    for number in range(30):
        core.add_request(request(number, chance))
        while core.has_work and (number % 4 == 3 or chance.random() < 0.9):
            core.step()
            assert set(follower.pages) == set(core._runner.published_hashes())
        if number == 20:
            core.reset_prefix_cache()
    while core.has_work:
        core.step()
    assert min(follower.num_events.values()) > 0
    parents = {page.parent for page in follower.pages.values()}
    num_whole = 0
    for last in set(follower.pages) - parents:
        tokens: list[int] = []
        page: Page | None = follower.pages[last]
        while page is not None:
            tokens[:0] = page.tokens
            first, page = page, follower.pages.get(page.parent or 0)
        if first.parent is not None:  # whose beginning has made room
            continue
        num_whole += 1
        salt = (first.salt or "").encode()
        assert core._runner.num_cached_tokens([*tokens, 1], salt) == len(tokens)
    assert num_whole > 0


def test_nothing_is_recorded_unless_asked() -> None:
    core = harness.make_core()
    harness.run(core, [harness.Job(tuple(range(300, 400)), SamplingParams(max_tokens=4))])
    assert core._runner.published_hashes() and not core._runner.take_page_events()


# ---- Sockets ------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        yield context


def publisher(**settings: Any) -> KVEventPublisher:
    on = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
    return KVEventPublisher(KVEventsConfig.of({**on, **settings}), 2)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


def replay(socket: zmq.Socket[bytes], start: int) -> list[tuple[int, bytes]]:
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    batches = []
    while True:
        empty, number, payload = receive(socket)
        assert empty == b""
        if number == END_OF_REPLAY:
            assert payload == b""
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def subscribed(context: zmq.Context[Any], made: KVEventPublisher, topic: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.subscribe(topic)
    socket.connect(made.endpoint)
    while not socket.poll(50):  # until the subscription has arrived
        made.publish([Event("removed", [1])])
    return socket


def test_a_subscriber_gets_topic_number_and_batch(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openspec.engine.core.kv_events.time.time", lambda: 1234.5)
    made = publisher(topic="kv@tiny", data_parallel_rank=2)
    with subscribed(context, made, "kv@") as socket:
        made.publish([STORED])
        made.publish([])
        numbers = []
        while True:
            topic, number, payload = receive(socket)
            numbers.append(int.from_bytes(number, "big"))
            ts, events, rank = msgspec.msgpack.decode(payload)
            if events[0]["type"] == "BlockStored":
                break
        assert topic == b"kv@tiny" and rank == 2 and ts == 1234.5
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert not socket.poll(50), "a step without news sends nothing"
    made.close()


def test_replay_of_what_was_missed(context: zmq.Context[Any]) -> None:
    made = publisher(replay_endpoint="tcp://127.0.0.1:*", buffer_steps=2000)
    for number in range(1, 3000):
        made.publish([Event("removed", [number])])
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        assert made.replay_endpoint
        socket.connect(made.replay_endpoint)
        found = replay(socket, 0)
        assert [number for number, _ in found] == list(range(1000, 3000))
        assert msgspec.msgpack.decode(found[-1][1])[1][0]["block_hashes"] == [2999]
        assert [number for number, _ in replay(socket, 2998)] == [2998, 2999]
        assert replay(socket, 3000) == []
    made.close()


def test_the_first_batch_says_that_the_cache_is_empty(context: zmq.Context[Any]) -> None:
    made = publisher(replay_endpoint="tcp://127.0.0.1:*")
    with context.socket(zmq.DEALER) as socket:
        socket.connect(made.replay_endpoint or "")
        [(number, payload)] = replay(socket, 0)
    assert number == 0 and msgspec.msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]
    made.close()


def test_bad_requests_for_replays_harm_nobody(context: zmq.Context[Any]) -> None:
    made = publisher(replay_endpoint="tcp://127.0.0.1:*")
    with context.socket(zmq.DEALER) as bad, context.socket(zmq.DEALER) as good:
        bad.connect(made.replay_endpoint or "")
        good.connect(made.replay_endpoint or "")
        for frames in ([b""], [b"", b"x"], [b"12345678"], [b"", b"", b""], [b"", b"x" * 100_000]):
            bad.send_multipart(frames)
        assert len(replay(good, 0)) == 1
        assert not bad.poll(50)
    made.close()


def test_a_subscriber_that_does_not_read_holds_nobody_up(context: zmq.Context[Any]) -> None:
    made = publisher(hwm=10)
    with subscribed(context, made, "") as socket:
        many = Event("removed", list(range(10_000)))
        for _ in range(2000):
            made.publish([many])  # which would wait for ever
        num_seen = 0
        while socket.poll(50):
            receive(socket)
            num_seen += 1
        assert 0 < num_seen < 2000, "what was too much is dropped"
    made.close()


def test_two_engines_of_one_server_have_addresses_of_their_own(tmp_path: Any) -> None:
    settings = {"endpoint": f"ipc://{tmp_path}/events"}
    made = [publisher(**settings, data_parallel_rank=rank) for rank in range(2)]
    assert [one.endpoint for one in made] == [settings["endpoint"], settings["endpoint"] + "_dp1"]
    for one in made:
        one.close()


# ---- Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "bound", "open_to_others"),
    [
        ("tcp://*:5557", True, True),
        ("tcp://0.0.0.0:5557", True, True),
        ("tcp://[::]:5557", True, True),
        ("tcp://127.0.0.1:5557", True, False),
        ("tcp://localhost:5557", True, False),
        ("tcp://[::1]:5557", True, False),
        ("ipc:///tmp/kv", True, False),
        ("inproc://kv", True, False),
        ("tcp://picker.llm-d.svc.cluster.local:5557", False, False),
        ("tcp://10.0.0.7:5557", False, False),
    ],
)
def test_which_addresses_are_bound(endpoint: str, bound: bool, open_to_others: bool) -> None:
    assert (is_bound(endpoint), is_open_to_others(endpoint)) == (bound, open_to_others)


def test_ports_rise_by_rank() -> None:
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert endpoint_of_rank("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"
    assert endpoint_of_rank("inproc://kv", 1) == "inproc://kv_dp1"


def test_off_by_default() -> None:
    assert not KVEventsConfig.of({}).is_on
    assert not KVEventsConfig.of({"publisher": "zmq"}).is_on
    assert not KVEventsConfig.of({"enable_kv_cache_events": True, "publisher": "null"}).is_on
    assert KVEventsConfig.of({"enable_kv_cache_events": True}).is_on


def test_the_flag_takes_vllms_json() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv", "hwm": 5}'
    config, _ = parse_engine_args("test", "", ["--kv-events-config", text], environ={})
    assert config.kv_events_config
    assert KVEventsConfig.of(config.kv_events_config) == KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", topic="kv", hwm=5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end_point": "x"}, "unknown key 'end_point'; did you mean 'endpoint'?"),
        ({"hwm": "many"}, "hwm"),
        ({"buffer_steps": -1}, r"buffer_steps must be in \[0"),
        ({"publisher": "kafka"}, "publisher"),
        ({"enable_kv_cache_events": True, "endpoint": "tcp://no such host:x"}, "cannot connect to"),
        ({"enable_kv_cache_events": True, "endpoint": "nonsense"}, "cannot listen on nonsense"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(kv_events_config=settings, kv_cache_memory="4MiB")


def test_engines_of_one_server_have_ports_of_their_own() -> None:
    on: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"}
    close = KVEventsConfig.of({**on, "replay_endpoint": "tcp://*:5560"})
    assert close.of_engine(2, 3).data_parallel_rank == 2
    with pytest.raises(ConfigError, match=r"too close for 4 engines.* the port 5660"):
        close.of_engine(0, 4)
    for replay in (None, "tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "ipc:///tmp/replay"):
        assert KVEventsConfig.of({**on, "replay_endpoint": replay}).of_engine(1, 64)
    assert KVEventsConfig(data_parallel_rank=8).of_engine(1, 2).data_parallel_rank == 9


def test_not_json() -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-config expects a JSON object"):
        parse_engine_args("test", "", ["--kv-events-config", "{on}"], environ={})


def test_events_need_a_prefix_cache() -> None:
    settings = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="drop one of"):
        LLM(kv_events_config=settings, enable_prefix_caching=False)


def test_an_address_in_use() -> None:
    made = publisher()
    with pytest.raises(ConfigError, match=f"cannot listen on {made.endpoint}: Address already in"):
        publisher(endpoint=made.endpoint)
    with pytest.raises(ConfigError, match=f"cannot listen on {made.endpoint}"):
        publisher(replay_endpoint=made.endpoint)
    made.close()


def test_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zmq":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r'pip install "\.\[kv-events\]"'):
        publisher()


def test_llm_publishes_what_it_caches(context: zmq.Context[Any]) -> None:
    settings = config_from_settings(
        {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "inproc://x"}}
    )
    assert settings.kv_events_config
    events = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
    }
    with LLM(kv_events_config=events, kv_cache_memory="4MiB", stats_interval_s=0) as llm:
        made = llm.engine._kv_events
        assert made and made.replay_endpoint
        prompt = list(range(300, 400))
        llm.generate([prompt], SamplingParams(max_tokens=8), use_tqdm=False)
        follower = Follower()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(made.replay_endpoint)
            for _, payload in replay(socket, 0):
                follower.apply(payload)
            assert follower.num_cached(prompt, "") == 96
            llm.engine.reset_prefix_cache()
            for _, payload in replay(socket, 0):
                follower.apply(payload) if b"Cleared" in payload else None
        assert not follower.pages
