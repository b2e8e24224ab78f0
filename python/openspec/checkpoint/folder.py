"""Checkpoint folders: which of their files may be opened, and how the hub's come here."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from openspec.errors import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
GIVE = "give a local folder, or an id of the Hugging Face hub such as Qwen/Qwen3-4B"


def split_revision(source: str) -> tuple[str, str | None]:
    """The id or folder and the revision after it, as in `org/name@revision`.

    Any other name is whole, and so is that of something on this disk.
    """
    name, at, revision = source.partition("@")
    is_named = at and (HUB_ID.fullmatch(name) or os.path.isdir(name))
    return (name, revision) if is_named and not os.path.exists(source) else (source, None)


def is_hub_id(source: str) -> bool:
    """Whether it has the form `org/name` or `org/name@revision` and is nothing on this disk."""
    name, _ = split_revision(source)
    return HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


def check_source(source: str, kind: str = "model") -> None:
    """Refuses what is neither a folder nor the id of a model of the hub; asks nobody.

    Raises:
        ConfigError: with the remedy.
    """
    if source == "":
        raise ConfigError(f"{kind} folder must not be empty; '.' is the current one")
    name, revision = split_revision(source)
    if revision == "":
        raise ConfigError(f"{kind} {source}: no revision follows the @; name one, or drop it")
    if is_hub_id(source):
        return
    open_folder(name, kind)
    if revision is not None:
        raise ConfigError(
            f"{kind} {name} is a folder, and only models of the hub have revisions; drop {revision}"
        )


def downloaded(
    repo: str,
    revision: str | None,
    kind: str = "model",
    files: Sequence[str] = HUB_FILES,
    subfolder: str | None = None,
) -> Path:
    """The folder in the hub's cache with `files` of a repository, fetched as far as they lack.

    `subfolder`: the same files of this folder of the repository too, if it has one.

    Raises:
        ConfigError: one line with the reason and the remedy.
    """
    from huggingface_hub import snapshot_download  # takes a third of a second

    try:
        folder = Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]
            )
        )
        if subfolder is not None:
            inner = [f"{subfolder}/{file}" for file in files]
            snapshot_download(repo, revision=folder.name, allow_patterns=inner)
    except Exception as error:  # several HTTP libraries' own, by the version of the client
        source = repo if revision is None else f"{repo}@{revision}"
        raise ConfigError(f"{kind} {source}: {_explained(error, repo, revision)}") from None
    return folder


def hub_id_of(folder: Path) -> str | None:
    """The id of the model that a folder of the hub's cache is a snapshot of; None: it is none."""
    revisions, repo = folder.parent, folder.parent.parent.name
    is_snapshot = revisions.name == "snapshots" and repo.startswith("models--")
    return repo.removeprefix("models--").replace("--", "/", 1) if is_snapshot else None


def _explained(error: BaseException, repo: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    hub, causes = constants.ENDPOINT, list(_causes(error))
    statuses = {
        one.response.status_code
        for one in causes
        if isinstance(one, errors.HfHubHTTPError) and one.response is not None
    }
    if any(isinstance(one, OSError) and one.errno == errno.ENOSPC for one in causes):
        return (
            f"no space is left for the hub's cache, {constants.HF_HUB_CACHE}; free some, or let "
            "HF_HOME name another disk"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access is gated; accept its terms at {hub}/{repo} and set HF_TOKEN to a token of "
            "the same account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"neither a folder here nor a model that {hub} shows; check the spelling, or set "
            "HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"there is no such revision; name a branch, tag or commit of {hub}/{repo}"
    if statuses & {401, 403}:
        return f"{hub} refuses access (HTTP {min(statuses)}); check HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        return (
            f"not in the hub's cache, {constants.HF_HUB_CACHE}, or only in part, and "
            "HF_HUB_OFFLINE is set; unset it, or give a folder"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and not statuses:
        return (
            f"{hub} cannot be reached, and the hub's cache, {constants.HF_HUB_CACHE}, lacks it; "
            "check the network, or give a folder"
        )
    reason = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split())
    return f"the download from {hub} failed ({reason[:200]}); try again"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


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
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{kind} folder {folder!s} {what}; {GIVE}")
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
        raise ConfigError(f"{link} is not a regular file; put the checkpoint's own there")
    return path


def is_plain_name(name: str) -> bool:
    """Whether `name` names an entry of a folder itself: no separators, no dots alone, printable."""
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\:")
