"""Stages 2 and 3: the target writes texts, then the head is trained on them within a time limit.

    python -m bench.tiny_model.eagle3.train --data .tiny/eagle3 --out .tiny/eagle3/run \\
        --generate-seconds 60 --max-seconds 240 --compile

Training-time test, as published: the head runs STEPS times over every position, each time with its
own last output where the target's state stood, and is held each time against the target's own
distribution (over the draft vocabulary). Writes `head.pt` and `curve.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import UNLEARNED
from ..model import TinyQwen3
from ..tokenizer import ADDED_TOKENS
from ..train import make_optimizer
from .generate import (
    attend_heads,
    documents_of,
    generate,
    generate_for,
    load_prompts,
    load_target,
    pack,
)
from .head import AFTER_LAYERS, DRAFT_VOCAB, Eagle3Head, Entries, chain_mask
from .prompts import LIMITS, MODEL

STEPS = 6  # passes of the head per position
DECAY = 0.8  # weight of a step against the one before
DOCUMENT_SHARE = 0.1  # of the rows, texts of the target's own training


class Lesson(NamedTuple):
    """What the target says about a batch of rows."""

    tokens: Tensor  # [n, t]
    mask: Tensor  # [n, t, t]
    features: Tensor  # [n, t, 3 * hidden]: of the position before
    truth: Tensor  # [n, t, draft vocabulary]: probabilities of the next token
    best: Tensor  # [n, t]: the draft id of the most likely next token, -1 if it has none
    learned: Tensor  # [n, t]: whether the next token was generated


def draft_vocabulary(documents: list[np.ndarray], rows: int, size: int) -> Tensor:
    """The most frequent generated tokens, and all added ones, in rising order."""
    counts = np.zeros(rows, dtype=np.int64)
    for document in documents:
        counts += np.bincount(document[document < UNLEARNED], minlength=rows)
    counts[list(ADDED_TOKENS.values())] = counts.sum() + 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def trunk(
    model: TinyQwen3, tokens: Tensor, places: Tensor, after_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The target over packed rows: final hidden states and the captured ones side by side."""
    document = (places == 0).cumsum(-1)
    row = torch.arange(places.shape[-1], device=places.device)
    mask = (document[:, :, None] == document[:, None, :]) & (row[:, None] >= row)
    x, captured = model.model.embed_tokens(tokens), []
    for index, layer in enumerate(model.model.layers):
        x = attend_heads(layer, x, places, mask, model.config)
        if index in after_layers:
            captured.append(x)
    return model.model.norm(x), torch.cat(captured, -1)


def teach(
    model: TinyQwen3, vocabulary: Tensor, to_draft: Tensor, tokens: Tensor, places: Tensor
) -> tuple[Tensor, ...]:
    """Marked tokens and their places -> the fields of a lesson.

    What crosses the border of a compiled function is plain tuples; named ones some versions of
    torch cannot take apart again.
    """
    ids = tokens & (UNLEARNED - 1)
    hidden, captured = trunk(model, ids, places, AFTER_LAYERS)
    logits = model.logits(hidden)
    features = F.pad(captured[:, :-1], (0, 0, 1, 0))
    truth = logits[..., vocabulary].float().softmax(-1).to(logits.dtype)
    inside = F.pad(places[:, 1:], (0, 1)) > 0
    learned = inside & F.pad(tokens[:, 1:] < UNLEARNED, (0, 1))
    best = to_draft[logits.argmax(-1)]
    return ids, chain_mask(places), features, truth, best, learned


def measure(
    head: Eagle3Head, state: Tensor, lesson: Lesson, places: Tensor, step: Tensor
) -> Tensor:
    """Sums over the positions: loss, agreement with the target's best token, and their number."""
    logits = head.logits(state).float()
    length = places.shape[1]
    at = torch.arange(length, device=places.device) + step
    inside = at < length
    at = at.clamp(max=length - 1)
    # The position predicted from must lie in the document in which the chain began.
    same = places[:, at] == places + step
    best = lesson.best[:, at]
    counted = lesson.learned[:, at] & same & inside & (places > 0)
    learned = (counted & (best >= 0)).float()
    loss = logits.logsumexp(-1) - (lesson.truth[:, at].float() * logits).sum(-1)
    agreed = (logits.argmax(-1) == best) & counted
    return torch.stack(((loss * learned).sum(), agreed.sum().float(), learned.sum(),
                        counted.sum().float()))  # fmt: skip


