"""What the target computes at each token of a text: captured states, by the engine itself."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from openspec import _C
from openspec.adapt.texts import Rows
from openspec.engine.load import CompiledRunner
from openspec.llm import LLM
from openspec.messages import SamplingParams


class Replay:
    """Replays finished texts as prompts.

    The engine computes them with the kernels that served them, so that a head learns from the very
    states that it will read. Nothing else may use the engine meanwhile.
    """

    def __init__(self, llm: LLM, layers: Sequence[int]) -> None:
        """Captures the outputs of `layers`, from 0, rising."""
        runner, info = llm.engine.runner, llm.engine.info
        assert isinstance(runner, CompiledRunner)
        self._runner, self._most_rows = runner, info.max_num_batched_tokens
        self._width = len(layers) * llm.model_config.hidden_size
        runner.set_capture(list(layers))

    def texts(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The states [tokens, layers * hidden] of each text, float32, on the CPU."""
        found: list[list[Tensor]] = [[] for _ in texts]
        waiting = deque(range(len(texts)))
        running: deque[tuple[int, int, int]] = deque()  # text, slot, tokens that are left
        while waiting or running:
            step = self._plan(texts, waiting, running)
            with _Step(self._runner, [(slot, count) for _, slot, count, _ in step]) as captured:
                parts = captured.split([count for _, _, count, _ in step])
            for (index, slot, _, left), part in zip(step, parts, strict=True):
                found[index].append(part)
                if left == 0:
                    self._runner.remove_sequence(slot)
                else:
                    running.append((index, slot, left))
        return [torch.cat(parts) for parts in found]

    def _plan(
        self,
        texts: Sequence[Sequence[int]],
        waiting: deque[int],
        running: deque[tuple[int, int, int]],
    ) -> list[tuple[int, int, int, int]]:
        """What the next step computes: text, slot, tokens, and how many are left after them."""
        step: list[tuple[int, int, int, int]] = []
        room, pages = self._most_rows, self._runner.num_free_pages
        while room > 0 and (running or (waiting and self._runner.num_free_slots > 0)):
            if running:
                index, slot, left = running.popleft()
            else:
                index = waiting[0]
                slot, left = self._added(texts[index]), len(texts[index])
                waiting.popleft()
            count = min(left, room)
            pages -= self._runner.num_pages_needed(slot, count)
            if pages < 0 and step:
                running.appendleft((index, slot, left))
                break
            step.append((index, slot, count, left - count))
            room -= count
        return step

    def _added(self, text: Sequence[int]) -> int:
        params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=1)
        return self._runner.add_sequence(text, len(text), params)

    def rows(self, rows: Rows) -> Tensor:
        """The states [n, t, layers * hidden] of packed rows, as `texts` has them; else zeros."""
        captured = torch.zeros(*rows.tokens.shape, self._width)
        spans = [
            (row, begin, end)
            for row, places in enumerate(rows.places)
            for begin, end in spans_of(places)
        ]
        found = self.texts([rows.tokens[row, begin:end].tolist() for row, begin, end in spans])
        for (row, begin, end), states in zip(spans, found, strict=True):
            captured[row, begin:end] = states
        return captured


def spans_of(places: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each text of a row, from its positions; a single token is none."""
    begins = [*(places == 0).nonzero()[:, 0].tolist(), len(places)]
    return [(a, b) for a, b in itertools.pairwise(begins) if b - a > 1]


class _Step:
    """One step of spans (slot, tokens), committed when it is left; yields the captured states."""

    def __init__(self, runner: CompiledRunner, spans: Sequence[tuple[int, int]]) -> None:
        self._runner = runner
        self._lease = runner.reserve([(slot, count, 0) for slot, count in spans])

    def __enter__(self) -> Tensor:
        self._lease.launch()
        self._lease.collect()
        return torch.from_numpy(self._runner.captured())

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._lease.commit()
        else:
            self._lease.close()
