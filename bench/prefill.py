"""How fast prompts are computed: time to the first token at the engine, and the share of the matrix
rate that this is.

    python -m bench.prefill --model DIR --json FILE

The matrix rate is torch's (cuBLAS's) product of two 8192 x 8192 matrices in bf16, measured in the
same run. What a prompt of n tokens costs: two operations for each weight of the layers and token,
and 2 n^2 for each dimension of each query head and layer, scores and values, half of it masked.
The LM head runs for one row and is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch

from openspec.bench.environment import environment
from openspec.checkpoint.targets.config import ModelConfig
from openspec.drafters import plain_method
from openspec.engine.core.engine_core import EngineCore
from openspec.llm import LLM
from openspec.messages import EngineRequest, SamplingParams


def matrix_rate(size: int = 8192, turns: int = 30) -> float:
    """Operations per second of a bf16 product on the GPU."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds: list[float] = []
    for _ in range(turns):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, b)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / median(seconds[turns // 3 :])


def operations(model: ModelConfig, num_tokens: int) -> float:
    """Multiplications and additions of a prompt."""
    q = model.num_q_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    weights = model.hidden_size * (2 * q + 2 * kv + 3 * model.intermediate_size)
    return model.num_layers * num_tokens * (2.0 * weights + 2.0 * q * num_tokens)


def first_token_seconds(core: EngineCore, prompt: list[int]) -> float:
    """From adding the request to its first token, nothing else running."""
    request = EngineRequest(
        request_id="0", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1)
    )
    start = time.perf_counter()
    core.add_request(request)
    while True:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.finish_reason is not None:
                return time.perf_counter() - start


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="checkpoint folder; default: the embedded model")
    parser.add_argument("--prompt-tokens", default="550,2048,8192")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args()
    lengths = [int(text) for text in args.prompt_tokens.split(",")]
    draw = random.Random(0)
    record: dict[str, object] = {"environment": environment(vars(args) | {"json": None}, {})}
    with LLM(
        args.model, method=plain_method(), max_model_len=max(lengths) + 16, device="cuda",
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        model = llm.model_config
        for length in lengths:
            times = []
            for _ in range(args.turns + 2):
                prompt = [draw.randrange(llm.tokenizer.num_tokens) for _ in range(length)]
                times.append(first_token_seconds(llm.engine, prompt))
            rate = matrix_rate()
            seconds = median(times[2:])
            speed = operations(model, length) / seconds
            record[str(length)] = {
                "first_token_ms": round(1e3 * seconds, 2),
                "tflops": round(speed / 1e12, 1),
                "matrix_tflops": round(rate / 1e12, 1),
                "share": round(speed / rate, 3),
            }
            print(length, json.dumps(record[str(length)]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