def begin(
    head: Eagle3Head, embedding: Tensor, fields: tuple[Tensor, ...], places: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Step 0 of every position: its sums, states and entries."""
    lesson = Lesson(*fields)
    embedded = F.embedding(lesson.tokens, embedding)
    tables = head.tables(places, places.shape[1] + STEPS)
    state, entries = head.first(embedded, lesson.features, lesson.mask, tables, STEPS - 1)
    none = torch.zeros((), dtype=torch.long, device=places.device)
    return measure(head, state, lesson, places, none), state, tuple(entries)


def go_on(
    head: Eagle3Head, embedding: Tensor, fields: tuple[Tensor, ...], places: Tensor,
    state: Tensor, entries: tuple[Tensor, ...], step: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """A further step of every position."""
    lesson, length = Lesson(*fields), places.shape[1]
    at = (torch.arange(length, device=places.device) + step).clamp(max=length - 1)
    embedded = F.embedding(lesson.tokens[:, at], embedding)
    tables = head.tables(places + step, length + STEPS)
    state, made = head.further(embedded, state, Entries(*entries), tables, step)
    return measure(head, state, lesson, places, step), state, tuple(made)


class Trainer:
    """The head, its target, and functions that may be compiled."""

    head: Eagle3Head
    num_steps = STEPS
    step_functions: tuple[Any, Any] = (begin, go_on)

    def __init__(self, target: TinyQwen3, vocabulary: Tensor, is_compiled: bool) -> None:
        self.target = target
        device = target.model.embed_tokens.weight.device
        self.device = device
        self.vocabulary = vocabulary.to(device)
        self.to_draft = torch.full((target.config.vocab_size,), -1, device=device)
        self.to_draft[self.vocabulary] = torch.arange(len(vocabulary), device=device)
        self.head = self.make_head(len(vocabulary)).to(device)
        with torch.no_grad():  # where the head's parts have a counterpart, it begins as that
            self.head.lm_head.weight.copy_(target.model.embed_tokens.weight[self.vocabulary])
            self.head.norm.load_state_dict(target.model.norm.state_dict())
            self.head.fc.weight[:, -target.config.hidden_size :].fill_diagonal_(1)
        self.steps = [torch.tensor(step, device=device) for step in range(1, self.num_steps)]

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=False) if is_compiled else function

        first, further = self.step_functions
        self.teach, self.begin, self.go_on = compiled(teach), compiled(first), compiled(further)

    def make_head(self, draft_vocab: int) -> Eagle3Head:
        """With random weights."""
        return Eagle3Head(draft_vocab)

    def embedding(self) -> Tensor:
        """What tokens become for the head: here the target's."""
        return self.target.model.embed_tokens.weight

    def run(self, tokens: Tensor, places: Tensor) -> Tensor:
        """`measure` of every step, [steps, 4]."""
        embedding = self.embedding()
        with torch.autocast(self.device.type, torch.bfloat16):
            with torch.no_grad():
                fields = self.teach(self.target, self.vocabulary, self.to_draft, tokens, places)
            sums, state, entries = self.begin(self.head, embedding, fields, places)
            all_sums = [sums]
            for step in self.steps:
                sums, state, entries = self.go_on(
                    self.head, embedding, fields, places, state, entries, step
                )
                all_sums.append(sums)
        return torch.stack(all_sums)

    def held_out(self, tokens: Tensor, places: Tensor, rows: int) -> tuple[list[float], ...]:
        """Loss and agreement per step.

        With gradients, which nobody uses: without them all would be compiled once more.
        """
        sums = torch.zeros(self.num_steps, 4, device=self.device)
        for part, at in zip(tokens.split(rows), places.split(rows), strict=True):
            missing = (0, 0, 0, rows - len(part))  # one shape, for the same reason
            unlearned = F.pad(part, missing, value=UNLEARNED)
            sums += self.run(unlearned, F.pad(at, missing)).detach()
        return (sums[:, 0] / sums[:, 2]).tolist(), (sums[:, 1] / sums[:, 3]).tolist()


def endless_rows(
    generated: list[np.ndarray], documents: list[np.ndarray], length: int, size: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Batches of packed rows; the texts in another order each time."""
    num_tokens = sum(len(text) for text in generated)
    drawn = np.random.default_rng(0)

    def packed(epoch: int) -> tuple[Tensor, Tensor]:
        some, left = [], num_tokens * DOCUMENT_SHARE if documents else 0
        while left > 0:
            some.append(documents[drawn.integers(len(documents))])
            left -= len(some[-1])
        tokens, places = pack(generated + some, length, epoch)
        return torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(places.astype(np.int32))

    with ThreadPoolExecutor(1) as worker:
        coming, epoch = worker.submit(packed, 0), 0
        while True:
            (tokens, places), epoch = coming.result(), epoch + 1
            coming = worker.submit(packed, epoch)
            tokens, places = tokens.to(device), places.to(device)
            for rows in torch.randperm(len(tokens), device=device).split(size):
                if len(rows) == size:
                    yield tokens[rows].long(), places[rows].long()


def rate_factor(progress: float, warm_up: float = 0.03, decay_from: float = 0.3) -> float:
    """Up, level, linearly down to zero."""
    if progress < warm_up:
        return progress / warm_up
    return min(1.0, max(0.0, 1 - progress) / (1 - decay_from))


def held_out_texts(
    target: TinyQwen3, prompts: list[np.ndarray], group: str, length: int
) -> tuple[Tensor, Tensor]:
    """The target's greedy answers to held-out prompts, packed."""
    device = target.model.embed_tokens.weight.device
    texts = generate(target, prompts, LIMITS[group], torch.zeros(len(prompts), device=device))
    tokens, places = pack(list(documents_of(texts)), length, 0)
    return (torch.from_numpy(tokens.astype(np.int64)).to(device),
            torch.from_numpy(places.astype(np.int64)).to(device))  # fmt: skip


def save(trainer: Trainer, folder: Path) -> None:
    """The weights as they are."""
    weights = {name: tensor.cpu() for name, tensor in trainer.head.state_dict().items()}
    torch.save({"head": weights, "vocabulary": trainer.vocabulary.cpu()}, folder / "head.pt")


def train(args: argparse.Namespace, make_trainer: type[Trainer] = Trainer) -> None:
    """Generate, then train until the time is used up."""
    start = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writer = load_target(MODEL, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    prompts = load_prompts(args.data / "prompts.npz")
    generated, counts = generate_for(
        writer, prompts, args.generate_rows, args.generate_seconds, args.seed
    )
    held_out = load_prompts(args.data / "held_out.npz")
    asked = held_out["problems"][: args.held_out]
    measured = held_out_texts(writer, asked, "problems", args.length)
    with np.load(args.data / "documents.npz") as file:
        documents = np.split(file["tokens"], file["starts"][1:].astype(np.int64))
    vocabulary = draft_vocabulary(generated, writer.config.vocab_size, args.draft_vocab)
    print(f"{time.monotonic() - start:.0f} s: {len(generated)} texts, new tokens {counts}",
          flush=True)  # fmt: skip

    trainer = make_trainer(load_target(MODEL, device, torch.float32), vocabulary, args.compile)
    optimizer = make_optimizer(trainer.head, args.rate, args.weight_decay, device.type == "cuda")
    weights = torch.tensor([DECAY**step for step in range(trainer.num_steps)], device=device)
    supply = endless_rows(generated, documents, args.length, args.batch, device)
    args.out.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, object]] = []
    recent: list[Tensor] = []
    step, tokens, trained_from = 0, 0, time.monotonic()
    while True:
        elapsed = time.monotonic() - start
        # The first step compiles; the schedule covers what is left after it.
        if step == 1:
            trained_from = time.monotonic()
        used = (time.monotonic() - trained_from) / max(
            1e-3, args.max_seconds - (trained_from - start)
        )
        progress = max(used if step else 0.0, step / args.max_steps)
        if progress >= 1 or step % args.measure_every == 0:
            losses, agreed = trainer.held_out(*measured, args.batch)
            trained = torch.stack(recent).mean(0).tolist() if recent else None
            recent = []
            curve.append({"step": step, "seconds": round(elapsed, 1), "tokens": tokens,
                          "train": trained, "held_out": losses, "agreement": agreed})  # fmt: skip
            print(f"{step:6} {elapsed:6.1f} s", *(f"{x:.3f}" for x in losses), " agreed",
                  *(f"{x:.3f}" for x in agreed), flush=True)  # fmt: skip
            if all(map(math.isfinite, losses)):
                save(trainer, args.out)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rate_factor(progress)
        rows, places = next(supply)
        sums = trainer.run(rows, places)
        losses_of_steps = sums[:, 0] / sums[:, 2].clamp(min=1)
        (losses_of_steps * weights / weights.sum()).sum().backward()
        nn.utils.clip_grad_norm_(trainer.head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(losses_of_steps.detach())
        step, tokens = step + 1, tokens + rows.numel()
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    seconds = time.monotonic() - start
    speed = tokens / (time.monotonic() - trained_from)
    summary = {"options": options, "seconds": round(seconds, 1), "texts": len(generated),
               "new_tokens": counts, "row_tokens_per_second": round(speed),
               "steps": trainer.num_steps, "decay": DECAY, "curve": curve}  # fmt: skip
    (args.out / "curve.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{tokens / 1e6:.1f} M positions, {seconds:.0f} s, {speed / 1e6:.2f} M/s")


def arguments(description: str, out: Path) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=Path(".tiny/eagle3"))
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--generate-seconds", type=float, default=60)
    parser.add_argument("--generate-rows", type=int, default=8192, help="texts at a time")
    parser.add_argument("--max-seconds", type=float, default=240, help="generation included")
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=32, help="rows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--measure-every", type=int, default=500, help="steps")
    parser.add_argument("--held-out", type=int, default=256, help="problems to measure with")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Command line."""
    train(arguments("Texts of the target, then training.", Path(".tiny/eagle3/run")))


if __name__ == "__main__":
    main()
