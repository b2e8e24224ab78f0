"""smolagents: its model for OpenAI's API, and agents that call tools or write code."""

import contextlib
import io
import json

from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from smolagents import (
    ActionOutput,
    CodeAgent,
    LogLevel,
    OpenAIModel,
    ToolCallingAgent,
    agglomerate_stream_deltas,
    tool,
)
from smolagents.models import CODEAGENT_RESPONSE_FORMAT

calls: list[tuple[int, int]] = []


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number
        b: another number
    """
    calls.append((a, b))
    return a + b


def model(url: str, **options: object) -> OpenAIModel:
    return OpenAIModel(MODEL, api_base=f"{url}/v1", api_key="unused", **options)


question = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
embedded = model(EMBEDDED, temperature=0, max_tokens=512)
whole = embedded.generate(question)
assert whole.token_usage.output_tokens > 0
deltas = list(embedded.generate_stream(question))
joined = agglomerate_stream_deltas(deltas)
assert joined.content == whole.content
assert joined.token_usage.output_tokens == whole.token_usage.output_tokens
word = whole.content.split()[-1]
stopped = embedded.generate(question, stop_sequences=[word])
assert whole.content.startswith(stopped.content) and word not in stopped.content
# The tool that a request forces, as ToolCallingAgent does at every step.
forced = embedded.generate(question, tools_to_call_from=[add])
assert {one.function.name for one in forced.tool_calls} == {"add"}
for one in forced.tool_calls:
    arguments = one.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert {*arguments} == {"a", "b"}, arguments
# An object is in the content, whatever the model samples; it may think too long to begin one.
system = [{"role": "system", "content": "Write thought and code."}]
for seed in range(8):
    sampled = model(EMBEDDED, temperature=1.0, max_tokens=256, seed=seed)
    found = sampled.generate([*system, *question], response_format=CODEAGENT_RESPONSE_FORMAT)
    num_thought = found.raw.usage.completion_tokens_details.reasoning_tokens
    is_object = found.content.lstrip().startswith("{")
    assert is_object or (not found.content and num_thought > 250), (seed, found)

quiet = {"tools": [add], "model": model(SCRIPTED), "verbosity_level": LogLevel.OFF}
steps = (call("add", a=3, b=4), call("final_answer", answer="seven"))


def play(stream: bool) -> None:
    """The script: tools that are called, code between tags, and code in an object."""
    agent = ToolCallingAgent(stream_outputs=stream, **quiet)
    calls.clear()
    assert agent.run(played(*steps)) == "seven" and calls == [(3, 4)]
    results = [e for e in agent.run(played(*steps), stream=True) if isinstance(e, ActionOutput)]
    assert results[-1].is_final_answer and results[-1].output == "seven", results
    assert agent.monitor.get_total_token_counts().output_tokens > 0
    # Two calls at a time.
    both = f"{steps[0]}\n{call('add', a=5, b=6)}"
    assert agent.run(played(both, steps[1])) == "seven"
    assert sorted(calls[-2:]) == [(3, 4), (5, 6)], calls
    # Code, between tags of which the second is a stop string.
    agent = CodeAgent(stream_outputs=stream, **quiet)
    texts = [
        f"Thought: I add.\n<code>\n{code}\n</code> too much"
        for code in ("x = add(3, 4)\nprint(x)", "final_answer(x + 1)")
    ]
    assert agent.run(played(*texts)) == 8
    outputs = [step.model_output for step in agent.memory.steps if hasattr(step, "model_output")]
    assert [text.partition("</code>")[2] for text in outputs] == ["", ""], outputs
    agent = CodeAgent(stream_outputs=stream, use_structured_outputs_internally=True, **quiet)
    objects = [
        json.dumps({"thought": "I add.", "code": code})
        for code in ("x = add(3, 4)", "final_answer(x + 2)")
    ]
    assert agent.run(played(*objects)) == 9


# What is streamed is drawn on the terminal as well.
with contextlib.redirect_stdout(io.StringIO()):
    play(stream=False)
    play(stream=True)
print_versions("smolagents", "openai")
