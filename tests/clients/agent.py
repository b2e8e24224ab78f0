"""What programs of coding agents share: a folder and a home, and what a turn must do.

The engine is scripted (`scripted.py`): it calls one of the agent's own tools, and ends after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ASK = "Write hello into made.txt"
MADE = "made.txt"
DONE = "All done: made.txt says hello."
HOME = "@HOME@"
TIMEOUT_S = 200


def run_agent(*commands: list[str], **variables: str) -> str:
    """Runs an agent's commands, the first on ASK, in one folder and home; returns their output.

    HOME in a variable stands for the home.

    Raises:
        AssertionError: one failed, or there is no file.
    """
    output = ""
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        own = {name: value.replace(HOME, str(home)) for name, value in variables.items()}
        # PWD as well: some read it rather than ask the system.
        environment = {**os.environ, "HOME": str(home), "PWD": str(work), **own}
        for command in commands:
            done = subprocess.run(
                command,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            output += done.stdout + done.stderr
            assert done.returncode == 0, output
        assert (work / MADE).is_file(), f"no tool ran:\n{output}"
        assert (work / MADE).read_text().strip() == "hello"
        return output


def version(*command: str) -> str:
    """What a command says about its version."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout.strip() or done.stderr.strip()


def address() -> str:
    """The address of the server with the script."""
    return sys.argv[2]
