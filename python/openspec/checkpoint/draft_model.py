"""Draft checkpoints: what any of them is to the engine, and the reading that all have in common.

Which formats there are and what their keys mean is the business of the method (`drafters/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openspec.checkpoint.float16 import FLOAT16
from openspec.checkpoint.folder import find_file, hub_id_of, open_folder
from openspec.checkpoint.strict_json import JsonKeys, read_json_object
from openspec.checkpoint.tensor_info import TensorInfo, name_some
from openspec.checkpoint.weights import (
    CONVERTER,
    SafetensorsFile,
    checkpoint_files,
)
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

KIND = "draft model"
OTHER_TARGET = "the head was trained for another target; give one made for this model"
PICKLED_WEIGHTS = "pytorch_model.bin"
CHUNK_BYTES = 1 << 16
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Of speculators and SpecForge; of vLLM's configurations with parallel_drafting; of PARD."""


class DraftCheckpoint:
    """A draft folder, open: config.json and the headers of all tensors, nothing loaded."""

    def __init__(self, folder: Path, keys: JsonKeys, files: list[SafetensorsFile]) -> None:
        self.folder = folder
        self.keys = keys
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for file in files for name, info in file.tensors.items()
        }
        self._file_of = {name: file for file in files for name in file.tensors}

    def tensor(self, name: str) -> TensorInfo:
        """One tensor's header.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.tensors:
            raise ConfigError(
                f"{self.folder}: missing tensor {name}; the tensors there are "
                f"{name_some(sorted(self.tensors))}"
            )
        return self.tensors[name]

    def values(self, name: str) -> torch.Tensor:
        """One tensor, over the file's pages."""
        return self._file_of[name].tensor(name)

    def data(self, name: str) -> memoryview:
        """The bytes of one tensor: the file's own pages."""
        return self._file_of[name].data(name)

    def integers(self, name: str) -> list[int]:
        """The values of a vector of integers.

        Raises:
            ConfigError: it is not one.
        """
        info = self.tensor(name)
        if info.dtype not in ("I64", "I32") or len(info.shape) != 1:
            raise ConfigError(
                f"{info.path}: {name}: expected a vector of I64 or I32, "
                f"found {info.dtype} {list(info.shape)}"
            )
        return self.data(name).cast("q" if info.dtype == "I64" else "i").tolist()


def read_draft_keys(folder: str | Path) -> JsonKeys:
    """A draft folder's config.json, which needs no torch.

    Raises:
        ConfigError: no folder or no config.json.
    """
    root = open_folder(folder, KIND)
    config = find_file(root, "config.json")
    if config is None:
        raise ConfigError(f"{root} has no config.json; give the folder of a complete draft model")
    return JsonKeys(read_json_object(config), str(root / "config.json"))


def read_mask_token(keys: JsonKeys, vocab: int) -> int | None:
    """The token that stands for those that are not known; None: no key names one.

    Raises:
        ConfigError: it is outside the vocabulary, or two keys name different ones.
    """
    named = [name for name in MASK_KEYS if keys.get(name) is not None]
    if not named:
        return None
    token = keys.integer(named[0], 0, vocab - 1)
    for name in named[1:]:
        if keys.integer(name, 0, vocab - 1) != token:
            keys.refuse(name, f"{token}, as {named[0]} says")
    return token


def open_draft_checkpoint(folder: str | Path) -> DraftCheckpoint:
    """Opens a draft folder; its files stay mapped while the result or a tensor of it lives.

    Raises:
        ConfigError: no folder, config.json or readable weights, with the remedy.
    """
    keys, root = read_draft_keys(folder), open_folder(folder, KIND)
    if not any(root.glob("*.safetensors*")):
        # Of the hub only the files that are read come here, and pickles are none of these.
        source = hub_id_of(root) or root
        if any(root.glob(f"{PICKLED_WEIGHTS}*")) or source != root:
            raise ConfigError(
                f"{root} has no safetensors, and {PICKLED_WEIGHTS} is not read because it can run "
                f"code; convert it once: {CONVERTER} {source} NEW_FOLDER"
            )
    return DraftCheckpoint(root, keys, checkpoint_files(root))


