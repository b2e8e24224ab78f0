"""DFlash and its family: a block of drafts in one pass over the target's hidden states."""

from __future__ import annotations

from pathlib import Path

from openspec.checkpoint.draft_model import opened_draft_checkpoint, read_draft_keys
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.dflash_formats import (
    AUTO,
    CAUSAL,
    DRAFT_ANCHOR,
    DRAFT_ATTENTION,
    DROP,
    FIRST,
    FULL,
    MAX_BLOCK,
    describe,
    num_drafts_of,
    read_dialect,
)
from openspec.drafters.spec import (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    DRAFT_WINDOW_OPTION,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    Options,
    OptionValue,
    Variant,
    check_rejection,
    check_trees,
    layer_variants,
)
from openspec.errors import ConfigError

MAX_TREE_SIZE = 256


def _num_drafts_of(folder: Path, options: Options) -> int:
    return num_drafts_of(read_dialect(read_draft_keys(folder)), options)


def _read_draft_model(setup: DraftSetup, has_markov: bool) -> DraftModel:
    with opened_draft_checkpoint(setup.draft_folder) as checkpoint:
        model = describe(checkpoint, setup.options, setup.target, has_markov=has_markov)
        most = num_drafts_of(read_dialect(checkpoint.keys), setup.options)
    if setup.draft_depth > most:
        raise ConfigError(
            f"num_speculative_tokens must be at most {most}, the drafts of a block that "
            f"{setup.folder} was trained on, got {setup.draft_depth}"
        )
    return model


def _plan_checkup(setup: DraftSetup, has_markov: bool) -> Checkup:
    draft_model = _read_draft_model(setup, has_markov)
    model = draft_model.options
    variants = [*layer_variants(draft_model, setup.target)]
    anchor = DROP if model["anchor_drafts"] else FIRST
    given, block_size = setup.num_speculative_tokens, int(model["block_size"])
    options: dict[str, OptionValue] = {DRAFT_ANCHOR: anchor}
    also = ""
    tree_size = int(setup.options[DRAFT_TREE_SIZE])
    if anchor == FIRST and given is None and 0 < tree_size < block_size:
        options[DRAFT_TREE_SIZE] = block_size  # the default depth, which is one more so
    if anchor == DROP and given == block_size:
        options["num_speculative_tokens"] = block_size - 1  # all that such a block has
        also = f", and --num-speculative-tokens {block_size - 1}"
    variants.append(
        Variant(
            label=f"anchor-{anchor} blocks",
            options=options,
            advice="the head was trained with the other rows drafting: use --draft-anchor "
            f"{anchor} or mend config.json (num_anchors, sample_from_anchor){also}",
        )
    )
    attention = FULL if model["is_causal"] else CAUSAL
    variants.append(
        Variant(
            label=f"{attention} attention within blocks",
            options={DRAFT_ATTENTION: attention},
            advice=f"the head was trained so: use --draft-attention {attention} or mend "
            "config.json (causal_head)",
        )
    )
    return Checkup(
        usual=(0.72,),
        source="DFlash heads for Qwen3 4B and 8B on chats; on mathematics 0.85 to 0.88",
        least_first=0.30,
        variants=tuple(variants),
        causes=(
            *HEAD_CAUSES,
            "the context was trained with the layers' input norm; here only block rows pass it",
            "mask_token_id is not the token that the head was trained with",
            "thinking mode: heads trained without it accept half as much with it",
            "another chat template than in training; texts far from its data",
        ),
    )


def _max_draft_tokens(depth: int, options: Options) -> int:
    """Drafts of a step: K, or the nodes of a tree of depth K."""
    top_k, wanted = int(options[DRAFT_TOP_K]), int(options[DRAFT_TREE_SIZE])
    if top_k == 1 or depth == 0:
        return depth
    num_nodes, level = 0, 1
    for _ in range(depth):
        level = min(level * top_k, MAX_TREE_SIZE)
        num_nodes += level
    return min(wanted or max(depth, 15), num_nodes, MAX_TREE_SIZE)


_OPTIONS = (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_WINDOW_OPTION,
    DrafterOption(
        name=DRAFT_ANCHOR,
        default=AUTO,
        choices=(AUTO, FIRST, DROP),
        help="Whether the row of the last known token drafts as well (first) or not (drop). auto: "
        "what the head's config.json says.",
    ),
    DrafterOption(
        name=DRAFT_ATTENTION,
        default=AUTO,
        choices=(AUTO, FULL, CAUSAL),
        help="Whether the rows of a block see those behind them (full) or not (causal). auto: "
        "what the head's config.json says.",
    ),
    DrafterOption(
        name=DRAFT_TOP_K,
        default=1,
        minimum=1,
        maximum=64,
        help="Above 1 a tree is drafted from the best so many tokens of every position.",
    ),
    DrafterOption(
        name=DRAFT_TREE_SIZE,
        default=0,
        minimum=0,
        maximum=MAX_TREE_SIZE,
        help="Drafts of a tree, the most likely ones. Default: K, at least 15.",
    ),
)


def make_spec(name: str, summary: str, num_drafts: int, has_markov: bool) -> DrafterSpec:
    """A method of the family; `num_drafts` where no checkpoint says it."""

    def check(setup: DraftSetup) -> None:
        check_rejection(setup)
        check_trees(setup)

    return DrafterSpec(
        name=name,
        summary=summary,
        default_num_speculative_tokens=num_drafts,
        max_num_speculative_tokens=MAX_BLOCK,
        options=_OPTIONS,
        num_drafts_of=_num_drafts_of,
        supports_rejection=True,
        check=check,
        max_draft_tokens=_max_draft_tokens,
        read_draft_model=lambda setup: _read_draft_model(setup, has_markov),
        plan_checkup=lambda setup: _plan_checkup(setup, has_markov),
    )


SPEC = make_spec(
    "dflash",
    "a head of several layers reads the target's hidden states and drafts a block at once",
    num_drafts=15,
    has_markov=False,
)
