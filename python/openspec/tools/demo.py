"""`python -m openspec.demo [PROMPT]`: one question to the embedded model, and what speculation did.

Starts a server, asks it over the OpenAI API with and without speculation in turns, and compares.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from openspec.bench.client import ClientError
from openspec.bench.load import LoadResult, RequestSettings, run_load
from openspec.bench.report import compare, speculation_of
from openspec.bench.server import ServerUnderTest, started_server
from openspec.bench.workloads import Prompt, Workload
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.messages import acceptance_rate, mean_acceptance_length

DEFAULT_PROMPT = '''Rewrite this code with `start` renamed to `first`:

```python
def shortest_path(graph, start, goal):
    """Return the shortest list of nodes from start to goal, or None."""
    queue = [[start]]
    seen = {start}
    while queue:
        path = queue.pop(0)
        node = path[-1]
        if node == goal:
            return path
        for other in graph.get(node, ()):
            if other not in seen:
                seen.add(other)
                queue.append(path + [other])
    return None
```'''
NUM_TURNS = 3
_TINT, _DIM, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m openspec.demo", description=__doc__)
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="what to ask")
    parser.add_argument("--model", default=None, help="folder or id of the hub; default: embedded")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    args = parser.parse_args(argv)
    try:
        config = EngineConfig(model=args.model)
        config.check()
        folder = config.with_folders().model_path
        print("Starting a server ...", file=sys.stderr)
        with started_server({"model": str(folder)}) as server:
            is_identical = _demonstrate(server, folder, args.prompt, args.max_tokens)
    except (ConfigError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        "\nStart the server for real:  python -m openspec.serve"
        "\nMeasure it:                 python -m openspec.bench"
    )
    return 0 if is_identical else 1


def _demonstrate(server: ServerUnderTest, folder: Path, prompt: str, max_tokens: int) -> bool:
    settings = RequestSettings(
        model=server.model,
        max_tokens=max_tokens,
        temperature=0.0,
        seed=0,
        ignore_eos=False,
        detailed=True,
    )
    workload = Workload("demo", [Prompt(user=prompt, thinking=False)])
    plain, speculative = _measure(server, workload, settings)
    answer = speculative[0].completions[0]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        steps = answer.speculation.num_accepted_tokens_per_step if answer.speculation else []
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        print(f"{_DIM}{prompt}{_RESET}\n\n{tinted(answer.token_ids, steps, tokenizer)}\n")
        print(f"{_TINT}Green{_RESET}: accepted drafts.")
    else:
        print(f"{prompt}\n\n{''.join(answer.chunk_text)}\n")
    is_identical = compare(plain, speculative).holds
    print(statistics_line(plain, speculative, is_identical))
    return is_identical


def tinted(
    token_ids: Sequence[int], num_accepted_per_step: Sequence[int], tokenizer: Tokenizer
) -> str:
    """The text, with what came from accepted drafts in green.

    A step's tokens are its accepted drafts, then one more.
    """
    is_draft = [flag for num in num_accepted_per_step for flag in (*[True] * num, False)]
    parts: list[str] = []
    shown = ""
    for end in range(1, len(token_ids) + 1):
        text: str = tokenizer.decode(list(token_ids[:end]), skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(token_ids):
            continue  # a character is spread over several tokens
        new, shown = text[len(shown) :], text
        parts.append(f"{_TINT}{new}{_RESET}" if end <= len(is_draft) and is_draft[end - 1] else new)
    return "".join(parts).replace(_RESET + _TINT, "")


def _measure(
    server: ServerUnderTest, workload: Workload, settings: RequestSettings
) -> tuple[list[LoadResult], list[LoadResult]]:
    """The same request plain and speculative, in turns; the first turn warms up."""
    results: dict[bool, list[LoadResult]] = {False: [], True: []}
    for turn in range(1 + NUM_TURNS):
        for speculative in (False, True):
            result = run_load(
                server.address,
                workload,
                1,
                settings,
                speculative=speculative,
                cache_salt=f"{turn}/{speculative}",
            )
            if turn > 0:
                results[speculative].append(result)
    return results[False], results[True]


def statistics_line(
    plain: Sequence[LoadResult], speculative: Sequence[LoadResult], is_identical: bool
) -> str:
    """What speculation did for the answer. No speed is shown for a text that is not the plain one.

    Speeds are medians over the turns, prompt processing included.
    """
    identical = f"identical to plain decoding: {'yes' if is_identical else 'NO'}"
    if not is_identical:
        return identical
    counters = speculation_of(speculative[0].completions)
    speed = median(result.tokens_per_s for result in speculative)
    plain_speed = median(result.tokens_per_s for result in plain)
    parts = [f"{speculative[0].output_tokens} tokens at {speed:.0f} tok/s"]
    if counters.num_drafts:
        parts.append(f"acceptance rate {acceptance_rate(counters):.0%}")
        parts.append(f"mean acceptance length {mean_acceptance_length(counters):.2f}")
    parts.append(f"{speed / plain_speed:.2f}x plain decoding ({plain_speed:.0f} tok/s)")
    return ", ".join((*parts, identical))
