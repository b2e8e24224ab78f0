"""`python -m openspec.doctor --model DIR --method NAME`: does this drafter fit this model?

A drafter that does not fit is still exact, only useless: nothing fails, and hardly a draft is
accepted. This says what the machine has, what the draft checkpoint is and whether its numbers are
numbers. It runs a short text, compares the acceptance with what the method should reach, and where
it is low tries what is likely to be wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from openspec.checkpoint.draft_model import open_draft_checkpoint
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.tensor_info import shown_name
from openspec.checkpoint.weights import LOADABLE_DTYPES, DraftModel, is_finite
from openspec.config import EngineConfig, engine_group, parse_engine_args
from openspec.drafters import get_drafter
from openspec.drafters.spec import DrafterSpec, Options, Variant
from openspec.errors import ConfigError, RequestError, check_is_built
from openspec.messages import (
    SamplingParams,
    SpecDecodeStats,
    acceptance_per_position,
    mean_acceptance_length,
    total_speculation,
)
from openspec.settings.setting import build, check_ranges, group_of, number

CHATS = (
    "Explain in a few sentences how binary search works, then write it in Python.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Think step by step.",
    "Write a short story about a lighthouse keeper who finds a bottle with a letter.",
    "What are the advantages of trains over cars? Give a list of five points.",
)
COMPLETIONS = (
    "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, n):\n",
    "Once upon a time there was a small village by the sea. Every morning the fishermen",
    "import json\n\n\ndef read_settings(path):\n",
    "The water cycle begins when the sun warms the sea. The water",
)
PROBLEM = "PROBLEM:"
MIN_DRAFTS = 20  # fewer say nothing about acceptance
CLEARLY_LONGER = 1.03  # times the mean length; all variants write the same text, so little is noise


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of the check itself."""

    doctor_tokens: int = number(128, 2, 1 << 20)
    """Tokens of each of the texts that the check lets the model write."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the drafter did on the built-in texts."""

    chat: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    completion: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    num_failures: int = 0
    """Steps in which the drafter threw."""

    @property
    def total(self) -> SpecDecodeStats:
        """Both kinds of text together."""
        return total_speculation([self.chat, self.completion])

    @property
    def first(self) -> float:
        """Acceptance at the first position."""
        return next(iter(acceptance_per_position(self.total)), 0.0)

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return mean_acceptance_length(self.total)


Measure = Callable[[EngineConfig], Sample]

