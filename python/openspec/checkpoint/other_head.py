"""A draft head that may take the running one's place: where it may come from, and its shape."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

from openspec.checkpoint.weights import checkpoint_files
from openspec.errors import RequestError
from openspec.specs.head import HeadSpec

_CHUNK_BYTES = 1 << 22


def find_folder(path: str, root: Path) -> Path:
    """The folder that `path` names, below `root` where it is not absolute.

    Neither it nor a file in it may lead out of `root`, and all its files are regular ones.

    Raises:
        RequestError: it is elsewhere, or no folder.
    """
    root = root.resolve()
    try:
        folder = (root / path).resolve()
        found = sorted(folder.iterdir()) if folder.is_relative_to(root) else []
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        raise RequestError(
            f"{path!r}: {reason}; name a folder below drafter_dir, {root}",
            "path",
            "drafter_unreadable",
        ) from None
    outside = [one.name for one in (folder, *found) if not one.resolve().is_relative_to(root)]
    if outside:
        raise RequestError(
            f"{path!r} leads out of drafter_dir, {root}, with {outside[0]!r}; copy the head there",
            "path",
            "drafter_outside",
        )
    special = [one.name for one in found if not one.is_file() and not one.is_dir()]
    if special:
        raise RequestError(
            f"{path!r}: {special[0]!r} is no regular file; remove it", "path", "drafter_unreadable"
        )
    return folder


def check_same_shape(folder: Path, head: HeadSpec, running: HeadSpec) -> None:
    """Refuses a head that computes something else than the one that runs.

    Raises:
        RequestError: with the first fact that differs.
    """
    found = difference(head, running)
    if found is not None:
        where, new, old = found
        raise RequestError(
            f"{folder}: another shape than the head that runs, at #{where}: {new}, there {old}; "
            "start a server with it",
            "path",
            "drafter_other_shape",
        )


def difference(new: object, old: object, at: str = "") -> tuple[str, str, str] | None:
    """Where two descriptions first differ, as a JSON pointer, and how; None: nowhere."""
    if new == old:
        return None
    if type(new) is type(old):
        for key, one, other in _inner(new, old):
            if (found := difference(one, other, f"{at}/{key}")) is not None:
                return found
    return at, _shown(new), _shown(old)


def _inner(new: object, old: object) -> list[tuple[str, object, object]]:
    if dataclasses.is_dataclass(new):
        names = [field.name for field in dataclasses.fields(new)]
        return [(name, getattr(new, name), getattr(old, name)) for name in names]
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return [(key, new.get(key), old.get(key)) for key in sorted(new.keys() | old.keys())]
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return [(str(i), one, other) for i, (one, other) in enumerate(zip(new, old, strict=True))]
    return []


def _shown(value: object) -> str:
    if isinstance(value, (tuple, Mapping)):
        return f"{len(value)} entries"
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def hash_of_weights(folder: Path) -> str:
    """SHA-256 of the safetensors file; of several, of their bytes one after another, by name."""
    digest = hashlib.sha256()
    files = checkpoint_files(folder)
    for file in files:
        file.close()
    for path in sorted(file.path for file in files):
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
