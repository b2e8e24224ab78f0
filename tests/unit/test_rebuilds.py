"""What a change of a kernel's contract compiles anew, from the sources' includes alone."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KERNELS = CSRC / "kernels"

# Of the extension's objects, about 100, without CUDA. A format, an epilogue or a parameter of an op
# is a change of its contract; with the contracts of all families in each copy of the CPU's ops it
# compiled up to 58 of them. 25 until ranks exchanged sums (three sources) and weights had codes and
# scales (a source, and the tile of a product that attention's four copies share): six more. Experts
# multiply as linears do: routing and experts, each in three copies, their part, target and op, and
# a layer with a running state: eleven more. Heads that are a whole model or a target's own layer,
# their drafters, and head rows that are copied: seven more.
MAX_OBJECTS = 49

# Not contracts: what the sequence table and the runtime hold of a family. No op is declared there.
HELD = (
    KERNELS / "choose" / "sampling_params.h",
    KERNELS / "drafts" / "table_rows.h",
    KERNELS / "delta_net" / "delta_states.h",
)


@cache
def included(path: Path) -> tuple[Path, ...]:
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
    return tuple(CSRC / name for name in names if (CSRC / name).is_file())


def closure(path: Path) -> set[Path]:
    seen, left = {path}, [path]
    while left:
        new = set(included(left.pop())) - seen
        seen |= new
        left += new
    return seen


def objects() -> list[Path]:
    """Sources, those of the CPU's copies as often as they are compiled."""
    text = (KERNELS / "CMakeLists.txt").read_text()
    copies = [
        path
        for path in KERNELS.rglob("*.cpp")
        if "\nnamespace openspec::OPENSPEC_ISA " in path.read_text() and path.name != "amx_cpu.cpp"
    ]
    assert copies
    more = len(re.findall(r'openspec_add_isa\(\w+ "\$\{isa_sources\}"', text)) - 1
    return sorted(CSRC.rglob("*.cpp")) + more * copies


FAMILIES = sorted(
    path.name for path in KERNELS.iterdir() if path.is_dir() and path.name != "common"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_a_contract_compiles_few_objects(family: str) -> None:
    counts = Counter(header for source in objects() for header in closure(source))
    headers = [path for path in (KERNELS / family).glob("*.h") if path not in HELD]
    assert headers
    many = {path.name: counts[path] for path in headers if counts[path] > MAX_OBJECTS}
    assert not many, f"{many} of {len(objects())} objects, at most {MAX_OBJECTS}"


def test_what_others_hold_declares_no_op() -> None:
    for path in HELD:
        assert not re.search(r"_(cpu|cuda)\(", path.read_text()), path
