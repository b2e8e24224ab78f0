"""Trains a tiny hybrid or a tiny mixture within a time limit and writes its folder.

    python -m bench.tiny_model.targets.train hybrid --data .tiny --out .tiny/hybrid \\
        --max-seconds 220 --compile

The loop, the data and the schedule are the embedded model's. The folder has no tokenizer: it is the
embedded model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batches import Corpus, held_out_rows, split_targets
from ..data import UNLEARNED
from ..export import write_checkpoint
from ..model import TinyQwen3
from ..tokenizer import ADDED_TOKENS, TURN_END
from ..train import command_line, train
from . import hybrid
from .hybrid import TinyHybrid, agreement, joint_loss
from .mixture import TinyMixture, balanced_loss, use_of_experts

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "hybrid": (TinyHybrid, joint_loss),
    "mixture": (TinyMixture, balanced_loss),
}
NUM_WRITTEN = 128  # tokens of an answer


@torch.no_grad()
def written(model: TinyQwen3, corpus: Corpus, count: int) -> Tensor:
    """Greedy answers to held-out problems, a row each; what was given is marked as unlearned."""
    asked = [corpus.tokens[start:end] for start, end in corpus.spans["problems"][:count]]
    prompts = [document[: int((document < UNLEARNED).argmax())] for document in asked]
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.full((count, int(ends.max()) + NUM_WRITTEN), UNLEARNED)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
    rows, ends = rows.to(model.device), ends.to(model.device)
    every = torch.arange(count, device=model.device)
    for _ in range(NUM_WRITTEN):
        hidden = model.model(rows & (UNLEARNED - 1))
        rows[every, ends] = model.logits(hidden[every, ends - 1]).argmax(-1)
        ends += 1
    is_stop = rows == ADDED_TOKENS[TURN_END]
    return torch.where(is_stop.cumsum(-1) > is_stop.long(), rows | UNLEARNED, rows)


@torch.compiler.set_stance("force_eager")
def report(model: TinyQwen3, corpus: Corpus, count: int) -> dict[str, Any]:
    """What the parts of its kind do on held-out texts and on its own answers."""
    groups = {
        name: torch.from_numpy(held_out_rows(corpus, name, 512, count).astype(np.int64))
        for name in corpus.spans
    } | {"own answers": written(model, corpus, count)}
    found = {}
    for name, rows in groups.items():
        inputs, targets = split_targets(rows.to(model.device))
        if isinstance(model, TinyMixture):
            found[name] = use_of_experts(model, inputs)
        elif isinstance(model, TinyHybrid):
            found[name] = agreement(model, inputs, targets)
    return found


def main() -> None:
    """Command line."""
    parser = command_line(__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("kind", choices=KINDS)
    args = parser.parse_args()
    make_model, objective = KINDS[args.kind]
    if args.compile and args.kind == "mixture":
        objective = torch.compile(objective, dynamic=False)
    elif args.compile:  # the whole, with the chunks of all layers, would take minutes
        for name in ("delta_rule", "distance", "token_loss"):
            setattr(hybrid, name, torch.compile(getattr(hybrid, name), dynamic=False))
    train(args, make_model, objective)
    weights = torch.load(args.out / "best.pt", map_location="cpu", weights_only=True)
    model = make_model()
    model.load_state_dict(weights)
    write_checkpoint(model, args.out / "model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = report(model.to(device).eval(), Corpus(args.data / "held_out.npz"), args.held_out_rows)
    print(json.dumps(found))
    (args.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
