"""Compares every token of speculative decoding with plain decoding's, at the size of a real model.

    python -m bench.equality --model DIR --methods ngram,eagle3 --json FILE

Built-in prompts (`openspec.bench.workloads`: chat and repeat in turns), greedy and sampled, at
several numbers of requests at a time, prefix cache on: from the second number on the prompts are in
it. Every answer runs to its limit, and drafts are made at every step, whether they pay or not.
Plain decoding is an engine of one device without a drafter, without a prefix cache. --chunk makes
the others cut prompts to so many rows a step, --tensor-parallel-size gives them so many devices.
Ends with status 1 if one token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openspec.bench.environment import environment
from openspec.bench.workloads import build_workload
from openspec.drafters import plain_method
from openspec.engine.core.engine_core import EngineCore
from openspec.llm import LLM
from openspec.messages import EngineRequest, SamplingParams
from openspec.text.tokenizer import Tokenizer

Answer = tuple[list[int], str | None]
"""Token ids and why they end."""


def prompts_of(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Chat turns as token ids."""
    half = (count + 1) // 2
    sets = [
        build_workload(name, half, seed, vocab_size=tokenizer.num_tokens, input_len=0).prompts
        for name in ("chat", "repeat")
    ]
    turns = [prompt for pair in zip(*sets, strict=True) for prompt in pair][:count]
    return [
        tokenizer.render_chat([{"role": "user", "content": turn.user or ""}]).token_ids
        for turn in turns
    ]


def run(
    core: EngineCore,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    concurrency: int,
) -> list[Answer]:
    """All answers; the next request begins when one ends."""
    answers: list[Answer] = [([], None) for _ in prompts]
    num_sent = num_done = 0
    while num_done < len(prompts) or core.has_work:  # a step ahead holds pages
        while num_sent < len(prompts) and num_sent - num_done < concurrency:
            core.add_request(
                EngineRequest(
                    request_id=str(num_sent),
                    prompt_token_ids=list(prompts[num_sent]),
                    sampling=sampling[num_sent],
                )
            )
            num_sent += 1
        for output in core.step():
            at = int(output.request_id)
            if output.error is not None:
                raise RuntimeError(f"request {at}: {output.error}")
            answers[at] = (answers[at][0] + output.token_ids, output.finish_reason)
            num_done += output.finish_reason is not None
    core.check_integrity()
    return answers


def num_differing(found: Sequence[Answer], expected: Sequence[Answer]) -> int:
    """Tokens that are not what plain decoding wrote in their place, missing ones included."""
    count = 0
    for (tokens, reason), (plain, plain_reason) in zip(found, expected, strict=True):
        same = sum(a == b for a, b in zip(tokens, plain, strict=False))
        count += max(len(tokens), len(plain)) - same
        count += tokens == plain and reason != plain_reason
    return count


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="checkpoint folder; default: the embedded model")
    parser.add_argument("--methods", default="ngram,eagle3")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--chunk", type=int, help="max_num_batched_tokens of engines that draft")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of engines that draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args()
    numbers = [int(text) for text in args.concurrency.split(",")]
    temperatures = [float(text) for text in args.temperatures.split(",")]
    common: dict[str, Any] = {
        "model": args.model,
        "max_num_seqs": max(numbers),
        "stats_interval_s": 0.0,
        "adaptive_speculation": False,
    }

    plain: dict[float, list[Answer]] = {}
    with LLM(**common, method=plain_method(), enable_prefix_caching=False) as llm:
        prompts = prompts_of(llm.tokenizer, args.num_prompts, args.seed)

        def sampling_of(temperature: float) -> list[SamplingParams]:
            return [
                SamplingParams(
                    temperature=temperature, seed=args.seed + i, max_tokens=args.max_tokens
                )
                for i in range(len(prompts))
            ]

        for temperature in temperatures:
            plain[temperature] = run(llm.engine, prompts, sampling_of(temperature), max(numbers))

    record: dict[str, object] = {"environment": environment(vars(args) | {"json": None}, {})}
    cells: list[dict[str, object]] = []
    total = 0
    for method in args.methods.split(","):
        with LLM(
            **common,
            method=method,
            max_num_batched_tokens=args.chunk,
            tensor_parallel_size=args.tensor_parallel_size,
        ) as llm:
            for temperature in temperatures:
                for concurrency in numbers:
                    before = llm.stats()
                    start = time.perf_counter()
                    found = run(llm.engine, prompts, sampling_of(temperature), concurrency)
                    seconds = time.perf_counter() - start
                    after = llm.stats()
                    differing = num_differing(found, plain[temperature])
                    total += differing
                    cells.append(
                        {
                            "method": method,
                            "temperature": temperature,
                            "concurrency": concurrency,
                            "tokens": sum(len(tokens) for tokens, _ in found),
                            "differing": differing,
                            "drafts_accepted": after.num_accepted_tokens
                            - before.num_accepted_tokens,
                            "prefix_cache_hits": after.prefix_cache_hits - before.prefix_cache_hits,
                            "seconds": round(seconds, 2),
                        }
                    )
                    print(json.dumps(cells[-1]), flush=True)
    record["cells"] = cells
    record["differing"] = total
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{total} differing tokens of {sum(int(str(c['tokens'])) for c in cells)}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
