"""DSpark: DFlash's block, whose drafts are chosen one after another with a Markov head."""

from __future__ import annotations

from openspec.drafters.dflash.dflash import make_spec

SPEC = make_spec(
    "dspark",
    "a block drafted at once, each draft corrected by the one before (DFlash with a Markov head)",
    ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7"),
    num_drafts=7,
    has_markov=True,
)
