"""pydantic-ai: agents over chat, responses and messages: text, forms, tools, whole and streamed."""

import asyncio
from typing import Literal

from forms import ANSWER, QUESTION, Sum
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput, UsageLimits, UserError
from pydantic_ai.messages import FunctionToolCallEvent, FunctionToolResultEvent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ToolOrOutput


class Word(BaseModel):
    """One word."""

    word: Literal["yes", "no"]


def models(url: str) -> list[Model]:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
    anthropic = AnthropicProvider(base_url=url, api_key="unused")
    return [
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=anthropic),
    ]


settings = {"max_tokens": 512, "extra_body": {"temperature": 0}}


async def ask(model: Model) -> None:
    """The embedded model: text, and forms that the request enforces."""
    agent = Agent(model, model_settings=settings)
    whole = await agent.run(QUESTION)
    assert whole.usage.output_tokens > 0
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces) == whole.output, model
    # The chat API has no counting; of the others, the count is that of the request.
    counts = not isinstance(model, OpenAIChatModel)
    limits = UsageLimits(input_tokens_limit=9999, count_tokens_before_request=counts)
    history = whole.all_messages()
    again = await agent.run("And 5 more?", message_history=history, usage_limits=limits)
    assert again.usage.input_tokens > whole.usage.input_tokens
    forms = [Sum, ToolOutput(Sum), [Sum, Word]]
    if not isinstance(model, AnthropicModel):
        forms.append(NativeOutput(Sum))
    for form in forms:
        agent = Agent(model, output_type=form, model_settings=settings)
        whole = await agent.run(QUESTION)
        assert isinstance(whole.output, Sum | Word), (model, form, whole.output)
        async with agent.run_stream(QUESTION) as stream:
            assert await stream.get_output() == whole.output, (model, form)


async def play(model: Model) -> None:
    """The script: loops over tools, whole and streamed; a form that only the prompt asks for."""
    calls = []
    agent = Agent(model, output_type=[Sum, str])

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds."""
        calls.append((a, b))
        return a + b

    script = (
        call("add", a=3, b=4) + "\n" + call("add", a=7, b=5),
        call("final_result", **ANSWER.model_dump()),
    )
    whole = await agent.run(played(*script))
    assert whole.output == ANSWER and sorted(calls) == [(3, 4), (7, 5)], (
        model,
        whole.output,
        calls,
    )
    assert whole.usage.requests == 2 and whole.usage.tool_calls == 2
    async with agent.run_stream_events(played(*script)) as stream:
        events = [type(event) async for event in stream]
    assert events.count(FunctionToolCallEvent) == events.count(FunctionToolResultEvent) == 2
    async with agent.run_stream(played(*script[:1], "It is seven.")) as stream:
        assert await stream.get_output() == "It is seven."
    assert sorted(calls) == [(3, 4)] * 3 + [(7, 5)] * 3  # tools of one turn run together

    @agent.tool_plain
    def subtract(a: int, b: int) -> int:
        """Subtracts."""
        raise AssertionError("it is not among those that may be called")

    some = {"tool_choice": ToolOrOutput(function_tools=["add"])}
    whole = await agent.run(played(*script), model_settings=some)
    assert whole.output == ANSWER
    # A call whose arguments are refused is sent back, and comes again.
    whole = await agent.run(played(call("add", a="three", b=4), *script))
    assert whole.output == ANSWER and whole.usage.requests == 3
    prompted = Agent(model, output_type=PromptedOutput(Sum))
    assert (await prompted.run(played(ANSWER.model_dump_json()))).output == ANSWER


async def main() -> None:
    for model in models(EMBEDDED):
        await ask(model)
    for model in models(SCRIPTED):
        await play(model)
    # Its own fault: it knows by their names which models of Anthropic's API take a schema.
    try:
        await Agent(models(EMBEDDED)[2], output_type=NativeOutput(Sum)).run(QUESTION)
        raise SystemExit("pydantic-ai takes NativeOutput over messages: change docs/clients.md")
    except UserError as error:
        assert "Native structured output is not supported" in str(error), error


asyncio.run(main())
print_versions("pydantic-ai-slim", "openai", "anthropic")
