"""What the prefix cache holds, told to routers: events in vLLM's wire format over ZeroMQ.

A batch is three frames, topic, sequence number (8 bytes, big-endian) and msgpack:
`[ts, [event, ...], data_parallel_rank]`, where an event is a map with its kind under "type". Who
missed batches asks the replay socket. Source: `vllm/distributed/kv_events.py` of vLLM 0.33.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from openspec.errors import ConfigError
from openspec.settings.names import nearest
from openspec.settings.setting import Raw

if TYPE_CHECKING:
    import zmq

    from openspec._C import PageEvent

logger = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM's word for the pool that steps read, whatever the device."""
SPEC_KIND = "full_attention"
"""vLLM's word for pages that no window takes from the middle of a sequence."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 64
_LINGER_MS = 200


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV events go. The keys are vLLM's; so are the defaults, except the address."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """Default: zmq if events are enabled."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Bound if it names this machine (`*`, a wildcard or loopback address, ipc, inproc), else
    connected to."""
    replay_endpoint: str | None = None
    """Bound. Default: no replay."""
    buffer_steps: int = 10_000
    """Batches that a replay can have."""
    hwm: int = 100_000
    """Batches that wait for one slow subscriber, before it misses some."""
    max_queue_size: int = 100_000
    """Accepted without effect: a batch goes to the sockets at once."""
    topic: str = ""
    data_parallel_rank: int = 0
    """Number of the engine among those of one server; ports rise by it."""

    @classmethod
    def of(cls, settings: Mapping[str, Raw]) -> KVEventsConfig:
        """The configuration that the JSON of the setting gives.

        Raises:
            ConfigError: for an unknown key or a value that does not fit.
        """
        for key in settings:
            if key not in cls.__struct_fields__:
                raise ConfigError(
                    f"kv_events_config: unknown key {key!r}{nearest(key, cls.__struct_fields__)}"
                )
        try:
            config = msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_events_config: {error}") from None
        for name in ("buffer_steps", "hwm", "max_queue_size", "data_parallel_rank"):
            value = getattr(config, name)
            if not 0 <= value <= 1 << 30:
                raise ConfigError(
                    f"kv_events_config: {name} must be in [0, {1 << 30}], got {value}"
                )
        return config

    def of_engine(self, number: int, num_engines: int) -> KVEventsConfig:
        """What one of several engines publishes: its number is added to the rank.

        Raises:
            ConfigError: two engines would have the same port.
        """
        ports = _port_of(self.endpoint), _port_of(self.replay_endpoint or "")
        if self.is_on and all(ports) and abs(ports[0] - ports[1]) < num_engines:
            raise ConfigError(
                f"kv_events_config: the ports {ports[0]} and {ports[1]} are too close for "
                f"{num_engines} engines, because each adds its number to both; give "
                f"replay_endpoint the port {max(ports) + 100}"
            )
        return msgspec.structs.replace(self, data_parallel_rank=self.data_parallel_rank + number)

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """One change of the cache, by the hashes of its pages ("blocks" in vLLM)."""


class BlockStored(KVCacheEvent, kw_only=True):
    """Pages that requests can reuse from here on, one after another."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """By page, what its hash depends on beside tokens: the salt, in a sequence's first."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KVCacheEvent, kw_only=True):
    """Pages that are gone."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


AnyEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What happened in one step."""

    ts: float
    """Seconds since the epoch."""
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


def wire_event(event: PageEvent, page_size: int) -> AnyEvent:
    """An event of the runner as subscribers know it."""
    hashes = list(event.hashes)
    if event.kind == "stored":
        extra_keys: list[tuple[str, ...] | None] = [None] * len(hashes)
        if event.cache_salt:
            extra_keys[0] = (event.cache_salt.decode(),)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=event.parent,
            token_ids=list(event.token_ids),
            block_size=page_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=extra_keys,
            group_idx=0,
            kv_cache_spec_kind=SPEC_KIND,
        )
    if event.kind == "removed":
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=0)
    return AllBlocksCleared()


