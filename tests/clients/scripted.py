"""A server whose engine plays an agent's model: our HTTP stack, answers that are written here.

The embedded model calls no tools by itself. Here it thinks, says a word, calls one of the agent's
own tools, and ends the turn once it has the result. A program of a framework writes
the answers to its requests itself (`frameworks/playing.py`). Everything else is real: the template
and the tokenizer of the embedded model, the parsers, the events, the client.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
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
NO_THINKING = "</think>\n\n"
TOOLS, RESULT = "\n</tools>\n", "<tool_response>\n"
PLAN = re.compile(r"\[\[(eyJpZCI6[\w=-]*)\]\]")
"""In base64, where `eyJpZCI6` is `{"id":`: agents write links in double brackets, too."""


@dataclass(frozen=True)
class Script:
    """What the model answers to an agent."""

    first: str = "I have nothing to do."
    """To the request itself, after its thinking."""
    last: str = DONE
    """To a tool's result, and to a summary that says it."""
    without_tools: str = "A short title"
    """To requests without tools: agents ask for titles of conversations."""


def call(name: str, **arguments: object) -> Script:
    """An answer that calls a tool."""
    text = json.dumps({"name": name, "arguments": arguments})
    return Script(f"I write it.\n<tool_call>\n{text}\n</tool_call>")


class Player:
    """Gives the answers that `played` of `frameworks/playing.py` put into a text."""

    def __init__(self) -> None:
        self.num_given: Counter[str] = Counter()

    def answer(self, prompt: str) -> str | None:
        """The next answer of the last plan in the prompt; None where it has no plan."""
        plans = PLAN.findall(prompt)
        if not plans:
            return None
        plan = json.loads(base64.urlsafe_b64decode(plans[-1]))
        number = self.num_given[plan["id"]]
        self.num_given[plan["id"]] += 1
        if number >= len(plan["answers"]):
            return "This is a request too many."
        return plan["answers"][number]


@contextmanager
def scripted_server(script: Script) -> Iterator[RunningServer]:
    """A server that answers by the script; its model is called `tiny` too."""
    options = {"max_model_len": MAX_MODEL_LEN}
    player = Player()
    with run_fake_server(MODEL, options, served_model_name=["tiny"]) as server:

        def answer(request: EngineRequest) -> list[int]:
            ids = request.prompt_token_ids
            prompt = server.context.tokenizer.decode(ids, skip_special_tokens=False)
            thinking = "" if prompt.endswith(NO_THINKING) else THINKING
            text = player.answer(prompt)
            if text is None and (RESULT in prompt or script.last in prompt):
                thinking, text = "", script.last
            elif text is None:
                text = script.first if TOOLS in prompt else script.without_tools
            return server.ids(f"{thinking}{text}<|im_end|>")

        server.engine.script = answer
        yield server
