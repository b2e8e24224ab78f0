"""Stage 2: train the model within a time limit.

    python -m bench.tiny_model.train --data .tiny --out .tiny/run --max-seconds 300 --compile

The learning rate follows the fraction of the time limit (or of --max-steps) that is used: it rises,
stays and falls to zero. Every so often the held-out loss is measured; `best.pt` keeps the weights
with the lowest mean over the groups, `curve.json` all measurements.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import IGNORED, Corpus, Mixture, held_out_rows, split_targets
from .model import TinyQwen3

# Share of the training tokens, all groups of data.py. Small sources get small shares, so that no
# text is read too often.
SHARES = {
    "problems": 0.20,
    "python": 0.29,
    "functions": 0.12,
    "plays": 0.02,
    "scenes": 0.03,
    "copy": 0.34,
    "talk": 0.02,
}


def learning_rate_factor(progress: float, warm_up: float = 0.02, decay_from: float = 0.4) -> float:
    """A trapezoid over the run: up, level, linearly down to zero."""
    if progress < warm_up:
        return progress / warm_up
    return min(1.0, max(0.0, 1 - progress) / (1 - decay_from))


def make_optimizer(model: nn.Module, rate: float, decay: float, fused: bool) -> torch.optim.AdamW:
    """AdamW; matrices shrink, norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Loss of the learned tokens; [batch, length, vocabulary] scores."""
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def loss_of(model: TinyQwen3, inputs: Tensor, targets: Tensor) -> Tensor:
    """What is learned, if nothing else is asked for."""
    return token_loss(model(inputs), targets)


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def held_out_losses(
    model: TinyQwen3, groups: dict[str, Tensor], batch: int, device: torch.device
) -> dict[str, float]:
    """Mean loss per held-out group, in nats per token."""
    model.eval()
    losses = {}
    for name, rows in groups.items():
        total = torch.zeros((), device=device)
        count = 0
        for part in rows.split(batch):
            inputs, targets = split_targets(part)
            with torch.autocast(device.type, torch.bfloat16):
                total += token_loss(model(inputs), targets, "sum")
            count += int((targets != IGNORED).sum())
        losses[name] = float(total) / count
    model.train()
    return losses


def train(
    args: argparse.Namespace,
    make_model: Callable[..., TinyQwen3] = TinyQwen3,
    objective: Callable[..., Tensor] = loss_of,
) -> None:
    """Run until the time or the steps are used up; `objective` is called as `loss_of` is."""
    begin = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(dropout=args.dropout).to(device)
    optimizer = make_optimizer(model, args.rate, args.weight_decay, device.type == "cuda")
    batches = Mixture(Corpus(args.data / "train.npz"), SHARES, args.length, args.seed)
    held_out = Corpus(args.data / "held_out.npz")
    groups = {
        name: torch.from_numpy(
            held_out_rows(held_out, name, args.length, args.held_out_rows).astype(np.int32)
        ).to(device)
        for name in held_out.spans
    }
    args.out.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, object]] = []
    best, recent, step, tokens = float("inf"), [], 0, 0
    supply = batches.batches(args.batch, device)
    trained_from = time.monotonic()
    while True:
        elapsed = time.monotonic() - begin
        if step == 1:  # what comes before compiles; the schedule covers what is left
            trained_from = time.monotonic()
        left = max(1e-3, args.max_seconds - (trained_from - begin))
        used = (time.monotonic() - trained_from) / left if step else 0.0
        progress = max(used, step / args.max_steps)
        if progress >= 1 or step % args.measure_every == 0:
            losses = held_out_losses(model, groups, args.batch, device)
            mean = sum(losses.values()) / len(losses)
            train_loss = float(torch.stack(recent).mean()) if recent else None
            recent = []
            passes = {name: round(count, 2) for name, count in batches.passes.items()}
            curve.append({"step": step, "seconds": round(elapsed, 1), "tokens": tokens,
                          "train": train_loss, "held_out_mean": mean, "held_out": losses,
                          "passes": passes})  # fmt: skip
            shown = " ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"{step:6} {elapsed:6.1f} s  train {train_loss or 0:.3f}  held out {mean:.3f}"
                  f"  {shown}", flush=True)  # fmt: skip
            if mean < best:
                best = mean
                weights = {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}
                torch.save(weights, args.out / "best.pt")
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.rate * learning_rate_factor(progress)
        inputs, targets = next(supply)
        with torch.autocast(device.type, torch.bfloat16):
            loss = objective(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.detach())
        step, tokens = step + 1, tokens + inputs.numel()
    seconds = time.monotonic() - begin
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    speed = tokens / (time.monotonic() - trained_from)
    summary = {"options": options, "seconds": round(seconds, 1), "tokens_per_second": round(speed),
               "shares": SHARES, "best_held_out_mean": best, "curve": curve}  # fmt: skip
    (args.out / "curve.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{tokens / 1e6:.1f} M tokens in {seconds:.0f} s ({speed / 1e6:.2f} M/s); "
          f"passes {curve[-1]['passes']}")  # fmt: skip


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The options of `train`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=Path(".tiny"))
    parser.add_argument("--out", type=Path, default=Path(".tiny/run"))
    parser.add_argument("--max-seconds", type=float, default=300)
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=32, help="rows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--measure-every", type=int, default=500, help="steps")
    parser.add_argument("--held-out-rows", type=int, default=64, help="per group")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    """Command line."""
    args = command_line(__doc__.split("\n")[0] if __doc__ else None).parse_args()
    train(args, objective=torch.compile(loss_of, dynamic=False) if args.compile else loss_of)


if __name__ == "__main__":
    main()
