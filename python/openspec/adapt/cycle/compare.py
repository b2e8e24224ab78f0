"""`python -m openspec.adapt score`: which of several heads drafts best on your prompts.

    python -m openspec.adapt score --model DIR --method METHOD --heads OLD,NEW --prompts FILE.jsonl

The engine answers the prompts with each head, drafting at every step. Texts are the same, so heads
are compared prompt by prompt: tokens over the measured time of prompts and steps.
The first head is the one that the others are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openspec.adapt.decide import Measured, decide
from openspec.adapt.scoring import StepPrices, Tally, step_prices
from openspec.adapt.target import ENGINE_SHARE
from openspec.adapt.texts import Text, read_prompts
from openspec.config import EngineConfig
from openspec.errors import ConfigError, EngineError
from openspec.llm import LLM
from openspec.messages import (
    SamplingParams,
    SpecDecodeStats,
    acceptance_per_position,
    add_counters,
    mean_acceptance_length,
)
from openspec.settings.setting import named, number
from openspec.specs.head import HeadSpec


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of the comparison itself."""

    heads: str | None = named(None, "DIR,DIR,...")
    """Folders of heads; the first is what the others are compared with."""
    prompts: str | None = named(None, "FILE")
    """Prompts to answer, a JSON object on each line: prompt, messages, turns or question."""
    answer_tokens: int = number(256, 2, 1 << 16)
    """Tokens of an answer, at most."""
    temperature: float = number(0.0, 0.0, 100.0)
    """Of the answers."""
    num_requests: int = number(1, 1, 1 << 12)
    """Requests at a time that speeds are predicted for."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One head on all prompts."""

    name: str
    counters: tuple[SpecDecodeStats, ...]
    """Of each prompt."""
    texts: tuple[tuple[int, ...], ...]
    spec: HeadSpec
    prices: StepPrices

    @property
    def measured(self) -> Measured:
        """Prompt by prompt."""
        # Of all steps but the prompt's: the last ones have no room for drafts.
        tallies = [
            Tally(max(0, one.num_steps - 1), len(text) - 1)
            for one, text in zip(self.counters, self.texts, strict=True)
        ]
        return Measured(tallies, [], {}, self.prices.drafted)

    def shown(self) -> str:
        """One line."""
        total = SpecDecodeStats()
        add_counters(total, self.counters)
        places = " ".join(f"{100 * share:.0f}%" for share in acceptance_per_position(total))
        plain = self.prices.plain.speed(Tally(len(text) - 1, len(text) - 1) for text in self.texts)
        return (
            f"{self.name}: {mean_acceptance_length(total):.3f} tokens a step ({places} by place), "
            f"{self.measured.speed:.0f} tokens/s at {self.prices.plain.at}, "
            f"plain decoding {plain:.0f} (by times of prompts and steps)"
        )


def compare_heads(config: EngineConfig, own: ScoreConfig) -> str:
    """The report.

    Raises:
        ConfigError: for a setting, a head or prompts that cannot be used, with the remedy.
    """
    if own.heads is None or own.prompts is None:
        raise ConfigError(f"--{'heads' if own.heads is None else 'prompts'} is needed")
    if not config.drafter.needs_draft_model:
        raise ConfigError(f"--method {config.method} has no heads to compare; name another")
    if config.acceptance != "match":
        raise ConfigError("--acceptance rejection: texts differ by head then; drop it")
    judged: list[Judged] = []
    for folder in own.heads.split(","):
        judged.append(judge(config, folder, own, judged))
    first, lines = judged[0], [one.shown() for one in judged]
    for other in judged[1:]:
        if other.texts != first.texts:
            raise EngineError(f"{other.name}: its texts differ from those of {first.name}")
        lines.append(f"{other.name} is {decide(first.measured, other.measured).why}")
    return "\n".join(lines)


def judge(config: EngineConfig, folder: str, own: ScoreConfig, others: Sequence[Judged]) -> Judged:
    """One head's answers to all prompts; a head like one of the others has its prices."""
    drafting = dataclasses.replace(
        config,
        draft_model=folder,
        adaptive_speculation=False,
        copied_drafts=False,
        draft_memory=None,
        stats_interval_s=0.0,
        gpu_memory_utilization=min(config.gpu_memory_utilization, ENGINE_SHARE),
    ).with_folders()
    with LLM(**dataclasses.asdict(drafting)) as llm:
        room = llm.engine.info.max_model_len - own.answer_tokens
        prompts = read_prompts(Path(str(own.prompts)), llm, room)
        params = [
            SamplingParams(temperature=own.temperature, max_tokens=own.answer_tokens, seed=seed)
            for seed in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_drafts = llm.engine.info.num_speculative_tokens
        setup = drafting.draft_setup(llm.model_config)
    assert drafting.drafter.read_draft_model is not None
    spec = drafting.drafter.read_draft_model(setup).head
    known = [other.prices for other in others if other.spec == spec]
    path = Path(str(drafting.draft_model))
    counters = tuple(one.metrics.spec_decode or SpecDecodeStats() for one in outputs)
    texts = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
    whole = [Text([*a, *b], len(a)) for a, b in zip(prompts, texts, strict=True)]
    prices = known or [step_prices(drafting, path, num_drafts, whole, own.num_requests)]
    return Judged(folder, counters, texts, spec, prices[0])
