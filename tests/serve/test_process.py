"""Start and end of the server process: errors, signals, settings, orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

import openspec
from openspec.config import EMBEDDED_MODEL
from tests.serve.real_server import (
    RealServer,
    all_children_of,
    command,
    environment,
    import_cpu_s,
    is_running,
    real_server,
    run_to_its_end,
)
from tests.serve.sse import parse_events
from tests.serve.waiting import PATIENCE_S, wait_until

MAX_FAILURE_COST = 3.5
"""In imports of the server: its own, and what an engine's process does until it is ended, which
begins beside it."""

LONG = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


def fails_with_one_line(*arguments: str, says: str, **variables: str) -> None:
    status, errors, seconds = run_to_its_end(command(arguments), **variables)
    assert status == 1, errors
    lines = errors.strip().splitlines()
    assert lines[-1].startswith("openspec.serve: ") and says in lines[-1], errors
    assert "Traceback" not in errors and sum(": ERROR" in line for line in lines) == 0
    assert seconds < MAX_FAILURE_COST * import_cpu_s()


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        fails_with_one_line("--port", port, says="in use")
        # Before the hub is asked for anything.
        fails_with_one_line(
            "some/model", "--port", port, says="in use", HF_ENDPOINT="http://[::1]:9"
        )


def test_host_that_is_not_ours() -> None:
    fails_with_one_line("--host", "203.0.113.7", says="cannot listen on")
    fails_with_one_line("--host", "no.such.host.invalid", says="cannot listen on")


def test_wrong_settings(tmp_path: Path) -> None:
    fails_with_one_line("--model", str(tmp_path / "none"), says="does not exist")
    fails_with_one_line("--model", str(tmp_path), "--port", "0", says="config.json")
    fails_with_one_line("--prot", "1", says="--port")
    fails_with_one_line("--port", "70000", says="port must be in")
    fails_with_one_line("--method", "nope", says="nope")
    fails_with_one_line("--api-key", "has space", says="API key")
    fails_with_one_line(says="expects a whole number", OPENSPEC_PORT="x")
    fails_with_one_line(says="api_key is given but holds no key", OPENSPEC_API_KEY="")
    bad = tmp_path / "bad.yaml"
    bad.write_text("portt: 1")
    fails_with_one_line("--config", str(bad), says="port")


@pytest.mark.full
def test_wrong_settings_of_answers(tmp_path: Path) -> None:
    fails_with_one_line("--max-logprobs", "50", says="may ask for 20 log-probabilities")
    fails_with_one_line("--tool-call-parser", "pythonic", says="one of auto, hermes")
    fails_with_one_line("--template-date", "today", says="expected YYYY-MM-DD")
    fails_with_one_line("--chat-template", str(tmp_path / "none"), says="No such file")
    fails_with_one_line("--reasoning-parser", "mistral", says="one of auto, qwen3")


def test_working_directory_that_is_gone(tmp_path: Path) -> None:
    shell = ["bash", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone")]
    (tmp_path / "gone").mkdir()
    status, errors, _ = run_to_its_end([*shell, *command(["--port", "0"])])
    assert status == 1 and errors.strip().endswith("start in a folder that exists"), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("num_kib", "kv_bytes"),
    [(600_000, "16MiB"), pytest.param(8_000_000, "16GiB", marks=pytest.mark.full)],
)
def test_too_little_address_space(num_kib: int, kv_bytes: str) -> None:
    shell = ["bash", "-c", 'ulimit -v "$0" && exec "$@"', str(num_kib)]
    line = [*command(["--port", "0", "--kv-cache-memory", kv_bytes]), "--num-threads", "1"]
    status, errors, _ = run_to_its_end([*shell, *line])
    last = errors.strip().splitlines()[-1]
    assert status == 1 and last.startswith("openspec.serve: "), errors
    assert "not enough memory" in last or "out of memory" in last, errors
    assert "lower --kv-cache-memory" in last and "Traceback" not in errors, errors


def test_help() -> None:
    done = subprocess.run(
        command(["--help"]), capture_output=True, text=True, env=environment(), check=True
    )
    for flag in ("--host", "--port", "--api-key", "--max-num-queued-reqs", "--method", "--model"):
        assert flag in done.stdout


def test_version() -> None:
    done = subprocess.run(
        command(["--version"]), capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == f"openspec {openspec.__version__}\n"


def test_the_age_counts_from_the_start_of_the_process() -> None:
    code = (
        "import time; time.sleep(0.5)\n"
        "from openspec.engine.start_phases import process_age_s; print(process_age_s())"
    )
    started = time.monotonic()
    done = subprocess.run(
        [command([])[0], "-c", code], env=environment(), check=True, capture_output=True, text=True
    )
    assert 0.5 <= float(done.stdout) <= time.monotonic() - started + 0.02


def test_the_first_line_comes_before_heavy_imports() -> None:
    code = """
import sys, time, types

def serve(*arguments):  # in place of the server's, which the first line precedes
    standby = arguments[-2]
    assert standby._child.is_running  # it imports beside this process
    global child
    child = standby._child
    heavy = {"torch", "pydantic", "starlette", "tokenizers", "openspec._C"} & set(sys.modules)
    print(sorted(heavy), time.process_time())

