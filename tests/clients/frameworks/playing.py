"""What programs of frameworks share: texts that tell the scripted server what to answer.

The embedded model calls no tools by itself. A program therefore writes the model's answers, and
the framework carries them to the server in the text that its user sends: `ask(played(...))`.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import sys
import uuid

EMBEDDED, SCRIPTED = sys.argv[1:3]
"""Addresses of the servers: one with the embedded model, one that plays."""
MODEL = "tiny"


def played(*answers: str, text: str = "Play") -> str:
    """A user's text; each request that holds it gets the next of the answers.

    Answers are what the model writes: `call(...)` for a call, JSON for a form. They come after
    some thinking where the prompt leaves it on. A request too many gets a text that says so.
    """
    plan = json.dumps({"id": str(uuid.uuid4()), "answers": answers})
    return f"{text} [[{base64.urlsafe_b64encode(plan.encode()).decode()}]]"


def call(name: str, **arguments: object) -> str:
    """The text by which the model calls a tool."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def print_versions(*packages: str) -> None:
    """One line a package, which the runner shows."""
    for name in packages:
        print(name, importlib.metadata.version(name))
