"""`python -m openspec.adapt run`: a head for your own traffic, if there is one to be had.

    python -m openspec.adapt run --model DIR --method METHOD --records DIR --base FILE --out HEAD

Measures how far the present head drafts along texts of the traffic, tries for a moment what
learning brings, and stops where that is next to nothing. Else it fits the draft vocabulary, trains
with a fourth of base texts, and compares both heads on texts that neither has seen. With --server a
running server takes the better head between two steps, and the old one back if its drafts come less
far than before. No text changes, whatever comes of it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from openspec.adapt.cycle.duty import BesideConfig, BusyServerError
from openspec.adapt.cycle.server import Server, counters_of, live_length
from openspec.adapt.cycle.shadow import HeadSourceConfig, Shadow, opened, shown
from openspec.adapt.cycle.vocabulary import (
    CHANGED,
    chosen,
    coverage,
    shares,
    with_vocabulary,
)
from openspec.adapt.cycle.watch import DRAFTS, EXPECTED, LENGTH
from openspec.adapt.decide import Measured, Verdict, decide
from openspec.adapt.heads.parts import TargetEnds, TrainableHead, VocabularyHead
from openspec.adapt.loop import Schedule, Trainer
from openspec.adapt.replay import HeadStates
from openspec.adapt.scoring import Price, step_prices
from openspec.adapt.target import answering_config, load_ends, set_threads
from openspec.adapt.texts import Texts, batches, gather
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.llm import LLM
from openspec.settings.setting import named, number

logger = logging.getLogger(__name__)

TRIAL_S, TRIAL_SHARE, TRIAL_TEXTS = 10.0, 0.1, 16
"""The trial takes the lesser one, seconds or a share of the time, and so many held-out texts."""
TRIAL_WORTH = 1.01
"""What a trial gains that is worth going on from."""
ENOUGH_STEPS = 100
"""A trial of fewer steps says nothing of what learning brings."""
MOST_FORGOTTEN, FORGETTING = 0.99, 10.0
"""Below that share of its length on base texts, a head loses so many times what it forgets."""
ENOUGH_DRAFTS, ROLLBACK_BELOW = 2000, 0.98
"""A swap is taken back if, over so many steps, drafts come less far than that of before."""
GIVEN_UP = 1.1
"""What still waits for a server when so many times `minutes` are over has waited in vain."""
AT_HOME = 0.98
"""Traffic along which a head drafts nearly as far as along its base texts is its own domain."""


@dataclass(frozen=True)
class RunConfig(HeadSourceConfig, BesideConfig):
    """Settings of one turn."""

    out: str | None = named(None, "DIR")
    """Folder of the new head, which is made; for --server below its --drafter-dir."""
    minutes: float = number(8.0, 0.01, 1e6)
    """Wall time of all stages together."""
    answer_share: float = number(0.25, 0.0, 0.9)
    """Of the time, what answers to --prompts take."""
    batch_rows: int = number(4, 1, 1 << 12)
    """Rows of a training step."""
    rate: float | None = number(None, 0.0, 1.0)
    """Learning rate; default: a tenth of the kind's for a new head."""
    max_steps: int | None = number(None, 1, 1 << 40)
    """Steps of training, if the time does not end first."""
    anyway: bool = False
    """Train although the trial says that it is not worth it."""
    force: bool = False
    """Take the new head whatever is decided, unless it has numbers that are not finite."""
    watch_s: float = number(60.0, 0.0, 86400.0)
    """Seconds after the swap in which --server's counters decide whether the head stays."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    before: Measured
    after: Measured
    num_drafts: int
    verdict: Verdict
    notes: list[str] = field(default_factory=list)
    """Sentences about what happened on the way."""

    @property
    def shown(self) -> str:
        """The report."""
        before, after = self.before, self.after
        base = ""
        if before.base_length is not None and after.base_length is not None:
            base = f"; base texts {100 * (after.base_length / before.base_length - 1):+.1f} %"
        return "\n".join(
            [
                f"your traffic: {before.length:.2f} to {after.length:.2f} tokens a step with "
                f"{self.num_drafts} drafts, {before.speed:.0f} to {after.speed:.0f} tokens a "
                f"second at {before.price.at}{base}",
                f"the new head is {self.verdict.why}",
                *self.notes,
            ]
        )


class Turn:
    """One turn, from texts to a head that is taken or not."""

    def __init__(self, config: EngineConfig, own: RunConfig) -> None:
        """Checks what can be checked before the model is loaded.

        Raises:
            ConfigError: with the setting and the remedy.
        """
        self.begin = time.monotonic()
        if own.out is None:
            raise ConfigError("--out is needed")
        own.check_sources()
        self.out, self.own, self.server = Path(own.out), own, own.opened()
        if self.out.exists():
            raise ConfigError(f"--out {self.out} is there already; name a new folder")
        if self.server is not None:
            said = self.server.drafter()
            if said["method"] != config.method:
                raise ConfigError(
                    f"--server {own.server} has --method {said['method']}: it cannot take a head "
                    f"of --method {config.method}; start it with a head of that method"
                )
            config = dataclasses.replace(config, draft_model=config.draft_model or said["folder"])
        self.config = config.with_folders()
        self.old = opened(self.config, own)
        self.num_drafts = self.config.num_speculative_tokens or self.old.head.most_drafts
        self.old.head.learn_for(self.num_drafts)
        self.price: Price | None = None
        self.notes: list[str] = []

    def run(self) -> Outcome:
        """Measures, learns, decides; a head that is taken is written, and swapped in."""
        with LLM(**dataclasses.asdict(answering_config(self.config))) as llm:
            set_threads(self.config)
            self.beside = self.own.beside(llm, self.begin + self._share(GIVEN_UP))
            torch.manual_seed(self.own.training_seed)
            lesson = self._lesson(llm, 0.0, TRIAL_TEXTS)
            before = after = lesson.measured(self.old.head)
            head = self.old.head
            if self.own.anyway or self._is_worth_it(lesson, before):
                lesson = self._lesson(llm, self._share(self.own.answer_share))
                before = lesson.measured(head)
                self._say(f"now {shown(before, self.num_drafts)}")
                head, after = self._learned(lesson, before)
        is_finite = all(bool(one.isfinite().all()) for one in head.state_dict().values())
        verdict = decide(before, after, is_finite)
        outcome = Outcome(before, after, self.num_drafts, verdict, self.notes)
        is_new = head is not self.old.head
        if is_new and (verdict.takes_it or (self.own.force and is_finite)):
            self._take(head, after)
        else:
            self._say("nothing is written, nothing is swapped")
        self._say(f"{(time.monotonic() - self.begin) / 60:.1f} minutes")
        return outcome

    def _share(self, share: float) -> float:
        """Seconds."""
        return self.own.minutes * 60 * share

    def _lesson(self, llm: LLM, seconds: float, few: int | None = None) -> Lessons:
        texts = gather(llm, self.own, seconds, lambda *_: None, few)
        ends = load_ends(llm.model_config, torch.device(llm.engine.info.device))
        self.old.head.to(ends.embedding.device)
        states = HeadStates(llm, self.old.head, ends)
        num_tokens = sum(len(text.tokens) - text.prompt for text in texts.learned)
        self._say(f"{len(texts.learned)} texts, {num_tokens} tokens to learn from")
        if self.price is None:
            folder, at = self.old.start.model.folder, self.own.num_requests
            count, held_out = self.num_drafts, texts.held_out
            of = step_prices(self.config, folder, count, held_out, at, llm.around_step)
            self.price = of.drafted
        return Lessons(texts, ends, states, Shadow(states, texts, self.num_drafts, self.price))

    def _is_worth_it(self, lesson: Lessons, before: Measured) -> bool:
        """Whether a moment of learning shows that there is something to gain, or does not tell."""
        head, best = self.old.head, before
        if not is_at_home(before):
            head, best = self._with_vocabulary(lesson, before)
        trial = self._schedule(lesson, min(TRIAL_S, self._share(TRIAL_SHARE)), 1 << 40)
        trial = dataclasses.replace(trial, clock=self.beside.clock)
        _, best, num_steps = self._trained(lesson, before, head, best, trial)
        gain = worth(before, best)
        tells = is_at_home(before) or num_steps >= ENOUGH_STEPS
        if gain >= TRIAL_WORTH or not tells:
            return True
        self._say(f"do not bother: a trial brings {100 * (gain - 1):+.1f} %")
        return False

    def _schedule(self, lesson: Lessons, seconds: float, measure_every: int | None) -> Schedule:
        hidden = lesson.ends.embedding.shape[1]
        rate = self.own.rate or self.old.kind.rate_of(hidden, is_new=False)
        return Schedule(
            seconds=seconds, max_steps=self.own.max_steps, rate=rate, measure_every=measure_every,
            piece=lesson.states.piece,
        )  # fmt: skip

    def _learned(self, lesson: Lessons, before: Measured) -> tuple[TrainableHead, Measured]:
        """The best head that was found, and what it reaches; the old one if there is none."""
        head, best = self._with_vocabulary(lesson, before)
        self._say_vocabulary(lesson, head)
        left = self._share(1.0) - (time.monotonic() - self.begin)
        rest = self._schedule(lesson, max(1.0, left), None)
        head, best, num_steps = self._trained(lesson, before, head, best, rest)
        self._say(f"{num_steps} steps of training")
        return head, best

    def _with_vocabulary(self, lesson: Lessons, before: Measured) -> tuple[TrainableHead, Measured]:
        """The head with rows for what the traffic writes, if that is better."""
        old = self.old.head
        if not isinstance(old, VocabularyHead):
            return old, before
        texts, size = lesson.texts, len(lesson.ends.embedding)
        traffic, base = shares(texts.traffic, size), shares(texts.base, size)
        head, best = old, before
        known = old.vocabulary.cpu()
        for share in CHANGED:
            vocabulary = chosen(known, traffic, base, len(known) // share)
            with lesson.states.piece():
                made = with_vocabulary(old, self.old.kind, self.old.plan, vocabulary, lesson.ends)
            found = lesson.measured(made)
            if worth(before, found) > worth(before, best):
                head, best = made, found
        return head, best

    def _say_vocabulary(self, lesson: Lessons, head: TrainableHead) -> None:
        old = self.old.head
        if not isinstance(old, VocabularyHead) or not isinstance(head, VocabularyHead):
            return
        traffic = shares(lesson.texts.traffic, len(lesson.ends.embedding))
        covered = [100 * coverage(one.vocabulary.cpu(), traffic) for one in (old, head)]
        if head is old:
            self._say(f"its vocabulary stays: {covered[0]:.1f} % of your tokens are in it")
            return
        is_new = ~torch.isin(head.vocabulary.cpu(), old.vocabulary.cpu())
        self._say(
            f"{int(is_new.sum())} of {len(is_new)} rows of its vocabulary are new: "
            f"{covered[0]:.1f} to {covered[1]:.1f} % of your tokens"
        )

    def _trained(
        self, lesson: Lessons, before: Measured, head: TrainableHead, best: Measured,
        schedule: Schedule,
    ) -> tuple[TrainableHead, Measured, int]:  # fmt: skip
        """Goes on from a head; the best of all that were measured, and how many steps it took."""
        learning, kept = copy.deepcopy(head), head
        found = best

        def measure() -> tuple[float, dict[str, Any]]:
            nonlocal found
            found = lesson.measured(learning)
            said = {"length": found.length, "base": found.base_length}
            return worth(before, found), said

        def keep() -> None:
            nonlocal kept, best
            kept, best = copy.deepcopy(learning), found

        trainer = Trainer(learning, lesson.ends, schedule, None, self.own.training_seed)
        trainer.at.best = worth(before, best)
        trainer.at.curve.append({"step": 0, "length": best.length})  # it has been measured
        sizes = (self.own.text_length, self.own.batch_rows)
        try:
            trainer.run(
                lambda first: lesson.states.lessons(batches(lesson.texts.learned, *sizes, first)),
                measure,
                keep,
            )
        except BusyServerError as error:
            if best is before or schedule.measure_every is not None:  # a trial has told nothing yet
                raise
            self._say(f"{error}; what was best by then is judged")
        return kept, best, trainer.at.step

    def _take(self, head: TrainableHead, after: Measured) -> None:
        self.out.mkdir(parents=True)
        self.old.start.write(self.out, head)
        expected = {DRAFTS: self.num_drafts, LENGTH: after.length}
        (self.out / EXPECTED).write_text(json.dumps(expected) + "\n", "utf-8")
        if self.server is None:
            self._say(
                f"python -m openspec.serve --model {self.config.model_path} --method "
                f"{self.config.method} --draft-model {self.out}"
            )
            return
        try:
            self._say(swap(self.server, self.out, self.num_drafts, self.own.watch_s))
        except ConfigError as error:
            self._say(f"{self.out} is written, but what the server does with it is open: {error}")

    def _say(self, sentence: str) -> None:
        self.notes.append(sentence)
        logger.info("%.0f s: %s", time.monotonic() - self.begin, sentence)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Texts, and what heads read and learn of them."""

    texts: Texts
    ends: TargetEnds
    states: HeadStates
    shadow: Shadow

    def measured(self, head: TrainableHead) -> Measured:
        """How far a head drafts along held-out texts."""
        return self.shadow.measured(head, self.ends)


