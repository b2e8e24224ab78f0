"""A case: one published format, the authors' code that computes it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal


class DiffersError(Exception):
    """openspec and the oracle compute different things; the message says what and where."""


class AbsentError(Exception):
    """The oracle's package, or the folder with its code, is not here."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders with code that is on no package index, by name (`--source NAME=FOLDER`)."""

    folders: Mapping[str, Path]

    def folder(self, name: str) -> Path:
        """The folder of one source.

        Raises:
            AbsentError: it was not given.
        """
        if name not in self.folders:
            raise AbsentError(f"--source {name}=FOLDER was not given")
        return self.folders[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    kind: Literal["target", "head", "memory"]
    format: str
    """As users know it, such as "Llama 3.2 (tied, head_dim 64)"."""
    reading: Literal["read", "refused"] = "read"
    oracle: str
    """The distribution whose code runs, or the name of a source; "none" where nothing is read."""
    run: Callable[[Path, Sources], str]
    """Compares in an empty folder and returns the result in a few words.

    Raises DiffersError, or AbsentError where the oracle cannot run.
    """

    def shown_oracle(self) -> str:
        """With its version, where it is an installed distribution."""
        try:
            return f"{self.oracle} {metadata.version(self.oracle)}"
        except metadata.PackageNotFoundError:
            return self.oracle
