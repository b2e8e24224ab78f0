"""An engine process without a model, for bench/front_load.py: so many tokens a step and sequence.

Its steps take as long as FRONT_LOAD_STEP_MS says, whatever they hold.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import cast

from openspec.config import EngineConfig
from openspec.engine.core.drafters import Drafters
from openspec.engine.core.executor import Runner
from openspec.engine.core.fan_out import fan_out
from openspec.engine.devices import Share
from openspec.engine.processes import process
from openspec.messages import (
    DrafterState,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    SpecDecodeStats,
)

TOKENS_PER_STEP = 5
STEP_MS = "FRONT_LOAD_STEP_MS"
MAX_MODEL_LEN = 16384


class SyntheticCore:
    """What `process.run` needs of an engine core."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        self.info = EngineInfo(
            model=str(config.model_path),
            vocab_size=4096,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=512,
            page_size=config.page_size,
            num_pages=config.max_num_seqs * 1024,
            method=config.method,
            num_speculative_tokens=TOKENS_PER_STEP - 1,
            dtype="float32",
            device="cpu",
            memory_plan={"grammar_bytes": 1 << 28},
            startup_seconds=0.0,
        )
        self.drafters = Drafters(cast(Runner, None), config.method)  # of whom nothing is asked
        self.on_launch: Callable[[int], None] = lambda num_rows: None
        self._stats = EngineStats(num_pages=self.info.num_pages, num_free_pages=self.info.num_pages)
        self._left: dict[str, int] = {}
        self._step_s, self._due = step_s, 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, request: EngineRequest) -> None:
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        for one in fan_out(request):
            self._left[one.request_id] = one.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        now = time.monotonic()
        self._due = max(self._due + self._step_s, now)
        time.sleep(self._due - now)
        self.on_launch(len(self._left))
        self._stats.num_steps += 1
        first = 300 + self._stats.num_steps % 500
        outputs = []
        for request_id, num_left in list(self._left.items()):
            num = min(TOKENS_PER_STEP, num_left)
            is_last = num == num_left
            outputs.append(
                EngineOutput(
                    request_id=request_id,
                    token_ids=list(range(first, first + num)),
                    finish_reason="length" if is_last else None,
                    spec_decode=SpecDecodeStats() if is_last else None,
                )
            )
            self._left[request_id] -= num
            self._stats.num_generation_tokens += num
            if is_last:
                del self._left[request_id]
        return outputs

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self._left)
        return self._stats

    def drafter_state(self) -> DrafterState:
        return self.drafters.state(self._stats)

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


def load(config: EngineConfig, _: Share) -> SyntheticCore:
    return SyntheticCore(config, float(os.environ[STEP_MS]) / 1000)


if __name__ == "__main__":
    sys.exit(process.main(load))  # type: ignore[arg-type]
