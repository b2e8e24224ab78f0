"""No drafts: plain decoding, the baseline that every other drafter must equal."""

from openspec.drafters.spec import DrafterSpec

SPEC = DrafterSpec(
    name="none",
    summary="plain decoding",
    default_num_speculative_tokens=0,
    max_num_speculative_tokens=0,
)
