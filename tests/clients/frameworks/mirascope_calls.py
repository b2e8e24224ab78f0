"""Mirascope over chat, responses and messages: calls, streams, forms, tools, a second turn."""

from mirascope import llm
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
MODELS = (f"openai/{MODEL}:completions", f"openai/{MODEL}", f"anthropic/{MODEL}")
calls = []


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


@llm.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append((a, b))
    return a + b


def use(base: str) -> None:
    """Sends what follows to a server."""
    llm.register_provider("openai", api_key="unused", base_url=f"{base}/v1")
    llm.register_provider("anthropic", api_key="unused", base_url=base)


use(EMBEDDED)
for name in MODELS:
    model = llm.Model(name, max_tokens=1024)
    whole = model.call(QUESTION)
    assert whole.text() != ""
    assert whole.finish_reason is None
    assert whole.usage.input_tokens > 0 < whole.usage.output_tokens
    stream = model.stream(QUESTION)
    assert "".join(stream.text_stream()).rstrip("\n") == stream.text().rstrip("\n") != ""
    assert stream.usage.input_tokens == whole.usage.input_tokens
    assert stream.usage.output_tokens > 0
    cut = llm.Model(name, max_tokens=4).call(QUESTION)
    assert cut.finish_reason == llm.FinishReason.MAX_TOKENS
    again = whole.resume("And 5 more?")
    assert again.usage.input_tokens > whole.usage.input_tokens
    for mode in ("strict", "tool"):
        asked = llm.format(Sum, mode=mode)
        assert isinstance(model.call(QUESTION, format=asked).parse(), Sum), (name, mode)
        stream = model.stream(QUESTION, format=asked)
        assert list(stream.structured_stream())[-1].model_dump() == stream.parse().model_dump()

use(SCRIPTED)
for name in MODELS:
    calls.clear()
    model = llm.Model(name, max_tokens=512)
    asked = played(call("add", a=3, b=4), "It is 7.", call("add", a=7, b=1), "It is 8.")
    response = model.call(asked, tools=[add])
    assert response.finish_reason is None
    response = response.resume(response.execute_tools())
    assert response.text() == "It is 7."
    stream = model.stream(asked, tools=[add])
    stream.finish()
    stream = stream.resume(stream.execute_tools())
    assert "".join(stream.text_stream()).rstrip("\n") == "It is 8."
    assert calls == [(3, 4), (7, 1)]
    formed = played('{"apples": 7, "is_enough": true}')
    assert model.call(formed, format=Sum).parse() == Sum(apples=7, is_enough=True)
print_versions("mirascope", "openai", "anthropic")
