"""The commands from a terminal: what there are, and what a clone says that is not built."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import openspec
from openspec.__main__ import COMMANDS

PACKAGE = Path(openspec.__file__).parent


def run(module: str, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """`python -m module` of the package in this folder."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=path,
    )


def test_the_commands_are_listed() -> None:
    shown = run("openspec", path=PACKAGE.parent)
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f"python -m openspec.{name} " in shown.stdout
        assert importlib.util.find_spec(f"openspec.{name}") is not None
    unknown = run("openspec", "srve", path=PACKAGE.parent)
    assert unknown.returncode == 2 and unknown.stdout == ""
    assert unknown.stderr.startswith("openspec: there is no command 'srve'\nCommands")
    for name in COMMANDS:
        helps = run(f"openspec.{name}", "--help", path=PACKAGE.parent).stdout
        assert helps.startswith(f"usage: python -m openspec.{name}")
    assert run("openspec", name, "--help", path=PACKAGE.parent).stdout == helps
    files = {path.stem for path in PACKAGE.glob("*.py") if "import main" in path.read_text()}
    folders = {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    assert files | folders == set(COMMANDS)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, less what the build puts there."""
    folder: Path = tmp_path_factory.mktemp("clone")
    (folder / "openspec").mkdir()
    for path in PACKAGE.iterdir():
        if path.suffix != ".so":
            (folder / "openspec" / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("command", ["bench", "demo", "doctor", "serve"])
def test_a_clone_says_how_to_build_it(command: str, clone: Path) -> None:
    ended = run(f"openspec.{command}", path=clone)
    assert ended.returncode != 0 and ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.endswith(": the extension is not built: run `pip install .` or `tests/run cpp`")


def test_an_unbuilt_package_says_so_in_python(clone: Path) -> None:
    (clone / "ask.py").write_text("import openspec\nopenspec.LLM()\n")
    ended = run("ask", path=clone)
    assert ended.returncode == 1
    said = "openspec.errors.ConfigError: the extension is not built: "
    assert ended.stderr.splitlines()[-1].startswith(said)


def test_an_extension_that_does_not_load_is_another_matter(clone: Path, tmp_path: Path) -> None:
    """As one that was built with another torch."""
    (tmp_path / "openspec").mkdir()
    for path in (clone / "openspec").iterdir():
        (tmp_path / "openspec" / path.name).symlink_to(path)
    (tmp_path / "openspec" / "_C.py").write_text("raise ImportError('undefined symbol: x')\n")
    ended = run("openspec.doctor", path=tmp_path)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "does not load (undefined symbol: x); it needs the torch that it was built" in line
