from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from openspec.bench.__main__ import main
from openspec.bench.bench_config import parse_arguments
from openspec.bench.run import methods_of, server_of
from openspec.bench.server import inherited
from openspec.errors import ConfigError
from tests.unit.fake_openai_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def bench(server: FakeServer, *arguments: str) -> int:
    return main(
        [
            f"--server=http://127.0.0.1:{server.port}",
            "--num-prompts=6",
            "--max-tokens=20",
            "--repeats=2",
            *arguments,
        ]
    )


def test_interleaved_run(
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("client", "load"):
        monkeypatch.setattr(f"openspec.bench.{module}.perf_counter", lambda: server.clock_s)
    out = tmp_path / "out.json"
    status = bench(server, "--workload=repeat,random", "--concurrency=1,3", f"--json={out}")
    printed, progress = capsys.readouterr()
    assert status == 0
    assert "4 cells of 4 runs" in printed and "a / b: median / 99th percentile." in printed
    # Beyond a terminal a line for each cell, without speeds.
    cells = ("repeat c=1", "repeat c=3", "random c=1", "random c=3")
    lines = [line.partition("; next ") for line in progress.splitlines()]
    assert [cell for _, _, cell in lines] == list(cells)
    assert [line.split(" in ")[0] for line, _, _ in lines] == [
        f"{done} of 144 requests" for done in (0, 24, 72, 96)
    ]
    assert "36/36 identical to plain" in printed
    assert "Accepted by position" in printed
    document = json.loads(out.read_text())
    assert len(document["runs"]) == 2 * 2 * 2
    assert {run["method"] for run in document["runs"]} == {"none", "ngram"}
    assert document["environment"]["server"] == {"vocab_size": 1000, "method": "ngram"}
    speedups = [run["speedup"] for run in document["runs"] if run["method"] == "ngram"]
    # Four tokens a step; a few answers are a token or two shorter.
    assert speedups == pytest.approx([4.0] * 4, rel=0.1)

    # Plain and method requests differ in one field; every run has a salt of its own.
    salts: dict[str, set[bool]] = {}
    for body in server.bodies:
        assert body["temperature"] == 0
        assert body["stream"] and body["return_token_ids"]
        is_plain = body.get("speculative") == {"enabled": False}
        assert is_plain or "speculative" not in body
        salts.setdefault(body["cache_salt"], set()).add(is_plain)
    assert all(len(kinds) == 1 for kinds in salts.values())
    # Turns: plain, method, then method, plain; each after a warm-up of both.
    first_cell = [kinds.pop() for kinds in list(salts.values())[:6]]
    assert first_cell == [True, False, True, False, False, True]


@pytest.mark.parametrize("fault", ["wrong_from", "drops_last_token"])
def test_differing_text_fails(
    server: FakeServer, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setattr(server, fault, 5)
    assert bench(server, "--workload=chat", "--concurrency=2") == 1
    printed = capsys.readouterr().out
    assert "0/8 identical to plain" in printed
    assert "request 0 parts at token" in printed
    assert "x (" not in printed


def test_split_packets_change_nothing(server: FakeServer) -> None:
    server.split_writes = True
    assert bench(server, "--workload=repeat", "--concurrency=2", "--num-prompts=3") == 0


def test_server_error(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.error_status = 503
    assert bench(server, "--workload=chat", "--concurrency=2") == 2
    assert "HTTP 503" in capsys.readouterr().err


def test_plain_alone(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--workload=chat", "--concurrency=2", "--method=none") == 0
    assert "8/8 identical to plain" in capsys.readouterr().out


def test_dataset(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    assert bench(server, f"--dataset={path}", "--concurrency=1") == 0
    alone = capsys.readouterr().out
    assert "mine" in alone and "6/6 identical to plain" in alone
    assert bench(server, f"--dataset={path}", "--workload=chat", "--concurrency=1") == 0
    both = capsys.readouterr().out
    assert "mine" in both and "chat" in both and "12/12 identical to plain" in both


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server=http://127.0.0.1:9"]) == 2
    assert "no OpenAI server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload=sonnet"],
        ["--concurrency=0"],
        ["--concurrency=1,x"],
        ["--num-prompts=0"],
        ["--temperature=-1"],
        ["--json=/nowhere/at/all.json"],
        ["--html=/nowhere/at/all.html"],
        ["--html=/"],
        ["--compare", "a.json", "b.json", "c.json"],
        ["--method=telepathy"],
        ["--metod=ngram"],
    ],
)
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_arguments(["--model=.", *arguments])


def test_no_speed_of_texts_that_are_not_plain_decodings() -> None:
    arguments = ["--model=.", "--acceptance=rejection"]
    with pytest.raises(ConfigError, match="sampled texts are not plain decoding's"):
        parse_arguments([*arguments, "--temperature=1"])
    assert parse_arguments(arguments).server_settings["acceptance"] == "rejection"


def test_engine_settings_reach_the_server() -> None:
    plan = parse_arguments(
        [
            "--model=.",
            "--seed=3",
            "--num-speculative-tokens=7",
            "--repeats=5",
            "--method-option=ngram_min=3",
        ]
    )
    assert plan.methods == ["none", "ngram"]
    assert plan.bench.seed == 3
    assert plan.server_settings == {
        "model": ".",
        "num_speculative_tokens": 7,
        "method_options": {"ngram_min": "3"},
    }


PEER_FIELDS = ("cache_salt", "return_token_ids", "chat_template_kwargs", "speculative")


def test_a_peer_that_takes_and_tells_nothing_more(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.owner, server.refuses = None, PEER_FIELDS
    out, html = tmp_path / "peer.json", tmp_path / "peer.html"
    status = bench(server, "--workload=chat", "--concurrency=2", f"--json={out}", f"--html={html}")
    assert status == 0
    assert "8/8 the same in every turn" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert run["method"] == "server" and "speedup" not in run and run["may_differ"]
    assert 8 * 17 < run["output_tokens"] <= 8 * 20 and run["tpot_ms"] > 0 and run["ttft_ms"] > 0
    assert run["acceptance_rate"] is None and len(run["answers"]) == 8
    assert "8</span> of <span" in html.read_text()
    for body in server.bodies[4:]:  # the first four ask what it takes
        assert not set(PEER_FIELDS) & set(body)


def test_a_peer_that_counts_its_speculation(server: FakeServer, tmp_path: Path) -> None:
    server.owner, server.refuses, server.has_metrics = "vllm", ("chat_template_kwargs",), True
    out = tmp_path / "peer.json"
    assert bench(server, "--workload=chat", "--concurrency=2", f"--json={out}") == 0
    document = json.loads(out.read_text())
    (run,) = document["runs"]
    assert run["method"] == document["environment"]["server"]["owned_by"] == "vllm"
    # Of the two measured turns: five steps an answer, 16 answers, fewer where one is shorter.
    assert 70 <= run["num_drafts"] <= 80 and run["num_draft_tokens"] == 3 * run["num_drafts"]
    assert run["acceptance_per_position"] == [1, 1, 1]
    assert 0.9 < run["acceptance_rate"] <= 1
    for body in server.bodies[4:]:
        assert {"cache_salt", "return_token_ids"} <= set(body)
        assert not {"speculative", "chat_template_kwargs"} & set(body)


def test_a_peer_whose_texts_vary(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.owner, server.wrong_from = "vllm", 3
    original, count = server.answer, iter(range(1000))
    server.answer = lambda body: [t + next(count) % 7 for t in original(body)]  # type: ignore[method-assign]
    assert bench(server, "--workload=chat", "--concurrency=1") == 0
    printed = capsys.readouterr().out
    assert "the same in every turn" in printed and "6/6" not in printed and "tok/s" in printed


def test_key_prefix_and_model_of_a_server(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.prefix, server.api_key = "/openai", "sesame"
    url = f"--server=http://127.0.0.1:{server.port}/openai/v1/"
    out = tmp_path / "out.json"
    rest = ["--num-prompts=2", "--repeats=1", "--concurrency=1", "--workload=chat"]
    assert main([url, *rest]) == 2
    assert "--api-key has the key to send" in capsys.readouterr().err
    assert main([url, *rest, "--api-key=sesame", "--model=third"]) == 2
    assert "serves fake, other" in capsys.readouterr().err
    assert main([url, *rest, "--api-key=sesame", "--model=other", f"--json={out}"]) == 0
    assert {body["model"] for body in server.bodies} == {"other"}
    assert "sesame" not in out.read_text() + capsys.readouterr().out


@pytest.mark.parametrize("owner", ["openspec", "vllm"])
@pytest.mark.parametrize("habit", ["is_plain_http", "closes", "split_writes"])
def test_servers_with_other_habits(
    server: FakeServer, owner: str, habit: str, tmp_path: Path
) -> None:
    """Streams without chunks, lines that end in CR and LF, a connection for each request."""
    server.owner = owner
    out = tmp_path / "out.json"
    setattr(server, habit, True)
    assert bench(server, "--workload=chat", "--concurrency=3", f"--json={out}") == 0
    for run in json.loads(out.read_text())["runs"]:
        assert run["num_requests"] == run["num_identical_to_plain"] == 12
        assert run["tpot_ms"] > 0 and run["output_tokens"] > 12 * 17


def test_an_answer_that_is_no_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.owner = "vllm"
    server.chunk = lambda text: FakeServer.chunk(server, text.replace("[{", "[[{"))  # type: ignore[method-assign]
    assert bench(server, "--workload=chat", "--concurrency=1") == 2
    assert "the server's answer is not understood" in capsys.readouterr().err


def test_a_peers_list_of_models_may_be_incomplete(server: FakeServer) -> None:
    server.owner = "vllm"
    assert bench(server, "--workload=chat", "--concurrency=1", "--model=third") == 0
    assert {body["model"] for body in server.bodies} == {"third"}


def test_what_an_own_server_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENSPEC_API_KEY", "OPENSPEC_PORT", "OPENSPEC_METHOD", "OPENSPEC_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    kept = {name for name in inherited({"method": "none"}) if name.startswith("OPENSPEC_")}
    assert kept == {"OPENSPEC_NUM_THREADS"}


def test_the_method_is_the_servers_own(server: FakeServer) -> None:
    with pytest.raises(ConfigError, match="runs ngram; start it with --method"):
        plan = parse_arguments([f"--server=http://127.0.0.1:{server.port}", "--method=eagle3"])
        with server_of(plan) as found:
            methods_of(plan, found)


@pytest.mark.parametrize(
    "url", ["https://x:1", "ftp://x", "http://", "http://x:port", "http://x:0"]
)
def test_bad_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--server={url}"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err


def test_own_and_peer_beside_each_other(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "own.json", tmp_path / "peer.json"]
    for owner, path in zip(("openspec", "vllm"), files, strict=True):
        server.owner = owner
        assert bench(server, "--workload=chat", "--concurrency=1", f"--json={path}") == 0
    capsys.readouterr()
    html = tmp_path / "both.html"
    assert main(["--compare", *map(str, files), f"--html={html}"]) == 0
    printed = capsys.readouterr().out
    assert "none / vllm" in printed and "ngram / vllm" in printed
    assert printed.count("6/6\n") + printed.count("6/6") >= 2  # the fake's texts are the same
    assert "none / vllm" in html.read_text()
