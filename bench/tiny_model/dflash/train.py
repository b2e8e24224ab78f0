"""Stages 2 and 3: the target writes texts, then the heads learn from them side by side.

    python -m bench.tiny_model.dflash.train --data .tiny/eagle3 --out .tiny/dflash \\
        --generate-seconds 45 --max-seconds 300 --compile

Of every row of texts NUM_ANCHORS random positions become anchors; every block sees its own context
and itself, no other block. A share of the blocks is shorter: a head that never saw a short block
drafts nothing of use with one. What is learned at a place is half the target's distribution there,
given the text, and half its best token; places count exp(-(k - 1) / GAMMA). All heads see the same
rows and anchors in every step, so that their difference is their own. Writes `dflash.pt` and so on,
the weights at their best on held-out prompts, and `curve.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import UNLEARNED
from ..eagle3.generate import generate_for, load_prompts, load_target
from ..eagle3.prompts import MODEL
from ..eagle3.train import endless_rows, held_out_texts, rate_factor, trunk
from ..model import Layer, TinyQwen3
from ..train import make_optimizer
from .export import load_head
from .head import (
    AFTER_LAYERS,
    DFLASH,
    LAYOUTS,
    NUM_ANCHORS,
    BlockHead,
    KeysValues,
    Layout,
    Tables,
    block_ids,
    block_layer,
    context_entries,
)
from .selector import SELECTOR_SHARE

GAMMA = 7.0
HARD_SHARE = 0.5  # of the loss, the target's best token; the rest its distribution
LONGEST = max(layout.block_size for layout in LAYOUTS.values())
MOST = DFLASH.num_drafts
MEASURED = (3, MOST)  # drafts of the blocks that the curve is about


def teach(
    model: TinyQwen3, tokens: Tensor, places: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Marked tokens and their places -> ids, captured states, and of the next token: the target's
    probabilities, its best one, whether it was generated; [n, t, ...]."""
    ids = tokens & (UNLEARNED - 1)
    hidden, captured = trunk(model, ids, places, AFTER_LAYERS)
    logits = model.logits(hidden)
    truth = logits.float().softmax(-1).to(logits.dtype)
    inside = F.pad(places[:, 1:], (0, 1)) > 0
    learned = inside & F.pad(tokens[:, 1:] < UNLEARNED, (0, 1))
    return ids, captured, truth, logits.argmax(-1), learned