def is_same_tensor(checkpoint: DraftCheckpoint, name: str, folder: Path, other: str) -> bool:
    """Whether a draft's tensor is a copy of one in the target's folder, once both are loaded."""
    info = checkpoint.tensor(name)
    for file in checkpoint_files(folder):
        found = file.tensors.get(other)
        if found is None or found.shape != info.shape:
            continue
        if FLOAT16 in (found.dtype, info.dtype):
            import torch

            both = (checkpoint.values(name), file.tensor(other))
            return both[0].to(torch.bfloat16).equal(both[1].to(torch.bfloat16))
        if found.dtype == info.dtype:
            left, right = checkpoint.data(name), file.data(other)
            starts = range(0, len(left), CHUNK_BYTES)
            # As bytes, which are compared ten times as fast as memoryviews.
            return all(
                bytes(left[at : at + CHUNK_BYTES]) == bytes(right[at : at + CHUNK_BYTES])
                for at in starts
            )
    return False


def check_same_tokenizer(draft_folder: Path, target_folder: Path) -> str:
    """Compares the tokenizers, if the draft folder brings one; returns a line that says so.

    Training may have added tokens after the target's, such as a mask for blocks.

    Raises:
        ConfigError: tokens are missing or new among the target's, or an id is a different token.
    """
    draft_file = find_file(draft_folder, "tokenizer.json")
    target_file = find_file(target_folder, "tokenizer.json")
    if draft_file is None or target_file is None:
        return "tokenizer: the draft model brings none, the target's is used"
    draft, target = token_ids(draft_file), token_ids(target_file)
    if draft == target:
        return f"tokenizer: the target's and the draft model's are the same, {len(target)} tokens"
    added = [token for token in draft if token not in target]
    if all(draft.get(token) == target[token] for token in target) and all(
        draft[token] > max(target.values()) for token in added
    ):
        return f"tokenizer: the target's {len(target)} tokens and after them {name_some(added)}"
    remedy = "the draft model belongs to another target; give one that was trained for this one"
    if len(draft) != len(target):
        raise ConfigError(
            f"{draft_file}: expected {len(target)} tokens, as the target's, found {len(draft)}; "
            f"{remedy}"
        )
    token = next(token for token in target if draft.get(token) != target[token])
    raise ConfigError(
        f"{draft_file}: token {token!r:.80}: expected id {target[token]}, as the target's, "
        f"found {draft.get(token, 'none')}; {remedy}"
    )


def added_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the tokens that a folder's tokenizer.json adds to its vocabulary, in rising order."""
    file = find_file(folder, "tokenizer.json")
    return (
        ()
        if file is None
        else tuple(sorted(_added_ids(JsonKeys(read_json_object(file), str(file))).values()))
    )


def token_ids(file: Path) -> dict[str, int]:
    """The id of each token of a tokenizer.json, added ones among them.

    Raises:
        ConfigError: it is none, or an id is none.
    """
    keys = JsonKeys(read_json_object(file), str(file))
    model = keys.object("model")
    vocabulary = model.object("vocab") if model is not None else None
    if vocabulary is None:
        keys.refuse("model", "an object with vocab")
    ids = {token: vocabulary.integer(token, 0, 1 << 24) for token in vocabulary.values}
    return ids | _added_ids(keys)


def _added_ids(keys: JsonKeys) -> dict[str, int]:
    ids = {}
    added = keys.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict):
            one = JsonKeys(entry, f"{keys.source}: added_tokens")
            content = one.get("content")
            if isinstance(content, str):
                ids[content] = one.integer("id", 0, 1 << 24)
    return ids
