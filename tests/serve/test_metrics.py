"""/metrics as dashboards and benchmark clients read it."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import cast

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from openspec.engine.processes.output_stream import OutputStream
from openspec.engine.processes.replica import STATS_MAX_AGE_S, Replica
from openspec.errors import RequestError
from openspec.messages import EngineRequest, EngineStats
from openspec.serve.generation.metrics import PAGE_MAX_AGE_S, Histogram, ServerMetrics
from tests.serve.conftest import RunningServer
from tests.serve.waiting import wait_until

VLLM_NAMES = (
    """
num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total prompt_tokens_total
generation_tokens_total spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds request_success_total cache_config_info admission_rejections_total
"""
).split()


def scrape(server: RunningServer) -> dict[str, float]:
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in samples, "a sample twice"
            samples[name] = float(value)
    return samples


def series(name: str, **labels: str) -> str:
    """A sample's key; the text format sorts labels."""
    every = {"model_name": "fake", **labels}
    return f"{name}{{{','.join(f'{key}={every[key]!r}' for key in sorted(every))}}}".replace(
        "'", '"'
    )


def total(samples: dict[str, float], name: str) -> float:
    found = [value for key, value in samples.items() if key.partition("{")[0] == name]
    assert found, name
    return sum(found)


def test_everything_exists_at_zero_from_the_start(start_server) -> None:
    samples = scrape(start_server())
    names = {key.partition("{")[0] for key in samples}
    for name in VLLM_NAMES:
        for prefix in ("openspec:", "vllm:"):
            if (prefix, name) != ("openspec:", "gpu_cache_usage_perc"):
                assert {prefix + name, f"{prefix}{name}_bucket"} & names, name
    spec = {key: value for key, value in samples.items() if key.startswith("vllm:spec_decode")}
    assert {value for key, value in spec.items() if "_total" in key} == {0}
    assert sum('position="' in key for key in spec) == 4
    assert sum("engine_step_seconds_total" in key for key in samples) == 4
    assert series("vllm:request_success_total", engine="0", finished_reason="stop") in samples
    assert samples[series("openspec:ready")] == 1


def test_gpus_that_share_a_model(start_server) -> None:
    server = start_server()
    names = ("exchange_rounds", "exchange_wait_seconds")
    engine = get_engine(server)
    assert [engine[name] for name in names] == [[], []]
    assert not any("exchange" in key for key in scrape(server))
    server.engine._stats.exchange_rounds = [72, 72]
    server.engine._stats.exchange_wait_seconds = [0.25, 0.5]
    server.engine.wait_seconds = [0.0001, 0.0002]
    time.sleep(1.5 * STATS_MAX_AGE_S)
    engine = get_engine(server)
    assert [engine[name] for name in names] == [[72, 72], [0.25, 0.5]]
    samples = scrape(server)
    for device, seconds in enumerate((0.25, 0.5)):
        labels = {"engine": "0", "device": str(device)}
        assert samples[series("openspec:exchange_rounds_total", **labels)] == 72
        assert samples[series("openspec:exchange_wait_seconds_total", **labels)] == seconds
    answer = server.complete(prompt="a", max_tokens=9, speculative={"detailed": True})
    assert all(step["wait_time_ms"] == [0.1, 0.2] for step in answer["choices"][0]["steps"])


def test_experts_of_a_step(start_server) -> None:
    server = start_server()
    counts = {"expert_layers": 48, "distinct_experts": 1392, "expert_rows": 1536}
    for name, count in counts.items():
        assert scrape(server)[series(f"openspec:engine_{name}_total", engine="0")] == 0
        setattr(server.engine._stats, f"num_{name}", count)
    server.engine._stats.experts_of_drafts = 0.65
    time.sleep(1.5 * STATS_MAX_AGE_S)
    samples, engine = scrape(server), get_engine(server)
    for name, count in counts.items():
        assert samples[series(f"openspec:engine_{name}_total", engine="0")] == count
        assert engine[f"num_{name}"] == count
    assert (engine["experts_of_drafts"], engine["experts_of_sequences"]) == (0.65, 1.0)


def get_engine(server: RunningServer) -> dict[str, list[float]]:
    return server.client.get("/server_info").json()["engines"][0]


def test_the_format_is_prometheus(server: RunningServer) -> None:
    server.complete(prompt="a", max_tokens=20)
    families = list(text_string_to_metric_families(server.client.get("/metrics").text))
    assert len({family.name for family in families}) == len(families) > 40


def test_counts(start_server) -> None:
    server = start_server()
    answer = server.complete(prompt=["one", "two"], max_tokens=50)
    server.engine.script = lambda _: server.ids("one<|im_end|>")
    server.complete(prompt="three")
    stats = answer["metrics"]["speculative_decoding"]
    samples = scrape(server)
    for prefix in ("openspec:", "vllm:"):
        assert total(samples, f"{prefix}spec_decode_num_drafts_total") >= stats["num_drafts"]
        per_pos = total(samples, f"{prefix}spec_decode_num_accepted_tokens_per_pos_total")
        assert per_pos == total(samples, f"{prefix}spec_decode_num_accepted_tokens_total")
        reached = total(samples, "openspec:spec_decode_num_drafts_per_pos_total")
        assert reached == total(samples, f"{prefix}spec_decode_num_draft_tokens_total")
        assert total(samples, f"{prefix}time_to_first_token_seconds_count") == 3
        num_tokens = total(samples, f"{prefix}generation_tokens_total")
        assert total(samples, f"{prefix}inter_token_latency_seconds_count") <= num_tokens - 3
        success = f"{prefix}request_success_total"
        assert samples[series(success, engine="0", finished_reason="length")] == 2
        assert samples[series(success, engine="0", finished_reason="stop")] == 1
    handled = series("openspec:http_requests_total", path="/v1/completions", status="200")
    assert samples[handled] == 2


