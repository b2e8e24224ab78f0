"""DFlash and its family: a block of drafts in one pass over the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from openspec.checkpoint.draft_head import (
    CAPTURE_LAYERS,
    EMBEDDING,
    HEAD,
    LAYER_TENSORS,
    QK_NORMS,
    DraftHead,
    layers_of_user,
)
from openspec.checkpoint.draft_model import DraftCheckpoint, open_draft_checkpoint, read_draft_keys
from openspec.checkpoint.token_map import TOKEN_MAP
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.dflash.dflash_format import (
    AUTO,
    CAUSAL,
    DRAFT_ANCHOR,
    DRAFT_ATTENTION,
    DROP,
    FIRST,
    FULL,
    MAX_BLOCK,
    BlockDialect,
    named_layer_ids,
    read_dialect,
)
from openspec.drafters.spec import (
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    Options,
    OptionValue,
    Variant,
    check_head_options,
    layer_variants,
    num_one_pass_nodes,
    one_pass_options,
)
from openspec.errors import ConfigError

MAX_MARKOV_RANK = 256
OUTER_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight")
MARKOV_TENSORS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def _read_draft_model(setup: DraftSetup, has_markov: bool) -> DraftModel:
    target, checkpoint = setup.target, open_draft_checkpoint(setup.draft_folder)
    dialect = read_dialect(checkpoint.keys, setup.options)
    block, rank = dialect.block, dialect.markov_rank
    if has_markov and rank == 0:
        block.refuse("markov_rank", "above 0", "without a Markov head it is for --method dflash")
    if not has_markov and rank > 0:
        block.refuse("markov_rank", "0 or none", "with a Markov head it is for --method dspark")
    if rank % 8 or rank > MAX_MARKOV_RANK:
        expected = f"a multiple of 8, at most {MAX_MARKOV_RANK}"
        block.refuse("markov_rank", expected, "its kernels know no other; published heads have 256")

    user = layers_of_user(str(setup.options[CAPTURE_LAYERS]))
    layer_ids = user or named_layer_ids(dialect, checkpoint, target)
    head = DraftHead(checkpoint, dialect, layer_ids, target)
    if rank == 0:
        head.ignored.update(dict.fromkeys(CONFIDENCE_TENSORS, "only used beside a Markov head"))
    draft_vocab = target.vocab_size
    if head.has(HEAD):
        rows = checkpoint.tensor(HEAD).shape[0]
        draft_vocab = dialect.keys.integer("draft_vocab_size", 1, draft_vocab, rows)
    _check_parts(setup, dialect, draft_vocab)
    has_confidence = head.has(CONFIDENCE_TENSORS[0])
    num_layers = dialect.num_layers
    spec = replace(
        head.spec("layers.0.", draft_vocab, num_layers, dialect.sliding),
        block_size=dialect.block_size,
        mask_token=block.integer("mask_token_id", 0, target.vocab_size - 1),
        anchor_drafts=dialect.anchor_drafts,
        is_causal=dialect.is_causal,
        sliding_is_causal=dialect.sliding_is_causal,
        window_follows_rows=dialect.window_follows_rows,
        markov_rank=rank,
        conv_group=dialect.parts.conv_group,
        selector_rank=dialect.parts.selector_rank,
        selector_top_k=dialect.parts.selector_top_k,
        has_confidence=has_confidence,
        confidence_sees_token=has_confidence
        and _confidence_sees_token(checkpoint, target.hidden_size, rank),
    )
    inner = (*LAYER_TENSORS, *QK_NORMS)
    names = [f"layers.{layer}.{name}" for layer in range(num_layers) for name in inner]
    names += [*OUTER_TENSORS, *filter(head.has, (EMBEDDING, HEAD, TOKEN_MAP))]
    names += MARKOV_TENSORS if rank > 0 else ()
    names += CONFIDENCE_TENSORS if has_confidence else ()
    names += dialect.parts.tensors(num_layers)
    shown = f"{num_layers} layers, {dialect.shown_block()}"
    details = [
        f"block: {shown}, mask token {spec.mask_token}",
        f"sight: {dialect.shown_attention()}",
    ]
    details += dialect.parts.details()
    if rank > 0:
        details.append(
            f"Markov head: rank {rank}, with{'' if has_confidence else 'out'} confidences"
        )
    if setup.draft_depth > dialect.num_drafts:
        raise ConfigError(
            f"num_speculative_tokens must be at most {dialect.num_drafts}, the drafts of a block "
            f"that {setup.folder} was trained on, got {setup.draft_depth}"
        )
    return head.model(
        "DSpark" if has_markov else dialect.parts.kind,
        shown,
        spec,
        {name: name for name in names},
        details,
    )


def _check_parts(setup: DraftSetup, dialect: BlockDialect, draft_vocab: int) -> None:
    """Refuses a selector and convolutions that go with nothing else that was asked for."""
    parts, vocab_size = dialect.parts, setup.target.vocab_size
    if parts.conv_group and setup.target.hidden_size % parts.conv_group:
        expected = f"a divisor of hidden_size ({setup.target.hidden_size})"
        dialect.block.refuse("conv_group_size", expected)
    if parts.selector_rank == 0:
        return
    if dialect.markov_rank > 0:
        dialect.block.refuse("selector_rank", "no such key", "a Markov head is there already")
    if draft_vocab != vocab_size:
        remedy = "a selector needs the whole vocabulary, as its trainer does; give another head"
        dialect.keys.refuse("draft_vocab_size", f"the target's {vocab_size}", remedy)
    if parts.selector_top_k > vocab_size:
        dialect.block.refuse("selector_top_k", f"at most the vocabulary's {vocab_size}")
    if setup.acceptance == "rejection":
        raise ConfigError(
            "--acceptance rejection needs the chances of all tokens, and this head's selector "
            "knows those of its candidates alone: drop it"
        )
    top_k = int(setup.options[DRAFT_TOP_K])
    if top_k > parts.selector_top_k:
        raise ConfigError(
            f"{DRAFT_TOP_K} must be at most {parts.selector_top_k}, the candidates of this head's "
            f"selector, got {top_k}"
        )


def _confidence_sees_token(checkpoint: DraftCheckpoint, hidden_size: int, markov_rank: int) -> bool:
    info = checkpoint.tensor(CONFIDENCE_TENSORS[0])
    for width, sees_token in ((hidden_size, False), (hidden_size + markov_rank, True)):
        if info.shape == (1, width):
            return sees_token
    raise ConfigError(
        f"{info.path}: {info.name}: expected shape [1, {hidden_size}] or "
        f"[1, {hidden_size + markov_rank}] (with markov_rank {markov_rank}), "
        f"found {list(info.shape)}; config.json and weights belong to different heads"
    )


def _other_attentions(model: DraftModel) -> tuple[str, ...]:
    """What draft_attention could say that is not what is done."""
    head = model.head
    causal = {head.sliding_is_causal if layer.window else head.is_causal for layer in head.layers}
    return tuple(name for name, is_so in ((CAUSAL, True), (FULL, False)) if causal != {is_so})


def _plan_checkup(setup: DraftSetup, has_markov: bool) -> Checkup:
    draft_model = _read_draft_model(setup, has_markov)
    dialect = read_dialect(open_draft_checkpoint(setup.draft_folder).keys, setup.options)
    anchor = DROP if dialect.anchor_drafts else FIRST
    given, block_size = setup.num_speculative_tokens, dialect.block_size
    tree_size, also = int(setup.options[DRAFT_TREE_SIZE]), ""
    options: dict[str, OptionValue] = {DRAFT_ANCHOR: anchor}
    if anchor == FIRST and given is None and 0 < tree_size < block_size:
        options[DRAFT_TREE_SIZE] = block_size  # the default depth, which is one more so
    if anchor == DROP and given == block_size:
        options["num_speculative_tokens"] = block_size - 1  # all that such a block has
        also = f", and --num-speculative-tokens {block_size - 1}"
    return Checkup(
        usual=(0.72,),
        source="DFlash heads for Qwen3 4B and 8B on chats; on mathematics 0.85 to 0.88",
        least_first=0.30,
        variants=(
            *layer_variants(draft_model, setup.target),
            Variant(
                label=f"anchor-{anchor} blocks",
                options=options,
                advice="the head was trained with the other rows drafting: use --method-option "
                f"{DRAFT_ANCHOR}={anchor} or mend config.json (num_anchors, "
                f"sample_from_anchor){also}",
            ),
            *(
                Variant(
                    label=f"{attention} attention within blocks, in all layers",
                    options={DRAFT_ATTENTION: attention},
                    advice=f"the head was trained so: use --method-option "
                    f"{DRAFT_ATTENTION}={attention} or mend config.json (is_causal)",
                )
                for attention in _other_attentions(draft_model)
            ),
        ),
        causes=(
            *HEAD_CAUSES,
            "the context was trained with the layers' input norm; here only block rows pass it",
            "mask_token_id is not the token that the head was trained with",
            "thinking mode: heads trained without it accept half as much with it",
            "another chat template than in training; texts far from its data",
        ),
    )


_OPTIONS = (
    *one_pass_options(),
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
        help="Whether the rows of a block see later ones (full) or not (causal). auto: "
        "what the head's config.json says.",
    ),
)


def _num_drafts_of(folder: Path, options: Options) -> int:
    return read_dialect(read_draft_keys(folder), options).num_drafts


def make_spec(
    name: str,
    summary: str,
    example: tuple[str, str],
    num_drafts: int,
    has_markov: bool,
    aliases: tuple[str, ...] = (),
) -> DrafterSpec:
    """A method of the family; `num_drafts` where no checkpoint says it."""
    return DrafterSpec(
        name=name,
        summary=summary,
        example=example,
        aliases=aliases,
        default_num_speculative_tokens=num_drafts,
        max_num_speculative_tokens=MAX_BLOCK,
        options=_OPTIONS,
        num_drafts_of=_num_drafts_of,
        supports_rejection=True,
        check=check_head_options,
        num_tree_drafts=num_one_pass_nodes,
        read_draft_model=lambda setup: _read_draft_model(setup, has_markov),
        plan_checkup=lambda setup: _plan_checkup(setup, has_markov),
    )


SPEC = make_spec(
    "dflash",
    "a head of several layers reads the target's hidden states and drafts a block at once",
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    num_drafts=15,
    has_markov=False,
    aliases=("dflash2",),
)
