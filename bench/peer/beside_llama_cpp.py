"""Plain decoding on the CPU beside llama.cpp's of the same model, in turn, by processor time.

    LLAMA_CPP_LIB_PATH=DIR python bench/peer/beside_llama_cpp.py MODEL MODEL.gguf

MODEL is a Hugging Face folder, and llama-cpp-python has to be importable. Random prompts, greedy
answers that run to their limit, one thread each. Processor time counts neither what else the
machine does nor waiting for it, but caches and memory are shared all the same: compare ratios of
turns, not turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import llama_cpp as cpp  # type: ignore[import-not-found]

from openspec.llm import LLM
from openspec.messages import EngineRequest, SamplingParams

Times = tuple[float, float]
"""Seconds of a processor for all prompts, and for decoding the rest."""
Prompts = list[list[int]]


def ours(llm: LLM, prompts: Prompts, num_new: int) -> Times:
    """Of one engine."""
    core, sampling = llm.engine, SamplingParams(temperature=0.0, max_tokens=num_new)
    for number, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
        )
    begin, begun, first = time.process_time(), set[str](), 0.0
    while core.has_work:
        begun |= {output.request_id for output in core.step() if output.token_ids}
        if not first and len(begun) == len(prompts):
            first = time.process_time()
    return first - begin, time.process_time() - first


def theirs(context: Any, prompts: Prompts, num_new: int) -> Times:
    """Of llama.cpp: the prompts one by one, then a batch of one token of each a step."""
    cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
    chooser = cpp.llama_sampler_init_greedy()
    size = max(len(prompts[0]), len(prompts))
    batch = cpp.llama_batch_init(size, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, is_last) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, is_last
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        if cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")

    begin, tokens = time.process_time(), []
    for sequence, prompt in enumerate(prompts):
        last = len(prompt) - 1
        decode([(token, at, sequence, at == last) for at, token in enumerate(prompt)])
        tokens.append(cpp.llama_sampler_sample(chooser, context, last))
    first = time.process_time()
    for at in range(num_new - 1):
        decode([(token, len(prompts[0]) + at, i, True) for i, token in enumerate(tokens)])
        tokens = [cpp.llama_sampler_sample(chooser, context, i) for i in range(len(tokens))]
    return first - begin, time.process_time() - first


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("--quantization", nargs="+", default=["bfloat16", "fp8", "fp8_per_block"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    args = parser.parse_args()
    most = max(args.requests)
    silent = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(silent, ctypes.c_void_p())
    settings = cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = most * (args.prompt + args.new), most
    settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = 1
    weights = cpp.llama_model_load_from_file(
        os.fsencode(args.gguf), cpp.llama_model_default_params()
    )
    context = cpp.llama_init_from_model(weights, settings)
    common: dict[str, Any] = {"max_num_seqs": most, "num_threads": 1, "stats_interval_s": 0.0}
    common |= {"method": "none", "enable_prefix_caching": False, "dtype": "bfloat16"}
    sides: dict[str, Callable[[Prompts, int], Times]] = {
        "llama.cpp": lambda prompts, new: theirs(context, prompts, new)
    }
    for name in args.quantization:
        wanted = None if name == "bfloat16" else name
        llm = LLM(model=args.model, quantization=wanted, **common)
        sides[name] = lambda prompts, new, llm=llm: ours(llm, prompts, new)  # type: ignore[misc]
    for count in args.requests:
        times: dict[str, list[Times]] = {name: [] for name in sides}
        for turn in range(args.turns + 1):
            draw = random.Random(turn)
            prompts = [
                [draw.randrange(100, 40000) for _ in range(args.prompt)] for _ in range(count)
            ]
            for name, side in sides.items():
                found = side(prompts, args.new)
                if turn:  # the first one warms up
                    times[name].append(found)
        for name, of in times.items():
            rates = {
                "prompt": [count * args.prompt / one[0] for one in of],
                "decode": [count * (args.new - 1) / one[1] for one in of],
            }
            base = times["llama.cpp"]
            ratios = [b[1] / a[1] for a, b in zip(of, base, strict=True)]
            line = {kind: round(median(rate)) for kind, rate in rates.items()}
            spread = [round(value, 2) for value in (median(ratios), min(ratios), max(ratios))]
            print(count, name, json.dumps(line), "decode x llama.cpp", spread, flush=True)


if __name__ == "__main__":
    main()
