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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openspec.adapt.heads.parts import ReadText, TargetEnds, TrainableHead, mixed_precision
from openspec.adapt.target import ENGINE_SHARE
from openspec.adapt.texts import Text
from openspec.config import EngineConfig
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.load import load_engine
from openspec.errors import ConfigError
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions

Piece = Callable[[], AbstractContextManager[object]]

TIMED_LOOPS, TIMED_ARRIVALS = 3, 6
"""Loops that are timed, and the requests in each that come while others go on."""
TIMED_TOKENS, ARRIVAL_TOKENS = 128, 8
"""Tokens of an answer, and of all answers from one arrival to the next; the larger one counts."""


class Tally(NamedTuple):
    """What drafts made of a text, or of several."""

    steps: int
    tokens: int
    """That these steps made, one of each text was made before."""
    texts: int = 1


@dataclass(frozen=True, slots=True)
class Price:
    """Milliseconds at some number of requests at a time, of which each has its share."""

    step: float
    """From the end of the step before it."""
    request: float = 0.0
    """What one adds beside its steps: its prompt, for which the others wait."""
    num_requests: int = 1

    def speed(self, tallies: Iterable[Tally]) -> float:
        """Tokens a second."""
        steps, tokens, texts = map(sum, zip(*tallies, strict=True))
        return 1000 * (tokens + texts) / (steps * self.step + texts * self.request)

    @property
    def at(self) -> str:
        """For a sentence."""
        return "one request" if self.num_requests == 1 else f"{self.num_requests} requests"


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Of the same requests."""

    plain: Price
    drafted: Price
    """With the head's drafts."""


def step_prices(
    config: EngineConfig, folder: Path, num_drafts: int, texts: Sequence[Text], num_requests: int,
    piece: Piece = nullcontext,
) -> StepPrices:  # fmt: skip
    """What steps and prompts of `texts` take with the head in `folder`, whatever its numbers.

    Loading the engine is a `piece` of work, and so is each loop that is timed.

    Raises:
        ConfigError: the engine does not take the head, or answers have no room for steps.
    """
    timed = dataclasses.replace(
        config,
        draft_model=str(folder),
        num_speculative_tokens=num_drafts,
        max_num_seqs=num_requests,
        adaptive_speculation=False,
        copied_drafts=False,
        enable_prefix_caching=False,
        gpu_memory_utilization=min(config.gpu_memory_utilization, ENGINE_SHARE),
    )
    with piece():
        core = load_engine(timed)
    with closing(core):
        both = (price(core, texts, num_requests, drafts=d, piece=piece) for d in (False, True))
        return StepPrices(*both)


def price(
    core: EngineCore, texts: Sequence[Text], num_requests: int, *, drafts: bool,
    piece: Piece = nullcontext,
) -> Price:  # fmt: skip
    """Of three loops the middle one; an engine's own times of steps know none between two.

    Prompts are of the mean length. At first all places of an answer are there, each in another
    request, as in the long run. As one ends the next one begins. A step's price is the mean of
    those in which all go on, a request's what they leave of the time until the last one's begin.
    """
    turn = max(TIMED_TOKENS, ARRIVAL_TOKENS * num_requests)
    mean = statistics.mean(text.prompt for text in texts)
    usual = itertools.cycle(sorted(texts, key=lambda text: abs(text.prompt - mean)))
    arrivals = list(itertools.islice(usual, TIMED_ARRIVALS))
    asked = []
    for left, text in enumerate(itertools.islice(usual, num_requests)):
        begun = text.prompt + (len(text.tokens) - text.prompt) * left // num_requests
        asked.append((text.tokens[:begun], turn * (num_requests - left) // num_requests))
    asked += [(text.tokens[: text.prompt], turn) for text in arrivals]
    most, size, num_pages = core.info.max_model_len, core.info.page_size, core.info.num_pages
    pages = sorted(-(-min(len(tokens) + count, most) // size) for tokens, count in asked)
    needed = sum(pages[-num_requests:])
    if needed > num_pages:
        raise ConfigError(
            f"--num-requests {num_requests}: {needed} KV pages are needed, {num_pages} are there; "
            "lower it, or raise --kv-cache-memory"
        )
    requests = [
        EngineRequest(
            request_id=f"timed {number}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0),
            speculative=SpeculativeOptions(enabled=drafts),
        )
        for number, (tokens, count) in enumerate(asked)
    ]
    found = []
    for _ in range(TIMED_LOOPS):
        with piece():
            found.append(_timed(core, requests, num_requests))
    return sorted(found, key=lambda one: one.step)[TIMED_LOOPS // 2]


def _timed(core: EngineCore, requests: Sequence[EngineRequest], num_requests: int) -> Price:
    """Of one loop."""
    for request in requests:
        core.add_request(request)
    known, ends = set[str](), list[tuple[float, int, int]]()
    while core.has_work:
        names = {output.request_id for output in core.step()}
        if names and num_requests <= len(names | known) and len(known) < len(requests):
            ends.append((time.perf_counter(), len(names | known), len(names & known)))
        known |= names
        if len(known) == len(requests):  # nothing is timed after that
            for request in requests:
                core.abort(request.request_id)
    whole = [b[0] - a[0] for a, b in itertools.pairwise(ends) if b[2] == num_requests]
    if not whole:
        raise ConfigError(
            f"--num-requests {num_requests}: answers end before all have begun; lower it, or "
            "raise --max-model-len or --max-num-batched-tokens"
        )
    step = statistics.mean(whole) / num_requests
    rest = ends[-1][0] - ends[0][0] - step * sum(num_going for _, _, num_going in ends[1:])
    num_arrivals = len(requests) - ends[0][1]
    return Price(1000 * step, 1000 * rest / num_arrivals, num_requests)


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
    steps, tokens, _ = map(sum, zip(*tallies, strict=True))
    return tokens / max(1, steps)


@torch.no_grad()
def tallies(
    head: TrainableHead, ends: TargetEnds, texts: Sequence[ReadText], count: int
) -> list[Tally]:
    """Of each text, with `count` drafts at every step."""
    return [walk(chain_hits(text, drafted(head, ends, text, count))) for text in texts]
