"""How far a head's drafts would have been accepted, by replay of finished texts.

Speculation does not change a text, greedy or with a given random draw for each position, so a draft
is accepted exactly where it equals the text, and what is drafted at a position depends on the text
alone. So all positions of a text draft at once, and walking along the text from one position to the
next not yet written gives the steps that the engine makes.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openspec.adapt.heads.parts import ReadText, TargetEnds, TrainableHead, mixed_precision
from openspec.adapt.target import ENGINE_SHARE
from openspec.config import EngineConfig
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.load import load_engine
from openspec.errors import ConfigError
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions

TIMED_ANSWERS, TIMED_PROMPT, TIMED_TOKENS, LEAST_TIMED_TOKENS = 3, 32, 256, 16


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Milliseconds of one request's step, from the end of the one before it."""

    plain: float
    drafted: float
    """With the head's drafts."""


def step_prices(config: EngineConfig, method: str, folder: Path, num_drafts: int) -> StepPrices:
    """What steps take with the head in `folder`; they do not depend on its numbers.

    Raises:
        ConfigError: the engine does not take the head.
    """
    timed = dataclasses.replace(
        config,
        method=method,
        draft_model=str(folder),
        num_speculative_tokens=num_drafts,
        max_num_seqs=1,
        adaptive_speculation=False,
        copied_drafts=False,
        gpu_memory_utilization=min(config.gpu_memory_utilization, ENGINE_SHARE),
    )
    with closing(load_engine(timed)) as core:
        return StepPrices(*(step_milliseconds(core, drafts=drafts) for drafts in (False, True)))


def step_milliseconds(core: EngineCore, *, drafts: bool) -> float:
    """The median of an answer's steps, of three answers the least.

    An engine's own times of steps know none between them.

    Raises:
        ConfigError: its texts have no room for an answer of a few steps.
    """
    room = core.info.max_model_len - TIMED_PROMPT
    if room < LEAST_TIMED_TOKENS:
        least = TIMED_PROMPT + LEAST_TIMED_TOKENS
        raise ConfigError(f"--max-model-len: steps are timed with {least} tokens; raise it")
    request = EngineRequest(
        request_id="timed",
        prompt_token_ids=list(range(TIMED_PROMPT)),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=min(room, TIMED_TOKENS), ignore_eos=True, seed=0
        ),
        speculative=SpeculativeOptions(enabled=drafts),
    )
    medians = []
    for _ in range(TIMED_ANSWERS):
        core.add_request(request)
        ends = []
        while core.has_work:
            if core.step():
                ends.append(time.perf_counter())
        medians.append(statistics.median(b - a for a, b in itertools.pairwise(ends)))
    return 1000 * min(medians)


class Tally(NamedTuple):
    """What drafts made of a text, or of several."""

    steps: int
    tokens: int
    """That these steps made."""


@torch.no_grad()
def score(
    head: TrainableHead, ends: TargetEnds, texts: Sequence[ReadText], counts: Sequence[int]
) -> dict[int, float]:
    """Tokens of a step along the texts, the target's own included, by number of drafts.

    A block is drafted anew for each number: its rows see each other.
    """
    lengths: dict[int, float] = {}
    drafts: list[Tensor] = []
    for count in sorted(counts, reverse=True):
        if not (drafts and head.is_chain):
            drafts = [drafted(head, ends, text, count) for text in texts]
        hits = [chain_hits(text, one[:, :count]) for text, one in zip(texts, drafts, strict=True)]
        lengths[count] = length_of(map(walk, hits))
    return dict(sorted(lengths.items()))


def drafted(head: TrainableHead, ends: TargetEnds, text: ReadText, count: int) -> Tensor:
    """What the head drafts along a text, whose states lie wherever there is room."""
    device = ends.embedding.device
    with mixed_precision(device):
        return head.drafts(text._replace(captured=text.captured.to(device)), ends, count)


def chain_hits(text: ReadText, drafts: Tensor) -> list[int]:
    """How many drafts after each position from text.prompt on the text confirms."""
    count = drafts.shape[1]
    ahead = F.pad(text.tokens[text.prompt + 1 :], (0, count), value=-1).unfold(0, count, 1)
    hits: list[int] = (drafts == ahead).long().cumprod(1).sum(1).tolist()
    return hits


def walk(hits: Sequence[int]) -> Tally:
    """Steps, and tokens made by them, from the first token that a drafter can follow."""
    at = steps = 0
    while at + 1 < len(hits):
        at += hits[at] + 1
        steps += 1
    return Tally(steps, len(hits) - 1)


def length_of(tallies: Iterable[Tally]) -> float:
    """Tokens of a step over all texts."""
    steps, tokens = map(sum, zip(*tallies, strict=True))
    return tokens / max(1, steps)


@torch.no_grad()
def tallies(
    head: TrainableHead, ends: TargetEnds, texts: Sequence[ReadText], count: int
) -> list[Tally]:
    """Of each text, with `count` drafts at every step."""
    return [walk(chain_hits(text, drafted(head, ends, text, count))) for text in texts]