def choose_anchors(tokens: Tensor, learned: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Rows [n, count] of generated tokens before generated ones, where there are so many."""
    draws = torch.rand(tokens.shape, device=tokens.device, generator=random)
    possible = learned & (tokens < UNLEARNED)
    return (draws + possible).topk(count, -1).indices.sort(-1).values


def seen_context(places: Tensor, anchors: Tensor) -> Tensor:
    """What the blocks see, [n, blocks, t]: their texts before their anchors."""
    text = (places == 0).cumsum(-1)
    row = torch.arange(places.shape[1], device=places.device)
    return (text[:, None] == text.gather(1, anchors)[..., None]) & (row < anchors[..., None])


def choose_lengths(
    anchors: Tensor, most: int, short_share: float, random: torch.Generator
) -> Tensor:
    """Drafts of every block: any number in a share of them, else all."""
    draws = torch.rand(*anchors.shape, 2, device=anchors.device, generator=random)
    some = (draws[..., 0] * most).long() + 1
    return torch.where(draws[..., 1] < short_share, some, most)


def layer_pass(
    layer: Layer, x: Tensor, tables: Tables, context: Tensor, context_tables: Tables, seen: Tensor,
    num_rows: Tensor,
) -> Tensor:  # fmt: skip
    """`block_layer` with the context as one state per position."""
    entries: KeysValues = context_entries(layer, context, context_tables)
    return block_layer(layer, x, tables, entries, seen, num_rows)


def measure(
    head: BlockHead, x: Tensor, embedding: Tensor, fields: tuple[Tensor, ...], places: Tensor,
    anchors: Tensor, num_drafts: Tensor,
) -> Tensor:  # fmt: skip
    """Sums over the blocks by place, [5, drafts]: loss, right drafts, drafts with all before them
    right and themselves, places that count, loss of the confidence."""
    ids, _, truth, best, learned = fields
    state = head.drafting_rows(x)
    count = state.shape[2]
    place = torch.arange(count, device=anchors.device)
    at = anchors[..., None] + place  # of the token before
    last = places.shape[1] - 1
    batch = torch.arange(len(places), device=places.device)[:, None, None]
    inside = (at < last) & (place < num_drafts[..., None])
    at = at.clamp(max=last)
    first = places.gather(1, anchors)[..., None]
    same = places[batch, at] == first + place
    counted = (learned[batch, at] & same & inside).long().cumprod(-1)
    before = ids[batch, at]
    actual = ids[batch, (at + 1).clamp(max=last)]
    if head.layout.selector_rank:
        logits = F.linear(state, embedding).float()
    else:
        logits = head.logits(state, before, embedding).float()
    hard = logits.gather(-1, best[batch, at][..., None])[..., 0]
    soft = (truth[batch, at].float() * logits).sum(-1)
    loss = logits.logsumexp(-1) - HARD_SHARE * hard - (1 - HARD_SHARE) * soft
    chosen = logits.argmax(-1)
    if head.layout.selector_rank:
        more, chosen = head.candidate_selector.lesson(state, before, logits, best[batch, at])
        loss = loss + SELECTOR_SHARE * more
    right = (chosen == actual).long() * counted
    run = right.cumprod(-1)
    rows = [loss * counted, right, run, counted]
    if head.layout.markov_rank:
        guess = head.confidence(state, before).float()
        wrong = F.binary_cross_entropy_with_logits(guess, right.float(), reduction="none")
        rows.append(wrong * F.pad(run[..., :-1], (1, 0), value=1) * counted)
    else:
        rows.append(torch.zeros_like(loss))
    return torch.stack([row.float().sum((0, 1)) for row in rows])


def loss_of(sums: Tensor) -> Tensor:
    """One number to descend from `measure`."""
    places = torch.arange(sums.shape[1], device=sums.device)
    weights = torch.exp(-places / GAMMA)
    loss = (sums[0] * weights).sum() / (sums[3] * weights).sum().clamp(min=1)
    reached = sums[2, :-1].sum() + sums[3, 0]
    return loss + sums[4].sum() / reached.clamp(min=1)


def mean_run(sums: Tensor) -> float:
    """Drafts accepted per anchor, from `measure` of greedy texts."""
    return float(sums[2].sum() / sums[3, 0].clamp(min=1))


class Trainer:
    """The target, the heads, and functions that may be compiled."""

    def __init__(
        self, target: TinyQwen3, is_compiled: bool, begin_with: Path | None,
        names: Iterable[str] = LAYOUTS,
    ) -> None:  # fmt: skip
        self.target = target
        self.device = target.model.embed_tokens.weight.device
        assert all(layout.num_drafts == MOST for layout in LAYOUTS.values())
        self.heads = {
            name: load_head(layout, begin_with / name).requires_grad_().to(self.device)
            if begin_with
            else self._new(layout)
            for name, layout in LAYOUTS.items()
            if name in names
        }

        def compiled(function: Any) -> Any:
            return torch.compile(function, dynamic=False) if is_compiled else function

        self.teach, self.layer_pass = compiled(teach), compiled(layer_pass)
        self.measure = compiled(measure)

    def _new(self, layout: Layout) -> BlockHead:
        head = BlockHead(layout).to(self.device)
        head.norm.load_state_dict(self.target.model.norm.state_dict())
        return head

    def lesson(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """`teach`, once for all heads."""
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            return self.teach(self.target, tokens, places)

    def run(
        self, head: BlockHead, fields: tuple[Tensor, ...], places: Tensor, anchors: Tensor,
        num_drafts: Tensor,
    ) -> Tensor:  # fmt: skip
        """`measure` of one head."""
        embedding = self.target.model.embed_tokens.weight
        rows, length = head.layout.block_size, places.shape[1]
        offsets = torch.arange(rows, device=places.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            x = F.embedding(block_ids(fields[0].gather(1, anchors), rows), embedding)
            x.requires_grad_()  # like every other layer's input, or the first compiles on its own
            positions = places.gather(1, anchors)[..., None] + offsets
            tables = head.tables(positions, length + LONGEST)
            context, context_tables = head.context(fields[1]), head.tables(places, length)
            seen = seen_context(places, anchors)
            num_rows = num_drafts + (not head.layout.is_anchor_first)
            for layer in head.layers:
                x = self.layer_pass(layer, x, tables, context, context_tables, seen, num_rows)
            return self.measure(head, x, embedding, fields, places, anchors, num_drafts)

    def held_out(
        self, tokens: Tensor, places: Tensor, rows: int, num_anchors: int
    ) -> dict[str, dict[int, Tensor]]:
        """`measure` by head and drafts of the blocks, at anchors that stay the same.

        With gradients, which nobody uses: without them all would be compiled once more.
        """
        random = torch.Generator(self.device).manual_seed(0)
        none = torch.zeros(5, MOST, device=self.device)
        sums = {name: dict.fromkeys(MEASURED, none) for name in self.heads}
        for part, at in zip(tokens.split(rows), places.split(rows), strict=True):
            missing = (0, 0, 0, rows - len(part))  # one shape, for the same reason
            part, at = F.pad(part, missing, value=UNLEARNED), F.pad(at, missing)
            fields = self.lesson(part, at)
            anchors = choose_anchors(part, fields[-1], num_anchors, random)
            for name, head in self.heads.items():
                for most in MEASURED:
                    num_drafts = torch.full_like(anchors, most)
                    run = self.run(head, fields, at, anchors, num_drafts)
                    sums[name][most] = sums[name][most] + run.detach()
        return sums


def figures(sums: dict[int, Tensor]) -> dict[str, object]:
    """For the curve, of one head; right drafts given the text, by place, of whole blocks."""
    whole = sums[MOST]
    return {
        "loss": round(float(whole[0].sum() / whole[3].sum().clamp(min=1)), 4),
        "right": [round(x, 4) for x in (whole[1] / whole[3].clamp(min=1)).tolist()],
        "mean_run": {most: round(mean_run(of_length), 4) for most, of_length in sums.items()},
    }


class Curve:
    """What is measured on the way, and the weights when they were best."""

    def __init__(self, out: Path) -> None:
        self.out, self.points = out, list[dict[str, object]]()
        self.best: dict[str, float] = {}

    def add(
        self, trainer: Trainer, step: int, seconds: float, sums: dict[str, dict[int, Tensor]]
    ) -> None:
        """Records one point; writes the heads that have never been better."""
        point = {name: figures(sums_of_one) for name, sums_of_one in sums.items()}
        self.points.append({"step": step, "seconds": round(seconds, 1), **point})
        for name, head in trainer.heads.items():
            run = sum(map(mean_run, sums[name].values()))
            if run >= self.best.get(name, 0.0):  # never a NaN
                self.best[name] = run
                weights = {key: tensor.cpu() for key, tensor in head.state_dict().items()}
                torch.save(weights, self.out / f"{name}.pt")
        print(f"{step:6} {seconds:6.1f} s", json.dumps(point), flush=True)


def train(args: argparse.Namespace) -> None:
    """Generate, then train until the time is used up."""
    start = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writer = load_target(MODEL, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    generated, counts = generate_for(
        writer, load_prompts(args.data / "prompts.npz"), args.generate_rows,
        args.generate_seconds, args.seed,
    )  # fmt: skip
    asked = load_prompts(args.data / "held_out.npz")["problems"][: args.held_out]
    measured = held_out_texts(writer, asked, "problems", args.length)
    print(f"{time.monotonic() - start:.0f} s: {len(generated)} texts, new tokens {counts}",
          flush=True)  # fmt: skip

    names = args.heads.split(",")
    trainer = Trainer(
        load_target(MODEL, device, torch.float32), args.compile, args.begin_with, names
    )
    optimizers = {
        name: make_optimizer(head, args.rate, args.weight_decay, device.type == "cuda")
        for name, head in trainer.heads.items()
    }
    supply = endless_rows(generated, [], args.length, args.batch, device)
    random = torch.Generator(device).manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    curve = Curve(args.out)
    step, trained_from = 0, time.monotonic()
    while True:
        # The first step compiles; the schedule covers what is left after it.
        if step == 1:
            trained_from = time.monotonic()
        left = max(1e-3, args.max_seconds - (trained_from - start))
        used = (time.monotonic() - trained_from) / left if step else 0.0
        progress = max(used, step / args.max_steps)
        if progress >= 1 or step % args.measure_every == 0:
            sums = trainer.held_out(*measured, args.batch, args.anchors)
            curve.add(trainer, step, time.monotonic() - start, sums)
        if progress >= 1:
            break
        rows, places = next(supply)
        fields = trainer.lesson(rows, places)
        anchors = choose_anchors(rows, fields[-1], args.anchors, random)
        num_drafts = choose_lengths(anchors, MOST, args.short_share, random)
        for name, head in trainer.heads.items():
            for group in optimizers[name].param_groups:
                group["lr"] = args.rate * rate_factor(progress)
            loss_of(trainer.run(head, fields, places, anchors, num_drafts)).backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad()
        step += 1
    seconds = time.monotonic() - start
    blocks = step * args.batch * args.anchors
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    summary = {"options": options, "seconds": round(seconds, 1), "texts": len(generated),
               "new_tokens": counts, "blocks_per_head": blocks, "gamma": GAMMA,
               "hard_share": HARD_SHARE, "curve": curve.points}  # fmt: skip
    (args.out / "curve.json").write_text(json.dumps(summary, indent=1) + "\n")
    trained = time.monotonic() - trained_from
    print(f"{step} steps, {blocks / 1e6:.2f} M blocks per head, {trained:.0f} s, "
          f"{1e3 * trained / max(1, step):.1f} ms per step", flush=True)  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(".tiny/eagle3"))
    parser.add_argument("--out", type=Path, default=Path(".tiny/dflash"))
    parser.add_argument("--heads", default="dflash,dspark", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--begin-with", type=Path, help="folder of exported heads to go on from")
    parser.add_argument("--generate-seconds", type=float, default=45)
    parser.add_argument("--generate-rows", type=int, default=8192, help="texts at a time")
    parser.add_argument("--max-seconds", type=float, default=300, help="all stages together")
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=32, help="rows")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--anchors", type=int, default=NUM_ANCHORS, help="per row")
    parser.add_argument("--short-share", type=float, default=0.5, help="blocks of any length")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--measure-every", type=int, default=500, help="steps")
    parser.add_argument("--held-out", type=int, default=256, help="problems to measure with")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
