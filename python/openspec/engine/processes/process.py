"""The engine core in its process: `python -m openspec.engine.processes.process FD HEARTBEAT_FD`.

FD is a socket to the client; see `protocol.py` for what is said on it. HEARTBEAT_FD is memory that
both share; see `heartbeat.py`. The process does nothing but step: it waits for the socket when
idle, looks at it between steps without blocking, and ends when the client does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TypeAlias

from openspec.checkpoint.targets import all_kinds
from openspec.checkpoint.weights import LIBRARY
from openspec.child_process import die_with_owner
from openspec.config import EngineConfig
from openspec.drafters import all_drafters
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.fan_out import sequence_ids
from openspec.engine.devices import Share
from openspec.engine.processes import protocol
from openspec.engine.processes.heartbeat import ROW_S, Heartbeat
from openspec.engine.processes.log import log_to_stderr, open_standard_files
from openspec.engine.start_phases import Phases, process_age_s
from openspec.errors import ConfigError, EngineError, RequestError, cut, out_of_memory
from openspec.messages import EngineStats

logger = logging.getLogger(__name__)

IDLE_BEAT_S = 1.0
LOAD_LOOK_S = 0.01
"""How long an idle engine waits at a time while a draft head is loaded."""

Load: TypeAlias = Callable[[EngineConfig, Share], EngineCore]


def run(channel: protocol.EngineChannel, heartbeat: Heartbeat, load: Load) -> int:
    """Loads the engine and serves the client until it closes; returns the exit status."""
    core = None
    try:
        core = _start(channel, heartbeat, load)
        if core is None:
            return 1
        with contextlib.closing(core):
            while _exchange(channel, heartbeat, core):
                outputs = core.step()
                if outputs:
                    channel.send(protocol.Outputs(outputs))
        return 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the client is gone, and nobody is left to work for
    except Exception as error:
        memory_error = out_of_memory(error)
        reason = memory_error or _one_line(error)
        # What the engine itself found wrong needs no traceback.
        is_known = memory_error is not None or isinstance(error, EngineError)
        logger.error("the engine stops: %s", reason, exc_info=not is_known)
        with contextlib.suppress(OSError):
            channel.send(protocol.Fatal(reason, None if core is None else _last_stats(core)))
        return 1


def _last_stats(core: EngineCore) -> EngineStats | None:
    """Of an engine that is broken, and may know nothing any more."""
    try:
        return core.stats()
    except Exception:
        logger.exception("the last counters of the engine are lost")
        return None


def _start(channel: protocol.EngineChannel, heartbeat: Heartbeat, load: Load) -> EngineCore | None:
    first = channel.receive(wait_s=None)[0]
    if not isinstance(first, protocol.Start):
        raise EOFError
    os.environ.update(first.environ)
    log_to_stderr(first.log_level, first.share.role)
    try:
        core = load(first.config, first.share)
    except ConfigError as error:
        channel.send(protocol.StartFailed(_one_line(error), is_config_error=True))
        return None
    except Exception as error:
        memory_error = out_of_memory(error)
        if memory_error is None:
            logger.exception("the engine did not start")
        channel.send(protocol.StartFailed(memory_error or _one_line(error), is_config_error=False))
        return None
    gc.collect()
    gc.freeze()
    heartbeat.beat()  # whatever holds the loop up from here on shows
    channel.send(protocol.Ready(core.info))
    row_s = ROW_S[core.info.device]
    core.on_launch = lambda num_rows: heartbeat.beat(num_rows * row_s)
    return core


def _exchange(channel: protocol.EngineChannel, heartbeat: Heartbeat, core: EngineCore) -> bool:
    """Takes what the client sent, waiting for it if there is no work. False: the client closes."""
    while True:
        idle_s = LOAD_LOOK_S if core.drafters.is_loading else IDLE_BEAT_S
        wait_s = 0.0 if core.has_work else idle_s
        heartbeat.beat(wait_s)
        for message in channel.receive(wait_s):
            if isinstance(message, protocol.Close):
                return False
            _handle(channel, core, message)
        if (load := core.drafters.take_load()) is not None:
            _answer_drafter(channel, core, load.result)
        if core.has_work:
            return True


def _handle(channel: protocol.EngineChannel, core: EngineCore, message: protocol.ToEngine) -> None:
    if isinstance(message, protocol.Submit):
        try:
            core.add_request(message.request)
        except RequestError as error:
            request_ids = sequence_ids(message.request)
            channel.send(protocol.Rejected(request_ids, str(error), error.param, error.code))
    elif isinstance(message, protocol.Abort):
        for request_id in message.request_ids:
            core.abort(request_id)
    elif isinstance(message, protocol.ReadStats):
        channel.send(protocol.Stats(core.stats(), core.drafter_state()))
    elif isinstance(message, protocol.ResetPrefixCache):
        core.reset_prefix_cache()
    elif isinstance(message, protocol.StageDrafter):
        try:
            core.drafters.begin_load(message.path, message.sha256)
        except RequestError as error:
            _refuse_drafter(channel, core, error)
    elif isinstance(message, protocol.ExchangeDrafter):
        exchange = functools.partial(
            core.exchange_drafter,
            back=message.back,
            flush_prefix_cache=message.flush_prefix_cache,
            weight_version=message.weight_version,
        )
        _answer_drafter(channel, core, exchange)
    elif isinstance(message, protocol.SetVocabulary):
        core.grammars.set_vocabulary(message.tokens, message.vocab_size, message.stop_ids)
    elif isinstance(message, protocol.LoadGrammar):
        core.grammars.load_grammar(message.key, message.data)
    elif isinstance(message, protocol.DropGrammar):
        core.grammars.drop_grammar(message.key)


def _answer_drafter(
    channel: protocol.EngineChannel, core: EngineCore, act: Callable[[], object]
) -> None:
    try:
        act()
    except RequestError as error:
        _refuse_drafter(channel, core, error)
    else:
        channel.send(protocol.DrafterAnswer(core.drafter_state()))


def _refuse_drafter(channel: protocol.EngineChannel, core: EngineCore, error: RequestError) -> None:
    answer = protocol.DrafterAnswer(core.drafter_state(), str(error), error.param, error.code)
    channel.send(answer)


def _one_line(error: Exception) -> str:
    return cut(" ".join(str(error).split())) or type(error).__name__


def main(load: Load | None = None) -> int:
    """Entry point of the process."""
    die_with_owner()
    open_standard_files()
    # The client decides when this process ends: Ctrl-C, a service manager's SIGTERM and the end of
    # a terminal reach it too, while the server still drains.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # shows where an engine hangs
    channel = protocol.EngineChannel(socket.socket(fileno=int(sys.argv[1])))
    heartbeat = Heartbeat(int(sys.argv[2]))
    if load is None:
        phases = Phases(process_age_s())
        _import_ahead()
        phases.end("imports")
        load = functools.partial(_load, phases)
    return run(channel, heartbeat, load)


def _import_ahead() -> None:
    """Imports what loading takes, before the first message: it may come much later.

    No context of a device is made, and no environment read that the first message may change.
    """
    with contextlib.suppress(Exception):  # `_load` meets it again, and it is reported
        importlib.import_module("openspec.engine.load")
        importlib.import_module(LIBRARY)
        all_drafters()
        all_kinds()


def _load(phases: Phases, config: EngineConfig, share: Share) -> EngineCore:
    phases.end("wait for settings")
    # Here, so that an import that fails (no compiled core) is reported like any start-up error.
    from openspec.engine.load import load_engine

    return load_engine(config, share=share, phases=phases)


if __name__ == "__main__":
    sys.exit(main())
