"""Records in files, a shard each; appended to, never changed.

A record is a header (magic, number of ids, how many of them were the prompt, crc32 of the ids, the
time in seconds since 1970, and the temperature) and its ids, little endian, four bytes each.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from openspec.errors import ConfigError

MAGIC = b"OSR2"
HEADER = struct.Struct("<4sIIIQf")
SUFFIX = ".ids"
MANIFEST = "manifest.json"
MAX_RECORD_IDS = 1 << 24


class Record(NamedTuple):
    """Token ids, of which the first `prompt` were given to the target and it wrote the others."""

    tokens: list[int]
    prompt: int
    time: int
    """Seconds since 1970."""
    temperature: float = 0.0
    """With which the target's tokens were drawn."""


def encoded(record: Record) -> bytes:
    """As it stands in a shard."""
    ids = _bytes_of(record.tokens)
    numbers = (len(record.tokens), record.prompt, zlib.crc32(ids), record.time, record.temperature)
    return HEADER.pack(MAGIC, *numbers) + ids


def size_of(num_tokens: int) -> int:
    """Bytes of the record of so many tokens."""
    return HEADER.size + 4 * num_tokens


def _bytes_of(tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def decoded(data: bytes) -> Iterator[Record]:
    """The records of a shard up to the first that is cut or damaged."""
    at = 0
    while at + HEADER.size <= len(data):
        magic, num_ids, prompt, checksum, time, temperature = HEADER.unpack_from(data, at)
        begin, at = at + HEADER.size, at + HEADER.size + 4 * num_ids
        ids = data[begin:at]
        is_whole = magic == MAGIC and num_ids <= MAX_RECORD_IDS and len(ids) == 4 * num_ids
        if not is_whole or prompt > num_ids or zlib.crc32(ids) != checksum:
            return
        tokens = array("I", ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        yield Record(tokens.tolist(), prompt, time, temperature)


def target_identity(model_folder: Path) -> str:
    """What tells one target's records from another's: its configuration and its tokenizer."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        path = model_folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def open_folder(folder: Path) -> Path:
    """The folder, made if it is not there.

    Raises:
        ConfigError: it is no folder, another's, or open to others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name another folder") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is no folder of records; name another one")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: records are text for whoever has the tokenizer; its owner must be this "
            "process's user and nobody else may enter it (chmod 700)"
        )
    return folder


def check_identity(folder: Path, identity: str) -> None:
    """Notes whose records these are, or compares.

    Raises:
        ConfigError: they are another target's.
    """
    path = folder / MANIFEST
    if not path.exists():
        write_new(path, json.dumps({"format": 1, "target": identity}).encode())
        return
    try:
        known = json.loads(read_own(path))["target"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(f"{path}: not a manifest of records; name another folder") from None
    if known != identity:
        raise ConfigError(f"{folder} has records of another model; name another folder")


def write_new(path: Path, data: bytes) -> None:
    """A new file of this user alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def read_own(path: Path) -> bytes:
    """A file that is no link."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read()


def shards(folder: Path) -> list[Path]:
    """The oldest first."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def begin_of(shard: Path) -> float:
    """When its first record was written, in seconds since 1970: its name begins with it."""
    nanoseconds = shard.name.partition("-")[0]
    return int(nanoseconds) / 1e9 if nanoseconds.isdecimal() else 0.0


def num_bytes(shard: Path) -> int:
    """Of the file; none if it has gone meanwhile."""
    try:
        return shard.stat().st_size
    except FileNotFoundError:
        return 0


def read_records(folder: Path, identity: str) -> Iterator[Record]:
    """All records of a target, the oldest first.

    Raises:
        ConfigError: the folder cannot be used, or its records are another target's.
    """
    check_identity(open_folder(folder), identity)
    for path in shards(folder):
        try:
            data = read_own(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; remove it") from None
        yield from decoded(data)


def erase(folder: Path) -> int:
    """Removes all records; returns how many files that were."""
    paths = shards(open_folder(folder))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
