"""`python -m openspec.adapt train`: a draft head for a model, from prompts alone.

    python -m openspec.adapt train --model DIR --method METHOD --prompts FILE.jsonl --out DIR

The model answers the prompts, with drafts from the text itself. A head learns from these answers
what the model would say next, and the checkpoint that drafts furthest on prompts held out is kept,
in a format that other engines read as well: --method NAME --draft-model DIR.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import HeadPlan, TrainableHead
from openspec.adapt.loop import Progress, Schedule, Trainer
from openspec.adapt.replay import HeadStates
from openspec.adapt.scoring import StepPrices, score, step_prices
from openspec.adapt.start import read_start
from openspec.adapt.target import (
    answering_config,
    check_target,
    geometry_of,
    load_ends,
    set_threads,
)
from openspec.adapt.texts import (
    SourceConfig,
    Text,
    Texts,
    batches,
    draft_vocabulary,
    gather,
    load_texts,
    save_texts,
    unused_token,
)
from openspec.checkpoint.draft_head import (
    CAPTURE_LAYERS,
    LayerIds,
    captured_layers,
    layers_of_user,
)
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import SINGLE_FILE
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.llm import LLM
from openspec.settings.setting import named, number

logger = logging.getLogger(__name__)

TRAINING = "training"
"""Folder in the head's with what `--resume` goes on from."""
TEXTS = "texts.safetensors"
DRAFTS = "num_speculative_tokens"


@dataclass(frozen=True)
class TrainConfig(SourceConfig):
    """Settings of the training itself."""

    out: str | None = named(None, "DIR")
    """Folder of the head, which is made."""
    resume: bool = False
    """Go on with a training that ended too early, in the same folder."""
    head: str | None = named(None, "KIND")
    """Kind of the head where the method has several; default: the method's name."""
    minutes: float = number(8.0, 0.01, 1e6)
    """Wall time of all stages together."""
    answer_share: float = number(0.25, 0.0, 0.9)
    """Of the time, what the model's answers take; at least one round of prompts is answered."""
    batch_rows: int = number(8, 1, 1 << 12)
    """Rows of a training step."""
    max_steps: int | None = number(None, 1, 1 << 40)
    """Steps of training, if the time does not end first."""
    measure_every: int | None = number(None, 1, 1 << 40)
    """Steps between two measurements; default: a tenth of the time."""
    rate: float | None = number(None, 0.0, 1.0)
    """Learning rate; default: the kind's, less for wide models."""
    draft_vocab_size: int = number(32000, 16, 1 << 24)
    """Target tokens that the head drafts, of those that have a vocabulary of their own."""
    head_intermediate_size: int | None = number(None, 8, 1 << 20)
    """Width of the head's MLP; default: the target's."""
    head_layers: int | None = number(None, 1, 64)
    """Layers of the head; default: the kind's."""
    block_drafts: int = number(15, 1, 63)
    """Drafts of a block."""
    anchors: int = number(64, 1, 1 << 12)
    """Blocks that begin in a row of texts, in training."""
    mask_token: int | None = number(None, 0, 1 << 24)
    """Token id at positions whose token is not known; default: one that no text has."""


