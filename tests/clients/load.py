"""What programs of load generators share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "python" / "openspec" / "models" / "tiny"
"""Its tokenizer counts tokens on the client's side."""
TIMEOUT_S = 500


def address() -> str:
    """The server's address."""
    return sys.argv[1]


def run_load(*command: str, offline: bool = True) -> dict[str, str]:
    """Runs a generator in an empty folder; what it wrote there, by path.

    `offline` keeps it from asking the hub for what a folder does not hold.

    Raises:
        AssertionError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HOME": f"{folder}/hub"}
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        files = [file for file in Path(folder).rglob("*.json*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_text() for file in files}
