"""semantic-kernel: chat, completions, functions, and agents over chat and over responses."""

import asyncio

from forms import QUESTION, Sum
from openai import AsyncOpenAI
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function


class Sums:
    """A plug-in."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    @kernel_function(description="Adds")
    def add(self, a: int, b: int) -> int:
        """Adds."""
        self.calls.append((a, b))
        return a + b


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def ask() -> None:
    """The embedded model: text, a form and a function that the request enforces."""
    service = OpenAIChatCompletion(MODEL, async_client=client(EMBEDDED))
    text = QUESTION
    history = ChatHistory()
    history.add_user_message(text)
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=512)
    whole = await service.get_chat_message_content(history, settings)
    assert whole.finish_reason.value == "stop" and whole.metadata["usage"].completion_tokens > 0
    stream = service.get_streaming_chat_message_content(history, settings)
    pieces = [piece async for piece in stream if piece is not None]
    assert "".join(str(piece) for piece in pieces) == str(whole)
    assert pieces[-1].metadata["usage"].completion_tokens > 0
    form = settings.model_copy(update={"response_format": Sum, "structured_json_response": True})
    Sum.model_validate_json(str(await service.get_chat_message_content(history, form)))
    kernel = Kernel()
    kernel.add_plugin(Sums(), "Sums")
    behavior = FunctionChoiceBehavior.Required(auto_invoke=False)
    settings.function_choice_behavior = behavior
    whole = await service.get_chat_message_content(history, settings, kernel=kernel)
    called = [item for item in whole.items if isinstance(item, FunctionCallContent)]
    assert {item.name for item in called} == {"Sums-add"}, whole
    assert {*called[0].parse_arguments()} == {"a", "b"}, called
    text_service = OpenAITextCompletion(MODEL, async_client=client(EMBEDDED))
    settings = OpenAITextPromptExecutionSettings(temperature=0, max_tokens=16)
    (whole,) = await text_service.get_text_contents("1, 2, 3, 4, 5,", settings)
    stream = text_service.get_streaming_text_contents("1, 2, 3, 4, 5,", settings)
    assert "".join([str(piece) async for (piece,) in stream]) == str(whole) and str(whole)


async def play() -> None:
    """The script: loops over a function, whole and streamed, and the next question."""
    both = f"{call('Sums-add', a=3, b=4)}\n{call('Sums-add', a=7, b=5)}"
    script = (both, call("Sums-add", a=12, b=1), "It is 13.")
    scripted, sums = client(SCRIPTED), Sums()
    options = {"name": "adder", "plugins": [sums], "instructions": "Add."}
    responses = {"ai_model_id": MODEL, "client": scripted, **options}
    for agent in (
        ChatCompletionAgent(service=OpenAIChatCompletion(MODEL, async_client=scripted), **options),
        OpenAIResponsesAgent(**responses),
        OpenAIResponsesAgent(store_enabled=False, **responses),
    ):
        sums.calls.clear()
        whole = await agent.get_response(played(*script))
        assert str(whole.message) == "It is 13.", whole
        assert sorted(sums.calls) == [(3, 4), (7, 5), (12, 1)], sums.calls
        again = await agent.get_response(played("And 14."), thread=whole.thread)
        assert str(again.message) == "And 14.", again
        pieces = [piece async for piece in agent.invoke_stream(played(*script))]
        assert "".join(str(piece.message) for piece in pieces) == "It is 13.", pieces
        assert len(sums.calls) == 6, sums.calls
    form = Sum(apples=7, size="small").model_dump_json()
    text = {"format": {"type": "json_schema", "name": "Sum", "schema": Sum.model_json_schema()}}
    agent = OpenAIResponsesAgent(text=text, **responses)
    found = await agent.get_response(played(call("Sums-add", a=3, b=4), form))
    assert Sum.model_validate_json(str(found.message)).apples == 7


asyncio.run(ask())
asyncio.run(play())
print_versions("semantic-kernel", "openai")