sys.modules["openspec.serve.server.run"] = types.ModuleType("server")
sys.modules["openspec.serve.server.run"].serve = serve
from openspec.serve.__main__ import main
main([])
assert not child.is_running  # no engine took it
"""
    done = subprocess.run(
        [command([])[0], "-c", code], env=environment(), check=True, capture_output=True, text=True
    )
    heavy, _, seconds = done.stdout.strip().rpartition(" ")
    assert f"openspec {openspec.__version__} starts with the embedded model" in done.stderr
    assert heavy == "[]" and float(seconds) < 0.5


def test_the_front_process_does_not_load_torch() -> None:
    code = "import sys, openspec.serve.server.run; sys.exit('torch' in sys.modules)"
    subprocess.run([command([])[0], "-c", code], env=environment(), check=True)


def test_the_engine_s_process_does_not_load_torch() -> None:
    code = """
import contextlib, sys
from openspec.config import EngineConfig
from openspec.engine.devices import Share
from openspec.engine.processes import process
from openspec.engine.start_phases import Phases

process._import_ahead()
ahead = set(sys.modules)
with contextlib.closing(process._load(Phases(), EngineConfig().with_folders(), Share())):
    print("torch" in sys.modules, sorted(set(sys.modules) - ahead))
"""
    done = subprocess.run(
        [command([])[0], "-c", code], env=environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout == "False []\n", "what loading needs is imported before the settings come"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_standard_files_are_open_before_anything_else(closed: str) -> None:
    code = """
import os, socket, sys
from openspec.engine.processes.log import open_standard_files
report = int(sys.argv[1])
open_standard_files()
with socket.socket() as sock:
    names = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
    print("nowhere", file=sys.stderr)
    print("nowhere")
    os.write(report, f"{sock.fileno() > 2} {names}".encode())
