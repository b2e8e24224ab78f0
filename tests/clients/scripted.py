"""A server whose engine plays an agent's model: our HTTP stack, answers that are written here.

The embedded model calls no tools by itself. Here it thinks, says a word, calls one of the agent's
own tools, and ends the turn once it has the result. Everything else is real: the template and the
tokenizer of the embedded model, the parsers, the events, the client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openspec
from openspec.messages import EngineRequest
from tests.clients.agent import DONE
from tests.serve.conftest import RunningServer, run_fake_server

MODEL = Path(openspec.__file__).parent / "models" / "tiny"
MAX_MODEL_LEN = 1 << 18
THINKING = "<think>\nI write the file.\n</think>\n\n"
TOOLS, RESULT = "\n</tools>\n", "<tool_response>\n"


@dataclass(frozen=True)
class Script:
    """What the model answers to an agent."""

    first: str
    """To the request itself, after its thinking."""
    last: str = DONE
    """To a tool's result, and to a summary that says it."""
    without_tools: str = "A short title"
    """To requests without tools: agents ask for titles of conversations."""


def call(name: str, **arguments: object) -> Script:
    """An answer that calls a tool."""
    text = json.dumps({"name": name, "arguments": arguments})
    return Script(f"I write it.\n<tool_call>\n{text}\n</tool_call>")


@contextmanager
def scripted_server(script: Script) -> Iterator[RunningServer]:
    """A server that answers by the script; its model is called `tiny` too."""
    options = {"max_model_len": MAX_MODEL_LEN}
    with run_fake_server(MODEL, options, served_model_name=["tiny"]) as server:

        def answer(request: EngineRequest) -> list[int]:
            ids = request.prompt_token_ids
            prompt = server.context.tokenizer.decode(ids, skip_special_tokens=False)
            if RESULT in prompt or script.last in prompt:
                text = script.last
            elif TOOLS in prompt:
                text = THINKING + script.first
            else:
                text = THINKING + script.without_tools
            return server.ids(f"{text}<|im_end|>")

        server.engine.script = answer
        yield server
