"""Which engine runs where."""

from __future__ import annotations

import subprocess

import pytest

from openspec.engine import devices
from openspec.engine.devices import (
    Links,
    check_ranks,
    links_between,
    listed_devices,
    listed_links,
    neighbours,
    places,
    visible_devices,
)
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


# ---- Several ranks ------------------------------------------------------------------------------

FOUR_GPUS = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i * 11111111:08d}-aaaa)\n" for i in range(4))
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPIX\tNV4\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tNV4\tPIX\t0-15\t0\t\tN/A
GPU2\tNV4\tSYS\t X \tPXB\tSYS\t16-31\t1\t\tN/A
GPU3\tSYS\tNV4\tPXB\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
"""GPUs 0 and 2, and 1 and 3, have NVLinks between them."""


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, TOPOLOGY if "topo" in command else FOUR_GPUS)

    monkeypatch.setattr(subprocess, "run", run)


def matrix(num_devices: int, links: dict[tuple[int, int], int]) -> Links:
    both = links | {(other, one): number for (one, other), number in links.items()}
    return [[both.get((i, j), 0) for j in range(num_devices)] for i in range(num_devices)]


ALL_LINKED = [[18] * 8] * 8
CUBE_MESH = matrix(
    8,
    {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2}
    | {(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
)
"""Two rings of four, as in a DGX-1."""


@pytest.mark.parametrize(
    ("links", "size", "num_groups", "expected"),
    [
        (ALL_LINKED, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (ALL_LINKED, 4, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (ALL_LINKED, 8, 1, [tuple(range(8))]),
        (ALL_LINKED, 4, 3, []),
        (CUBE_MESH, 2, 1, [(0, 3)]),
        (CUBE_MESH, 2, 4, [(0, 3), (1, 2), (4, 7), (5, 6)]),
        (CUBE_MESH, 4, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (CUBE_MESH, 8, 1, []),
        # The strongest pair first would leave two without a link.
        (matrix(4, {(0, 1): 1, (1, 2): 4, (2, 3): 1}), 2, 2, [(0, 1), (2, 3)]),
        (matrix(4, {(0, 1): 1, (1, 2): 4, (2, 3): 1}), 2, 1, [(1, 2)]),
        (matrix(4, {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 3): 1}), 4, 1, []),
        (matrix(3, {}), 2, 1, []),
    ],
)
def test_neighbours(
    links: Links, size: int, num_groups: int, expected: list[tuple[int, ...]]
) -> None:
    assert neighbours(links, size, num_groups) == expected


@pytest.mark.usefixtures("four_gpus")
def test_links() -> None:
    assert listed_links(TOPOLOGY) == {("0", "2"): 4, ("2", "0"): 4, ("1", "3"): 4, ("3", "1"): 4}
    assert links_between(["GPU-2222", "0", "1"]) == [[0, 4, 0], [4, 0, 0], [0, 0, 0]]


@pytest.mark.usefixtures("four_gpus")
def test_ranks_are_on_neighbours() -> None:
    def devices(*arguments: object, num_ranks: int = 2, **environ: str) -> list[str | None]:
        found = places(*arguments, environ, GB, num_ranks=num_ranks)  # type: ignore[arg-type]
        assert {one.share.num_on_device for one in found} == {1}
        return [one.device for one in found]

    assert devices(None, None) == devices(1, None) == ["0,2"]
    assert devices(2, None) == ["0,2", "1,3"]
    assert devices(None, ["0", "1", "2", "3"]) == ["0,2", "1,3"]
    assert devices(None, ["3", "2", "1", "0"]) == ["3,1", "2,0"]
    assert devices(None, ["0", "1"], CUDA_VISIBLE_DEVICES="3,GPU-11111111") == ["3,GPU-11111111"]
    (place,) = places(None, None, {}, GB, num_ranks=2)
    assert place.environ == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_ranks_without_gpus_are_threads() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for environ, may_use_gpus in ((hidden, True), ({}, False)):
        found = places(2, None, environ, GB, may_use_gpus=may_use_gpus, num_ranks=4)
        assert [one.environ for one in found] == [{}, {}]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("number", "names", "num_ranks", "environ", "message"),
    [
        (None, None, 8, {}, "tensor_parallel_size 8 and replicas 1 take 8 GPUs, of which there"),
        (3, None, 2, {}, "replicas 3 take 6 GPUs, of which there are 4: 0,1,2,3"),
        (2, ["0", "1", "2"], 2, {}, "take 4 GPUs, of which there are 3: 0,1,2"),
        (None, ["2"], 2, {}, "take 2 GPUs, of which there are 1: 2"),
        (None, ["0", "1", "2"], 2, {}, "3 devices for 1 replicas of 2 ranks"),
        (None, ["0", "1"], 2, {}, "0,1 do not make 1 groups of 2 in which NVLinks.*--replicas"),
        (None, None, 4, {}, "do not make 1 groups of 4.*--replicas"),
        (None, ["MIG-a", "MIG-b"], 2, {}, "MIG-a is a part of a GPU.*--replicas"),
        (None, None, 2, {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1.*unset it"),
    ],
)
def test_ranks_that_cannot_be_placed(
    number: int | None,
    names: list[str] | None,
    num_ranks: int,
    environ: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        places(number, names, environ, GB, num_ranks=num_ranks)


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("num_ranks", "names", "environ", "message"),
    [
        (4, [H100] * 2, {}, "size 4 takes 4 GPUs, of which CUDA shows 2: .*show more with CUDA_V"),
        (2, [H100, H200], {}, f"the GPUs are unlike, {H100}, {H200}; choose some of a kind with"),
        (
            2,
            [f"{H100} MIG 1g.10gb"],
            {"CUDA_VISIBLE_DEVICES": ""},
            "MIG 1g.10gb is a part of a GPU",
        ),
        (2, [H100], {"CUDA_VISIBLE_DEVICES": "MIG-a"}, "MIG-a is a part of a GPU.*--replicas"),
        (2, [H100] * 4, {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1.*unset it.*--repl"),
        (2, [H100] * 4, {}, "GPU 0 does not have an NVLink to GPU 1, see nvidia-smi topo.*--repl"),
        (2, [H100] * 2, {"CUDA_VISIBLE_DEVICES": "1,2"}, "GPU 0 does not have an NVLink to GPU 1"),
        (4, [H100] * 4, {"CUDA_VISIBLE_DEVICES": "0,2,1,3"}, "not have an NVLink to GPU 2"),
    ],
)
def test_ranks_that_cannot_share_a_model(
    num_ranks: int, names: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ranks(num_ranks, names, lambda one, other: one != other, environ)


@pytest.mark.usefixtures("four_gpus")
def test_ranks_that_can_share_a_model() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "2,0"}
    check_ranks(2, [H100] * 2, lambda one, other: one != other, visible)
    with pytest.raises(ConfigError, match=r"GPU 1 does not reach the memory of GPU 0.*--repl"):
        check_ranks(2, [H100] * 2, lambda one, other: one < other, visible)


def test_access_has_to_do_where_links_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    check_ranks(2, [H100] * 2, lambda one, other: True, {})
    with pytest.raises(ConfigError, match="GPU 0 does not reach the memory of GPU 1"):
        check_ranks(2, [H100] * 2, lambda one, other: False, {})
