"""BAML: functions over chat, responses and messages, whole and streamed, with a class as answer."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from baml_py import Collector
from playing import EMBEDDED, MODEL, SCRIPTED, played, print_versions

FUNCTIONS = """
class Sum {
  apples int
  is_enough bool
}
function Ask(question: string) -> string {
  client Chat
  prompt #"{{ _.role("user") }} {{ question }}"#
}
function Count(question: string) -> Sum {
  client ScriptedChat
  prompt #"{{ _.role("user") }} {{ question }} {{ ctx.output_format }}"#
}
"""


def client(name: str, provider: str, base_url: str, limit: str, *more: str) -> str:
    """A client in BAML's language, which has one option a line."""
    options = [f'base_url "{base_url}"', 'api_key "unused"', f'model "{MODEL}"', "temperature 0"]
    lines = "\n".join([*options, f"{limit} 512", *more])
    return f"client<llm> {name} {{\nprovider {provider}\noptions {{\n{lines}\n}}\n}}\n"


def generated(folder: Path) -> None:
    """Writes the functions and has BAML make Python of them."""
    source = folder / "baml_src"
    source.mkdir()
    clients = []
    for name, url in (("", EMBEDDED), ("Scripted", SCRIPTED)):
        v1 = f"{url}/v1"
        clients += [
            client(f"{name}Chat", "openai-generic", v1, "max_tokens"),
            client(f"{name}Responses", "openai-responses", v1, "max_output_tokens"),
            client(f"{name}Messages", "anthropic", url, "max_tokens"),
        ]
    off = 'reasoning {\neffort "none"\n}'
    clients.append(
        client("ResponsesOff", "openai-responses", f"{EMBEDDED}/v1", "max_output_tokens", off)
    )
    target = f'output_type "python/pydantic"\noutput_dir "../"\nversion "{version("baml-py")}"'
    generator = f"generator target {{\n{target}\ndefault_client_mode sync\n}}\n"
    (source / "main.baml").write_text("".join([FUNCTIONS, *clients, generator]))
    subprocess.run(["baml-cli", "generate"], cwd=folder, check=True, capture_output=True)
    sys.path.insert(0, str(folder))


os.environ["BAML_LOG"] = "off"
with tempfile.TemporaryDirectory() as temporary:
    generated(Path(temporary))
    from baml_client import b

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
texts, streamed = {}, {}
for name in ("Chat", "Responses", "ResponsesOff", "Messages"):
    collector = Collector()
    chosen = b.with_options(client=name, collector=collector)
    texts[name] = chosen.Ask(QUESTION)
    assert texts[name], name
    assert collector.last.usage.input_tokens > 0 and collector.last.usage.output_tokens > 0
    stream = chosen.stream.Ask(QUESTION)
    assert list(stream), name
    streamed[name] = stream.get_final_response()
# At the end of a stream it takes the text of the first item, which is the thinking.
assert streamed.pop("Responses") != texts["Responses"]
assert streamed == {name: texts[name] for name in streamed}

for name in ("ScriptedChat", "ScriptedResponses", "ScriptedMessages"):
    chosen = b.with_options(client=name)
    text = played('{"apples": 7, "is_enough": true}', '{"apples": 8, "is_enough": false}')
    answer = chosen.Count(text)
    assert (answer.apples, answer.is_enough) == (7, True), name
    if name != "ScriptedResponses":
        stream = chosen.stream.Count(text)
        assert any(part.apples in (None, 8) for part in stream), name
        assert stream.get_final_response().model_dump() == {"apples": 8, "is_enough": False}
print_versions("baml-py")
