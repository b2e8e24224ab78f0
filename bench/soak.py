"""Keep a server busy for a long time and look for what grows, gets lost or changes.

    python -m bench.soak --minutes 60 --json FILE [-- --method eagle3 ...]

Starts `python -m openspec.serve` with the flags after `--` and sends random requests: prompts,
chats, streams, several choices, every sampling parameter, grammars and tools in all four APIs,
wrong ones, clients that leave at any time and clients that read slowly. Every answer is compared
with that of the same request sent again, or with its schema (`soak_answers.py`). Every few seconds
it notes memory, open files and counters of all the server's processes. At the end it checks that

- memory grows by less than 0.5 MB a minute: the upper end of the 95 % confidence interval of a
  line through the last two thirds;
- no file stays open, no page stays in use, no sequence is left over, and the engine's sequences
  are those that the clients were answered;
- probe requests get the same answer throughout, and acceptance drifts by less than 5 %.

Ends with status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import soak_answers

from openspec.bench.environment import environment
from openspec.bench.server import free_port

try:
    import httpx
except ModuleNotFoundError as error:
    raise SystemExit(f"needs httpx: pip install httpx ({error})") from None

MOST_GROWTH = 0.5  # MB a minute
MOST_DRIFT = 0.05
NUM_PROBES = 4
PATHS_OF_OPENAI = ("/v1/completions", "/v1/chat/completions")
PATIENCE_S = 120.0
WORDS = (Path(__file__).parent / "soak.py").read_text().split()


@dataclass
class Sample:
    """What the server holds at one moment."""

    seconds: float
    megabytes: float
    files: list[str]
    """Those open, by process."""
    num_draft_tokens: float
    num_accepted_tokens: float


class Traffic:
    """Clients of one server, and what they were answered."""

    def __init__(self, url: str, seed: int, patience_s: float) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ends_at = math.inf
        self._draw = random.Random(seed)
        self._probes: dict[str, str] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._client = httpx.AsyncClient(base_url=url, timeout=patience_s, limits=limits)

    async def run(self, num_clients: int, seconds: float) -> None:
        self.ends_at = time.monotonic() + seconds
        async with self._client:
            await asyncio.gather(*(self._client_life() for _ in range(num_clients)))

    async def warm_up(self) -> None:
        """Has the server start the processes that it starts when somebody needs them."""
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE_S, limits=limits
        ) as client:
            bodies = [soak_answers.asked(random.Random(seed), WORDS) for seed in range(16)]
            await asyncio.gather(*(client.post(one.path, json=one.body) for one in bodies))

    async def _client_life(self) -> None:
        kinds: list[tuple[float, Callable[[], Awaitable[str]]]] = [
            (10, self._whole),
            (6, self._stream),
            (6, self._structured),
            (4, self._leave),
            (2, self._wrong),
            (2, self._probe),
            (1, self._slow_reader),
            (1, self._half_a_request),
        ]
        while time.monotonic() < self.ends_at:
            kind = self._draw.choices([one for _, one in kinds], [weight for weight, _ in kinds])[0]
            try:
                self.outcomes[f"{kind.__name__[1:]}: {await kind()}"] += 1
            except httpx.TimeoutException as error:
                request = error.request.content.decode(errors="replace")
                self.problems.append(f"{kind.__name__[1:]}: {type(error).__name__}: {request}")
            except (httpx.HTTPError, OSError, AssertionError) as error:
                self.problems.append(f"{kind.__name__[1:]}: {type(error).__name__}: {error}")

    def _text(self, most_words: int) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(1, most_words)))

    def _request(self) -> tuple[str, dict[str, object]]:
        """A path and a body, both right."""
        draw = self._draw
        body: dict[str, object] = {"max_tokens": draw.choice([1, 4, 16, 64, 128])}
        body["seed"] = draw.randrange(1 << 40)
        optional: dict[str, Callable[[], object]] = {
            "n": lambda: draw.randint(1, 4),
            "temperature": lambda: draw.choice([0, 0.3, 1.0, 1.7]),
            "top_p": lambda: draw.uniform(0.1, 1),
            "top_k": lambda: draw.randint(1, 50),
            "min_p": lambda: draw.uniform(0, 0.3),
            "presence_penalty": lambda: draw.uniform(-2, 2),
            "frequency_penalty": lambda: draw.uniform(-2, 2),
            "repetition_penalty": lambda: draw.uniform(0.5, 2),
            "logit_bias": lambda: {str(draw.randrange(4000)): draw.uniform(-5, 5)},
            "bad_words": lambda: [self._text(2)],
            "min_tokens": lambda: draw.randint(0, 4),
            "stop": lambda: [self._text(1), "."],
            "ignore_eos": lambda: True,
            "prompt_logprobs": lambda: draw.randint(0, 5),
            "priority": lambda: draw.randint(-3, 3),
            "cache_salt": lambda: str(draw.randrange(5)),
            "speculative": lambda: {"enabled": draw.random() < 0.5},
            "return_token_ids": lambda: True,
        }
        for name in draw.sample(sorted(optional), draw.randint(0, 6)):
            body[name] = optional[name]()
        if body["max_tokens"] == 1:
            body.pop("min_tokens", None)
        if draw.random() < 0.5:
            messages = [{"role": "user", "content": self._text(80)}]
            return "/v1/chat/completions", {**body, "messages": messages}
        if draw.random() < 0.1:
            body["prompt"] = [draw.randrange(4000) for _ in range(draw.randint(1, 800))]
        else:
            body["prompt"] = [self._text(120) for _ in range(draw.randint(1, 3))]
        return "/v1/completions", body

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.post(path, json=body)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]} {body}"
        return dict(answer.json())

    async def _events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self._client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
            assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]} {body}"
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        if path in PATHS_OF_OPENAI:
            assert lines.pop() == "data: [DONE]", lines[-1][:300]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert not any("error" in event and event["error"] for event in events), events[-1]
        return events

    async def _whole(self) -> str:
        path, body = self._request()
        choices = (await self._ask(path, body))["choices"]
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        again = (await self._ask(path, body))["choices"]
        assert texts_of(choices) == texts_of(again), f"another answer to {body}"
        return "answered"

    async def _structured(self) -> str:
        asked = soak_answers.asked(self._draw, WORDS)
        if self._draw.random() < 0.5:
            answer = asked.whole(await self._events(asked.path, asked.body))
        else:
            answer = await self._ask(asked.path, asked.body)
        if asked.is_checked(answer):
            return f"fits, {asked.path}"
        again = await self._ask(asked.path, asked.body)
        told = asked.texts(answer), asked.texts(again)
        assert told[0] == told[1], f"once this, once that: {told}, {asked.body}"
        return f"cut short, {asked.path}"

    def _streamed_request(self) -> tuple[str, dict[str, object]]:
        path, body = self._request()
        body["stream"] = True
        if "n" in body:  # cannot be streamed together
            body.pop("prompt_logprobs", None)
        return path, body

    async def _stream(self) -> str:
        path, body = self._streamed_request()
        streamed = [""] * len(
            (whole := await self._ask(path, {**body, "stream": False}))["choices"]
        )
        for event in await self._events(path, body):
            for choice in event["choices"]:
                delta = choice.get("delta") or {}
                streamed[choice["index"]] += choice.get("text") or delta.get("content") or ""
        assert streamed == texts_of(whole["choices"]), f"a stream tells otherwise: {body}"
        return "answered"

    async def _leave(self) -> str:
        path, body = self._request()
        body |= {"max_tokens": 512, "ignore_eos": True}
        if self._draw.random() < 0.3:
            asked = soak_answers.asked(self._draw, WORDS)
            path, body = asked.path, dict(asked.body)
        most = self._draw.randint(0, 5)
        body["stream"] = self._draw.random() < 0.7
        patience = self._draw.uniform(0.001, 0.3)
        try:
            async with self._client.stream("POST", path, json=body, timeout=patience) as answer:
                async for _ in answer.aiter_lines():
                    most -= 1
                    if most < 0:
                        break
        except httpx.TimeoutException:
            pass
        return "left"

    async def _wrong(self) -> str:
        path, body = self._request()
        wrong: list[dict[str, object]] = [
            {"temperature": -1},
            {"max_tokens": 0},
            {"n": 1000},
            {"stop": 5},
            {"logit_bias": {"x": 1}},
            {"model": "nobody"},
            {"prompt": [10**9], "messages": []},
        ]
        change = self._draw.choice(wrong)
        answer = await self._client.post(path, json=body | change)
        assert answer.status_code in (400, 404), f"{answer.status_code} for {path} {change}"
        assert "error" in answer.json(), answer.text[:300]
        return "refused"

    async def _probe(self) -> str:
        number = self._draw.randrange(NUM_PROBES)
        sampling: dict[str, object] = {"temperature": 0} if number % 2 else {"seed": number}
        prompt = " ".join(WORDS[60 * number : 60 * number + 40])
        body = {"prompt": prompt, "max_tokens": 48, "n": 2, **sampling}
        answer = await self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        text = json.dumps([choice["text"] for choice in answer.json()["choices"]])
        assert self._probes.setdefault(f"{number}", text) == text, f"probe {number} changed"
        return "the same"

    async def _slow_reader(self) -> str:
        path, body = self._streamed_request()
        body["max_tokens"] = 64
        async with self._client.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_bytes(64):
                await asyncio.sleep(0.01)
        return "answered"

    async def _half_a_request(self) -> str:
        host, _, port = self.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        whole = head + b'content-length: 1000\r\n\r\n{"prompt": "' + b"a" * 500
        writer.write(whole[: self._draw.randint(1, len(whole))])
        await writer.drain()
        writer.close()
        return "left"


def texts_of(choices: list[dict[str, Any]]) -> list[str]:
    """Of completions and chats; a chat that only thinks has none."""
    return [one["text"] if "text" in one else one["message"]["content"] or "" for one in choices]


ENDED = (FileNotFoundError, ProcessLookupError)
"""What looking at a process, a thread or a file says that is no longer there."""


def processes(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        with suppress(*ENDED):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def resident_megabytes(pid: int) -> float:
    """What the process alone keeps in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def open_files(pid: int) -> list[str]:
    """What a process has open, without the numbers of sockets and pipes."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(*ENDED):
            links.append(f"{name}: {link.readlink()}".partition(":[")[0])
    return links


def metrics(url: str) -> Counter[str]:
    """Sums over labels, by name without prefix."""
    sums: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines():
        if line.startswith("openspec:"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0].removeprefix("openspec:")] += float(value)  # type: ignore[assignment]
    return sums


def look(pid: int, url: str, began: float) -> Sample:
    counters, megabytes, files = metrics(url), 0.0, list[str]()
    for one in processes(pid):
        with suppress(*ENDED):
            megabytes += resident_megabytes(one)
            files += open_files(one)
    return Sample(
        round(time.monotonic() - began, 1),
        round(megabytes, 2),
        sorted(files),
        counters["spec_decode_num_draft_tokens_total"],
        counters["spec_decode_num_accepted_tokens_total"],
    )


def growth(samples: list[Sample]) -> tuple[float, float]:
    """Megabytes a minute: the slope, and the upper end of its 95 % confidence interval."""
    xs, ys = [one.seconds / 60 for one in samples], [one.megabytes for one in samples]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(rest / (len(xs) - 2) / spread)
    return slope, slope + 1.96 * error


def acceptance(first: Sample, last: Sample) -> float:
    drafted = last.num_draft_tokens - first.num_draft_tokens
    return (last.num_accepted_tokens - first.num_accepted_tokens) / max(drafted, 1)


def verdicts(traffic: Traffic, samples: list[Sample], idle: Sample, url: str) -> dict[str, str]:
    """What is wrong, by name."""
    wrong: dict[str, str] = {}
    if traffic.problems:
        wrong["answers"] = f"{len(traffic.problems)}, the first: {traffic.problems[0]}"
    late = samples[len(samples) // 3 :]
    slope, upper = growth(late)
    if upper >= MOST_GROWTH:
        wrong["memory"] = f"{slope:.2f} MB a minute, up to {upper:.2f}"
    if left_open := Counter(idle.files) - Counter(samples[0].files):
        wrong["files"] = f"more than before: {dict(left_open)}"
    middle = late[len(late) // 2]
    if (drift := abs(acceptance(late[0], middle) - acceptance(middle, late[-1]))) >= MOST_DRIFT:
        wrong["acceptance"] = f"drifts by {drift:.3f}"
    left = metrics(url)
    for name in ("num_requests_running", "num_requests_waiting", "server_load"):
        if left[name]:
            wrong[name] = f"{left[name]:g} when nobody asks"
    for name in (
        "engine_step_failures_total",
        "engine_admission_failures_total",
        "drafter_failures_total",
        "engine_failures_total",
    ):
        if name not in left or left[name]:
            wrong[name] = f"{left[name]:g}"
    httpx.post(f"{url}/flush_cache").raise_for_status()
    time.sleep(0.2)
    if used := metrics(url)["kv_cache_usage_perc"]:
        wrong["pages"] = f"{100 * used:.2f} % in use when nobody asks"
    return wrong


async def wait_idle(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        left = metrics(url)
        if not left["num_requests_running"] + left["num_requests_waiting"] + left["server_load"]:
            return
        await asyncio.sleep(0.2)


async def soak(pid: int, url: str, arguments: argparse.Namespace) -> tuple[Traffic, list[Sample]]:
    traffic = Traffic(url, arguments.seed, arguments.patience)
    await traffic.warm_up()
    began = time.monotonic()
    samples = [look(pid, url, began)]
    load = asyncio.create_task(traffic.run(arguments.clients, 60 * arguments.minutes))
    interval_s = min(10.0, 60 * arguments.minutes / 30)
    while not (await asyncio.wait({load}, timeout=interval_s))[0]:
        samples.append(await asyncio.to_thread(look, pid, url, began))
    await load
    await wait_idle(url)
    return traffic, samples


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=12, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds of a client")
    parser.add_argument("--json", type=Path, help="write samples and verdict to this file")
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    arguments = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "openspec.serve", "--port", str(port), *arguments.server]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    log.seek(0)
                    print(log.read().decode(), file=sys.stderr)
                    return 1
                time.sleep(0.1)
            traffic, samples = asyncio.run(soak(process.pid, url, arguments))
            idle = look(process.pid, url, time.monotonic() - 60 * arguments.minutes)
            wrong = verdicts(traffic, samples, idle, url)
            process.send_signal(signal.SIGTERM)
            if process.wait(PATIENCE_S) != 0:
                wrong["end"] = f"exit status {process.returncode}"
        finally:
            process.kill()
    slope, upper = growth(samples[len(samples) // 3 :])
    result = {
        "environment": environment({**vars(arguments), "json": None}, {}),
        "outcomes": dict(traffic.outcomes),
        "megabytes_per_minute": {"slope": round(slope, 4), "upper": round(upper, 4)},
        "wrong": wrong,
        "problems": traffic.problems[:20],
        "samples": [{**asdict(one), "files": len(one.files)} for one in samples],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, count in sorted(traffic.outcomes.items()):
        print(f"{count:8d} {name}")
    print(f"memory: {slope:+.3f} MB a minute, at most {upper:+.3f}")
    for name, text in wrong.items():
        print(f"WRONG {name}: {text}")
    print("soak failed" if wrong else "soak passed")
    return 1 if wrong else 0


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    os.environ.setdefault("OPENSPEC_LOG_LEVEL", "warning")
    sys.exit(main())
