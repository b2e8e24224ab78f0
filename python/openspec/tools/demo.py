"""`python -m openspec.demo [PROMPT]`: one question to the embedded model, and what speculation did.

Starts a server, asks it over the OpenAI API with and without speculation in turns, and compares.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tokenizers import Tokenizer

from openspec.bench.client import ClientError
from openspec.bench.load import LoadResult, RequestSettings, run_load
from openspec.bench.palette import INK_XTERM, POSITIONS, tint_of
from openspec.bench.printable import printable
from openspec.bench.report import compare, speculation_of
from openspec.bench.server import ServerUnderTest, started_server
from openspec.bench.workloads import Prompt, Workload
from openspec.config import EngineConfig
from openspec.errors import ConfigError, check_is_built
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
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
OWN = 0
"""In the place of a position: a token of the target itself."""


@dataclass(frozen=True)
class Demonstration:
    """One question, its answer as (text, position of the draft or `OWN`), and what it took."""

    prompt: str
    pieces: list[tuple[str, int]]
    is_identical: bool
    figures: list[str]
    """Lines for people."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m openspec.demo", description=__doc__)
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="what to ask")
    parser.add_argument("--model", default=None, help="folder or id of the hub; default: embedded")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="TOKENS", help="longest answer"
    )
    parser.add_argument("--no-color", action="store_true", help="as NO_COLOR=1 does")
    args = parser.parse_args(argv)
    try:
        shown = demonstrate(args.prompt, args.model, args.max_tokens)
    except (ConfigError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(rendered(shown, has_color=not args.no_color and takes_color()))
    print(
        "\nStart the server for real:  python -m openspec.serve"
        "\nMeasure it:                 python -m openspec.bench"
    )
    return 0 if shown.is_identical else 1


def takes_color() -> bool:
    """Whether stdout is a terminal and nobody has asked for less (https://no-color.org)."""
    wants_none = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not wants_none


def demonstrate(
    prompt: str = DEFAULT_PROMPT, model: str | None = None, max_tokens: int = 256
) -> Demonstration:
    """Start a server, ask it with and without drafts, and stop it.

    Raises:
        ConfigError: the model cannot be served.
        ClientError: the server refused the request.
    """
    config = EngineConfig(model=model)
    config.check()
    check_is_built()
    folder = config.with_folders().model_path
    print("Starting a server ...", file=sys.stderr)
    with started_server({"model": str(folder)}) as server:
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
    steps = answer.speculation.num_accepted_tokens_per_step if answer.speculation else []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    is_identical = compare(plain, speculative).holds
    return Demonstration(
        prompt=prompt,
        pieces=pieces_of(answer.token_ids, steps, tokenizer),
        is_identical=is_identical,
        figures=figures_of_demo(plain, speculative, is_identical),
    )


def pieces_of(
    token_ids: Sequence[int], num_accepted_per_step: Sequence[int], tokenizer: Tokenizer
) -> list[tuple[str, int]]:
    """The text in pieces, each with its token's position in a draft, or `OWN`.

    A step's tokens are its accepted drafts, then one more. A character that is spread over several
    tokens stands with the last of them.
    """
    positions = [at for num in num_accepted_per_step for at in (*range(1, num + 1), OWN)]
    pieces: list[tuple[str, int]] = []
    shown = ""
    for end in range(1, len(token_ids) + 1):
        text: str = tokenizer.decode(list(token_ids[:end]), skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(token_ids):
            continue
        new, shown = text[len(shown) :], text
        if new:
            pieces.append((new, positions[end - 1] if end <= len(positions) else OWN))
    return pieces


def rendered(shown: Demonstration, *, has_color: bool) -> str:
    """All that the terminal shows of a demonstration."""
    prompt, figures = printable(shown.prompt), "\n".join(shown.figures)
    if not has_color:
        answer = "".join(printable(text) for text, _ in shown.pieces)
        return f"{prompt}\n\n{answer}\n\n{figures}"
    answer = "".join(_tinted(printable(text), position) for text, position in shown.pieces)
    legend = " ".join(
        _tinted(f" {tint.label} ", at) for tint, at in zip(POSITIONS, (1, 2, 3, 4, 8), strict=True)
    )
    return (
        f"{_DIM}{prompt}{_RESET}\n\n{answer}\n\n"
        f"Accepted drafts, by position: {legend}  The rest is the target's own.\n\n{figures}"
    )


def _tinted(text: str, position: int) -> str:
    """The text on its position's tint, ends of lines bare: terminals fill the line behind them."""
    if position == OWN:
        return text
    start = f"\x1b[38;5;{INK_XTERM};48;5;{tint_of(position).xterm}m"
    return "\n".join(f"{start}{line}{_RESET}" if line else "" for line in text.split("\n"))


def _measure(
    server: ServerUnderTest, workload: Workload, settings: RequestSettings
) -> tuple[list[LoadResult], list[LoadResult]]:
    """Runs one request plain and speculative, in turns; the first turn warms up."""
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


def figures_of_demo(
    plain: Sequence[LoadResult], speculative: Sequence[LoadResult], is_identical: bool
) -> list[str]:
    """What speculation did for the answer.

    No speed is shown for a text that is not the plain one, and no ratio where nothing was drafted:
    it would be the machine's noise. Speeds are medians over the turns, with the prompt's time.
    """
    identical = f"identical to plain decoding: {'yes' if is_identical else 'NO'}"
    if not is_identical:
        return [identical]
    counters = speculation_of(speculative[0].completions)
    speed = median(result.tokens_per_s for result in speculative)
    plain_speed = median(result.tokens_per_s for result in plain)
    answered = f"{speculative[0].output_tokens} tokens at {speed:.0f} tok/s"
    if not counters.num_drafts:
        return [
            f"{answered}, {identical}",
            "0 drafted: nothing to copy from the text so far, or nothing that would pay",
        ]
    return [
        f"{answered}, {speed / plain_speed:.2f}x plain decoding ({plain_speed:.0f} tok/s), "
        f"{identical}",
        f"{counters.num_draft_tokens} drafted, {counters.num_accepted_tokens} accepted: acceptance "
        f"rate {acceptance_rate(counters):.0%}, mean acceptance length "
        f"{mean_acceptance_length(counters):.2f} tokens a step",
    ]