class KVEventPublisher:
    """The sockets of one engine.

    `publish` belongs to one thread and never waits: ZeroMQ sends from a thread of its own, and a
    subscriber that does not read misses batches. Replays are answered by another thread.
    """

    def __init__(self, config: KVEventsConfig, page_size: int) -> None:
        """Binds the addresses.

        Raises:
            ConfigError: pyzmq is not there, or an address cannot be had.
        """
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                'kv_events_config needs pyzmq; in the checkout: pip install ".[kv-events]"'
            ) from None
        self._zmq = zmq
        self._page_size = page_size
        self._rank = config.data_parallel_rank
        self._topic = config.topic.encode()
        self._next = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        self._buffer: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=config.buffer_steps
        )
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._publisher.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self.endpoint = self._open(self._publisher, config.endpoint)
            self.replay_endpoint = self._open_replay(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        logger.info("KV events go to %s; replays: %s", self.endpoint, self.replay_endpoint)
        # Whoever followed the engine that had this address learns that its pages are gone.
        self._send([AllBlocksCleared()])

    @property
    def source(self) -> dict[str, str | int | bool | None]:
        """What a subscriber needs, under vLLM's names."""
        return {
            "data_parallel_rank": self._rank,
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": self._topic.decode(),
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
            "buffer_steps": self._buffer.maxlen,
        }

    def publish(self, events: Sequence[PageEvent]) -> None:
        """Sends the news of one step, if there are any."""
        if events:
            self._send([wire_event(event, self._page_size) for event in events])

    def close(self) -> None:
        """Closes the sockets, as soon as what is on its way has been sent."""
        self._publisher.close()
        self._context.term()  # the socket for replays is closed by its thread

    def _send(self, events: list[AnyEvent]) -> None:
        payload = self._encode(EventBatch(time.time(), events, self._rank))
        number = self._next.to_bytes(8, "big")
        self._next += 1
        with self._lock:
            self._buffer.append((number, payload))
        self._publisher.send_multipart((self._topic, number, payload))

    def _open_replay(self, config: KVEventsConfig) -> str | None:
        if config.replay_endpoint is None:
            return None
        zmq = self._zmq
        socket = self._context.socket(zmq.ROUTER)
        # Twice a whole replay: ZeroMQ learns late what was read.
        socket.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        endpoint = self._open(socket, config.replay_endpoint, must_bind=True)
        threading.Thread(
            target=self._serve_replays, args=(socket,), name="kv-event-replay", daemon=True
        ).start()
        return endpoint

    def _serve_replays(self, socket: zmq.Socket[bytes]) -> None:
        """Until the context ends."""
        with socket, contextlib.suppress(self._zmq.ContextTerminated):
            while True:
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a replay is asked for with an empty frame and 8 bytes")
                    continue
                with self._lock:
                    batches = [batch for batch in self._buffer if batch[0] >= frames[2]]
                for batch in (*batches, (END_OF_REPLAY, b"")):
                    socket.send_multipart((frames[0], b"", *batch))

    def _open(self, socket: zmq.Socket[Any], endpoint: str, must_bind: bool = False) -> str:
        """Binds or connects; the address with the port that was taken."""
        address = endpoint_of_rank(endpoint, self._rank)
        is_local = must_bind or is_bound(address)
        try:
            if is_open_to_others(address):
                logger.warning(
                    "%s is open to other machines: whoever reaches it reads the tokens of prompts",
                    address,
                )
            if "[" in address:
                socket.setsockopt(self._zmq.IPV6, 1)
            (socket.bind if is_local else socket.connect)(address)
        except self._zmq.ZMQError as error:
            doing = "listen on" if is_local else "connect to"
            raise ConfigError(
                f"kv_events_config: cannot {doing} {address}: {error.strerror}; give an address "
                "such as tcp://127.0.0.1:5557 that is free"
            ) from None
        # With the port that the system picked.
        last = socket.getsockopt_string(self._zmq.LAST_ENDPOINT)
        return last.rstrip("\0") or address


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_bound(endpoint: str) -> bool:
    """Whether an address is this machine's own; others are connected to, as vLLM does."""
    if not endpoint.startswith("tcp://"):
        return True
    host = _host_of(endpoint)
    return host in ("*", "0.0.0.0", "localhost") or "::" in host or host.startswith("127.")


def is_open_to_others(endpoint: str) -> bool:
    """Whether other machines can reach it."""
    if not endpoint.startswith("tcp://") or not is_bound(endpoint):
        return False
    host = _host_of(endpoint)
    return host not in ("localhost", "::1") and not host.startswith("127.")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The address of one of several engines: the port rises, a path gets an ending."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    port = _port_of(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + rank}" if port else endpoint


def _port_of(endpoint: str) -> int:
    """0 where there is none, or the system picks one."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdecimal() else 0
