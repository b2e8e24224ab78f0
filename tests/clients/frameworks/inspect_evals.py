"""inspect_ai: four providers, chat, responses and messages; tools, forms, log-probabilities."""

import asyncio
import multiprocessing
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel, Field

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
calls = []


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


@tool
def add() -> Tool:
    """A tool of inspect_ai's."""

    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.append((a, b))
        return str(a + b)

    return execute


def models(base: str, config: GenerateConfig) -> list[Model]:
    """The models of all providers and APIs."""
    openai = {"base_url": f"{base}/v1", "api_key": "unused", "config": config, "memoize": False}
    return [
        get_model(f"openai-api/openspec/{MODEL}", **openai),
        get_model(f"openai-api/openspec/{MODEL}", responses_api=True, **openai),
        get_model(f"openai/{MODEL}", responses_api=False, **openai),
        get_model(f"openai/{MODEL}", responses_api=True, **openai),
        get_model(f"vllm/{MODEL}", **openai),
        get_model(f"anthropic/{MODEL}", **{**openai, "base_url": base}),
    ]


async def ask_embedded() -> None:
    """Texts, forms, calls that must come, log-probabilities."""
    config = GenerateConfig(max_tokens=1024, temperature=0)
    form = ResponseSchema(name="sum", json_schema=json_schema(Sum))
    for model in models(EMBEDDED, config):
        output = await model.generate(QUESTION)
        # Some providers send no temperature, so that the embedded model may go on and on.
        assert output.stop_reason in ("stop", "max_tokens")
        assert output.completion.strip() or output.stop_reason == "max_tokens"
        assert output.usage.output_tokens > 0
        forced = await model.generate(QUESTION, tools=[add()], tool_choice="any")
        assert forced.stop_reason == "tool_calls"
        (chosen, *_) = forced.message.tool_calls
        assert (chosen.function, chosen.parse_error) == ("add", None)
        assert all(isinstance(number, int) for number in chosen.arguments.values())
        cut = await model.generate(QUESTION, config=GenerateConfig(max_tokens=4))
        assert cut.stop_reason == "max_tokens"
        formed = await model.generate(QUESTION, config=GenerateConfig(response_schema=form))
        assert isinstance(Sum.model_validate_json(formed.completion), Sum), model
    model = models(EMBEDDED, config)[0]
    several = GenerateConfig(
        num_choices=2, seed=7, temperature=1, logprobs=True, top_logprobs=3, extra_body=OFF
    )
    output = await model.generate(QUESTION, config=several)
    assert len(output.choices) == 2
    for choice in output.choices:
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def evaluate_scripted() -> None:
    """An evaluation whose samples call a tool."""
    settings = {"display": "none", "log_level": "error", "fail_on_error": True}
    config = GenerateConfig(max_tokens=512)
    written = get_model(
        f"openai-api/openspec/{MODEL}",
        base_url=f"{SCRIPTED}/v1",
        api_key="unused",
        config=config,
        emulate_tools=True,
    )
    for model in [*models(SCRIPTED, config), written]:
        calls.clear()
        asked = played(call("add", a=3, b=4), call("add", a=7, b=1), "It is 8.")
        solver = [use_tools(add()), generate()]
        task = Task([Sample(asked, target="8")], solver=solver, scorer=includes())
        with tempfile.TemporaryDirectory() as folder:
            (log,) = eval(task, model, log_dir=folder, **settings)
            assert log.status == "success", log.error
            assert calls == [(3, 4), (7, 1)], model
            assert log.samples[0].output.completion == "It is 8."
            assert log.results.scores[0].metrics["accuracy"].value == 1


# inspect_ai keeps one address for each model of vLLM's in a process.
for half in (lambda: asyncio.run(ask_embedded()), evaluate_scripted):
    process = multiprocessing.get_context("fork").Process(target=half)
    process.start()
    process.join()
    assert process.exitcode == 0
print_versions("inspect_ai", "openai", "anthropic")
