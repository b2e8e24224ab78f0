"""marvin: cast, classify, extract, generate, say, run; a task with tools."""

import os
import tempfile

os.environ["MARVIN_HOME_PATH"] = tempfile.mkdtemp()  # where its data base is

import marvin
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
marvin.settings.enable_default_print_handler = False
calls = []


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append((a, b))
    return a + b


def agent(base: str) -> marvin.Agent:
    """An agent that asks a server."""
    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="unused")
    model = OpenAIChatModel(MODEL, provider=provider)
    return marvin.Agent(model=model, model_settings={"max_tokens": 512, "temperature": 0})


clerk = agent(EMBEDDED)
assert isinstance(marvin.cast(QUESTION, Sum, agent=clerk), Sum)
assert isinstance(marvin.cast("seven", int, agent=clerk), int)
assert marvin.classify("It is great.", ["good", "bad"], agent=clerk) in ("good", "bad")
assert all(isinstance(one, bool) for one in marvin.extract("yes and no", bool, agent=clerk))
assert isinstance(marvin.run(QUESTION, result_type=bool, agents=[clerk]), bool)
assert isinstance(marvin.say("Hello", agent=clerk), str)

task = marvin.Task("", result_type=int, tools=[add], agents=[agent(SCRIPTED)])
done = call(f"MarkTaskSuccessful_{task.id}", result=8)
task.instructions = played(call("add", a=3, b=4), call("add", a=7, b=1), done)
assert task.run() == 8
assert calls == [(3, 4), (7, 1)]
print_versions("marvin", "pydantic-ai-slim", "openai")
