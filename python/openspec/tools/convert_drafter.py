"""`python -m openspec.convert_drafter SRC DST`: a draft model that openspec can read.

Takes pytorch_model.bin (or safetensors of another float type) and writes model.safetensors in
bfloat16, tensor names as they are, and a copy of config.json; all of it, or nothing. Needs torch.
This is the one place that opens a pickle, with torch's restricted reader and only on request; the
engine never does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openspec.checkpoint.draft_model import KIND, PICKLED_WEIGHTS
from openspec.checkpoint.float16 import Float16Weights
from openspec.checkpoint.folder import (
    HUB_FILES,
    check_source,
    downloaded,
    find_file,
    is_hub_id,
    open_folder,
    split_revision,
)
from openspec.checkpoint.tensor_info import name_some, shown_name
from openspec.checkpoint.weights import (
    CONVERTER,
    INDEX_FILE,
    SINGLE_FILE,
    checkpoint_files,
    is_finite,
    read_index,
)
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

PICKLED_PATTERN = "pytorch_model*.bin"
PICKLED_BESIDE = "warp_model.bin"
"""Of PARD-2: tensors beside those of the other files."""
PICKLED_INDEX = f"{PICKLED_WEIGHTS}.index.json"
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE")
METADATA = "__metadata__"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=CONVERTER, description=__doc__)
    parser.add_argument(
        "source", metavar="SRC", help="folder, or id of the hub: ORG/NAME[@REVISION]"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the hub, after an @ as well")
    parser.add_argument("target", metavar="DST", help="folder to write; must not exist or be empty")
    args = parser.parse_args(argv)
    try:
        source = args.source if args.revision is None else f"{args.source}@{args.revision}"
        print(convert(_folder_of(source), Path(args.target)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _folder_of(source: str) -> Path:
    check_source(source, KIND)
    if not is_hub_id(source):
        return Path(source)
    name, revision = split_revision(source)
    folder = downloaded(name, revision, KIND)
    if any(folder.glob("*.safetensors")):
        # Which may be of a type to convert; the same weights in a pickle are not needed.
        return downloaded(name, revision, KIND, (*HUB_FILES, PICKLED_BESIDE))
    return downloaded(name, revision, KIND, (*COPIED, PICKLED_PATTERN, PICKLED_INDEX))


def convert(source: Path, target: Path) -> str:
    """Writes the converted folder; returns a line that says what was done, and what float16 lost.

    Raises:
        ConfigError: nothing to convert, or nowhere to write it.
    """
    root = open_folder(source, KIND)
    if find_file(root, "config.json") is None:
        raise ConfigError(f"{root} has no config.json; give the folder of a complete draft model")
    try:
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} exists and is not an empty folder; name a new one")
        half = Float16Weights()
        tensors = {name: _converted(name, tensor, half) for name, tensor in _read(root).items()}
        num_bytes = _write_folder(root, target, tensors)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}; name another folder") from None
    said = f"{target / SINGLE_FILE}: {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB"
    return "; ".join(filter(None, (said, half.describe())))


def _write_folder(root: Path, target: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Writes the whole folder or nothing; returns the size of the weights."""
    from safetensors.torch import save_file

    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as partial:
            for name in COPIED:
                file = find_file(root, name)
                if file is not None:
                    shutil.copyfile(file, Path(partial) / name)
            weights = Path(partial) / SINGLE_FILE
            save_file(dict(tensors), weights, metadata={"format": "pt"})
            num_bytes = weights.stat().st_size
            for written in Path(partial).iterdir():
                written.rename(target / written.name)
        return num_bytes
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise


def _read(root: Path) -> dict[str, torch.Tensor]:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the conversion needs torch ({error}); install it, or convert elsewhere"
        ) from None

    beside = _read_pickles([entry for entry in [root / PICKLED_BESIDE] if os.path.lexists(entry)])
    found = sorted(root.glob(PICKLED_PATTERN))
    if not found or any(find_file(root, name) for name in (SINGLE_FILE, INDEX_FILE)):
        # Beside a pickle, the same weights: no need to open that.
        return beside | _read_safetensors(root)
    tensors = _read_pickles(found)
    _check_complete(root, tensors)
    return beside | tensors


def _read_pickles(entries: Sequence[Path]) -> dict[str, torch.Tensor]:
    """All tensors of state dicts."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:
        file = find_file(entry.parent, entry.name)
        if file is None:
            raise ConfigError(f"{entry} is a link to nothing; finish the download")
        try:
            # weights_only: tensors and plain containers; whatever would run code is refused.
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the library raises many things for a broken or hostile file
            # Its text is not shown: it tells how to load the file with the code in it.
            raise ConfigError(
                f"{entry}: torch does not load it as weights only ({type(error).__name__}): it is "
                "broken, or holds more than tensors; take the head from another source"
            ) from None
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in content.items()
        ):
            raise ConfigError(f"{entry}: expected a mapping of names to tensors (a state dict)")
        tensors.update(content)
    return tensors


def _check_complete(root: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses shards that lack what their index names."""
    index = find_file(root, PICKLED_INDEX)
    if index is None:
        return
    named = set().union(*read_index(index, root / PICKLED_INDEX).values())
    missing = sorted(named - set(tensors))
    if missing:
        raise ConfigError(
            f"{root / PICKLED_INDEX} names {name_some(missing)}, which no {PICKLED_PATTERN} holds; "
            "finish the download"
        )


def _read_safetensors(root: Path) -> dict[str, torch.Tensor]:
    if not any(find_file(root, name) for name in (SINGLE_FILE, INDEX_FILE)):
        raise ConfigError(f"{root} has neither {PICKLED_WEIGHTS} nor {SINGLE_FILE}")
    return {name: file.tensor(name) for file in checkpoint_files(root) for name in file.tensors}


def _converted(name: str, tensor: torch.Tensor, half: Float16Weights) -> torch.Tensor:
    """In a type that the engine reads: floats as bfloat16, token ids and masks as they are."""
    import torch

    if name == METADATA:
        raise ConfigError(f"{name}: a safetensors file has no tensor of this name; rename it")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ConfigError(
            f"{shown_name(name)}: expected a dense tensor with data, found {tensor.layout} on "
            f"{tensor.device}; save the head again with plain tensors"
        )
    # Copies, because tensors of a pickle may share memory and those of a file do not.
    packed = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.float16:
        return half.convert(packed, shown_name(name))
    if tensor.dtype in (torch.bfloat16, torch.float32, torch.float64):
        converted = packed.to(torch.bfloat16)
        if not is_finite(converted):
            raise ConfigError(
                f"{shown_name(name)}: holds NaN, or numbers that are infinite in bfloat16; take "
                "the head from another source"
            )
        return converted
    if tensor.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8):
        return packed
    raise ConfigError(f"{shown_name(name)}: {tensor.dtype} has no place in a draft model")
