"""strands-agents over three APIs: agents, forms, streams, tools, a second turn."""

import asyncio

from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
calls = []


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append((a, b))
    return a + b


def models(base: str) -> list:
    """The models of the three APIs."""
    openai = {"client_args": {"base_url": f"{base}/v1", "api_key": "unused"}, "model_id": MODEL}
    params = {"temperature": 0}
    return [
        OpenAIModel(**openai, params={**params, "max_tokens": 512}),
        OpenAIResponsesModel(**openai, params={**params, "max_output_tokens": 512}),
        AnthropicModel(
            client_args={"base_url": base, "api_key": "unused"},
            model_id=MODEL,
            max_tokens=512,
            params=params,
        ),
    ]


def num_prompt_tokens(agent: Agent) -> int:
    """Of all its requests; those from the cache are counted apart over messages alone."""
    usage = agent.event_loop_metrics.accumulated_usage
    is_apart = isinstance(agent.model, AnthropicModel)
    return usage["inputTokens"] + (usage.get("cacheReadInputTokens", 0) if is_apart else 0)


async def events_of(agent: Agent, text: str) -> tuple[str, object]:
    """The streamed text, and the result."""
    streamed, result = "", None
    async for event in agent.stream_async(text):
        streamed += event.get("data", "")
        result = event.get("result", result)
    return streamed, result


for model in models(EMBEDDED):
    agent = Agent(model=model, callback_handler=None)
    first = agent(QUESTION)
    assert first.stop_reason == "end_turn"
    assert str(first).strip()
    before = num_prompt_tokens(agent)
    assert before > 0 < agent.event_loop_metrics.accumulated_usage["outputTokens"]
    agent("And 5 more?")
    assert num_prompt_tokens(agent) > 2 * before
    streamed, result = asyncio.run(events_of(Agent(model=model, callback_handler=None), QUESTION))
    assert streamed.strip() == str(result).strip() == str(first).strip()

    result = Agent(model=model, callback_handler=None)(QUESTION, structured_output_model=Sum)
    assert isinstance(result.structured_output, Sum)

for model in models(SCRIPTED):
    calls.clear()
    agent = Agent(model=model, tools=[add], callback_handler=None)
    result = agent(played(call("add", a=3, b=4), call("add", a=7, b=1), "It is 8."))
    assert str(result).strip() == "It is 8."
    assert result.stop_reason == "end_turn"
    assert calls == [(3, 4), (7, 1)]
    formed = played(call("Sum", apples=7, is_enough=True), "Done.")
    result = Agent(model=model, callback_handler=None)(formed, structured_output_model=Sum)
    assert result.structured_output == Sum(apples=7, is_enough=True)
print_versions("strands-agents", "openai", "anthropic")
