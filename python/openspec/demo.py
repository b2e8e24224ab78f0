"""`python -m openspec.demo [PROMPT]`: one question to the embedded model, and what speculation did.

Starts a server, asks it over the OpenAI API, asks the same without speculation, and compares.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from tokenizers import Tokenizer

from openspec.bench.client import ClientError, read_chunk
from openspec.bench.load import LoadResult, RequestSettings, request_body, run_load
from openspec.bench.report import Acceptance, compare
from openspec.bench.server import ServerUnderTest, started_server
from openspec.bench.workloads import Prompt, Workload
from openspec.config import EMBEDDED_MODEL
from openspec.errors import ConfigError

DEFAULT_PROMPT = '''Rewrite this code with `total` renamed to `result`:

```python
def moving_average(values, width):
    """Return the averages of all windows of the given width."""
    if width <= 0:
        raise ValueError("width must be positive")
    averages = []
    total = 0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        if index >= width - 1:
            averages.append(total / width)
    return averages
```'''
NUM_TURNS = 3
_TINT, _DIM, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m openspec.demo", description=__doc__)
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="what to ask")
    parser.add_argument("--model", default=None, help="folder of a checkpoint; default: embedded")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    args = parser.parse_args(argv)
    folder = EMBEDDED_MODEL if args.model is None else Path(args.model)
    print("Starting a server ...", file=sys.stderr)
    try:
        with started_server({} if args.model is None else {"model": args.model}) as server:
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
        model=server.model, max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=False
    )
    question = Prompt(user=prompt, thinking=False)
    painter = _Painter(folder, sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    print(painter.dim(prompt) + "\n")
    body = request_body(question, 0, settings, speculative=True, cache_salt="shown")
    for text, token_ids in stream(server, question.endpoint(), body):
        print(painter.paint(text, token_ids), end="", flush=True)
    print("\n")
    if painter.is_on:
        print(f"{_TINT}Green{_RESET}: from accepted drafts.")
    plain, speculative = _measure(server, Workload("demo", [question]), settings)
    is_identical = compare(plain, speculative).holds
    print(statistics_line(plain, speculative, is_identical))
    return is_identical


def stream(server: ServerUnderTest, path: str, body: bytes) -> Iterator[tuple[str, list[int]]]:
    """(text, token ids) of every chunk of a streamed answer, as it arrives.

    Raises:
        ClientError: the server answered with an error.
    """
    connection = http.client.HTTPConnection(server.host, server.port, timeout=600)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ClientError(f"HTTP {response.status}: {response.read(500).decode()}")
        while line := response.readline():
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield from read_chunk(line[6:])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise ClientError(f"the stream broke: {error}") from error
    finally:
        connection.close()


class _Painter:
    """Tints the part of each chunk that came from accepted drafts."""

    def __init__(self, model_folder: Path, is_on: bool) -> None:
        self.is_on = is_on
        self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def dim(self, text: str) -> str:
        """Text that is not the model's."""
        return f"{_DIM}{text}{_RESET}" if self.is_on else text

    def paint(self, text: str, token_ids: list[int]) -> str:
        """A chunk holds the tokens of one step: accepted drafts, then the target's own choice."""
        if not self.is_on or len(token_ids) < 2:
            return text
        drafted: str = self._tokenizer.decode(token_ids[:-1], skip_special_tokens=True)
        if not text.startswith(drafted):
            drafted = text
        return f"{_TINT}{drafted}{_RESET}{text[len(drafted) :]}"


def _measure(
    server: ServerUnderTest, workload: Workload, settings: RequestSettings
) -> tuple[list[LoadResult], list[LoadResult]]:
    """The same request plain and speculative, in turns."""
    results: dict[bool, list[LoadResult]] = {False: [], True: []}
    for turn in range(NUM_TURNS):
        for speculative in (False, True):
            result = run_load(
                server.address,
                workload,
                1,
                settings,
                speculative=speculative,
                cache_salt=f"{turn}/{speculative}",
            )
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
    acceptance = Acceptance.of(speculative[0].completions)
    speed = median(result.tokens_per_s for result in speculative)
    plain_speed = median(result.tokens_per_s for result in plain)
    parts = [f"{speculative[0].output_tokens} tokens at {speed:.0f} tok/s"]
    if acceptance.rate is not None and acceptance.mean_length is not None:
        parts.append(f"acceptance rate {acceptance.rate:.0%}")
        parts.append(f"mean acceptance length {acceptance.mean_length:.2f}")
    parts.append(f"{speed / plain_speed:.2f}x plain decoding ({plain_speed:.0f} tok/s)")
    return ", ".join((*parts, identical))


if __name__ == "__main__":
    sys.exit(main())
