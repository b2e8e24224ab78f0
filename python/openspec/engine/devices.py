"""Which engine of a server runs where: GPUs by CUDA_VISIBLE_DEVICES, and parts of a machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from openspec.errors import ConfigError
from openspec.messages import StepTime

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")
_GPU_LINE = re.compile(r"GPU ([0-9]+): .*")
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
    """As CUDA_VISIBLE_DEVICES names it; None: whatever this process sees."""

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
) -> list[Place]:
    """A place for each engine: on the devices in turn, else on the GPUs that this process sees.

    An index in `devices` counts the GPUs that `environ` makes visible, as in CUDA.

    Raises:
        ConfigError: for a device that cannot be, or more devices than replicas.
    """
    if devices is not None and not may_use_gpus:
        raise ConfigError("devices are GPUs, but --device is cpu; drop one of the two")
    found: Sequence[str | None]
    if devices is not None:
        found = [_visible(device, environ) for device in devices]
        num_replicas = len(found) if num_replicas is None else num_replicas
        if not found or len(found) > num_replicas:
            raise ConfigError(
                f"{len(found)} devices for {num_replicas} replicas; name at least one device, and "
                "no more than there are replicas"
            )
        if len(set(found)) < len(found):
            raise ConfigError(
                f"devices: {','.join(devices)} names one twice; --replicas sets how many engines "
                "share the devices"
            )
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
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return listed_devices(listed)


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
