"""What the application of Ray Serve asks Ray for, and its settings; of Ray, names alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from openspec.errors import ConfigError

ROOT = Path(__file__).parents[2]
NUM_GPUS = 8


class Deployment:
    """Binds to what it was asked for."""

    def options(self, **options: Any) -> Deployment:
        self.asked = options
        return self

    def bind(self, *arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(**self.asked, engine=arguments[0])


def modules_of_ray() -> tuple[ModuleType, ...]:
    metrics, serve, ray = (ModuleType(name) for name in ("ray.serve.metrics", "ray.serve", "ray"))
    serve.__dict__.update(
        metrics=metrics,
        Application=SimpleNamespace,
        deployment=lambda **_: lambda _: Deployment(),
        ingress=lambda _: lambda replica: replica,
    )
    ray.__dict__.update(
        serve=serve, is_initialized=lambda: True, cluster_resources=lambda: {"GPU": NUM_GPUS}
    )
    return ray, serve, metrics


OURS = ("openspec.serve.ray_metrics", "openspec.serve.ray_app")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in modules_of_ray():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in OURS:
        sys.modules.pop(name, None)
    yield importlib.import_module(OURS[1])
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("args", "num_gpus"),
    [
        ({}, 1),
        ({"tp": "4"}, 4),
        ({"tensor_parallel_size": 2, "device": "cuda"}, 2),
        ({"tp": 2, "num_gpus": 2}, 2),
        ({"tp": 2, "device": "cpu"}, 0),
        ({"num_gpus": 0.5}, 0.5),
    ],
)
def test_a_replica_has_a_gpu_for_each_rank(app: Any, args: dict[str, Any], num_gpus: int) -> None:
    application = app.build(args)
    assert application.ray_actor_options == {"num_cpus": 1, "num_gpus": num_gpus}
    assert application.num_replicas == 1
    assert application.max_ongoing_requests == 2 * application.engine.max_num_seqs


def test_the_example_of_the_docs(app: Any) -> None:
    [example] = msgspec.yaml.decode((ROOT / "docs" / "serve.yaml").read_bytes())["applications"]
    module, function = example["import_path"].split(":")
    assert (module, function) == (app.__name__, app.build.__name__)
    application = app.build(example["args"])
    [deployment] = example["deployments"]
    assert (
        deployment["ray_actor_options"]["num_gpus"] == (application.ray_actor_options["num_gpus"])
    )
    assert set(deployment["user_config"]) <= app.RECONFIGURABLE


def test_settings(app: Any) -> None:
    engine, server, options = app.parse(
        {"num_replicas": "2", "max-num-seqs": "8", "api_key": "a,b"}
    )
    assert (engine.max_num_seqs, server.api_key, options.num_replicas) == (8, ["a", "b"], 2)
    scaled = app.build({"min_replicas": 2, "max_replicas": 3}).autoscaling_config
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 3)
    changed = app.reconfigured(server, {"api_key": ["c"], "max_num_queued_reqs": 3})
    assert (changed.api_key, changed.max_num_queued_reqs) == (["c"], 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda app: app.parse({"port": 8000}), "port: not of a replica"),
        (lambda app: app.parse({"replicas": 2}), "replicas: not of a replica"),
        (lambda app: app.parse({"max_num_seq": 8}), "did you mean 'max_num_seqs'?"),
        (lambda app: app.parse({"num_replicas": "many"}), "num_replicas"),
        (lambda app: app.parse({"tp": 2, "num_gpus": 1}), "must be its tensor_parallel_size, 2"),
        (lambda app: app.parse({"min_replicas": 4, "max_replicas": 3}), "less than min_replicas"),
        (lambda app: app.reconfigured(app.parse({})[1], {"uds": "x"}), "cannot change"),
        (lambda app: app.reconfigured(app.parse({})[1], {"api_key": []}), "holds no key"),
    ],
)
def test_what_does_not_fit(app: Any, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        call(app)
