"""The benchmark itself: every cell of workload x concurrency, the methods taking turns."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from tqdm import tqdm  # type: ignore[import-untyped]

from openspec.bench import peer
from openspec.bench.bench_config import BenchConfig, BenchPlan
from openspec.bench.client import Completion, split_url
from openspec.bench.load import EXTENSIONS, LoadResult, RequestSettings, run_load
from openspec.bench.server import ServerUnderTest, describe, started_server
from openspec.bench.transformers_baseline import TransformersBaseline
from openspec.bench.workloads import Workload, build_workload, load_dataset
from openspec.errors import ConfigError
from openspec.messages import counters_since

WARM_UP_TOKENS = 16


@dataclass
class Cell:
    """All runs of one workload at one concurrency."""

    workload: Workload
    concurrency: int
    results: dict[str, list[LoadResult]] = field(default_factory=dict)
    """By method; the first is plain decoding. Entry i of every method ran in turn i."""


@contextlib.contextmanager
def server_of(plan: BenchPlan) -> Iterator[ServerUnderTest]:
    """The server to measure: the one named, or one of our own for the time being."""
    if plan.bench.server is not None:
        address = split_url(plan.bench.server, plan.bench.api_key)
        yield describe(address, plan.served_model)
        return
    with started_server(plan.server_settings) as server:
        yield server


def methods_of(plan: BenchPlan, server: ServerUnderTest) -> list[str]:
    """What is run in turns: plain decoding and the server's method; of a peer, what it does.

    Raises:
        ConfigError: the server runs another method than the one that was asked for.
    """
    if plan.bench.server is None:
        return plan.methods
    if not server.is_openspec:
        return [server.owner or peer.NAME]
    wanted, plain = plan.server_settings.get("method"), plan.methods[0]
    if wanted not in (None, plain, server.method):
        raise ConfigError(
            f"--method {wanted}: the server at {server.address.url} runs {server.method}; start it "
            f"with --method {wanted}, or leave the flag out"
        )
    return [plain] if plain in (wanted, server.method) else [plain, server.method or peer.NAME]


def make_workloads(config: BenchConfig, vocab_size: int) -> list[Workload]:
    """The prompts of all workloads, as many as the most requests under way need."""
    count = config.prompts_at(max(config.concurrency))
    workloads = [
        build_workload(name, count, config.seed, vocab_size=vocab_size, input_len=config.input_len)
        for name in config.workloads
    ]
    if config.dataset is not None:
        workloads.append(load_dataset(Path(config.dataset), count, config.seed))
    return workloads


def run_benchmark(plan: BenchPlan, server: ServerUnderTest) -> list[Cell]:
    """Measure all cells.

    Raises:
        ClientError: a request failed.
    """
    config = plan.bench
    workloads = make_workloads(config, server.vocab_size)
    methods = methods_of(plan, server)
    num_methods = len(methods) + (config.baseline != "none")
    num_prompts = len(workloads) * sum(map(config.prompts_at, config.concurrency))
    progress = _Progress(num_prompts * num_methods * config.repeats)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        baseline = None
        if config.baseline == "transformers":
            baseline = TransformersBaseline(plan.engine.model_path, plan.engine.num_threads)
            stack.callback(baseline.close)
        extensions = EXTENSIONS
        if not server.is_openspec:
            extensions = peer.accepted_extensions(server.address, server.model)
        cells: list[Cell] = []
        for workload in workloads:
            for concurrency in config.concurrency:
                progress.begin_cell(f"{workload.name} c={concurrency}")
                prompts = workload.prompts[: config.prompts_at(concurrency)]
                cell = Cell(replace(workload, prompts=prompts), concurrency)
                runner = _CellRunner(plan, server, methods, extensions, cell, progress)
                runner.run(baseline)
                cells.append(cell)
    return cells


class _CellRunner:
    """Runs of one cell, in turns."""

    def __init__(
        self,
        plan: BenchPlan,
        server: ServerUnderTest,
        methods: list[str],
        extensions: frozenset[str],
        cell: Cell,
        progress: _Progress,
    ) -> None:
        self._methods = methods
        self._is_peer = not server.is_openspec
        self._repeats = plan.bench.repeats
        self._address = server.address
        self._cell = cell
        self._progress = progress
        self._settings = RequestSettings(
            model=server.model,
            max_tokens=plan.bench.max_tokens,
            temperature=plan.bench.temperature,
            seed=plan.bench.seed,
            ignore_eos=plan.bench.ignore_eos or cell.workload.ignore_eos,
            extensions=extensions,
        )

    def run(self, baseline: TransformersBaseline | None) -> None:
        """Warm up, then let the methods take turns; every other turn starts with the last one."""
        self._warm_up()
        for turn in range(self._repeats):
            order = self._methods if turn % 2 == 0 else self._methods[::-1]
            for method in order:
                self._begin(method)
                result = self._load(
                    method, self._cell.workload, self._settings, self._progress.advance
                )
                self._cell.results.setdefault(method, []).append(result)
            if baseline is not None:
                plain = self._cell.results[self._methods[0]][-1]
                self._begin(baseline.name)
                baseline_result = baseline.run(
                    [completion.prompt_token_ids for completion in plain.completions],
                    self._cell.concurrency,
                    self._settings,
                )
                for completion in baseline_result.completions:
                    self._progress.advance(completion)
                self._cell.results.setdefault(baseline.name, []).append(baseline_result)

    def _warm_up(self) -> None:
        first = self._cell.workload.prompts[: max(2, self._cell.concurrency)]
        max_tokens = min(self._settings.max_tokens, WARM_UP_TOKENS)
        for method in self._methods:
            self._load(
                method,
                replace(self._cell.workload, prompts=first),
                replace(self._settings, max_tokens=max_tokens),
            )

    def _load(
        self,
        method: str,
        workload: Workload,
        settings: RequestSettings,
        on_completion: Callable[[Completion], None] = lambda _: None,
    ) -> LoadResult:
        before = peer.counters(self._address) if self._is_peer else None
        result = run_load(
            self._address,
            workload,
            self._cell.concurrency,
            settings,
            speculative=self._is_peer or method != self._methods[0],
            # Its own for every run, so that no run finds the prompts of another in the cache.
            cache_salt=secrets.token_hex(8),
            on_completion=on_completion,
        )
        if self._is_peer:
            after = peer.counters(self._address)
            result.speculation = counters_since(before, after) if before and after else None
        return result

    def _begin(self, method: str) -> None:
        self._progress.begin(f"{self._cell.workload.name} c={self._cell.concurrency} {method}")


class _Progress:
    """A bar over the whole benchmark on a terminal; elsewhere a line for each cell.

    No speed is in the lines: one is shown only after its texts have been compared.
    """

    def __init__(self, num_requests: int) -> None:
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(
            total=num_requests, unit="req", disable=not self._has_bar, dynamic_ncols=True
        )
        self._num_requests, self._num_done = num_requests, 0
        self._begin_s = self._start_s = perf_counter()
        self._tokens = self._drafted = self._accepted = 0

    def begin_cell(self, name: str) -> None:
        if not self._has_bar:
            minutes, seconds = divmod(round(perf_counter() - self._begin_s), 60)
            done = f"{self._num_done} of {self._num_requests} requests"
            print(f"{done} in {minutes} min {seconds:02} s; next {name}", file=sys.stderr)

    def begin(self, name: str) -> None:
        self._bar.set_description(name)
        self._start_s = perf_counter()
        self._tokens = self._drafted = self._accepted = 0

    def advance(self, completion: Completion) -> None:
        self._num_done += 1
        self._tokens += completion.num_tokens
        if completion.speculation is not None:
            self._drafted += completion.speculation.num_draft_tokens
            self._accepted += completion.speculation.num_accepted_tokens
        shown = f"{self._tokens / (perf_counter() - self._start_s):.0f} tok/s"
        if self._drafted:
            shown += f", {self._accepted / self._drafted:.0%} accepted"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
