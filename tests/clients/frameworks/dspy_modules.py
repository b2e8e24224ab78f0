"""DSPy: language models over four APIs, adapters, agents by text and by calls, streams."""

import asyncio
import json
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions


class Sum(dspy.Signature):
    """Add what the question names."""

    question: str = dspy.InputField()
    apples: int = dspy.OutputField()
    size: Literal["small", "large"] = dspy.OutputField()


calls: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Adds."""
    calls.append((a, b))
    return a + b


def models(url: str, **options: object) -> dict[str, dspy.LM]:
    """By API; all of them want an address with /v1, Anthropic's too."""
    place = {"api_base": f"{url}/v1", "api_key": "unused", "num_retries": 0, **options}
    return {
        "chat": dspy.LM(f"openai/{MODEL}", **place),
        "responses": dspy.LM(f"openai/{MODEL}", model_type="responses", **place),
        "text": dspy.LM(f"openai/{MODEL}", model_type="text", **place),
        "messages": dspy.LM(f"anthropic/{MODEL}", **place),
    }


def fields(**values: object) -> str:
    """An answer as ChatAdapter reads it."""
    texts = [f"[[ ## {name} ## ]]\n{value}\n" for name, value in values.items()]
    return "\n".join([*texts, "[[ ## completed ## ]]"])


answer = {"apples": 7, "size": "small"}
as_json = json.dumps(answer)


def is_answer(found: dspy.Prediction) -> bool:
    return (found.apples, found.size) == (7, "small")


def play(lm: dspy.LM) -> None:
    """The script: answers in the form of each adapter, and agents."""
    xml = "".join(f"<{name}>\n{value}\n</{name}>\n" for name, value in answer.items())
    for adapter, text in (
        (dspy.ChatAdapter(), fields(**answer)),
        (dspy.JSONAdapter(), as_json),
        (dspy.XMLAdapter(), xml),
        (dspy.ChatAdapter(), "No field"),  # it asks again by JSONAdapter
    ):
        with dspy.context(lm=lm, adapter=adapter):
            found = dspy.Predict(Sum)(question=played(text, as_json))
            assert is_answer(found), (adapter, found)
    calls.clear()
    steps = (
        fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": 3, "b": 4}'),
        fields(next_thought="I end.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="3 + 4 = 7", **answer),
    )
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        found = dspy.ReAct(Sum, tools=[add])(question=played(*steps))
    assert is_answer(found) and calls == [(3, 4)] and found.trajectory["observation_0"] == 7


def declared(url: str, **options: object) -> dspy.LM:
    """Chat with a model that DSPy is told about; otherwise it holds that one it does not know
    neither calls tools nor writes by a schema, and asks for both in the prompt."""
    access = AccessPolicy(provider="openspec", base_url=f"{url}/v1")
    provider = ProviderDefinition.chat(access, compat=OpenAIChatCompat())
    support = ModelSupport(function_calling=True, response_schema=True)
    register_provider(provider, supports=support, replace=True)
    return dspy.LM(f"openspec/{MODEL}", api_key="unused", num_retries=0, **options)


async def stream(lm: dspy.LM) -> None:
    """A field of an answer, piece by piece."""
    predict = dspy.Predict("question -> text")
    listeners = [dspy.streaming.StreamListener(signature_field_name="text")]
    program = dspy.streamify(predict, stream_listeners=listeners)
    text = "It is seven, and no more than that."
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        found = [piece async for piece in program(question=played(fields(text=text)))]
    assert isinstance(found[-1], dspy.Prediction) and found[-1].text == text, found
    pieces = [piece.chunk for piece in found[:-1]]
    assert "".join(pieces).strip() == text and len(pieces) > 2, pieces


dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
for api, lm in models(EMBEDDED, max_tokens=256, temperature=0.0).items():
    (whole,) = lm("Tom has 3 apples and buys 4 more. How many?")
    assert whole if api == "text" else whole["text"], (api, whole)
    usage = lm.history[-1]["usage"]
    assert 0 < usage["prompt_tokens"] < usage["total_tokens"], (api, usage)
for lm in models(SCRIPTED, max_tokens=4096).values():
    if lm.model_type != "text":
        play(lm)
        asyncio.run(stream(lm))
lm = declared(EMBEDDED, max_tokens=512, temperature=0.0)
with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    found = dspy.Predict(Sum)(question="Tom has 3 apples and buys 4 more. How many?")
assert isinstance(found.apples, int) and found.size in {"small", "large"}, found
calls.clear()
with dspy.context(
    lm=declared(SCRIPTED), adapter=dspy.ChatAdapter(use_native_function_calling=True)
):
    steps = (call("add", a=3, b=4), call("submit", **answer))
    found = dspy.ReActV2(Sum, tools=[add])(question=played(*steps))
assert is_answer(found) and calls == [(3, 4)], (found, calls)
print_versions("dspy", "litellm")
