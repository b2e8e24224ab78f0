"""What the target computes at each token of a text: captured states, by the engine itself."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from openspec import _C
from openspec.adapt.heads.parts import Lesson, ReadText, TargetEnds, TrainableHead
from openspec.adapt.texts import Rows, Text
from openspec.engine.load import CompiledRunner
from openspec.llm import LLM
from openspec.messages import SamplingParams


class Replay:
    """Replays finished texts as prompts.

    The engine computes them with the kernels that served them, so that a head learns from the very
    states that it will read. Nothing else may use the engine meanwhile.
    """

    def __init__(self, llm: LLM, layers: Sequence[int], like: Tensor | None = None) -> None:
        """Captures the outputs of `layers`, from 0, rising, for the device and type of `like`."""
        runner, info = llm.engine.runner, llm.engine.info
        assert isinstance(runner, CompiledRunner)
        self.piece, self._runner = llm.around_step, runner
        self._most_rows = info.max_num_batched_tokens
        self._width = len(layers) * llm.model_config.hidden_size
        self._like = torch.empty(0) if like is None else like
        runner.set_capture(list(layers))

    def texts(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The states [tokens, layers * hidden] of each text; float32 on the CPU if not told."""
        found: list[list[Tensor]] = [[] for _ in texts]
        waiting = deque(range(len(texts)))
        running: deque[tuple[int, int, int]] = deque()  # text, slot, tokens that are left
        while waiting or running:
            step = self._plan(texts, waiting, running)
            counts = [count for _, _, count, _ in step]
            with self.piece(), _Step(self._runner, [(slot, count) for _, slot, count, _ in step]):
                parts = self._captured(sum(counts)).split(counts)
            for (index, slot, _, left), part in zip(step, parts, strict=True):
                found[index].append(part)
                if left == 0:
                    self._runner.remove_sequence(slot)
                else:
                    running.append((index, slot, left))
        return [torch.cat(parts) for parts in found]

    def _captured(self, num_rows: int) -> Tensor:
        """The states [rows, layers * hidden] of the step that was collected, the caller's own."""
        address = self._runner.captured_address()
        if address == 0:
            return torch.from_numpy(self._runner.captured()).to(self._like)
        there = torch.as_tensor(_OnDevice(address, (num_rows, self._width)), device="cuda")
        states = there.view(torch.bfloat16).to(self._like, copy=True)
        torch.cuda.current_stream().synchronize()  # the next step writes there
        return states

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
        captured = self._like.new_zeros(*rows.tokens.shape, self._width)
        spans = [
            (row, begin, end)
            for row, places in enumerate(rows.places)
            for begin, end in spans_of(places)
        ]
        found = self.texts([rows.tokens[row, begin:end].tolist() for row, begin, end in spans])
        for (row, begin, end), states in zip(spans, found, strict=True):
            captured[row, begin:end] = states
        return captured


class HeadStates:
    """What a head reads of the target, by replay of texts."""

    def __init__(self, llm: LLM, head: TrainableHead, ends: TargetEnds) -> None:
        last = llm.model_config.num_layers - 1
        layers = sorted({*head.capture_layers, last})
        self._replay = Replay(llm, layers, ends.embedding)
        self.piece = self._replay.piece
        self._places = [layers.index(layer) for layer in head.capture_layers]
        self._num_layers = len(layers)
        self._device = ends.embedding.device

    def _split(self, captured: Tensor) -> tuple[Tensor, Tensor]:
        """The states of the head's layers side by side, and those after the last layer."""
        by_layer = captured.unflatten(-1, (self._num_layers, -1))
        return by_layer[..., self._places, :].flatten(-2), by_layer[..., -1, :]

    def read(self, texts: Sequence[Text]) -> list[ReadText]:
        """Texts with what the head may read of them, which would fill much of a GPU: on the CPU."""
        found = self._replay.texts([text.tokens for text in texts])
        return [
            ReadText(
                torch.tensor(text.tokens, device=self._device),
                text.prompt,
                self._split(states)[0].cpu(),
            )
            for text, states in zip(texts, found, strict=True)
        ]

    def lessons(self, rows: Iterator[Rows]) -> Iterator[Lesson]:
        """Rows with all that the head learns from."""
        for batch in rows:
            yield Lesson(*batch, *self._split(self._replay.rows(batch)))


def spans_of(places: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each text of a row, from its positions; a single token is none."""
    begins = [*(places == 0).nonzero()[:, 0].tolist(), len(places)]
    return [(a, b) for a, b in itertools.pairwise(begins) if b - a > 1]


class _OnDevice:
    """Numbers of two bytes in the device's memory, as torch takes them from others."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "typestr": "<i2",
        }  # fmt: skip


class _Step:
    """One step of spans (slot, tokens), committed when it is left."""

    def __init__(self, runner: CompiledRunner, spans: Sequence[tuple[int, int]]) -> None:
        self._runner = runner
        self._lease = runner.reserve([(slot, count, 0) for slot, count in spans])

    def __enter__(self) -> None:
        self._lease.launch()
        self._lease.collect()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._lease.commit()
        else:
            self._lease.close()
