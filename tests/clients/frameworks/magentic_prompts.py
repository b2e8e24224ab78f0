"""magentic: prompts as functions: text, objects, lists, streams, calls, chains of calls."""

import asyncio
from typing import Annotated

from magentic import FunctionCall, OpenaiChatModel, StreamedStr, UserMessage, prompt, prompt_chain
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
settings = {"api_key": "unused", "max_tokens": 512, "temperature": 0}
model = OpenaiChatModel(MODEL, base_url=f"{EMBEDDED}/v1", **settings)
player = OpenaiChatModel(MODEL, base_url=f"{SCRIPTED}/v1", **settings)
calls = []


class Sum(BaseModel):
    """What the answer holds."""

    apples: Annotated[int, Field(ge=0, le=99)]
    is_enough: bool


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append((a, b))
    return a + b


@prompt("{question}", model=model)
def text(question: str) -> str: ...


@prompt("{question}", model=model)
def streamed(question: str) -> StreamedStr: ...


@prompt("{question}", model=model)
def parsed(question: str) -> Sum: ...


@prompt("{question}", model=model)
def listed(question: str) -> list[int]: ...


@prompt("{question}", model=model)
def decided(question: str) -> bool: ...


@prompt("{question}", model=model, functions=[add])
def called(question: str) -> FunctionCall[int]: ...


@prompt_chain("{question}", model=player, functions=[add])
def chained(question: str) -> str: ...


@prompt_chain("{question}", model=player, functions=[add])
async def chained_async(question: str) -> str: ...


assert "".join(streamed(QUESTION)) == text(QUESTION) != ""
assert isinstance(parsed(QUESTION), Sum)
assert isinstance(decided(QUESTION), bool)
assert all(isinstance(number, int) for number in listed(QUESTION))
chosen = called(QUESTION)
assert isinstance(chosen(), int)
assert calls == [tuple(chosen.arguments.values())]
message = model.complete([UserMessage(QUESTION)])
assert message.usage.input_tokens > 0 < message.usage.output_tokens

calls.clear()
assert chained(played(call("add", a=3, b=4), "It is 7.")) == "It is 7."
twice = played(call("add", a=3, b=4), call("add", a=7, b=1), "It is 8.")
assert asyncio.run(chained_async(twice)) == "It is 8."
assert calls == [(3, 4), (3, 4), (7, 1)]
print_versions("magentic", "openai")
