"""Which files of a checkpoint folder may be opened."""

from __future__ import annotations

import stat
from pathlib import Path

from openspec.errors import ConfigError


def open_folder(folder: str | Path, kind: str = "model") -> Path:
    """The folder as an absolute path; `kind` says in messages what is in it.

    Raises:
        ConfigError: it does not exist or is not a folder.
    """
    try:
        path = Path(folder).expanduser().resolve()
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{kind} folder {folder!s}: cannot be opened: {error}") from None
    if not is_folder:
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{kind} folder {path} {what}; give a local folder with config.json and *.safetensors, "
            "as it comes from Hugging Face (nothing is downloaded)"
        )
    return path


def find_file(folder: Path, name: str) -> Path | None:
    """The regular file `name` of a folder from `open_folder`, or None if there is none.

    A link may lead elsewhere in the folder, or to the `blobs` of the Hugging Face cache that the
    folder is a snapshot of, or lies in one (`models--x/snapshots/<revision>/head`); any other is
    refused, so that a downloaded folder cannot make the server read files outside of it.

    Raises:
        ConfigError: not a plain name, a link out of the folder, or not a regular file.
    """
    if not is_plain_name(name):
        raise ConfigError(f"{folder}: {name!r} is not a plain file name")
    link = folder / name
    try:
        path = link.resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{link}: cannot be opened: {error}") from None
    snapshots = [parent for parent in folder.parents if parent.name == "snapshots"]
    roots = [folder, *(parent.parent / "blobs" for parent in snapshots[:1])]
    if not any(path.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{link} is a link to {path}, outside of the model folder; copy the file there, "
            "or give the folder that holds it"
        )
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{link} is not a regular file")
    return path


def is_plain_name(name: str) -> bool:
    """Whether `name` names an entry of a folder itself: no separators, no dots alone, printable."""
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\:")
