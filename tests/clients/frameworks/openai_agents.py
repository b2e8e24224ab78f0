"""openai-agents over responses and chat: forms, tools, handoffs, sessions, whole and streamed."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
from forms import ANSWER, QUESTION, Sum
from openai import AsyncOpenAI
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions

calls: list[tuple[int, int]] = []


@function_tool
def add(a: Literal[3, 4], b: Literal[3, 4]) -> int:
    """Adds."""
    calls.append((a, b))
    return a + b


@function_tool(strict_mode=False)
def add_loosely(a: Literal[3, 4], b: Literal[3, 4] = 3) -> int:
    """Adds."""
    calls.append((a, b))
    return a + b


def models(url: str) -> list[Model]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    return [OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)]


async def ask(model: Model) -> None:
    """The embedded model: text, forms and calls that the request enforces."""
    greedy = {"temperature": 0, "max_tokens": 256}
    agent = Agent("a", model=model, model_settings=ModelSettings(**greedy, include_usage=True))
    whole = await Runner.run(agent, QUESTION)
    assert whole.context_wrapper.usage.output_tokens > 0
    streamed = Runner.run_streamed(agent, QUESTION)
    kinds = {event.type async for event in streamed.stream_events()}
    assert kinds >= {"raw_response_event", "run_item_stream_event"}, kinds
    assert streamed.final_output == whole.final_output
    assert streamed.context_wrapper.usage.output_tokens > 0
    agent = agent.clone(output_type=Sum)
    whole = await Runner.run(agent, QUESTION)
    streamed = Runner.run_streamed(agent, QUESTION)
    assert {event.type async for event in streamed.stream_events()} == kinds
    assert isinstance(whole.final_output, Sum) and streamed.final_output == whole.final_output
    # A call that must come beside the form of the last ANSWER.
    agent.tool_use_behavior = "stop_on_first_tool"
    for tool in (add, add_loosely):
        for choice in ("required", tool.name):
            forced = ModelSettings(**greedy, tool_choice=choice, parallel_tool_calls=False)
            agent = agent.clone(tools=[tool], model_settings=forced)
            calls.clear()
            await Runner.run(agent, QUESTION)
            streamed = Runner.run_streamed(agent, QUESTION)
            names = [e.name async for e in streamed.stream_events() if hasattr(e, "name")]
            assert names[-2:] == ["tool_called", "tool_output"], names
            assert len(calls) == 2 and {*sum(calls, ())} <= {3, 4}, (tool.name, calls)


async def play(model: Model) -> None:
    """The script: a loop over tools, a handoff, and a conversation that a session keeps."""
    sums = Agent("sums", model=model, tools=[add], output_type=Sum)
    desk = Agent("desk", model=model, handoffs=[sums])
    script = (call("transfer_to_sums"), call("add", a=3, b=4), ANSWER.model_dump_json())
    calls.clear()
    whole = await Runner.run(desk, played(*script))
    assert whole.final_output == ANSWER and whole.last_agent is sums and calls == [(3, 4)]
    assert whole.context_wrapper.usage.requests == 3
    streamed = Runner.run_streamed(desk, played(*script))
    names = [e.name async for e in streamed.stream_events() if hasattr(e, "name")]
    assert names.count("tool_called") == 1 and "handoff_occured" in names, names
    assert streamed.final_output == ANSWER and calls == [(3, 4)] * 2
    # The SDK forces the first call alone; the form holds for the turn after it.
    sums.model_settings = ModelSettings(tool_choice="required")
    assert (await Runner.run(sums, played(*script[1:]))).final_output == ANSWER
    session = SQLiteSession("one")
    agent = Agent("a", model=model, tools=[add])
    for text in (played(call("add", a=3, b=4), "Seven."), played("Twelve.")):
        whole = await Runner.run(agent, text, session=session)
    assert whole.final_output == "Twelve."
    kinds = [item.get("type", item.get("role")) for item in await session.get_items()]
    assert kinds.count("function_call_output") == 1 and len(kinds) >= 6, kinds


async def by_id() -> None:
    """A conversation by the id of its last answer, which the server keeps."""
    agent = Agent("a", model=models(SCRIPTED)[0], tools=[add])
    first = await Runner.run(agent, played(call("add", a=3, b=4), "Seven."))
    text = played(call("add", a=4, b=4), "Eight.")
    second = await Runner.run(agent, text, previous_response_id=first.last_response_id)
    assert second.final_output == "Eight." and calls[-1] == (4, 4)
    usage = [result.context_wrapper.usage.input_tokens for result in (first, second)]
    assert usage[1] > 1.5 * usage[0], usage
    chained = await Runner.run(
        agent, played(call("add", a=3, b=3), "Six."), auto_previous_response_id=True
    )
    assert chained.final_output == "Six." and calls[-1] == (3, 3)


async def main() -> None:
    set_tracing_disabled(True)
    for model in models(EMBEDDED):
        await ask(model)
    for model in models(SCRIPTED):
        await play(model)
    await by_id()


asyncio.run(main())
print_versions("openai-agents", "openai")