def test_sequences_that_failed_count(start_server) -> None:
    server = start_server({"step_s": 0.02})
    body = {"prompt": ["a", "b"], "max_tokens": 2000}
    failed = threading.Thread(target=lambda: server.error("/v1/completions", 500, **body))
    failed.start()
    wait_until(lambda: server.context.num_sequences == 2)
    server.call(server.engine.die)
    failed.join()
    samples = scrape(server)
    assert samples[series("vllm:request_success_total", engine="0", finished_reason="error")] == 2
    assert samples[series("vllm:request_success_total", engine="0", finished_reason="abort")] == 0


def test_what_the_engine_refuses_has_not_run(start_server, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    submit = server.engine.submit

    def refuse(*requests: EngineRequest, stream: OutputStream | None = None) -> OutputStream:
        stream = submit(*requests, stream=stream)
        stream.end(RequestError("min_tokens forbids all of it", "min_tokens"))
        return stream

    monkeypatch.setattr(server.engine, "submit", refuse)
    assert server.error("/v1/completions", prompt=["a", "b"])["param"] == "min_tokens"
    assert total(scrape(server), "vllm:request_success_total") == 0


def test_odd_paths_do_not_make_new_series(server: RunningServer) -> None:
    for number in range(20):
        server.client.get(f"/no/such/{number}")
        server.client.get(f"/v1/models/x{number}")
    time.sleep(PAGE_MAX_AGE_S)
    paths = {key for key in scrape(server) if "http_requests_total" in key and "404" in key}
    assert len(paths) == 2


def test_scraping_asks_the_engine_seldom(server: RunningServer) -> None:
    before = server.engine.num_stats_calls

    def scrape_often() -> None:
        for _ in range(25):
            scrape(server)

    started = time.monotonic()
    threads = [threading.Thread(target=scrape_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    assert server.engine.num_stats_calls - before <= 1 + seconds / STATS_MAX_AGE_S


def test_scraping_writes_the_page_seldom(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        "openspec.serve.generation.metrics.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    metrics = ServerMetrics("m", server.engine.info)
    first = metrics.render()
    metrics.load.inc()
    assert metrics.render() == first
    clock[0] += 2 * PAGE_MAX_AGE_S
    assert b'server_load{model_name="m"} 1.0' in metrics.render()


def test_sources_of_drafts(server: RunningServer) -> None:
    metrics = ServerMetrics("m", server.engine.info)
    stats = EngineStats(
        num_draft_tokens=9,
        num_accepted_tokens=6,
        num_forced_tokens=2,
        num_accepted_forced_tokens=1,
        num_copied_tokens=4,
        num_accepted_copied_tokens=3,
    )
    replica = SimpleNamespace(stats=stats, failures={}, is_alive=True, num_restarts=0, drafter=None)
    metrics.update([cast(Replica, replica)])
    shown = dict(
        re.findall(
            r"^openspec:spec_decode_num_(\w+)_tokens_total\{.*\} (\S+)$",
            metrics.render().decode(),
            re.M,
        )
    )
    assert shown == {
        "draft": "9.0",
        "accepted": "6.0",
        "forced": "2.0",
        "accepted_forced": "1.0",
        "copied": "4.0",
        "accepted_copied": "3.0",
    }


def test_vllm_bench_finds_the_speculation_counters(server: RunningServer) -> None:
    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for line in server.client.get("/metrics").text.splitlines():
            if line.startswith("vllm:spec_decode"):
                name = line.split("{")[0].split(" ")[0]
                if name.endswith("_total"):
                    found[name] = found.get(name, 0) + float(line.rsplit(" ", 1)[1])
        return found

    before = read()
    server.complete(prompt="a", max_tokens=100)
    time.sleep(STATS_MAX_AGE_S + 0.05)
    after = read()
    assert len(before) == 4
    drafts = (
        after["vllm:spec_decode_num_drafts_total"] - before["vllm:spec_decode_num_drafts_total"]
    )
    assert drafts > 10


def test_types_and_buckets(server: RunningServer) -> None:
    text = server.client.get("/metrics").text
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE "))
    assert types["vllm:num_requests_running"] == "gauge"
    assert types["vllm:spec_decode_num_drafts_total"] == "counter"
    assert types["openspec:request_prompt_tokens"] == "histogram"
    assert types["vllm:cache_config_info"] == types["openspec:engine_info"] == "gauge"
    assert "openspec:gpu_cache_usage_perc" not in types and "vllm:ready" not in types
    assert not any(name.endswith("_created") for name in types)
    bounds = re.findall(r'^vllm:request_prompt_tokens_bucket\{.*le="([^"]+)"', text, re.M)
    assert bounds[:4] == ["1", "2", "5", "10"] and bounds[-2:] == ["500000", "+Inf"]


def test_the_default_registry_stays_empty(server: RunningServer) -> None:
    assert server.client.get("/metrics").status_code == 200
    shown = {family.name for family in prometheus_client.REGISTRY.collect()}
    assert not any(name.startswith(("openspec:", "vllm:")) for name in shown)


def test_histogram() -> None:
    histogram = Histogram("h", "Help.", (0.1, 1))
    for value, times in ((0.1, 1), (0.5, 2), (7, 1)):
        histogram.observe(value, times)
    (family,) = histogram.collect()
    shown = [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples]
    assert shown == [
        ("h_bucket", "0.1", 1),
        ("h_bucket", "1", 3),
        ("h_bucket", "+Inf", 4),
        ("h_sum", None, 8.1),
        ("h_count", None, 4),
    ]
