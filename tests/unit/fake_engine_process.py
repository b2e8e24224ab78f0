"""The engine process with the fake runner: `python -m tests.unit.fake_engine_process FD`.

`EngineConfig.model` tells it how to behave: "fake", "slow steps", "bad config", "bad start",
"slow start"; at the tenth step "dies", "broken" (an invariant fails; "broken and stays" has a
thread that does not end) or "hangs"; or "refuses" (every request, as a device without a context
does).
"""

from __future__ import annotations

import os
import sys
import threading
import time

from openspec.config import EngineConfig
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.request import Request
from openspec.engine.devices import Share
from openspec.engine.processes import process as engine_process
from openspec.errors import ConfigError, EngineError
from tests.unit.fake_core import make_core
from tests.unit.fake_runner import FakeRunner


def load(config: EngineConfig, _: Share) -> EngineCore:
    if config.model == "bad config":
        raise ConfigError("max_model_len 5 exceeds 4;\nlower --max-model-len")
    if config.model == "bad start":
        raise RuntimeError("no such luck")
    if config.model == "slow start":
        time.sleep(60)
    is_broken = str(config.model).startswith("broken")
    if config.model == "broken and stays":
        threading.Thread(target=time.sleep, args=(600,)).start()
    runner = FakeRunner(num_pages=4096, max_model_len=1024, max_num_seqs=config.max_num_seqs)

    def hook(stage: str) -> None:
        time.sleep(0.01 if config.model == "slow steps" else 0.0002)
        if runner.stats.num_steps == 10 and config.model == "dies":
            os._exit(3)
        if runner.stats.num_steps == 10 and is_broken:
            raise EngineError("page 3 is held twice")
        if runner.stats.num_steps == 10 and config.model == "hangs":
            time.sleep(600)

    def check_integrity() -> None:
        if is_broken:
            raise EngineError("page 3 is held twice")

    def add(request: Request) -> int:
        raise RuntimeError("no context")

    runner.hook = hook
    if config.model == "refuses":
        runner.add = add  # type: ignore[method-assign]
    runner.check_integrity = check_integrity  # type: ignore[method-assign]
    return make_core(runner, config.max_num_seqs)


if __name__ == "__main__":
    sys.exit(engine_process.main(load))
