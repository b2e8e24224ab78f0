"""Heads side by side on the same texts, none of them drafting for anybody.

Also `python -m openspec.adapt decide`:

    python -m openspec.adapt decide --model DIR --method METHOD --heads OLD,NEW --records DIR
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openspec.adapt.cycle.duty import BesideConfig
from openspec.adapt.decide import Measured, decide, measured
from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import HeadKind, HeadPlan, ReadText, TargetEnds, TrainableHead
from openspec.adapt.replay import HeadStates
from openspec.adapt.scoring import Price, Tally, step_prices, tallies
from openspec.adapt.start import Start, read_head
from openspec.adapt.target import answering_config, check_target, load_ends, set_threads
from openspec.adapt.texts import SourceConfig, Texts, gather
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.llm import LLM
from openspec.settings.setting import named, number
from openspec.specs.head import HeadSpec


@dataclass(frozen=True)
class HeadSourceConfig(SourceConfig):
    """What says which head it is, and which texts."""

    head: str | None = named(None, "KIND")
    """Kind of the head where the method has several; default: the method's name."""
    anchors: int = number(64, 1, 1 << 12)
    """Blocks that begin in a row of texts, in training."""
    num_requests: int = number(1, 1, 1 << 12)
    """Requests at a time that speeds are predicted for."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A head as torch computes it, and what it was made from."""

    start: Start
    kind: HeadKind
    plan: HeadPlan
    head: TrainableHead


def opened(config: EngineConfig, own: HeadSourceConfig) -> Opened:
    """The head that `config` drafts with.

    Raises:
        ConfigError: there is none, or none that is trained here.
    """
    if not config.drafter.needs_draft_model:
        raise ConfigError(f"--method {config.method} has no heads to adapt; name another")
    if config.acceptance != "match":
        raise ConfigError("--acceptance rejection: texts differ by head then; drop it")
    kind = kind_named(own.head or config.method)
    if kind.method != config.method:
        raise ConfigError(f"--head {own.head}: that is for --method {kind.method}")
    target = ModelConfig.from_folder(config.model_path)
    check_target(config, target)
    start = read_head(config, target)
    plan = start.plan(target, own.text_length, own.anchors)
    head = kind.make(plan)
    start.load(head)
    return Opened(start, kind, plan, head)


class Shadow:
    """Held-out texts with what heads of one kind read of them."""

    def __init__(self, states: HeadStates, texts: Texts, num_drafts: int, price: Price) -> None:
        self._texts, self._num_drafts, self._price = texts, num_drafts, price
        self._piece = states.piece
        self._traffic, self._base = states.read(texts.held_out), states.read(texts.base_held_out)

    def measured(self, head: TrainableHead, ends: TargetEnds) -> Measured:
        """How far a head drafts along them."""

        def of(read: Sequence[ReadText]) -> list[Tally]:
            found: list[Tally] = []
            for text in read:
                with self._piece():
                    found += tallies(head, ends, [text], self._num_drafts)
            return found

        traffic = zip(self._texts.held_out, of(self._traffic), strict=True)
        return measured(list(traffic), of(self._base), self._price)


@dataclass(frozen=True)
class DecideConfig(HeadSourceConfig, BesideConfig):
    """Settings of a decision."""

    heads: str | None = named(None, "DIR,DIR,...")
    """Folders of heads; the first is what the others are compared with."""


def decide_heads(config: EngineConfig, own: DecideConfig) -> str:
    """The report.

    Raises:
        ConfigError: for a setting, a head or texts that cannot be used, with the remedy.
    """
    if own.heads is None:
        raise ConfigError("--heads is needed")
    folders = own.heads.split(",")
    own.check_sources()
    if own.prompts is not None:
        own = dataclasses.replace(own, held_out=own.held_out or own.prompts)
    config = config.with_folders()
    found = [opened(dataclasses.replace(config, draft_model=folder), own) for folder in folders]
    lines: list[str] = []
    with LLM(**dataclasses.asdict(answering_config(config))) as llm:
        set_threads(config)
        own.beside(llm)
        ends = load_ends(llm.model_config, torch.device(llm.engine.info.device))
        texts = gather(llm, own, None, lambda *_: None)
        count = config.num_speculative_tokens or found[0].head.most_drafts
        prices: list[tuple[HeadSpec, Price]] = []
        results: list[Measured] = []
        for folder, one in zip(folders, found, strict=True):
            spec = one.start.model.head
            price = next((price for other, price in prices if other == spec), None)
            if price is None:
                at, held_out = own.num_requests, texts.held_out
                of = step_prices(config, Path(folder), count, held_out, at, llm.around_step)
                price = of.drafted
                prices.append((spec, price))
            states = HeadStates(llm, one.head.to(ends.embedding.device), ends)
            results.append(Shadow(states, texts, count, price).measured(one.head, ends))
            lines.append(f"{folder}: {shown(results[-1], count)}")
    lines += [
        f"{folder} is {decide(results[0], result).why}"
        for folder, result in zip(folders[1:], results[1:], strict=True)
    ]
    return "\n".join(lines)


def shown(found: Measured, num_drafts: int) -> str:
    """One line."""
    base = "" if found.base_length is None else f", {found.base_length:.3f} on base texts"
    return (
        f"{found.length:.3f} tokens a step with {num_drafts} drafts, {found.speed:.0f} tokens/s at "
        f"{found.price.at}{base}"
    )