class Training:
    """One training, from prompts to the head's folder."""

    def __init__(self, config: EngineConfig, own: TrainConfig) -> None:
        """Checks what can be checked before the model is loaded.

        Raises:
            ConfigError: with the setting and the remedy.
        """
        self.begin = time.monotonic()
        self.config, self.own = config.with_folders(), own
        self.kind = kind_named(own.head or config.method)
        if self.kind.method != config.method:
            raise ConfigError(f"--head {own.head}: that is for --method {self.kind.method}")
        if own.out is None:
            raise ConfigError("--out is needed")
        if not self.kind.has_more_layers and own.head_layers not in (None, self.kind.num_layers):
            raise ConfigError(
                f"--head-layers {own.head_layers}: a head of kind {self.kind.name} has "
                f"{self.kind.num_layers}; drop it, or choose another --head"
            )
        own.check_sources()
        target = ModelConfig.from_folder(self.config.model_path)
        check_target(self.config, target)
        self.start = read_start(self.config, target)
        self.layers = () if self.start is not None else self._layers(target)
        self.out = Path(own.out)
        self.folder = self.out / TRAINING
        if (self.folder / TEXTS).exists() and not own.resume:
            raise ConfigError(f"{self.out} holds a training; go on with --resume, or name another")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {own.out}: {error.strerror}; name another folder") from None

    def run(self) -> dict[str, Any]:
        """Trains; returns the report, which then stands in the folder of the training as well."""
        with LLM(**dataclasses.asdict(answering_config(self.config))) as llm:
            device = torch.device(llm.engine.info.device)
            set_threads(self.config)
            torch.manual_seed(self.own.training_seed)
            texts = self._texts(llm)
            learned, held_out = texts.learned, texts.held_out
            ends = load_ends(llm.model_config, device)
            head = self._head(llm, learned).to(device)
            if self.start is None:
                head.begin_as(ends)
            num_drafts = self.config.num_speculative_tokens or head.most_drafts
            head.learn_for(num_drafts)
            self._write(head)
            prices = step_prices(self.config, self.out, num_drafts, held_out, 1)
            states = HeadStates(llm, head, ends)
            read = states.read(held_out)
            counts = sorted({1, 2, 3, num_drafts})

            def measure() -> tuple[float, dict[str, Any]]:
                lengths = score(head, ends, read, counts)
                speed = 1000 * lengths[num_drafts] / prices.drafted.step
                said = {f"length at {count}": length for count, length in lengths.items()}
                return speed, {**said, "tokens/s": speed}

            trainer = Trainer(head, ends, self._schedule(llm), self.folder, self.own.training_seed)
            if self.own.resume:
                trainer.resume(self.folder)
            trainer.run(
                lambda first: states.lessons(
                    batches(learned, self.own.text_length, self.own.batch_rows, first)
                ),
                measure,
                lambda: self._write(head),
            )
        return self._report(trainer.at, prices, num_drafts, learned, held_out)

    def _head(self, llm: LLM, texts: Sequence[Text]) -> TrainableHead:
        if self.start is None:
            return self.kind.make(self._plan(llm, texts))
        own = self.own
        head = self.kind.make(self.start.plan(llm.model_config, own.text_length, own.anchors))
        self.start.load(head)
        return head

    def _write(self, head: TrainableHead) -> None:
        if self.start is None:
            write_head(self.out, head)
        else:
            self.start.write(self.out, head)

    def _texts(self, llm: LLM) -> Texts:
        """Answers to learn from and to measure with; those of a training that is resumed."""
        path = self.folder / TEXTS
        if path.is_file():
            return load_texts(path)

        def report(num_texts: int, num_tokens: int) -> None:
            seconds = time.monotonic() - self.begin
            logger.info("%.0f s: %d answers, %d tokens", seconds, num_texts, num_tokens)

        seconds = self.own.minutes * 60 * self.own.answer_share
        texts = gather(llm, self.own, seconds, report)
        save_texts(path, texts)
        return texts

    def _plan(self, llm: LLM, texts: Sequence[Text]) -> HeadPlan:
        own, model, kind = self.own, llm.model_config, self.kind
        num_layers = own.head_layers or kind.num_layers
        special = sorted(llm.tokenizer.special_tokens.values())
        size = min(own.draft_vocab_size, model.vocab_size) if kind.has_vocabulary else 0
        return HeadPlan(
            geometry=geometry_of(
                model, kind, own.head_intermediate_size, num_layers, own.text_length
            ),
            capture_layers=self.layers,
            num_target_layers=model.num_layers,
            vocabulary=draft_vocabulary(texts, special, model.vocab_size, size),
            mask_token=unused_token(texts, llm.tokenizer.num_tokens, model.vocab_size, special)
            if own.mask_token is None
            else own.mask_token,
            block_size=own.block_drafts + kind.num_extra_rows,
            num_anchors=own.anchors,
        )

    def _layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Layers of the target that a new head reads."""
        named = layers_of_user(str(self.config.draft_setup(model).options[CAPTURE_LAYERS]))
        count = self.own.head_layers or self.kind.num_layers
        layers = self.kind.default_capture_layers(model.num_layers, count)
        told = f"the default of --head-layers {count} for {model.num_layers} layers"
        return captured_layers(named or LayerIds(layers, "output", told), model.num_layers)

    def _schedule(self, llm: LLM) -> Schedule:
        own, width = self.own, llm.model_config.hidden_size
        rate = self.kind.rate_of(width, is_new=self.start is None)
        return Schedule(
            seconds=max(1.0, own.minutes * 60 - (time.monotonic() - self.begin)),
            max_steps=own.max_steps,
            rate=own.rate or rate,
            measure_every=own.measure_every,
        )

    def _report(
        self, at: Progress, prices: StepPrices, num_drafts: int, learned: Sequence[Text],
        held_out: Sequence[Text],
    ) -> dict[str, Any]:  # fmt: skip
        best = max(at.curve, key=lambda point: float(point["tokens/s"]))
        report = {
            "method": self.kind.method,
            DRAFTS: num_drafts,
            "first": at.curve[0],
            "best": best,
            "plain tokens/s": 1000 / prices.plain.step,
            "step_ms": dataclasses.asdict(prices),
            "texts": len(learned),
            "generated_tokens": sum(len(text.tokens) - text.prompt for text in learned),
            "held_out_texts": len(held_out),
            "positions": at.num_positions,
            "seconds": round(time.monotonic() - self.begin, 1),
            "curve": at.curve,
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        return report


def write_head(folder: Path, head: TrainableHead) -> None:
    """Config and weights in bfloat16, for `--draft-model`."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in head.tensors().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / SINGLE_FILE)
    text = json.dumps(head.config(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def shown(config: EngineConfig, own: TrainConfig, report: dict[str, Any]) -> str:
    """What came out, and how to use it."""
    length = f"length at {report[DRAFTS]}"
    first, best = report["first"], report["best"]
    return (
        f"{own.out}: {best[length]:.2f} tokens a step with {report[DRAFTS]} drafts, "
        f"{first[length]:.2f} before; {best['tokens/s']:.0f} tokens/s at one request, plain "
        f"decoding {report['plain tokens/s']:.0f} (predicted between prompts, "
        f"{report['held_out_texts']} held-out texts)\npython -m openspec.serve "
        f"--model {config.model_path} --method {config.method} --draft-model {own.out}"
    )
