"""The vocabulary of a draft head that knows a part of its target's tokens: d2t and t2d."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

from openspec.checkpoint.draft_model import OTHER_TARGET, DraftCheckpoint
from openspec.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN_MAP = "d2t"
TOKEN_MASK = "t2d"


def is_rising(values: Iterable[int]) -> bool:
    """Whether each is greater than the one before."""
    return all(a < b for a, b in itertools.pairwise(values))


def check_token_map(checkpoint: DraftCheckpoint, draft_vocab: int, vocab: int) -> None:
    """Checks d2t, which holds offsets: draft id i is the target's id i + d2t[i].

    Without it the head has to know all of the target's `vocab` tokens. Zeros mean the first ids, as
    in engines that start from zeros, whatever t2d marks.
    """
    if TOKEN_MAP not in checkpoint.tensors:
        if draft_vocab == vocab:
            return
        raise ConfigError(
            f"{checkpoint.folder}: missing tensor {TOKEN_MAP}: the head knows {draft_vocab} of the "
            f"target's {vocab} tokens, and {TOKEN_MAP} says which; take the whole checkpoint"
        )
    info = checkpoint.tensor(TOKEN_MAP)
    where = f"{info.path}: {TOKEN_MAP}"
    offsets = checkpoint.integers(TOKEN_MAP)
    if len(offsets) != draft_vocab:
        raise ConfigError(f"{where}: expected {draft_vocab} entries, found {len(offsets)}")
    has_ids = "it holds ids where offsets are expected: subtract 0, 1, 2, ... from it"
    may_be_ids = offsets[0] >= 0 and offsets[-1] < vocab and is_rising(offsets)
    mask = _token_mask(checkpoint, vocab)
    wrong = [i for i, offset in enumerate(offsets) if not 0 <= i + offset < vocab]
    if wrong:
        i = wrong[0]
        raise ConfigError(
            f"{where}: expected i + {TOKEN_MAP}[i] in [0, {vocab}), the target's vocabulary, found "
            f"{i} + {offsets[i]}; {has_ids if may_be_ids and len(wrong) > 1 else OTHER_TARGET}"
        )
    if mask is None:
        return
    unmarked = [i for i, offset in enumerate(offsets) if not mask[i + offset]]
    if unmarked and not any(offsets):
        logger.warning(
            "%s: zeros: drafts are of the target's ids 0 to %d, of which %s does not mark %d",
            where,
            draft_vocab - 1,
            TOKEN_MASK,
            len(unmarked),
        )
    elif unmarked:
        i = unmarked[0]
        are_ids = may_be_ids and all(mask[offset] for offset in offsets)
        raise ConfigError(
            f"{where}: expected {TOKEN_MASK} to mark the target's id {i} + {offsets[i]}, found it "
            f"unmarked ({len(unmarked)} of {draft_vocab} ids are); "
            f"{has_ids if are_ids else f'{TOKEN_MAP} and {TOKEN_MASK} are of different heads'}"
        )


def _token_mask(checkpoint: DraftCheckpoint, vocab: int) -> bytes | None:
    info = checkpoint.tensors.get(TOKEN_MASK)
    if info is None:
        return None
    if info.dtype not in ("BOOL", "U8") or info.shape != (vocab,):
        raise ConfigError(
            f"{info.path}: {TOKEN_MASK}: expected BOOL [{vocab}], the target's vocabulary, "
            f"found {info.dtype} {list(info.shape)}; {OTHER_TARGET}"
        )
    return bytes(checkpoint.data(TOKEN_MASK))
