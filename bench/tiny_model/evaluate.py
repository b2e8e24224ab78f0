"""Stage 4: measure the exported checkpoint with Hugging Face transformers, in fp32.

    python -m bench.tiny_model.evaluate --data .tiny --texts FOLDER --json .tiny/evaluation.json

prints and records held-out loss per source, copy accuracy on held-out passages, the answers that
come out right, and sample texts. It also checks that the chat template renders what the training
documents contain, and that the recipe's model and transformers' agree.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from .augment import final_number
from .batches import IGNORED, Corpus, held_out_rows, split_targets
from .documents import chat
from .model import TinyQwen3
from .sources import load_sources
from .tasks import functions_of, passages


class Evaluation:
    """A loaded checkpoint and what is asked of it."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device).eval()

    @torch.no_grad()
    def loss(self, rows: np.ndarray) -> float:
        """Mean loss of the learned tokens, in nats."""
        total, count = 0.0, 0
        for row in torch.from_numpy(rows.astype(np.int32)).split(1):
            inputs, targets = split_targets(row.to(self.device))
            logits = self.model(inputs).logits.float()[0]
            total += float(
                F.cross_entropy(logits, targets[0], ignore_index=IGNORED, reduction="sum")
            )
            count += int((targets != IGNORED).sum())
        return total / count

    def prompt(self, user: str, thinking: bool) -> list[int]:
        """Token ids of a one-question chat."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": user}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    @torch.no_grad()
    def generate(self, prompt: list[int], limit: int, sample: bool = False) -> list[int]:
        """New token ids, greedy or with the checkpoint's own sampling settings."""
        options: dict[str, Any] = {} if sample else {"temperature": None, "top_k": None}
        if not sample:
            options["top_p"] = None
        ids = torch.tensor([prompt], device=self.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=sample,
            max_new_tokens=limit,
            **options,
        )
        new: list[int] = out[0, len(prompt) :].tolist()
        return new

    def text(self, ids: list[int]) -> str:
        """Decoded text without control tokens."""
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    def copy_accuracy(self, texts: list[str], repeats: str) -> dict[str, float]:
        """Greedy copies: tokens that are right at their place, and whole passages."""
        right = total = whole = 0
        end = self.tokenizer.eos_token_id
        for text in texts:
            wanted = [*self.tokenizer.encode(text), end]
            got = self.generate(self.prompt(repeats.format(p=text), False), len(wanted))
            right += sum(a == b for a, b in zip(got, wanted, strict=False))
            total += len(wanted)
            whole += got == wanted
        return {"tokens": right / total, "passages": whole / len(texts)}


def check_template(evaluation: Evaluation) -> None:
    """A rendered conversation equals the training document of the same conversation."""
    document = chat("Hello", "Hi!", thought="A greeting.", system="Be kind.").text
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!", "reasoning_content": "A greeting."},
    ]
    rendered = evaluation.tokenizer.apply_chat_template(messages, tokenize=False)
    assert document == rendered + "<|endoftext|>", (document, rendered)


@torch.no_grad()
def check_model(evaluation: Evaluation, weights: dict[str, torch.Tensor]) -> float:
    """Largest difference between the recipe's logits and transformers', in fp32."""
    model = TinyQwen3().eval().to(evaluation.device)
    model.load_state_dict({k: v for k, v in weights.items() if k != "lm_head.weight"})
    tokens = torch.randint(0, 4000, (2, 200), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(evaluation.device)
    return float((model(tokens) - evaluation.model(tokens).logits).abs().max())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("python/openspec/models/tiny"))
    parser.add_argument("--data", type=Path, default=Path(".tiny"))
    parser.add_argument("--texts", type=Path, required=True, help="GSM8K and the plays")
    parser.add_argument("--json", type=Path, help="where to record the figures")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows per source")
    parser.add_argument("--questions", type=int, default=100, help="test problems to answer")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    evaluation = Evaluation(args.model, args.device)
    check_template(evaluation)
    result: dict[str, Any] = {
        "logit_difference": check_model(evaluation, evaluation.model.state_dict())
    }
    corpus = Corpus(args.data / "held_out.npz")
    result["loss"] = {
        group: evaluation.loss(held_out_rows(corpus, group, 1024, args.rows))
        for group in corpus.spans
    }
    print(json.dumps(result), flush=True)

    _, held_out = load_sources(args.texts)
    rng = random.Random(7)
    stream = passages(held_out, rng)
    kinds: dict[str, list[str]] = {"python": [], "play": [], "problem": [], "symbols": []}
    while any(len(texts) < 12 for texts in kinds.values()):
        kind, text = next(stream)
        if len(kinds[kind]) < 12:
            kinds[kind].append(text)
    repeat = "Repeat the following text exactly:\n\n{p}"
    result["copy"] = {
        kind: evaluation.copy_accuracy(texts, repeat) for kind, texts in kinds.items()
    }
    print(json.dumps(result["copy"]), flush=True)

    right = 0
    for question, answer in held_out.problems[: args.questions]:
        ids = evaluation.generate(evaluation.prompt(question, False), 300)
        right += final_number(evaluation.text(ids)) == final_number(answer)
    result["problems_right"] = [right, args.questions]
    print(f"right answers: {right} of {args.questions}", flush=True)

    heads = [
        source[: source.index('"""', source.index('"""') + 3) + 3]
        for text in held_out.python_files
        for _, doc, source in functions_of(text)
        if source.count('"""') == 2 and len(doc) < 200
    ]
    scene = "\n\n".join(held_out.plays.split("\n\n")[3:6])
    torch.manual_seed(0)
    samples: dict[str, list[list[str]]] = {"problem": [], "python": [], "verse": [], "repeat": []}
    for index in range(3):
        asked = [
            ("problem", held_out.problems[index][0], index == 2),
            (
                "python",
                f"Complete this Python function.\n\n```python\n{heads[index * 3]}\n```",
                False,
            ),
            ("verse", f"Continue this scene:\n\n{scene}", False),
            ("repeat", repeat.format(p=list(kinds.values())[index][0][:300]), index == 1),
        ]
        for name, user, thinking in asked:
            ids = evaluation.generate(
                evaluation.prompt(user, thinking), 220, sample=name != "repeat"
            )
            samples[name].append([user, evaluation.text(ids)])
            print(f"--- {name}: {user}\n>>> {samples[name][-1][1]}\n", flush=True)
    result["samples"] = samples
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
