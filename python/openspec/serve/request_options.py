"""From a checked request body to what the engine takes."""

from __future__ import annotations

from typing import TypeVar

from openspec.errors import RequestError
from openspec.messages import SamplingParams, SpeculativeOptions
from openspec.serve.context import ServerContext
from openspec.serve.generation import GenerationOptions
from openspec.serve.request_models import GenerationFields, SpeculativeField

_T = TypeVar("_T")


def generation_options(
    context: ServerContext,
    request: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> GenerationOptions:
    """The options of a request, the model's own sampling defaults filled in.

    Raises:
        RequestError: naming the field.
    """
    takes_advice = context.config.generation_config == "auto"
    default = SamplingParams(**(context.model.sampling.given() if takes_advice else {}))
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    sampling = SamplingParams(
        n=_first(request.n, default.n),
        temperature=_first(request.temperature, default.temperature),
        top_p=_first(request.top_p, default.top_p),
        top_k=_first(request.top_k, default.top_k),
        min_p=_first(request.min_p, default.min_p),
        presence_penalty=_first(request.presence_penalty, default.presence_penalty),
        frequency_penalty=_first(request.frequency_penalty, default.frequency_penalty),
        repetition_penalty=_first(request.repetition_penalty, default.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias or {}),
        allowed_token_ids=_without_repeats(request.allowed_token_ids),
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=_first(request.min_tokens, default.min_tokens),
        stop=stop or [],
        stop_token_ids=_without_repeats(request.stop_token_ids) or [],
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=_first(request.skip_special_tokens, default.skip_special_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprobs_mode="processed"
        if request.logprobs_mode in ("processed", "processed_logprobs")
        else "raw",
    )
    sampling.check(context.engine.info.vocab_size)
    return GenerationOptions(
        sampling=sampling,
        priority=_first(request.priority, 0),
        cache_salt=request.cache_salt or "",
        speculative=_speculative(context, request.speculative),
    )


def check_stream_options(request: GenerationFields) -> None:
    """Refuses options of a stream where none is asked for.

    Raises:
        RequestError: on `stream_options`.
    """
    if request.stream_options is not None and not request.stream:
        options = request.stream_options
        if options.include_usage or options.continuous_usage_stats:
            raise RequestError("stream_options needs stream to be true", "stream_options")


def room_for_output(context: ServerContext, num_prompt_tokens: int, param: str) -> int:
    """Tokens that may follow a prompt, which came in the field `param`.

    Raises:
        RequestError: the prompt is empty or fills the context.
    """
    info = context.engine.info
    if num_prompt_tokens == 0:
        raise RequestError("The prompt is empty.", param)
    if num_prompt_tokens >= info.max_model_len:
        # OpenAI's words: clients such as LiteLLM know by them that a shorter prompt would do.
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{param} resulted in {num_prompt_tokens} tokens, and the answer needs room too.",
            param,
            "context_length_exceeded",
        )
    return info.max_model_len - num_prompt_tokens


def truncated(token_ids: list[int], limit: int | None, max_model_len: int) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` leaves."""
    if limit is None:
        return token_ids
    keep = max_model_len - 1 if limit == -1 else limit
    return token_ids[max(0, len(token_ids) - keep) :]


def _first(given: _T | None, default: _T) -> _T:
    return default if given is None else given


def _without_repeats(token_ids: list[int] | None) -> list[int] | None:
    return None if token_ids is None else list(dict.fromkeys(token_ids))


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError("logit_bias: every key must be a token id", "logit_bias")
        if int(key) in result:
            raise RequestError(f"logit_bias: token id {int(key)} is given twice", "logit_bias")
        result[int(key)] = bias
    return result


def _speculative(context: ServerContext, given: SpeculativeField | None) -> SpeculativeOptions:
    if given is None:
        return SpeculativeOptions()
    method = context.engine.info.method
    if given.method not in (None, "none", method):
        raise RequestError(
            f"speculative.method: this server runs {method!r}; a request can ask for that or "
            "'none'.",
            "speculative",
        )
    enabled = (
        given.enabled is not False and given.method != "none" and given.num_speculative_tokens != 0
    )
    return SpeculativeOptions(
        enabled=enabled,
        num_speculative_tokens=given.num_speculative_tokens or None,
        detailed=bool(given.detailed),
    )
