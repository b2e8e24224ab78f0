"""autogen-ext's client for OpenAI's API, and AgentChat's assistant over it."""

import asyncio
import json
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import (
    ModelClientStreamingChunkEvent,
    StructuredMessage,
    ToolCallExecutionEvent,
)
from autogen_core.models import CreateResult, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from forms import ANSWER, QUESTION, Sum
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions

calls: list[tuple[int, int]] = []


async def add(a: Literal[3, 4], b: Literal[3, 4]) -> int:
    calls.append((a, b))
    return a + b


# autogen asks this of every model whose name it does not know.
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
question = [UserMessage(content=QUESTION, source="user")]


def client(url: str, **options: object) -> OpenAIChatCompletionClient:
    place = {"base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0}
    return OpenAIChatCompletionClient(model=MODEL, model_info=INFO, **place, **options)


async def streamed(model: OpenAIChatCompletionClient, **options: object) -> CreateResult:
    """The last item of a stream, whose texts before it are the same text."""
    *pieces, last = [piece async for piece in model.create_stream(question, **options)]
    if isinstance(last.content, str):
        assert "".join(pieces).endswith(last.content), (pieces, last)
    return last


async def ask() -> None:
    """The embedded model: text, forms and calls that the request enforces."""
    model = client(EMBEDDED, temperature=0, max_tokens=512, parallel_tool_calls=False)
    whole = await model.create(question)
    assert whole.finish_reason == "stop" and whole.usage.completion_tokens > 0
    last = await streamed(model, include_usage=True)
    assert (last.content, last.usage) == (whole.content, whole.usage), last
    assert whole.thought and last.thought == whole.thought
    whole = await model.create(question, json_output=Sum)
    assert (await streamed(model, json_output=Sum)).content == whole.content
    Sum.model_validate_json(whole.content)
    loose, strict = (FunctionTool(add, "Adds", strict=strict) for strict in (False, True))
    for tool in (loose, strict):
        for choice in ("required", tool):
            options = {"tools": [tool], "tool_choice": choice}
            for found in (
                await model.create(question, **options),
                await streamed(model, **options),
            ):
                (one,) = found.content
                assert found.finish_reason == "function_calls" and one.name == "add", found
                assert {*json.loads(one.arguments).values()} <= {3, 4}, one


async def play() -> None:
    """The script: JSON mode, and an assistant with tools and with a form, whole and streamed."""
    model = client(SCRIPTED)
    text = [UserMessage(content=played(ANSWER.model_dump_json()), source="user")]
    assert Sum.model_validate_json((await model.create(text, json_output=True)).content) == ANSWER
    for is_streamed in (False, True):
        options = {"model_client": model, "model_client_stream": is_streamed}
        agent = AssistantAgent("a", tools=[add], reflect_on_tool_use=True, **options)
        calls.clear()
        both = f"{call('add', a=3, b=4)}\n{call('add', a=4, b=4)}"
        events = [e async for e in agent.run_stream(task=played(both, "It is seven."))]
        assert events[-1].messages[-1].content == "It is seven.", events[-1]
        assert sorted(calls) == [(3, 4), (4, 4)], calls
        kinds = {type(event) for event in events}
        assert ToolCallExecutionEvent in kinds
        assert (ModelClientStreamingChunkEvent in kinds) is is_streamed
        tool = FunctionTool(add, "Adds", strict=True)
        agent = AssistantAgent("b", tools=[tool], output_content_type=Sum, **options)
        script = played(call("add", a=3, b=4), ANSWER.model_dump_json())
        last = (await agent.run(task=script)).messages[-1]
        assert isinstance(last, StructuredMessage) and last.content == ANSWER, last


asyncio.run(ask())
asyncio.run(play())
print_versions("autogen-ext", "autogen-agentchat", "openai")