def is_at_home(head: Measured) -> bool:
    """Whether a head drafts along the traffic as along its base texts."""
    return head.base_length is not None and head.length >= AT_HOME * head.base_length


def worth(first: Measured, other: Measured) -> float:
    """How many times as far drafts come on the traffic; less where base texts are forgotten."""
    gain = other.length / first.length
    if first.base_length is None or other.base_length is None:
        return gain
    return gain - FORGETTING * max(0.0, MOST_FORGOTTEN - other.base_length / first.base_length)


def swap(server: Server, folder: Path, num_drafts: int, watch_s: float) -> str:
    """Has a server take the head, and the old one back if drafts come less far then.

    Raises:
        ConfigError: the server refuses, with its reason.
    """
    old = counters_of(server.drafter())
    said = server.load(str(folder.absolute()))
    version, begin = int(said["version"]), time.monotonic()
    taken = f"the server drafts with it as version {version}"
    if old.num_drafts < ENOUGH_DRAFTS:
        return f"{taken}; too few steps before to compare with"
    while time.monotonic() - begin < watch_s:
        time.sleep(min(1.0, watch_s))
        said = server.drafter()
        if int(said["version"]) != version:
            return f"{taken}; another one has taken its place"
        new = counters_of(said)
        if new.num_drafts >= ENOUGH_DRAFTS:
            lengths = [live_length(one, num_drafts) for one in (old, new)]
            shown = f"{lengths[0]:.2f} tokens a step before, {lengths[1]:.2f} since"
            if lengths[1] < ROLLBACK_BELOW * lengths[0]:
                return f"rolled back to version {server.rollback()['version']}: {shown}"
            return f"{taken}: {shown}"
    return f"{taken}; too few steps since to compare with"
