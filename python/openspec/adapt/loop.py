"""The training loop: schedule, checkpoints, and the head that was best."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from openspec.adapt.heads.parts import Lesson, TargetEnds, TrainableHead, mixed_precision
from openspec.errors import ConfigError

logger = logging.getLogger(__name__)

WEIGHT_DECAY, BETAS, MAX_NORM = 0.1, (0.9, 0.95), 1.0
WARM_UP, DECAY_FROM = 0.03, 0.3  # shares of the time
CHECKPOINT_S = 60.0
MOST_MEASURED = 0.1  # of the time, so that training gets the most of it
STATE, PROGRESS = "checkpoint.safetensors", "progress.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """How far a training has come."""

    step: int = 0
    seconds: float = 0.0
    """Spent in the loop, of all runs together."""
    num_positions: int = 0
    best: float = 0.0
    """Of what is measured on the way, the largest."""
    curve: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When training ends and what happens on the way."""

    seconds: float
    max_steps: int | None
    rate: float
    measure_every: int | None
    """Steps; None: ten times in all at most."""
    clock: Callable[[], float] = time.monotonic
    """What `seconds` are counted by."""
    piece: Callable[[], AbstractContextManager[object]] = nullcontext
    """What each part of a step runs within, one at a time; default: a step has one part."""

    def progress(self, at: Progress) -> float:
        """Of the time, or of the steps where those come first; 1: it is over."""
        of_steps = 0.0 if self.max_steps is None else at.step / self.max_steps
        return max(at.seconds / self.seconds, of_steps)


