"""Which engine of a server runs where: GPUs by CUDA_VISIBLE_DEVICES, and parts of a machine."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from openspec.errors import ConfigError
from openspec.messages import StepTime

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"
MODULE_LOADING = "CUDA_MODULE_LOADING"
Links = Sequence[Sequence[int]]
"""NVLinks between each two of the same devices: [num_devices, num_devices]."""
_DEVICE = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")
_GPU_LINE = re.compile(r"GPU ([0-9]+): .*\(UUID: (GPU-[^)]+)\)")
_LINKS_LINE = re.compile(r"^GPU([0-9]+)\t(.*)$", re.M)
_NVLINKS = re.compile(r"NV([0-9]+)")
_IS_DIVIDED = re.compile(r"\bMIG\b")
_INSTEAD = "; or leave --tensor-parallel-size out, and --replicas N runs N whole engines"
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What of a machine is one engine's, where a server has several."""

    replica: int = 0
    num_replicas: int = 1
    num_on_device: int = 1
    """Engines of the server on its GPU."""
    available_bytes: int | None = None
    """Memory of the machine before the first of them took any; None: what the engine finds."""
    step_times: list[StepTime] | None = None
    """Measured on its device by an engine with the same settings; None: it measures them."""

    @property
    def role(self) -> str:
        """The engine's name in the log."""
        return "engine" if self.num_replicas == 1 else f"engine {self.replica}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one engine runs."""

    share: Share
    device: str | None
    """As CUDA_VISIBLE_DEVICES names it, or them; None: whatever this process sees."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the engine's environment has of its own."""
        return {} if self.device is None else {VISIBLE_DEVICES: self.device}


