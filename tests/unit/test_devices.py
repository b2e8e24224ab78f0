"""Which engine runs where."""

from __future__ import annotations

import subprocess

import pytest

from openspec.engine import devices
from openspec.engine.devices import listed_devices, places, visible_devices
from openspec.errors import ConfigError

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 3g.20gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-33333333-aaaa-bbbb-cccc-000000000000)
"""
GB = 1 << 30


def where(*arguments: object, **environ: str) -> list[tuple[str | None, int]]:
    """Device of each engine, and how many share it."""
    found = places(*arguments, environ, 8 * GB)  # type: ignore[arg-type]
    assert [one.share.replica for one in found] == list(range(len(found)))
    assert {one.share.num_replicas for one in found} == {len(found)}
    return [(one.device, one.share.num_on_device) for one in found]


def test_listed_devices() -> None:
    migs = ["MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"]
    assert listed_devices(LISTED) == ["0", *migs, "2"], "CUDA does not use a GPU that is divided"
    assert listed_devices("No devices were found\n") == []


def test_one_engine_is_as_without_the_setting() -> None:
    for number in (None, 1):
        (place,) = places(number, None, {}, 8 * GB)
        assert place.environ == {} and place.share == devices.Share()
        assert place.share.role == "engine"


def test_named_devices() -> None:
    assert where(None, ["0", "1", "2"]) == [("0", 1), ("1", 1), ("2", 1)]
    assert where(5, ["0", "1"]) == [("0", 3), ("1", 2), ("0", 3), ("1", 2), ("0", 3)]
    (place,) = places(None, ["MIG-abc"], {}, 8 * GB)
    assert place.environ == {"CUDA_VISIBLE_DEVICES": "MIG-abc"}
    assert where(None, ["1", "0"], CUDA_VISIBLE_DEVICES="4,GPU-ab") == [("GPU-ab", 1), ("4", 1)]
    two = places(2, ["7"], {}, 8 * GB)
    assert [one.share.role for one in two] == ["engine 0", "engine 1"]
    assert {one.share.available_bytes for one in two} == {8 * GB}


@pytest.mark.parametrize(
    ("number", "names", "environ", "message"),
    [
        (None, ["gpu0"], {}, "neither the index of a GPU nor a UUID"),
        (None, ["-1"], {}, "neither the index"),
        (None, [], {}, "at least one device"),
        (1, ["0", "1"], {}, "2 devices for 1 replicas"),
        (None, ["0", "0"], {}, "names one twice"),
        (None, ["2"], {"CUDA_VISIBLE_DEVICES": "4,5"}, "no GPU 2 among the 2"),
    ],
)
def test_refused(
    number: int | None, names: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        places(number, names, environ, GB)
    with pytest.raises(ConfigError, match="--device is cpu"):
        places(number, names, environ, GB, may_use_gpus=False)


def test_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, MIG-abc"}) == ["3", "MIG-abc"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "2,-1,3"}) == ["2"]
    assert where(3, None, CUDA_VISIBLE_DEVICES="3,4") == [("3", 2), ("4", 1), ("3", 2)]
    assert where(2, None, CUDA_VISIBLE_DEVICES="3,4,5") == [("3", 1), ("4", 1)]
    assert where(2, None, CUDA_VISIBLE_DEVICES="") == [(None, 2)] * 2

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, LISTED, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert [device for device, _ in where(2, None)] == [
        "0",
        "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
    ]

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    assert where(2, None) == [(None, 2)] * 2
