"""anthropic's tool runner and threads, and forms of its beta: whole and streamed."""

import asyncio
from typing import Literal

import anthropic
from anthropic import beta_async_tool, beta_tool
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel

calls: list[tuple[int, int]] = []


def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: a number
        b: another number
    """
    calls.append((a, b))
    return str(a + b)


async def add_later(a: int, b: int) -> str:
    """Adds.

    Args:
        a: a number
        b: another number
    """
    return add(a, b)


class Size(BaseModel):
    """What the answer holds: no bounds, which the SDK asks for in words only."""

    size: Literal["small", "large"]


place = {"base_url": SCRIPTED, "api_key": "unused", "max_retries": 0}
both = f"{call('add', a=3, b=4)}\n{call('add', a=4, b=4)}"
answers = (both, call("add", a=7, b=8), "It is 15.")
expected = [(3, 4), (4, 4), (7, 8)]


def asked(*texts: str) -> dict:
    messages = [{"role": "user", "content": played(*texts)}]
    return {"model": MODEL, "max_tokens": 1024, "messages": messages}


client = anthropic.Anthropic(**place)
tools = [beta_tool(add)]
last = client.beta.messages.tool_runner(tools=tools, **asked(*answers)).until_done()
assert last.content[-1].text == "It is 15." and calls == expected, (last, calls)
calls.clear()
runner = client.beta.messages.tool_runner(tools=tools, stream=True, **asked(*answers))
ends = [[event.type for event in stream][-1] for stream in runner]
assert ends == ["message_stop"] * 3 and calls == expected, (ends, calls)


async def play() -> None:
    """The same with coroutines."""
    calls.clear()
    client = anthropic.AsyncAnthropic(**place)
    tools = [beta_async_tool(add_later, name="add")]
    runner = client.beta.messages.tool_runner(tools=tools, **asked(*answers))
    last = await runner.until_done()
    assert last.content[-1].text == "It is 15." and sorted(calls) == expected, (last, calls)


asyncio.run(play())
# A thread, with the setting by which it sends all of the conversation itself.
fields = {"model": MODEL, "max_tokens": 1024, "unsupported_request_behavior": "continue_unthreaded"}
thread = client.beta.messages.thread(**fields)
for text in ("One.", "Two."):
    message = thread.send({"role": "user", "content": played(text)})
    assert message.content[-1].text == text, message
assert [message["role"] for message in thread.messages] == ["user", "assistant"] * 2
embedded = anthropic.Anthropic(**{**place, "base_url": EMBEDDED})
question = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
form = {"model": MODEL, "max_tokens": 512, "messages": question, "output_format": Size}
assert isinstance(embedded.messages.parse(**form).parsed_output, Size)
with embedded.beta.messages.stream(**form) as stream:
    assert isinstance(stream.get_final_message().parsed_output, Size)
print_versions("anthropic")