def places(
    num_replicas: int | None,
    devices: Sequence[str] | None,
    environ: Mapping[str, str],
    available_bytes: int,
    *,
    may_use_gpus: bool = True,
    num_ranks: int = 1,
) -> list[Place]:
    """A place for each engine: on the devices in turn, else on the GPUs that this process sees.

    An index in `devices` counts the GPUs that `environ` makes visible, as in CUDA. With several
    ranks each engine has as many devices of its own, which NVLinks connect.

    Raises:
        ConfigError: for a device that cannot be, more devices than engines use, or too few for
            their ranks.
    """
    if devices is not None and not may_use_gpus:
        raise ConfigError("devices are GPUs, but --device is cpu; drop one of the two")
    found: Sequence[str | None]
    if devices is not None:
        named = _named(devices, environ)
        num_replicas = max(1, len(named) // num_ranks) if num_replicas is None else num_replicas
        if len(named) > num_replicas * num_ranks:
            raise ConfigError(
                f"{len(named)} devices for {num_replicas} replicas"
                + (f" of {num_ranks} ranks" if num_ranks > 1 else "")
                + "; name no more than they use"
            )
        found = named if num_ranks == 1 else _groups(named, num_replicas, num_ranks, environ)
    elif num_ranks > 1:
        visible = visible_devices(environ) if may_use_gpus else []
        num_replicas = num_replicas or 1
        found = _groups(visible, num_replicas, num_ranks, environ) if visible else [None]
    elif num_replicas is None or num_replicas == 1:
        return [Place(Share(), None)]
    else:
        found = (visible_devices(environ) if may_use_gpus else [])[:num_replicas] or [None]
    return [
        Place(
            Share(
                replica=replica,
                num_replicas=num_replicas,
                num_on_device=len(range(replica % len(found), num_replicas, len(found))),
                available_bytes=available_bytes if num_replicas > 1 else None,
            ),
            found[replica % len(found)],
        )
        for replica in range(num_replicas)
    ]


def _named(devices: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    found = [_visible(device, environ) for device in devices]
    if not found:
        raise ConfigError("devices: name at least one device, or leave it out")
    if len(set(found)) < len(found):
        raise ConfigError(
            f"devices: {','.join(devices)} names one twice; --replicas sets how many engines "
            "share the devices"
        )
    return found


def _groups(
    devices: Sequence[str], num_replicas: int, num_ranks: int, environ: Mapping[str, str]
) -> list[str]:
    """The devices of each engine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: where its ranks could wait for each other without end, or there are too few.
    """
    _check_whole(devices, num_ranks, environ)
    if len(devices) < num_replicas * num_ranks:
        raise ConfigError(
            f"{_shown(num_ranks)} and replicas {num_replicas} take {num_replicas * num_ranks} "
            f"GPUs, of which there are {len(devices)}: {','.join(devices)}; lower one of the two"
        )
    groups = neighbours(links_between(devices), num_ranks, num_replicas)
    if not groups:
        raise ConfigError(
            f"{_shown(num_ranks)}: GPUs {','.join(devices)} do not make {num_replicas} groups of "
            f"{num_ranks} in which NVLinks connect each two, as nvidia-smi topo -m shows them; "
            f"name others with --devices{_INSTEAD}"
        )
    return [",".join(devices[place] for place in group) for group in groups]


def check_ranks(
    num_ranks: int,
    names: Sequence[str],
    has_access: Callable[[int, int], bool],
    environ: Mapping[str, str],
) -> None:
    """Refuses to share a model among GPUs that cannot. The first ones that are visible are meant.

    `names` are those of all; `has_access(one, other)` says whether one reads the other's memory.

    Raises:
        ConfigError: with what to do instead.
    """
    shown, devices = _shown(num_ranks), visible_devices(environ)
    _check_whole(devices or names, num_ranks, environ)
    if len(names) < num_ranks:
        raise ConfigError(
            f"{shown} takes {num_ranks} GPUs, of which CUDA shows {len(names)}: "
            f"{', '.join(names)}; lower it, or show more with {VISIBLE_DEVICES}"
        )
    if len(set(names[:num_ranks])) > 1:
        raise ConfigError(
            f"{shown}: the GPUs are unlike, {', '.join(names[:num_ranks])}; choose some of a kind "
            f"with {VISIBLE_DEVICES}{_INSTEAD}"
        )
    # Where nvidia-smi does not run, access has to do.
    is_known = len(devices) == len(names)
    links = links_between(devices[:num_ranks]) if is_known else None
    for one, other in itertools.permutations(range(num_ranks), 2):
        if not has_access(one, other) or (links is not None and links[one][other] == 0):
            what = "reach the memory of" if not has_access(one, other) else "have an NVLink to"
            raise ConfigError(
                f"{shown}: GPU {one} does not {what} GPU {other}, see nvidia-smi topo -m; choose "
                f"others with {VISIBLE_DEVICES}{_INSTEAD}"
            )


def _shown(num_ranks: int) -> str:
    return f"tensor_parallel_size {num_ranks}"


def _check_whole(devices: Sequence[str], num_ranks: int, environ: Mapping[str, str]) -> None:
    """Refuses what lets ranks wait for each other without end, whatever the GPUs are."""
    if environ.get(LAUNCH_BLOCKING, "0") not in ("", "0"):
        raise ConfigError(
            f"{_shown(num_ranks)}: with {LAUNCH_BLOCKING}={environ[LAUNCH_BLOCKING]} a rank would "
            f"wait for others that are not started; unset it{_INSTEAD}"
        )
    if divided := [device for device in devices if _IS_DIVIDED.search(device)]:
        raise ConfigError(
            f"{_shown(num_ranks)}: {divided[0]} is a part of a GPU, which no NVLink reaches; name "
            f"whole GPUs{_INSTEAD}"
        )


def neighbours(links: Links, size: int, num_groups: int) -> list[tuple[int, ...]]:
    """Disjoint groups of `size` devices, each two of a group linked.

    The weakest link within the groups is as strong as can be; of equal choices, the first devices
    are taken. Empty if there are no such groups.
    """
    pairs = itertools.combinations(range(len(links)), 2)
    for least in sorted({links[one][other] for one, other in pairs} - {0}, reverse=True):
        if groups := _linked(links, least, range(len(links)), size, num_groups):
            return groups
    return []


def _linked(
    links: Links, least: int, free: Sequence[int], size: int, num_groups: int
) -> list[tuple[int, ...]]:
    """The first groups of free devices in order, each two with so many links; perhaps none."""
    for group in itertools.combinations(free, size):
        if any(links[one][other] < least for one, other in itertools.combinations(group, 2)):
            continue
        if num_groups == 1:
            return [group]
        rest = [device for device in free if device > group[0] and device not in group]
        if more := _linked(links, least, rest, size, num_groups - 1):
            return [group, *more]
    return []


def _visible(device: str, environ: Mapping[str, str]) -> str:
    if not _DEVICE.fullmatch(device):
        raise ConfigError(
            f"devices: {device!r} is neither the index of a GPU nor a UUID such as GPU-... or "
            "MIG-...; nvidia-smi -L lists them"
        )
    visible = environ.get(VISIBLE_DEVICES)
    if visible is None or not device.isdecimal():
        return device
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(device) >= len(names):
        raise ConfigError(
            f"devices: there is no GPU {device} among the {len(names)} that {VISIBLE_DEVICES}="
            f"{visible} shows"
        )
    return names[int(device)]


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; perhaps none."""
    visible = environ.get(VISIBLE_DEVICES)
    if visible is None:
        return _installed_devices()
    names = [name.strip() for name in visible.split(",")]
    # CUDA takes those before the first that is none.
    end = next((place for place, name in enumerate(names) if not _DEVICE.fullmatch(name)), None)
    return names[:end]


def _installed_devices() -> list[str]:
    return listed_devices(_nvidia_smi("-L"))


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it does not run."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def links_between(devices: Sequence[str]) -> Links:
    """NVLinks between each two devices, named as in CUDA_VISIBLE_DEVICES, by nvidia-smi."""
    uuids = {match[2]: match[1] for match in _GPU_LINE.finditer(_nvidia_smi("-L"))}
    links = listed_links(_nvidia_smi("topo", "-m"))
    # CUDA takes the beginning of a UUID as well.
    indices = [
        next((index for uuid, index in uuids.items() if uuid.startswith(device)), device)
        for device in devices
    ]
    return [[links.get((one, other), 0) for other in indices] for one in indices]


def listed_links(listed: str) -> dict[tuple[str, str], int]:
    """NVLinks between GPUs, by their indices, from what `nvidia-smi topo -m` prints."""
    rows = _LINKS_LINE.findall(listed)
    return {
        (index, other): int(link[1])
        for index, cells in rows
        for (other, _), cell in zip(rows, cells.split(), strict=False)
        if (link := _NVLINKS.fullmatch(cell))
    }


def listed_devices(listed: str) -> list[str]:
    """GPUs by index, or their MIG devices by UUID, from what `nvidia-smi -L` prints."""
    gpus: list[list[str]] = []
    for line in listed.splitlines():
        if match := _GPU_LINE.match(line):
            gpus.append([match[1]])
        elif (match := _MIG_LINE.match(line)) and gpus:
            # CUDA does not use a GPU that is divided.
            gpus[-1] = [name for name in gpus[-1] if name.startswith("MIG-")] + [match[1]]
    return [name for gpu in gpus for name in gpu]