"""
    read, write = os.pipe()
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", command([])[0], "-c", code, str(write)]
    subprocess.run(shell, env=environment(), pass_fds=[write], check=True)
    os.close(write)
    with os.fdopen(read) as report:
        is_above, _, names = report.read().partition(" ")
    assert is_above == "True" and names.count("/dev/null") >= closed.count("&-")


def test_a_start_that_fails_where_nobody_reads() -> None:
    shell = ["bash", "-c", 'exec "$@" 2>&-', "bash", *command(["--port", "70000"])]
    assert subprocess.run(shell, env=environment(), timeout=PATIENCE_S, check=False).returncode == 1


class TestRunning:
    """Needs the engine."""

    def test_settings_from_file_and_environment(self, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("served_model_name: [first, second]\nmax_num_seqs: 3\nmethod: none\n")
        with real_server("--config", str(config), OPENSPEC_API_KEY="k1,k2") as server:
            assert server.client.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer k2"}
            models = server.client.get("/v1/models", headers=headers).json()["data"]
            assert [model["id"] for model in models] == ["first", "second"]
            info = server.client.get("/server_info", headers=headers).json()
            assert info["max_num_seqs"] == 3 and info["method"] == "none"
            assert "k1" not in server.log
            assert server.stop() == 0

    def test_a_command_line_for_vllm(self) -> None:
        flags = "--tensor-parallel-size 1 --trust-remote-code --enable-auto-tool-choice"
        flags += " --tool-call-parser hermes --reasoning-parser qwen3 --max-logprobs 5"
        flags += " --served-model-name first second"
        with real_server(str(EMBEDDED_MODEL), *flags.split()) as server:
            models = server.client.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["first", "second"]
            assert "no code of a checkpoint is ever run" in server.log
            body = {"model": "second", "prompt": "a", "max_tokens": 1}
            answers = [
                server.client.post("/v1/completions", json={**body, "logprobs": num})
                for num in (20, 21)
            ]
            assert [answer.status_code for answer in answers] == [200, 400]
            assert answers[1].json()["error"]["param"] == "logprobs"

    def test_a_log_that_nobody_reads(self) -> None:
        line = command(["--port", "0", "--access-log", "--num-threads", "1"])
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            line[line.index("0")] = str(sock.getsockname()[1])
        url = f"http://127.0.0.1:{line[line.index('--port') + 1]}/health"
        process = subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None
            while b"ready after" not in process.stderr.readline():
                assert process.poll() is None
            with httpx.Client(timeout=PATIENCE_S) as client:
                for _ in range(1500):  # a pipe takes about 700 of their lines
                    assert client.get(url).status_code == 200
            process.terminate()
            time.sleep(0.2)  # the end waits for who reads now, and gives everything out
            assert process.stderr.read().count(b"GET /health 200") == 1500
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()

    @pytest.mark.parametrize(
        "closed", [pytest.param("2>&-", marks=pytest.mark.full), "<&- >&- 2>&-"]
    )
    def test_closed_standard_files(self, closed: str, tmp_path: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = str(sock.getsockname()[1])
        line = command(["--port", port, "--num-threads", "1", "--access-log"])
        shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *line]
        process = subprocess.Popen(shell, env=environment(), cwd=tmp_path)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                wait_until(lambda: process.poll() is not None or is_ready(client))
                body = {"prompt": "a", "max_tokens": 3, "guided_regex": "[a-c]{3}"}
                assert client.post("/v1/completions", json=body).status_code == 200
                chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
                assert client.post("/v1/chat/completions", json=chat).status_code == 200
            for pid in (process.pid, *all_children_of(process.pid)):
                assert os.readlink(f"/proc/{pid}/fd/2") == os.devnull
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()

    def test_unix_socket(self, tmp_path: Path) -> None:
        path = tmp_path / "sock"
        process = subprocess.Popen(
            command(["--uds", str(path)]), env=environment(), stderr=subprocess.DEVNULL
        )
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(
                transport=transport, base_url="http://x", timeout=PATIENCE_S
            ) as client:
                wait_until(lambda: process.poll() is not None or is_ready(client))
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            assert not path.exists()
        finally:
            process.kill()

    def test_sigterm_lets_streams_finish(self) -> None:
        with real_server("--shutdown-timeout", "60") as server:
            engine = server.engine_pid
            body = {**LONG, "max_tokens": 400}
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.iter_raw()
                answer = next(chunks)
                server.process.send_signal(signal.SIGTERM)
                _wait_for_signal(server)
                _expect_refusal(server.url)
                answer += b"".join(chunks)
            assert server.process.wait(PATIENCE_S) == 0
            assert parse_events(answer)[-1]["choices"][0]["finish_reason"] == "length"
            assert not is_running(engine)

    def test_shutdown_timeout_ends_streams_with_abort(self) -> None:
        with real_server("--shutdown-timeout", "0") as server:
            engine = server.engine_pid
            answers: list[bytes] = []

            def ask() -> None:
                answers.append(server.client.post("/v1/completions", json=LONG).content)

            thread = threading.Thread(target=ask)
            thread.start()
            client = server.client
            wait_until(lambda: client.get("/load").json()["server_load"] > 0)
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < server.end_s
            thread.join(PATIENCE_S)
            assert parse_events(answers[0])[-1]["choices"][0]["finish_reason"] == "abort"
            assert not is_running(engine)

    @pytest.mark.parametrize(
        "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT]
    )
    def test_second_signal_ends_at_once(self, number: int) -> None:
        with real_server("--shutdown-timeout", "600") as server:
            engine = server.engine_pid
            client = server.client
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                chunks = response.iter_raw()
                next(chunks)
                server.process.send_signal(number)
                _wait_for_signal(server)  # two that it has not taken yet are one
                time.sleep(0.3)
                assert server.process.poll() is None
                started = time.monotonic()
                assert server.stop(number) == 0
                assert time.monotonic() - started < server.end_s
            assert not is_running(engine)

    def test_a_slow_reader_does_not_hold_up_the_end(self) -> None:
        with real_server("--shutdown-timeout", "0") as server:
            body = {**LONG, "n": 16, "logprobs": 20}
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.iter_raw()
                next(chunks)
                time.sleep(3)
                started = time.monotonic()
                assert server.stop() == 0
                assert time.monotonic() - started < 11 + server.end_s

    def test_sigterm_while_idle_and_while_loading(self) -> None:
        with real_server() as server:
            engine = server.engine_pid
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < server.end_s
            assert not is_running(engine)
        process = subprocess.Popen(command(["--port", "0"]), env=environment())
        time.sleep(0.5)
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)

    def test_nothing_outlives_a_killed_server(self) -> None:
        """Not even what stands still, and so sees no end of its input."""
        with real_server() as server:
            demand = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
            server.client.post("/v1/completions", json=demand).raise_for_status()
            children = all_children_of(server.process.pid)
            assert len(children) == 3  # the engine, what renders and what compiles
            for child in children:
                os.kill(child, signal.SIGSTOP)
            server.process.kill()
            server.process.wait(PATIENCE_S)
            try:
                wait_until(lambda: not any(map(is_running, children)))
            finally:
                for child in filter(is_running, children):
                    os.kill(child, signal.SIGKILL)

    def test_a_killed_engine_shows(self) -> None:
        with real_server("--restart-engine", "0") as server:
            with server.client.stream("POST", "/v1/completions", json=LONG) as response:
                chunks = response.iter_raw()
                next(chunks)
                os.kill(server.engine_pid, signal.SIGKILL)
                rest = b"".join(chunks)
            assert b'"error":{' in rest and rest.endswith(b"data: [DONE]\n\n")
            assert server.client.get("/health").status_code == 503
            assert server.client.get("/ready").status_code == 503
            response = server.client.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 503
            assert server.client.get("/metrics").status_code == 200
            assert server.stop() == 0


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


def _wait_for_signal(server: RealServer) -> None:
    wait_until(lambda: "stopping: " in server.log)


def _expect_refusal(url: str) -> None:
    try:
        assert httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 503
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE_S)
        assert response.status_code == 503 and "retry-after" in response.headers
    except httpx.TransportError:
        pass  # already closed
