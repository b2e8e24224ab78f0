"""What the doctor says of the machine: its GPUs, the links between them, memory of the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from openspec.config import EngineConfig
from openspec.engine.devices import Links, links_between, visible_devices
from openspec.engine.plan import load_kernels_early, plan_engine  # which says why _C does not load

# isort: split
from openspec import _C

Peer = tuple[bool, int]
"""Whether a GPU reads another one's memory directly, and the link's performance rank."""


def examine_machine(config: EngineConfig) -> Iterator[str]:
    """Lines about the machine, and the memory plan of an engine on it.

    Raises:
        ConfigError: the engine cannot be, with the remedy.
    """
    load_kernels_early(config)
    if why := _C.why_no_cuda():
        yield f"GPUs: none that can be used ({why})"
    else:
        names = _C.cuda_device_names()
        places = range(len(names))
        yield from (f"GPU {place}: {name}" for place, name in enumerate(names))
        devices = visible_devices(os.environ)
        # Where nvidia-smi does not run, the links' ranks have to do.
        is_known = len(devices) == len(names)
        links = links_between(devices) if is_known else [[0 for _ in places] for _ in places]
        yield from link_table(
            links,
            [[_C.cuda_peer(a, b) if a != b else (True, 0) for b in places] for a in places],
        )
    planned = plan_engine(config)
    yield f"memory: {planned.memory.describe()}"
    num_ranks = config.tensor_parallel_size
    if num_ranks > 1 and planned.device.is_host:
        yield "exchange: not timed, the ranks are threads of the CPU"
    elif num_ranks > 1:
        shared, alone = (1e6 * seconds for seconds in _C.time_exchange(num_ranks))
        yield (
            f"exchange: {shared:.1f} us for a row's product and norm with the sums of {num_ranks} "
            f"GPUs, {alone:.1f} us without"
        )


def link_table(links: Links, peers: Sequence[Sequence[Peer]]) -> Iterator[str]:
    """What each GPU is to each other one; nothing for a single one.

    Both arguments are [num_devices, num_devices].
    """
    if len(peers) < 2:
        return
    yield "links (NV18: 18 NVLinks; P0: another link, of performance rank 0; -: no access):"
    for place, row in enumerate(peers):
        cells = [
            "."
            if other == place
            else f"NV{links[place][other]}"
            if has_access and links[place][other]
            else f"P{rank}"
            if has_access
            else "-"
            for other, (has_access, rank) in enumerate(row)
        ]
        yield f"  GPU {place}: " + " ".join(f"{cell:4}" for cell in cells).rstrip()
