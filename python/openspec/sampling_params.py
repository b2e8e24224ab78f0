"""Sampling parameters of a request, with vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from openspec.errors import RequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_N = 128
MAX_ALLOWED_IDS_OF_ALL = 1 << 21
"""`allowed_token_ids` times `n`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends.

    Every field acts exactly the same with speculation as without.
    """

    n: int = 1
    """Independent completions; number i is seeded with seed + i."""
    temperature: float = 1.0
    """0 chooses the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    """64-bit; None draws one at random."""
    max_tokens: int = 16
    min_tokens: int = 0
    """Stop ids are masked, and stop strings ignored, before this many tokens are out."""
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; n: of the chosen token and of the n most likely."""
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of the model's own distribution, or of the one the token was drawn from."""

    def typed(self) -> SamplingParams:
        """The same, every field of its type; `stop` may be one string, as vLLM takes it.

        Raises:
            RequestError: with the field and what it should be.
        """
        fields = msgspec.structs.asdict(self)
        if isinstance(self.stop, str):
            fields["stop"] = [self.stop]
        try:
            return msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"sampling parameters: {error}") from None

    def check(self, vocab_size: int, *, has_eos: bool = False) -> None:
        """Checks every range; `has_eos`: the model's EOS ids, any number, are among the stop ids.

        Raises:
            RequestError: with the parameter, its value and the allowed range.
        """
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise RequestError(
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}",
                "repetition_penalty",
            )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop"
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}",
                    "stop",
                )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"at most {MAX_LOGIT_BIAS} logit_bias entries, got {len(self.logit_bias)}",
                "logit_bias",
            )
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        num_allowed = self.n * len(self.allowed_token_ids or ())
        if num_allowed > MAX_ALLOWED_IDS_OF_ALL:
            raise RequestError(
                f"at most {MAX_ALLOWED_IDS_OF_ALL} allowed_token_ids in all {self.n} completions, "
                f"got {num_allowed}",
                "allowed_token_ids",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS and not has_eos:
            raise RequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(self.stop_token_ids)}",
                "stop_token_ids",
            )
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})",
                        name,
                    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # NaN fails both comparisons, hence the form.
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", name)
