"""google-adk by its LiteLlm: chat and messages; agents, two turns, streams, a form, tools."""

import asyncio

import litellm
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
calls = []
litellm.suppress_debug_info = True


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


def add(a: int, b: int) -> dict[str, int]:
    """Adds two numbers."""
    calls.append((a, b))
    return {"sum": a + b}


def models(base: str) -> list[LiteLlm]:
    """google-adk's models for both APIs."""
    settings = {"api_key": "unused", "temperature": 0, "max_tokens": 512}
    return [
        LiteLlm(f"openai/{MODEL}", api_base=f"{base}/v1", **settings),
        LiteLlm(f"hosted_vllm/{MODEL}", api_base=f"{base}/v1", **settings),
        LiteLlm(f"anthropic/{MODEL}", api_base=base, **settings),
    ]


async def ask(agent: Agent, *texts: str, streams: bool = False) -> list:
    """The events of turns of one session."""
    runner = InMemoryRunner(agent=agent, app_name="clerk")
    session = await runner.session_service.create_session(app_name="clerk", user_id="user")
    mode = StreamingMode.SSE if streams else StreamingMode.NONE
    events = []
    for text in texts:
        message = types.Content(role="user", parts=[types.Part(text=text)])
        config = RunConfig(streaming_mode=mode)
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message, run_config=config
        ):
            assert event.error_code is None, event
            events.append(event)
    return events


def text_of(event) -> str:
    """What an event says, without its thinking."""
    parts = event.content.parts if event.content else []
    return "".join(part.text for part in parts if part.text and not part.thought)


async def main() -> None:
    """Asks both servers."""
    for model in models(EMBEDDED):
        first, second = await ask(Agent(name="clerk", model=model), QUESTION, "And 5 more?")
        assert text_of(first).strip()
        assert first.usage_metadata.candidates_token_count > 0
        assert second.usage_metadata.prompt_token_count > first.usage_metadata.prompt_token_count
        events = await ask(Agent(name="clerk", model=model), QUESTION, streams=True)
        pieces = "".join(text_of(event) for event in events if event.partial)
        assert pieces == text_of(events[-1]) == text_of(first)
        (formed,) = await ask(Agent(name="clerk", model=model, output_schema=Sum), QUESTION)
        assert isinstance(Sum.model_validate_json(text_of(formed)), Sum)
    for model in models(SCRIPTED):
        for streams in (False, True):
            calls.clear()
            agent = Agent(name="clerk", model=model, tools=[add])
            asked = played(call("add", a=3, b=4), call("add", a=7, b=1), "It is 8.")
            *_, last = await ask(agent, asked, streams=streams)
            assert text_of(last) == "It is 8."
            assert calls == [(3, 4), (7, 1)]


asyncio.run(main())
print_versions("google-adk", "litellm")
