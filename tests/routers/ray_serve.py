"""The server on Ray Serve: `ray_serve.py FOLDER-OF-BINARIES`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import msgspec
import ray
from ray import serve
from tests.routers import fleet

from openspec.serve.ray_app import build

BIN = Path(sys.argv[1])
ROOT = Path(__file__).resolve().parents[2]
ARGS = {"kv_cache_memory": "64MiB", "max_model_len": "8192", "num_cpus": "1"}


def processes(mark: str = "") -> set[int]:
    """Those whose command line has the mark; of replicas and of whatever they started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        pid = int(path.parent.name)
        if mark in line and pid != os.getpid() and is_ours(pid):
            found.add(pid)
    return found


def is_ours(pid: int) -> bool:
    """Whether it carries the mark that this program put into its environment."""
    try:
        return OWN_MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


OWN_MARK = f"OPENSPEC_RAY_TEST={os.getpid()}"
os.environ["OPENSPEC_RAY_TEST"] = str(os.getpid())
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"


def replicas() -> set[int]:
    return processes("ray::ServeReplica")


def serve_run(*arguments: str) -> None:
    """The command that users type; it returns once the application is deployed."""
    address = ray.get_runtime_context().gcs_address
    command = [BIN / "serve", "run", "--non-blocking", "--address", address, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": address}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def check_requests(url: str, expected: list[str], asks: list[fleet.Ask]) -> None:
    assert fleet.answers(url, asks) == expected
    print(
        f"   {len(asks)} requests: texts equal to the server's without Ray, two of three streamed"
    )
    with httpx.Client(base_url=url, timeout=60) as client:
        named = client.get("/v1/models", headers={"x-request-id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]
        wrong = client.post("/v1/completions", json={"prompt": 3, "model": "tiny"})
        assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
        missing = client.post("/v1/completions", json={"prompt": "a", "model": "nobody"})
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert "vllm:num_requests_running" in client.get("/metrics").text
    print("   headers, errors and /metrics are the server's own")


def check_metrics() -> None:
    """On the node's own port, which Ray's dashboard and Prometheus read."""
    [node] = ray.nodes()

    def sample(name: str) -> float:
        page = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith(name + "{")]
        assert all('deployment="OpenSpec"' in line and 'replica="' in line for line in lines)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    fleet.until(lambda: sample("ray_openspec_generation_tokens_total") > 1000, "tokens are counted")
    fleet.until(lambda: sample("ray_openspec_num_requests_running") == 0, "nothing runs")
    print("   Ray's metrics have the engine's figures by deployment and replica")


def check_dead_engine(url: str) -> None:
    """Health checks find it, and Ray starts another replica."""
    [old] = replicas()
    [engine] = processes("openspec.engine.processes.process")
    os.kill(engine, 9)
    fleet.until(lambda: old not in replicas() and is_ready(url), "another replica, with an engine")
    print("   a replica whose engine died fails its health check and is replaced")


def check_killed_replica(url: str) -> None:
    [old] = replicas()
    stream = fleet.Stream(url, 1, max_tokens=6000)
    stream.has_begun.wait(fleet.PATIENCE_S)
    os.kill(old, 9)
    stream.join(fleet.PATIENCE_S)
    assert stream.error, "the stream of a killed replica must not look whole"
    fleet.until(lambda: old not in replicas() and is_ready(url), "another replica")
    fleet.until(
        lambda: len(processes("openspec.engine.processes.process")) == 1, "no engine is left over"
    )
    print("   a killed replica breaks its stream off and is replaced; its engine ends")


def check_scaling(url: str, folder: Path) -> None:
    """docs/serve.yaml for two replicas on CPUs, with an API key that needs no new replica."""
    [first] = replicas()
    config = msgspec.yaml.decode((ROOT / "docs" / "serve.yaml").read_bytes())
    config["http_options"]["port"] = int(url.rpartition(":")[2])
    [application] = config["applications"]
    application["args"] = ARGS
    [deployment] = application["deployments"]
    del deployment["autoscaling_config"], deployment["ray_actor_options"]
    deployment["num_replicas"] = 2
    path = folder / "serve.yaml"
    path.write_bytes(msgspec.yaml.encode(config))
    serve_run(str(path))
    fleet.until(lambda: len(replicas()) == 2, "two replicas")
    assert first in replicas(), "scaling keeps the replica that is there"
    fleet.until(lambda: httpx.get(f"{url}/v1/models").status_code == 401, "the key is asked for")
    headers = {"authorization": "Bearer change-me"}
    asks = [fleet.Ask(one.path, one.body, headers) for one in fleet.mixed(40, seed=5)]
    fleet.answers(url, asks)
    del deployment["user_config"]
    path.write_bytes(msgspec.yaml.encode(config))
    serve_run(str(path))
    print("   docs/serve.yaml scales from 1 to 2 and sets an API key while the replica runs")


def check_autoscaling(url: str) -> None:
    """One replica becomes two under load."""
    serve.delete("default")  # or Ray keeps the two that there are for ten minutes
    serve.run(build({**ARGS, "max_replicas": 2, "target_ongoing_requests": 2}), route_prefix="/")
    fleet.until(lambda: len(replicas()) == 1 and is_ready(url), "one replica when idle")
    ends = time.monotonic() + 90
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set() and time.monotonic() < ends:
            stream = fleet.Stream(url, 3, max_tokens=2000)
            stream.join()

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for client in clients:
        client.start()
    fleet.until(lambda: len(replicas()) == 2, "a second replica under load")
    is_over.set()
    for client in clients:
        client.join()
    print("   autoscaling by queue length: 8 streams bring a second replica")


def check_drain(url: str) -> None:
    streams = [fleet.Stream(url, seed, max_tokens=2000) for seed in range(4)]
    for stream in streams:
        stream.has_begun.wait(fleet.PATIENCE_S)
    serve.delete("default")
    for stream in streams:
        stream.join(fleet.PATIENCE_S)
        assert not stream.error and stream.text, stream.error
    fleet.until(lambda: not replicas(), "no replica is left")
    print("   deleting the application lets 4 streams end")


asks = fleet.mixed(100)
with fleet.servers(1, "--max-model-len", "8192") as [server]:
    expected = fleet.answers(server.url, asks)
port = fleet.free_port()
url = f"http://127.0.0.1:{port}"
with tempfile.TemporaryDirectory(prefix="ray") as temporary:
    started = time.monotonic()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=temporary,
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    ready = time.monotonic()
    serve_run("openspec.serve.ray_app:build", *(f"{name}={value}" for name, value in ARGS.items()))
    print(f"   ray {ray.__version__}: up in {ready - started:.0f} s,", end=" ")
    print(f"the application in {time.monotonic() - ready:.0f} s more")
    check_requests(url, expected, asks)
    check_metrics()
    check_dead_engine(url)
    check_killed_replica(url)
    check_scaling(url, Path(temporary))
    check_autoscaling(url)
    check_drain(url)
    serve.shutdown()
    ray.shutdown()
    fleet.until(lambda: not processes(), "no process is left")
    print("   no process is left")
