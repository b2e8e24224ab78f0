"""Where and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import openspec

_PACKAGES = ("torch", "transformers", "uvicorn", "starlette", "msgspec", "tokenizers")
_CHANGES_WHILE_IT_RUNS = ("spec_decode", "internal_states")


def environment(flags: dict[str, object], server_info: dict[str, object]) -> dict[str, object]:
    """Machine, versions, commit, server and flags, as the JSON report holds them."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu_models(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"openspec": openspec.__version__, **versions(_PACKAGES)},
        "commit": commit(),
        "server": {k: v for k, v in server_info.items() if k not in _CHANGES_WHILE_IT_RUNS},
        "flags": flags,
    }


def cpu_model() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_models() -> list[str]:
    """Names of the NVIDIA GPUs, empty where the driver's tool finds none."""
    lines = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    return [line.strip() for line in lines if line.strip()]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with a mark if files differ from it; None outside a checkout."""
    folder = Path(openspec.__path__[0]).resolve()
    root = folder.parent.parent
    if folder.parent.name != "python" or not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    head = _output([*git, "rev-parse", "--short=12", "HEAD"]).strip()
    if not head:
        return None
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no"]).strip()
    return f"{head}+changes" if changed else head


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
