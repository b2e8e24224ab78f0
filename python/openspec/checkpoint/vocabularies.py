"""Tokenizers of two models that exchange token ids: where their tables differ."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from openspec.checkpoint.draft_model import token_ids
from openspec.checkpoint.folder import find_file
from openspec.checkpoint.strict_json import JsonKeys, read_json_object
from openspec.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """What a target and a drafter with a table of its own have in common."""

    described: str
    """One line for people."""
    unknown_token: int = 0
    """What the drafter reads in place of tokens beyond its table."""


def share_vocabulary(draft_folder: Path, target_folder: Path) -> SharedVocabulary:
    """Compares the tables by id. An id that only one of them defines is no conflict.

    Raises:
        ConfigError: an id means two different texts, with the first such id.
    """
    draft_file = find_file(draft_folder, "tokenizer.json")
    target_file = find_file(target_folder, "tokenizer.json")
    if draft_file is None or target_file is None:
        whose = "the draft model" if draft_file is None else "the model"
        return SharedVocabulary(f"tokenizer: {whose} brings none to compare")
    draft = {number: token for token, number in token_ids(draft_file).items()}
    target = {number: token for token, number in token_ids(target_file).items()}
    for number in sorted(draft.keys() & target.keys()):
        if draft[number] != target[number]:
            raise ConfigError(
                f"{draft_file}: token id {number} is {draft[number]!r:.80}, but "
                f"{target[number]!r:.80} in the target's tokenizer; a draft model drafts ids, so "
                "give one with the target's tokenizer, such as a small model of its family"
            )
    num_shared = len(draft.keys() & target.keys())
    described = (
        f"tokenizer: {num_shared} tokens in common, {len(draft) - num_shared} the draft model's "
        f"alone, {len(target) - num_shared} the target's alone"
    )
    if draft != target:
        logger.info("%s: %s", draft_folder, described)
    return SharedVocabulary(described, _unknown_token(draft_file))


def _unknown_token(file: Path) -> int:
    """The id of the token that stands for unknown text; 0 where there is none."""
    keys = JsonKeys(read_json_object(file), str(file))
    model = keys.object("model")
    unknown = None if model is None else model.get("unk_token")
    return token_ids(file).get(unknown, 0) if isinstance(unknown, str) else 0