def rate_factor(progress: float) -> float:
    """Up, level, linearly down to zero."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return min(1.0, max(0.0, 1 - progress) / (1 - DECAY_FROM))


def make_optimizer(head: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW; matrices shrink, norms do not."""
    parameters = list(head.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


class Trainer:
    """A head, its optimizer, and the folder of its checkpoints."""

    def __init__(
        self,
        head: TrainableHead,
        ends: TargetEnds,
        schedule: Schedule,
        folder: Path | None,
        seed: int,
    ) -> None:
        """Without a `folder` no checkpoints are written."""
        self.head, self.ends, self.schedule, self.folder = head, ends, schedule, folder
        self.at = Progress()
        self.optimizer = make_optimizer(head, schedule.rate)
        self.device = ends.embedding.device
        self.seed = seed

    def resume(self, folder: Path) -> None:
        """Goes on where a checkpoint was written; from the beginning if there is none.

        Raises:
            ConfigError: the checkpoint is another head's.
        """
        if not (folder / STATE).is_file():
            return
        read = json.loads((folder / PROGRESS).read_text("utf-8"))
        with safe_open(folder / STATE, framework="torch", device=str(self.device)) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        wanted = {f"head.{name}": one.shape for name, one in self.head.named_parameters()}
        found = {name: one.shape for name, one in state.items() if name.startswith("head.")}
        if wanted != found:
            raise ConfigError(
                f"--resume: the head in {folder} has other sizes; give the settings that it "
                "was begun with"
            )
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(state[f"head.{name}"])
                moments = {moment: state[f"{moment}.{name}"] for moment in MOMENTS}
                steps = torch.tensor(float(read["step"]), device=self.device)
                self.optimizer.state[parameter] = {"step": steps, **moments}
        self.at = Progress(**read)

    def save(self) -> None:
        """Writes a checkpoint; the one before it is there until this one is whole."""
        if self.folder is None:
            return
        state: dict[str, Tensor] = {}
        for name, parameter in self.head.named_parameters():
            state[f"head.{name}"] = parameter.detach()
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        partial = self.folder / f"{STATE}.partial"
        save_file({name: one.contiguous() for name, one in state.items()}, partial)
        progress = self.folder / f"{PROGRESS}.partial"
        progress.write_text(json.dumps(asdict(self.at)) + "\n", "utf-8")
        partial.replace(self.folder / STATE)
        progress.replace(self.folder / PROGRESS)

    def run(
        self,
        lessons: Callable[[int], Iterator[Lesson]],
        measure: Callable[[], tuple[float, dict[str, Any]]],
        keep_best: Callable[[], None],
    ) -> None:
        """Trains until the schedule ends.

        `lessons` gives the batches from a number on. `measure` returns what is to be large, and
        what the curve says of it; `keep_best` is called when it was never larger.
        """
        supply, clock, piece = lessons(self.at.step), self.schedule.clock, self.schedule.piece
        if piece is nullcontext:  # else steps and lessons would wait for each other
            supply = ahead(supply)
        begin, before, saved_at = clock(), self.at.seconds, clock()
        losses: list[Tensor] = []
        measured_at = time_measured = 0.0
        while True:
            progress = self.schedule.progress(self.at)
            is_first = not self.at.curve
            share_measured = time_measured / max(1e-9, clock() - begin)
            is_due = self._is_due(progress - measured_at, share_measured)
            if is_first or progress >= 1 or is_due:
                measured_at, measuring_since = progress, clock()
                loss = float(torch.stack(losses).mean()) if losses else None
                losses = []
                value, said = measure()
                time_measured += clock() - measuring_since
                self._note(value, {"loss": loss, **said})
                if value > self.at.best:
                    self.at.best = value
                    keep_best()
            if progress >= 1:
                break
            losses.append(self._step(next(supply), progress))
            self.at.step += 1
            self.at.seconds = before + clock() - begin
            if clock() - saved_at > CHECKPOINT_S:
                self.save()
                saved_at = clock()
        self.save()

    def _is_due(self, progress_since: float, share_measured: float) -> bool:
        every = self.schedule.measure_every
        if every is not None:
            return self.at.step > 0 and self.at.step % every == 0
        return progress_since >= 0.1 and share_measured <= MOST_MEASURED

    def _step(self, lesson: Lesson, progress: float) -> Tensor:
        rate = self.schedule.rate * rate_factor(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lesson = Lesson(*(one.to(self.device) for one in lesson))
        # By step, so that a training that was resumed draws what it would have drawn.
        random = torch.Generator(self.device).manual_seed(self.seed + self.at.step)
        piece, total = self.schedule.piece, torch.zeros((), device=self.device)
        # Row by row where others wait for the device; a row counts as its tokens do.
        num_rows = len(lesson.tokens) if piece is nullcontext else 1
        parts = [
            Lesson(*some) for some in zip(*(one.split(num_rows) for one in lesson), strict=True)
        ]
        for part in parts:
            with piece():
                share = 1.0
                if len(parts) > 1:
                    share = float(part.learned.sum() / lesson.learned.sum().clamp(min=1))
                with mixed_precision(self.device):
                    loss = share * self.head.loss(part, self.ends, random)
                loss.backward()
                total += loss.detach()
        with piece():
            nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.at.num_positions += lesson.tokens.numel()
        return total

    def _note(self, value: float, said: dict[str, Any]) -> None:
        at = self.at
        at.curve.append({"step": at.step, "seconds": round(at.seconds, 1), **said})
        progress = self.schedule.progress(at)
        left = at.seconds * (1 - progress) / progress if progress else self.schedule.seconds
        logger.info(
            "step %d, %.0f s, about %.0f s left, %d positions: %s",
            at.step,
            at.seconds,
            max(0.0, left),
            at.num_positions,
            ", ".join(f"{name} {_shown(one)}" for name, one in said.items()),
        )


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def ahead(lessons: Iterator[Lesson]) -> Iterator[Lesson]:
    """The same, each made while the one before it is used."""
    with ThreadPoolExecutor(1) as worker:
        coming = worker.submit(next, lessons)
        while True:
            lesson = coming.result()
            coming = worker.submit(next, lessons)
            yield lesson
