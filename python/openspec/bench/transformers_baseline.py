"""Hugging Face's `generate` on the same prompts, in a process of its own.

Run as a module it is that process: requests and answers are lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import msgspec

from openspec.bench.client import Completion
from openspec.bench.load import LoadResult, RequestSettings
from openspec.errors import ConfigError


class _Request(msgspec.Struct):
    prompts: list[list[int]]
    max_tokens: int
    ignore_eos: bool


class _Answer(msgspec.Struct):
    token_ids: list[list[int]]
    has_ended: list[bool]
    """By the model's own end token."""
    seconds: float


class TransformersBaseline:
    """Times `generate` (float32, greedy) batch by batch; a batch ends with its longest answer."""

    name = "transformers"

    def __init__(self, model_folder: Path, num_threads: int | None) -> None:
        module = f"{__package__}.{Path(__file__).stem}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(model_folder), str(num_threads or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        self._ask(_Request([[1, 2, 3]], 4, True))  # Loads, and warms up.

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def run(
        self, prompts: list[list[int]], batch_size: int, settings: RequestSettings
    ) -> LoadResult:
        """Answer all prompts, left-padded to batches of `batch_size`.

        Raises:
            ConfigError: sampling was asked for, or the server returned no prompt ids.
        """
        if settings.temperature > 0:
            raise ConfigError("--baseline transformers needs --temperature 0")
        if not all(prompts):
            raise ConfigError("--baseline transformers: the server returns no prompt_token_ids")
        completions: list[Completion] = []
        total_s = 0.0
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            start_s = perf_counter()
            answer = self._ask(_Request(batch, settings.max_tokens, settings.ignore_eos))
            total_s += answer.seconds
            for token_ids, has_ended in zip(answer.token_ids, answer.has_ended, strict=True):
                completion = Completion(start_s, token_ids=token_ids)
                completion.finish_reason = "stop" if has_ended else "length"
                completions.append(completion)
        return LoadResult(completions, total_s)

    def _ask(self, request: _Request) -> _Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("--baseline transformers: it ended; is transformers installed?")
        return msgspec.json.decode(line, type=_Answer)


def serve_baseline(model_folder: str, num_threads: int) -> None:
    """Answer requests from stdin until it closes."""
    import torch
    from transformers import AutoModelForCausalLM

    if num_threads:
        torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=_Request)
        longest = max(map(len, request.prompts))
        pad = eos_ids[0] if eos_ids else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in request.prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in request.prompts])
        model.generation_config.eos_token_id = None if request.ignore_eos else eos
        start_s = perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=request.max_tokens,
                do_sample=False,
                temperature=None,
                top_k=None,
                top_p=None,
                pad_token_id=pad,
            )
        seconds = perf_counter() - start_s
        rows: list[list[int]] = output[:, longest:].tolist()
        stops = [] if request.ignore_eos else eos_ids
        rows = [_until_any(row, stops) for row in rows]
        answer = _Answer(rows, [row[-1] in stops for row in rows], seconds)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _until_any(row: list[int], stops: list[int]) -> list[int]:
    ends = [row.index(stop) + 1 for stop in stops if stop in row]
    return row[: min(ends)] if ends else row


if __name__ == "__main__":
    serve_baseline(sys.argv[1], int(sys.argv[2]))
