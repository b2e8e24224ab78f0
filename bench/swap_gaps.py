"""Draft heads that take each other's place under load: which texts change, how long streams wait.

    python -m bench.swap_gaps --method eagle3                      # the embedded model, on the CPU
    python -m bench.swap_gaps --model build/widened-4b --draft-model build/widened-4b/eagle3 \\
        --method eagle3 --device cuda --swaps 1000

The same requests run three times: as they are; with an exchange of heads every few steps; with a
head that is loaded again and again beside the steps, and takes its place each time. A gap is the
time between two outputs of a sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from openspec.config import EMBEDDED_MODEL, config_from_settings
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.load import load_engine
from openspec.messages import (
    EngineRequest,
    SamplingParams,
    counters_since,
    mean_acceptance_length,
)
from openspec.text.tokenizer import Tokenizer

PROMPT = "Tom has {} apples and buys {} more. How many has he, and how many does he sell?"
STEPS_PER_SWAP = 2


@dataclass
class Run:
    """What came of one run."""

    name: str
    num_swaps: int
    num_changed: int
    """Answers that differ from the first run's."""
    num_failed: int
    usual_gap_ms: float
    """The 99th percentile."""
    longest_gap_ms: float
    tokens_per_second: float
    acceptance_length: float
    longest_exchange_us: float
    longest_load_ms: float


def noisy_head(source: Path, folder: Path) -> None:
    """The head with numbers of the same size without sense."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (noise * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, folder / path.name)


def run(
    core: EngineCore,
    requests: list[EngineRequest],
    before_step: Callable[[int], None],
    num_rounds: int,
) -> tuple[list[list[int]], int, list[float], float]:
    """Answers of all rounds, failures, gaps in seconds, and tokens a second."""
    answers: dict[str, list[int]] = {}
    gaps: list[float] = []
    num_failed = num_steps = 0
    started = time.monotonic()
    for number in range(num_rounds):
        last: dict[str, float] = {}
        for request in requests:
            request_id = f"{number}-{request.request_id}"
            core.add_request(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling=request.sampling,
                )
            )
            answers[request_id] = []
        while core.has_work:
            before_step(num_steps)
            num_steps += 1
            outputs = core.step()
            now = time.monotonic()
            for output in outputs:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
                answers[output.request_id] += output.token_ids
                num_failed += output.finish_reason not in (None, "length")
    seconds = time.monotonic() - started
    num_tokens = sum(map(len, answers.values()))
    return list(answers.values()), num_failed, gaps, num_tokens / seconds


def measure(core: EngineCore, requests: list[EngineRequest], num_swaps: int) -> list[Run]:
    """The three runs."""
    exchanges: list[float] = []
    loads: list[float] = []

    def exchange(step: int) -> None:
        if step % STEPS_PER_SWAP == 0:
            exchanges.append(core.exchange_drafter(back=True).gap_us)

    def load(step: int) -> None:
        del step
        if not core.drafters.is_loading:
            core.drafters.begin_load("noisy")
        elif (ended := core.drafters.take_load()) is not None:
            ended.result()
            state = core.exchange_drafter()
            exchanges.append(state.gap_us)
            loads.append(state.stage_ms)

    def one(name: str, before_step: Callable[[int], None], num_rounds: int) -> Run:
        exchanges.clear()
        loads.clear()
        before, stats = core.drafter_state().num_swaps, core.stats()
        answers, num_failed, gaps, rate = run(core, requests, before_step, num_rounds)
        expected.extend(answers[: len(requests)] if not expected else [])
        return Run(
            name=name,
            num_swaps=core.drafter_state().num_swaps - before,
            num_changed=sum(
                answer != expected[i % len(requests)] for i, answer in enumerate(answers)
            ),
            num_failed=num_failed,
            usual_gap_ms=1000 * statistics.quantiles(gaps, n=100)[-1],
            longest_gap_ms=1000 * max(gaps),
            tokens_per_second=rate,
            acceptance_length=mean_acceptance_length(counters_since(stats, core.stats())),
            longest_exchange_us=max(exchanges, default=0.0),
            longest_load_ms=max(loads, default=0.0),
        )

    expected: list[list[int]] = []
    one("warm-up", lambda _: None, 1)
    plain = one("no swaps", lambda _: None, 3)
    core.drafters.begin_load("noisy").result()
    core.drafters.take_load()
    core.exchange_drafter()
    runs = [plain]
    num_left = num_swaps
    swapped = one("exchanges", exchange, 1)
    per_round = max(1, swapped.num_swaps)
    num_left -= swapped.num_swaps
    if num_left > 0:
        swapped = one("exchanges", exchange, -(-num_left // per_round))
        swapped.num_swaps += per_round
    return [*runs, swapped, one("loads beside steps", load, 3)]


def main() -> None:
    """Measures, prints a line for each run, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    model = Path(args.model or EMBEDDED_MODEL)
    head = Path(args.draft_model or model / args.method)
    with tempfile.TemporaryDirectory() as folder:
        noisy_head(head, Path(folder) / "noisy")
        settings = {"model": str(model), "draft_model": str(head), "drafter_dir": folder}
        settings |= {"method": args.method, "device": args.device, "stats_interval_s": 0}
        settings |= {"max_model_len": 1024, "max_num_seqs": max(args.requests, 2)}
        core = load_engine(config_from_settings(settings))
        tokenizer = Tokenizer.from_folder(model)
        requests = [
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=tokenizer.encode(PROMPT.format(i + 2, 2 * i + 3)),
                sampling=SamplingParams(
                    temperature=0.7 * (i % 2), seed=i, max_tokens=args.tokens, ignore_eos=True
                ),
            )
            for i in range(args.requests)
        ]
        runs = measure(core, requests, args.swaps)
    for one in runs:
        print(
            f"= {one.name}: {one.num_swaps} swaps, {one.num_changed} changed, {one.num_failed} "
            f"failed; gaps {one.usual_gap_ms:.2f} ms usual, {one.longest_gap_ms:.2f} longest; "
            f"{one.tokens_per_second:.0f} tokens/s, length {one.acceptance_length:.2f}; exchange "
            f"{one.longest_exchange_us:.0f} us, load {one.longest_load_ms:.0f} ms at most"
        )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))


if __name__ == "__main__":
    main()
