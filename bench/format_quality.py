"""What a format of weights does to text and to acceptance: each of FP8 beside bfloat16, on GSM8K.

    python -m bench.format_quality --problems gsm8k_test.jsonl --json FILE [MODEL ...]

Perplexity is of the questions with their answers. Agreement is the share of bfloat16's own greedy
answers that is the first choice with the other weights too, given the same text before; *alone* is
how many tokens the other answer has before it first differs. Tokens a step are of greedy answers
with a draft at every step, with the half width of their 95 % interval over answers.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from openspec.checkpoint.quantization.weight_format import MADE
from openspec.config import EMBEDDED_MODEL
from openspec.llm import LLM
from openspec.messages import SamplingParams, SpecDecodeStats
from openspec.text.outputs import RequestOutput

BFLOAT16 = "bfloat16"


def engine(model: str, name: str, **settings: Any) -> LLM:
    """With the weights made at load."""
    wanted = None if name == BFLOAT16 else name
    return LLM(model=model, quantization=wanted, stats_interval_s=0.0, **settings)


def answers(llm: LLM, questions: Sequence[str], max_tokens: int) -> list[RequestOutput]:
    """Greedy, as chat, thinking off."""
    turns = [[{"role": "user", "content": question}] for question in questions]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    thinking = {"enable_thinking": False}
    return llm.chat(turns, sampling, use_tqdm=False, chat_template_kwargs=thinking)


def scored(llm: LLM, texts: Sequence[list[int]], begins: Sequence[int]) -> tuple[float, float]:
    """Perplexity, and the share of first choices, of each text from its `begin` on."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    losses, hits = list[float](), list[bool]()
    for output, text, begin in zip(
        llm.generate(texts, sampling, use_tqdm=False),
        texts,
        begins,
        strict=True,
    ):
        for token, row in list(zip(text, output.prompt_logprobs or [], strict=True))[begin:]:
            assert row is not None
            losses.append(-row[token].logprob)
            hits.append(row[token].rank == 1)
    return math.exp(mean(losses)), mean(hits)


def tokens_a_step(outputs: Sequence[RequestOutput]) -> tuple[float, float]:
    """Committed in steps with drafts, and the half width of the interval (a ratio's variance)."""
    stats = [output.metrics.spec_decode or SpecDecodeStats() for output in outputs]
    num_drafts = sum(one.num_drafts for one in stats)
    ratio = sum(one.num_accepted_tokens for one in stats) / num_drafts
    squares = sum((one.num_accepted_tokens - ratio * one.num_drafts) ** 2 for one in stats)
    return 1.0 + ratio, 1.96 * math.sqrt(squares) / num_drafts


def same_before(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", default=[str(EMBEDDED_MODEL)])
    parser.add_argument("--problems", type=Path, required=True, help="GSM8K's jsonl")
    parser.add_argument("--count", type=int, default=64, help="problems")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--methods", default="ngram", help="whose acceptance: NAME,...")
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args()
    lines = args.problems.read_text("utf-8").splitlines()[: args.count]
    problems = [json.loads(line) for line in lines]
    questions = [problem["question"] for problem in problems]
    report: dict[str, Any] = {}
    for model in args.models:
        first: list[RequestOutput] = []
        for name in (BFLOAT16, *MADE):
            with engine(model, name, method="none", max_num_seqs=8) as llm:
                found = answers(llm, questions, args.max_tokens)
                first = first or found
                solved = [
                    llm.tokenizer.encode(
                        f"{one['question']}\n{re.sub('<<.*?>>', '', one['answer'])}"
                    )
                    for one in problems
                ]
                whole = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in first]
                begins = [len(one.prompt_token_ids) for one in first]
                pairs = [(a.outputs[0], b.outputs[0]) for a, b in zip(found, first, strict=True)]
                cell = {
                    "perplexity": scored(llm, solved, [1] * len(solved))[0],
                    "agreement": scored(llm, whole, begins)[1],
                    "alone": mean(same_before(a.token_ids, b.token_ids) for a, b in pairs),
                }
            for method in filter(None, args.methods.split(",")):
                drafting = {"method": method, "adaptive_speculation": False, "copied_drafts": False}
                with engine(model, name, **drafting) as llm:
                    cell[method] = tokens_a_step(answers(llm, questions, args.max_tokens))
            report.setdefault(model, {})[name] = cell
            print(model, name, json.dumps(cell), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