DESCRIPTION = """\
Checks a drafter against a model: what the draft checkpoint is, and what is accepted.

Examples:

{heads}

Exit status: 0, it fits; 1, something is wrong, and a line says what; 2, it cannot run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 it fits, 1 it does not, 2 it cannot run."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        config, values = parse_engine_args(
            "python -m openspec.doctor",
            DESCRIPTION,
            argv,
            [group_of("doctor", DoctorConfig)],
        )
        own = build(DoctorConfig, values)
        check_ranges(own)
        check_is_built()
        from openspec.tools.machine import examine_machine  # which loads the compiled core

        has_problem = False
        report = examine(config, lambda one: measure(one, own.doctor_tokens))
        for line in itertools.chain(examine_machine(config.with_folders()), report):
            print(line, flush=True)
            has_problem |= line.startswith(PROBLEM)
    except (ConfigError, RequestError) as error:  # the latter: the texts do not fit max_model_len
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(has_problem)


def examine(config: EngineConfig, measure: Measure) -> Iterator[str]:
    """The report, line by line as it comes; a line that begins with PROBLEM decides.

    Where another configuration accepts more, the line after it starts a server so.

    Raises:
        ConfigError: for a pairing that cannot work at all.
        RequestError: the built-in texts cannot be served.
    """
    asked, config = config, config.with_folders()
    target = ModelConfig.from_folder(config.model_path)
    spec = get_drafter(config.method)
    setup = config.draft_setup(target)
    spec.validate(setup)
    # Draft at every step, or a drafter that accepts little would soon not be asked; and alone.
    config = dataclasses.replace(
        config,
        adaptive_speculation=False,
        draft_memory=None,
        stats_interval_s=0.0,
    )
    yield (
        f"model: {config.model_path}: {target.num_layers} layers, hidden size "
        f"{target.hidden_size}, vocabulary {target.vocab_size}"
    )
    yield f"method: {spec.name}, {config.draft_depth} drafts per step"
    if spec.read_draft_model is not None:
        draft_model = spec.read_draft_model(setup)
        yield f"draft model: {draft_model.folder}"
        yield from (f"  {detail}" for detail in draft_model.details)
        broken = _broken_tensors(draft_model)
        if broken:  # acceptance would say nothing more
            rest = f" (one of {len(broken)} that do)" if len(broken) > 1 else ""
            yield (
                f"{PROBLEM} tensor {shown_name(broken[0])} holds NaN or infinite numbers{rest}; "
                "download the draft model again, or take it from another source"
            )
            return
    if config.draft_depth == 0:
        yield "nothing is drafted, nothing to check"
        return
    sample = measure(config)
    for label, counters in (("chat", sample.chat), ("completion", sample.completion)):
        if counters.num_drafts:
            yield f"acceptance, {label}: {_shown(counters)}"
    if sample.num_failures:
        yield (
            f"{PROBLEM} the drafter failed in {sample.num_failures} steps; the log of "
            "python -m openspec.serve has the reason"
        )
    yield from _judge(asked, config, spec, target, sample, measure)


def _broken_tensors(draft_model: DraftModel) -> list[str]:
    """The loaded tensors that hold NaN or infinity, which raises no error in the engine."""
    checkpoint = open_draft_checkpoint(draft_model.folder)
    return [
        name
        for name, info in checkpoint.tensors.items()
        if info.dtype in LOADABLE_DTYPES
        and name not in draft_model.ignored_tensors
        and not is_finite(checkpoint.values(name))
    ]


def _judge(
    asked: EngineConfig,
    config: EngineConfig,
    spec: DrafterSpec,
    target: ModelConfig,
    sample: Sample,
    measure: Measure,
) -> Iterator[str]:
    if spec.plan_checkup is None:
        yield "the method names no acceptance that it should reach"
        return
    checkup = spec.plan_checkup(config.draft_setup(target))
    usual = ", ".join(f"{100 * share:.0f}%" for share in checkup.usual)
    yield f"usual: {usual} at positions 1 to {len(checkup.usual)} ({checkup.source})"
    if sample.total.num_drafts < MIN_DRAFTS:
        yield (
            f"{PROBLEM} only {sample.total.num_drafts} drafts were made, too few to judge; "
            "raise --doctor-tokens"
        )
        return
    # Always: a neighbouring layer can serve the first draft well and the later ones badly.
    best: tuple[Variant, Sample] | None = None
    for variant in checkup.variants:
        tried = measure(_with_options(config, variant.options))
        yield f"tried {variant.label}: {_shown(tried.total)}"
        if tried.length > (best[1] if best else sample).length:
            best = variant, tried
    if best is not None and best[1].length > CLEARLY_LONGER * sample.length:
        variant, tried = best
        yield (
            f"{PROBLEM} {variant.label}: mean length of {tried.length:.2f}, the "
            f"configuration {sample.length:.2f}: {variant.advice}"
        )
        yield f"  {serve_command(_with_options(asked, variant.options))}"
        sample = tried
    elif sample.first >= checkup.usual[0] - _noise(checkup.usual[0], sample.total.num_drafts):
        yield "the drafter fits the model"
    elif sample.first >= checkup.least_first:
        yield (
            f"the drafter works; {100 * sample.first:.0f}% at position 1 is less than usual, which "
            "can be the draft model, the texts or the target"
        )
    if sample.first < checkup.least_first:
        yield (
            f"{PROBLEM} {100 * sample.first:.0f}% at position 1, below the "
            f"{100 * checkup.least_first:.0f}% that a fitting draft model reaches. The text is "
            "right all the same, but not sooner. Likely:"
        )
        yield from (f"  - {cause}" for cause in checkup.causes)


def _noise(share: float, num_drafts: int) -> float:
    """Two standard errors of a share of so many drafts."""
    return 2 * math.sqrt(share * (1 - share) / num_drafts)


def measure(config: EngineConfig, num_tokens: int) -> Sample:
    """Runs the built-in texts, greedy, on an engine of its own, where nothing else drafts."""
    from openspec.llm import LLM

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    config = dataclasses.replace(config, copied_drafts=False, draft_memory=None)
    with LLM(**dataclasses.asdict(config)) as llm:
        conversations = [[{"role": "user", "content": text}] for text in CHATS]
        without_thinking = {"enable_thinking": False}
        chats = (
            llm.chat(conversations, sampling, use_tqdm=False, chat_template_kwargs=without_thinking)
            if llm.tokenizer.has_chat_template
            else []
        )
        chat, completion = (
            total_speculation([one.metrics.spec_decode or SpecDecodeStats() for one in outputs])
            for outputs in (chats, llm.generate(list(COMPLETIONS), sampling, use_tqdm=False))
        )
        return Sample(chat, completion, llm.stats().num_drafter_failures)


def _with_options(config: EngineConfig, options: Options) -> EngineConfig:
    """A variant's options over the configured ones; the number of drafts may be one of them."""
    changed = dict(options)
    num_drafts = changed.pop("num_speculative_tokens", config.num_speculative_tokens)
    return dataclasses.replace(
        config,
        num_speculative_tokens=None if num_drafts is None else int(num_drafts),
        method_options={**config.method_options, **changed},
    )


def serve_command(config: EngineConfig) -> str:
    """The command line of a server with these settings, for a shell."""
    words = ["python", "-m", "openspec.serve"]
    for setting in engine_group().settings:
        value = getattr(config, setting.name, setting.default)
        if value == setting.default or setting.takes_pairs:
            continue
        if isinstance(value, bool):
            words.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif isinstance(value, dict):
            words += [setting.flag, msgspec.json.encode(value).decode()]
        else:
            words += [setting.flag, str(value)]
    for option in config.drafter.options:
        chosen = config.method_options.get(option.name, option.default)
        if chosen != option.default:
            shown = str(chosen).lower() if isinstance(chosen, bool) else chosen
            words += ["--method-option", f"{option.name}={shown}"]
    return shlex.join(words)


def _shown(counters: SpecDecodeStats) -> str:
    shares = " ".join(f"{100 * share:.0f}%" for share in acceptance_per_position(counters))
    return (
        f"{shares} by position, mean length {mean_acceptance_length(counters):.2f} "
        f"({counters.num_drafts} drafts)"
    )
