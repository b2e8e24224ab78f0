"""Haystack: its generators for chat and responses, and an agent over each."""

import os
from typing import Annotated, Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from forms import QUESTION, Sum
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.token_counters import OpenAITokenCounter
from haystack.tools import tool
from haystack.utils import Secret
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions

Generator = type[OpenAIChatGenerator] | type[OpenAIResponsesChatGenerator]


calls: list[tuple[int, int]] = []


@tool
def add(a: Annotated[Literal[3, 4], "a number"], b: Annotated[Literal[3, 4], "another"]) -> int:
    """Adds."""
    calls.append((a, b))
    return a + b


def generator(kind: Generator, url: str, **options: object) -> object:
    key = Secret.from_token("unused")
    return kind(api_key=key, model=MODEL, api_base_url=f"{url}/v1", max_retries=0, **options)


def ask(kind: Generator, limit: str, form: str) -> None:
    """The embedded model: text, forms and calls that the request enforces."""
    question = [ChatMessage.from_user(QUESTION)]
    model = generator(kind, EMBEDDED, generation_kwargs={"temperature": 0, limit: 512})
    (whole,) = model.run(question)["replies"]
    chunks: list[StreamingChunk] = []
    (streamed,) = model.run(question, streaming_callback=chunks.append)["replies"]
    assert streamed.text == whole.text == "".join(chunk.content for chunk in chunks), kind
    usage = whole.meta["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) > 0, usage
    assert {chunk.finish_reason for chunk in chunks} >= {"stop"}, chunks[-1]
    again = [*question, whole, ChatMessage.from_user("And 5 more?")]
    (second,) = model.run(again)["replies"]
    if kind is OpenAIResponsesChatGenerator:
        place = {"api_key": Secret.from_token("unused"), "api_base_url": f"{EMBEDDED}/v1"}
        counted = OpenAITokenCounter(MODEL, max_retries=0, **place).count(again)
        assert counted == second.meta["usage"]["input_tokens"], (counted, second.meta)
    (whole,) = model.run(question, generation_kwargs={form: Sum})["replies"]
    assert isinstance(Sum.model_validate_json(whole.text), Sum)
    for is_strict in (True, False):
        for callback in (None, chunks.append):
            (whole,) = model.run(
                question,
                tools=[add],
                tools_strict=is_strict,
                generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False},
                streaming_callback=callback,
            )["replies"]
            (one,) = whole.tool_calls
            assert one.tool_name == "add" and {*one.arguments} == {"a", "b"}, one
            assert {*one.arguments.values()} <= {3, 4}, one


def play(kind: Generator) -> None:
    """The script: an agent's loop over tools, whole and streamed, and its next question."""
    chunks: list[StreamingChunk] = []
    both = f"{call('add', a=3, b=4)}\n{call('add', a=4, b=4)}"
    for callback in (None, chunks.append):
        calls.clear()
        agent = Agent(chat_generator=generator(kind, SCRIPTED), tools=[add])
        script = played(both, call("add", a=3, b=3), "It is seven.")
        result = agent.run([ChatMessage.from_user(script)], streaming_callback=callback)
        assert result["last_message"].text == "It is seven.", result
        assert sorted(calls) == [(3, 3), (3, 4), (4, 4)], calls
        roles = [message.role.value for message in result["messages"]]
        assert roles.count("tool") == 3, roles
        question = ChatMessage.from_user(played("Twelve."))
        result = agent.run([*result["messages"], question], streaming_callback=callback)
        assert result["last_message"].text == "Twelve."
    assert [c.tool_calls[0].tool_name for c in chunks if c.tool_calls].count("add") >= 3


ask(OpenAIChatGenerator, "max_tokens", "response_format")
ask(OpenAIResponsesChatGenerator, "max_output_tokens", "text_format")
play(OpenAIChatGenerator)
play(OpenAIResponsesChatGenerator)
print_versions("haystack-ai", "openai")
