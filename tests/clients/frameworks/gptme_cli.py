"""gptme: conversations with a call of its shell tool, as a tool and as a block of Markdown."""

import os
import subprocess
import tempfile
from pathlib import Path

from playing import MODEL, SCRIPTED, call, played, print_versions


def conversation(*options: str, answers: list[str]) -> str:
    """The output of one in a home and a folder of its own, where the tool must have run."""
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        own = {"HOME": str(home), "PWD": str(work), "OPENAI_BASE_URL": f"{SCRIPTED}/v1"}
        command = ["gptme", "--non-interactive", "--model", f"local/{MODEL}", "--name", "turn"]
        done = subprocess.run(
            [*command, *options, played(*answers)],
            cwd=work,
            env={**os.environ, **own, "OPENAI_API_KEY": "unused"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert (work / "made.txt").read_text() == "hello\n", output
        return output


# Each last answer stands there twice: gptme also asks for a title of what the user said.
shell, ended = call("shell", command="echo hello > made.txt"), f"It is written.\n{call('complete')}"
for options in ([], ["--no-stream"]):
    output = conversation(*options, answers=[shell, ended, ended])
    assert "It is written." in output and "I write the file." in output, output
    assert "too many" not in output, output
shell, ended = "```shell\necho hello > made.txt\n```", "```complete\n```"
output = conversation("--tool-format", "markdown", answers=[shell, ended, ended])
assert "too many" not in output, output
print_versions("gptme")
