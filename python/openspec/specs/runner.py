"""What a runner of the compiled core is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openspec.specs.head import HeadSpec
from openspec.specs.target import TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """A target, a drafter and the sizes of their steps."""

    target: TargetSpec
    device: str
    """cpu or cuda."""
    dtype: str
    """Type of activations and KV: float32 or bfloat16, on cuda bfloat16 only."""
    page_size: int
    """Tokens of a KV page."""
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    """Rows of a step, at most."""
    max_num_logits_rows: int
    """Rows of logits at a time."""
    num_threads: int
    tensor_parallel_size: int = 1
    """Ranks that share the target, each with its part of every matrix."""
    exchange_deadline_s: float = 10.0
    """Seconds that one of them waits for the others on cuda; then the engine ends."""
    max_draft_tokens: int = 0
    """Drafts of a sequence and step, at most."""
    max_grammar_drafts: int = 0
    """Drafts that a grammar alone makes for a sequence and step, where there is no drafter."""
    max_copied_drafts: int = 0
    """Drafts of a sequence and step that are copied from its own text, in place of the drafter's;
    0: none."""
    draft_memory_bytes: int = 0
    """For recent answers, which drafts are copied from, too."""
    draft_depth: int = 0
    """Drafts one after another: fewer than max_draft_tokens for trees."""
    method: str = "none"
    method_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """What users set of the method, by the names that it declares."""
    head: HeadSpec | None = None
    """The draft head, for methods that have one."""
    has_spare_head: bool = False
    """Whether there is room for another such head's weights, which may take the place of its own.
    One device only."""
    acceptance: str = "match"
    """match or rejection: when a draft of a sampled request is accepted."""
    adaptive: bool = True
    """Whether steps draft only where that pays."""
    enable_prefix_caching: bool = True
    cache_key: bytes = bytes(16)
    """Keys the hashes of cached prefixes; 16 bytes."""
