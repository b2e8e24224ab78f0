"""crewai: calls, streams and forms over three APIs; crews with tools and with a form."""

import os
import sys
import tempfile
from contextlib import redirect_stdout

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CI="true")
os.environ["HOME"] = tempfile.mkdtemp()  # crewai keeps a data base there

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field

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


def llms(base: str, **settings: object) -> list[LLM]:
    """crewai's models: chat by two names, responses and messages."""
    settings = {"api_key": "unused", "temperature": 0, "max_tokens": 512, **settings}
    openai = {"base_url": f"{base}/v1", **settings}
    return [
        LLM(f"openai/{MODEL}", **openai),
        LLM(f"hosted_vllm/{MODEL}", **openai),
        LLM(f"openai/{MODEL}", api="responses", **openai),
        LLM(MODEL, provider="anthropic", base_url=base, **settings),
    ]


def ask_embedded() -> None:
    """Texts, streams, forms."""
    for whole, streamed in zip(llms(EMBEDDED), llms(EMBEDDED, stream=True), strict=True):
        text = whole.call(QUESTION)
        assert text.strip()
        assert streamed.call(QUESTION) == text
        assert isinstance(whole.call(QUESTION, response_model=Sum), Sum), whole


def run_scripted() -> None:
    """Crews."""
    for player in llms(SCRIPTED):
        calls.clear()
        agent = Agent(role="Clerk", goal="Add", backstory="None", llm=player, tools=[add])
        asked = played(call("add", a=3, b=4), call("add", a=7, b=1), "It is 8.")
        task = Task(description=asked, expected_output="A number", agent=agent)
        result = Crew(agents=[agent], tasks=[task]).kickoff()
        assert result.raw == "It is 8.", result
        assert calls == [(3, 4), (7, 1)]
        assert result.token_usage.successful_requests == 3
        assert result.token_usage.prompt_tokens > 0 < result.token_usage.completion_tokens
        asked = played(*['{"apples": 7, "is_enough": true}'] * 2)
        agent = Agent(role="Clerk", goal="Add", backstory="None", llm=player)
        task = Task(description=asked, expected_output="A sum", agent=agent, output_pydantic=Sum)
        result = Crew(agents=[agent], tasks=[task]).kickoff()
        assert result.pydantic == Sum(apples=7, is_enough=True)


with redirect_stdout(sys.stderr):  # crewai draws what streams
    ask_embedded()
    run_scripted()
print_versions("crewai", "openai", "anthropic")
