"""Prompt lookup: what followed the last few tokens where they occurred before."""

from __future__ import annotations

from openspec.drafters.spec import DrafterOption, DrafterSpec, DraftSetup, Options, OptionValue
from openspec.errors import ConfigError


def _adjust_defaults(given: Options, defaults: dict[str, OptionValue]) -> None:
    """One bound alone moves the other one's default out of its way."""
    if "ngram_max" in given:
        defaults["ngram_min"] = min(int(defaults["ngram_min"]), int(given["ngram_max"]))
    if "ngram_min" in given:
        defaults["ngram_max"] = max(int(defaults["ngram_max"]), int(given["ngram_min"]))


def _check(setup: DraftSetup) -> None:
    shortest, longest = int(setup.options["ngram_min"]), int(setup.options["ngram_max"])
    if shortest > longest:
        raise ConfigError(f"ngram_min ({shortest}) must not exceed ngram_max ({longest})")


SPEC = DrafterSpec(
    name="ngram",
    summary="copies what followed the longest repeated suffix of prompt and output",
    default_num_speculative_tokens=4,
    max_num_speculative_tokens=32,
    is_default=True,
    copies_text=True,
    aliases=("ngram_gpu", "suffix"),
    options=(
        DrafterOption(
            name="ngram_min",
            default=2,
            minimum=1,
            maximum=64,
            help="Shortest suffix, in tokens, that is looked up.",
            aliases=("prompt_lookup_min",),
        ),
        DrafterOption(
            name="ngram_max",
            default=4,
            minimum=1,
            maximum=64,
            help="Longest suffix, in tokens, that is looked up; the longest match wins.",
            aliases=("prompt_lookup_max",),
        ),
        DrafterOption(
            name="max_lookback",
            default=4096,
            minimum=16,
            maximum=1 << 20,
            help="How far back, in tokens, matches are sought.",
        ),
    ),
    adjust_defaults=_adjust_defaults,
    check=_check,
)
