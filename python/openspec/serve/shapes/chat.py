"""What requests may contain: the models that bodies are checked against and /openapi.json shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from openspec.errors import RequestError
from openspec.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N

MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
"""Prompts times n of one request."""
MAX_MESSAGES = 4096
MAX_CHOSEN_NAME_CHARS = 256

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Said = TypeVar("Said")
WHOLE = BeforeValidator(
    lambda given: int(given) if isinstance(given, float) and given.is_integer() else given
)
"""Takes 3.0 for 3, which languages without integers write."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# fail_fast: one complaint is enough, a million of them would be a way to keep the server busy.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class Model(BaseModel):
    """Strict about types, lenient about fields nobody knows."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class StreamOptions(Model):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """A last chunk with empty `choices` and the whole usage."""
    continuous_usage_stats: bool | None = None
    """Usage so far on every chunk."""


class SpeculativeField(Model):
    """A request's own say in speculation; it changes the speed, never the text."""

    enabled: bool | None = None
    method: Annotated[str, Field(max_length=64)] | None = None
    """The server's method, or "none"."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=1024), WHOLE] | None = None
    """At most this many draft tokens per step; the server's setting caps it."""
    detailed: bool | None = None
    """Report every step of each choice in its `steps`."""


class GenerationFields(Model):
    """What completions and chat completions have in common. null always means the default."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    """Keys are token ids."""
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    """Texts that the answer does not spell."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Accepted; byte-level vocabularies put no spaces there."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] | None = None
    """Of the model's own distribution (raw), or of the one the token was drawn from."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are written `token_id:N`."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None = None
    """Keep only the last so many prompt tokens; -1: as many as the context holds."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = None
    """Lower runs first."""
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    request_id: Annotated[str, Field(max_length=MAX_CHOSEN_NAME_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeField | None = None
    structured_outputs: dict[str, object] | None = None
    """What the text must be: exactly one of json, regex, choice, grammar, json_object and
    structural_tag."""
    guided_json: dict[str, object] | str | None = None
    """Older name of `structured_outputs.json`."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, object] | str | None = None
    """SGLang's name of `structured_outputs.json`; `regex` is spelled as there."""
    regex: str | None = None
    ebnf: str | None = None
    """SGLang's name of `structured_outputs.grammar`."""
    structural_tag: dict[str, object] | str | None = None
    user: str | None = None
    capture: bool | None = None
    """False: draft heads do not learn from it, whatever the server keeps for them."""


class JsonSchemaFormat(Model):
    """A schema with its name."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(max_length=MAX_CHOSEN_NAME_CHARS)] | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """True: the schema must keep OpenAI's rules for strict ones as well."""


class ResponseFormat(Model):
    """The form of the answer's content: text, json_object, json_schema or structural_tag."""

    model_config = ConfigDict(extra="allow")

    type: str
    json_schema: JsonSchemaFormat | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    """Text, several texts, token ids, or several lists of token ids."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = 16
    """Capped at what the context leaves; 0 only together with `echo`."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    """Must equal `n`."""
    suffix: str | None = None
    """Not supported."""
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text: those of every API, for a conversation that began elsewhere."""
THOUGHT_PARTS = ("thinking", "redacted_thinking")
"""Types of parts of an assistant's message that are thinking; the last can be read by no one."""


class TextPart(Model):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part of that type."""
    thinking: str | None = None
    """The same."""

    def said(self) -> str | None:
        """Its text; None where it is no text."""
        text = self.refusal if self.type == "refusal" else self.text
        return text if self.type in TEXT_PARTS else None


Content: TypeAlias = str | Annotated[list[TextPart], Field(fail_fast=True)]


class FunctionCall(Model):
    """A call the assistant made."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(Model):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(Model):
    """One message of a conversation."""

    role: Role
    content: Content | None = None
    refusal: str | None = None
    """Read where an assistant's message has no content."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    """Older form of one of `tool_calls`, whose result has the role `function`."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    """Of the last message: the answer goes on with it, by Mistral's and DeepSeek's name."""
    partial: bool | None = None
    """The same by Moonshot's and Qwen's."""


class FunctionDefinition(Model):
    """What a tool is called and takes."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=MAX_CHOSEN_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    """True: arguments keep to `parameters`; false: any object, where those cannot be enforced."""


class Tool(Model):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


def function_tool(
    name: str, description: str | None, parameters: dict[str, object] | None, strict: bool | None
) -> Tool:
    """A function without the fields that are None: templates write every field that is set."""
    function = FunctionDefinition(name=name)
    given = {"description": description, "parameters": parameters, "strict": strict}
    for key, value in given.items():
        if value is not None:
            setattr(function, key, value)
    return Tool(function=function)


Messages: TypeAlias = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class ThinkingField(Model):
    """`thinking` as Anthropic's, DeepSeek's and Zhipu's APIs have it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Accepted without effect: `max_tokens` bounds thinking and text together."""


class ReasoningField(Model):
    """`reasoning` as OpenRouter's API has it."""

    enabled: bool | None = None
    effort: Effort | None = None
    exclude: bool | None = None
    """As `include_reasoning: false`."""


class ChatFields(Model):
    """How messages are rendered into a prompt by the model's chat template."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tool_choice: str | dict[str, object] | None = None
    """"none", "auto", "required", or the function to call."""
    chat_template_kwargs: dict[str, object] | None = None
    """Known keys only, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Leave the last message open, for the model to go on with it."""
    add_special_tokens: bool | None = None
    """Of texts; a chat has those of its template."""
    reasoning_effort: Effort | None = None
    """"none" turns thinking off, anything else on; templates that know degrees are told which."""
    enable_thinking: bool | None = None
    """Whether to think, by Qwen's name."""
    think: bool | Effort | None = None
    """The same by Ollama's."""
    thinking: ThinkingField | None = None
    reasoning: ReasoningField | None = None

    def wants_thinking(self) -> bool | None:
        """Whether the answer is to think; None: the request does not say.

        Raises:
            RequestError: two of its fields contradict each other.
        """
        found = {name: value not in ("none", False) for name, value in self._wishes().items()}
        if self.thinking is not None:
            found["thinking"] = self.thinking.type != "disabled"
        return _one_of(found)

    def wanted_effort(self) -> Effort | None:
        """How much the answer is to think; None: not at all, or the request does not say.

        Raises:
            RequestError: two of its fields contradict each other.
        """
        if not self.wants_thinking():
            return None
        wishes = self._wishes().items()
        return _one_of({name: value for name, value in wishes if isinstance(value, str)})

    def _wishes(self) -> dict[str, bool | Effort]:
        """What fields say about thinking, by their names."""
        wishes: dict[str, bool | Effort | None] = {
            "reasoning_effort": self.reasoning_effort,
            "think": self.think,
        }
        if self.reasoning is not None:
            wishes["reasoning.effort"] = self.reasoning.effort
            wishes["reasoning.enabled"] = self.reasoning.enabled
        wishes["enable_thinking"] = self.enable_thinking
        return {name: value for name, value in wishes.items() if value is not None}


def _one_of(found: Mapping[str, Said]) -> Said | None:
    """What all fields say; None if there is none.

    Raises:
        RequestError: they do not agree.
    """
    if len(set(found.values())) > 1:
        raise RequestError(
            f"{' and '.join(found)} contradict each other; leave out all but one",
            next(iter(found)),
        )
    return next(iter(found.values()), None)


class ChatCompletionRequest(ChatFields, GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """Older name of `max_completion_tokens`. Default: what the context leaves."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    echo: bool | None = None
    """Not supported for chat."""
    parallel_tool_calls: bool | None = None
    """False keeps only the first call."""
    response_format: ResponseFormat | None = None
    include_reasoning: bool | None = None
    """False keeps the model's thinking out of the answer."""


class TokenizeRequest(ChatFields):
    """POST /tokenize: a text, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class AbortRequest(Model):
    """POST /abort_request."""

    request_id: str | None = None
    """The `id` of the response, or the X-Request-Id it was sent with."""
    rid: str | None = None
    """Another name for `request_id`."""
    abort_all: bool | None = None
