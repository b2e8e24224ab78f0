"""llm, a command: chat, streams, completions, schemas, functions, a conversation, its log."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions

COMMON = f"model_name: {MODEL}, api_key: unused"
MODELS = f"""
- {{model_id: chat, {COMMON}, api_base: {EMBEDDED}/v1, supports_schema: true}}
- {{model_id: text, {COMMON}, api_base: {EMBEDDED}/v1, completion: true}}
- {{model_id: tools, {COMMON}, api_base: {SCRIPTED}/v1, supports_tools: true}}
"""
WEATHER = '''
def weather(city: str) -> str:
    """The weather in a city."""
    print("asked for", city)
    return f"sunny in {city}"
'''
QUESTION = "Tom has 3 apples and buys 4 more. How many?"
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "128")

with tempfile.TemporaryDirectory() as home:
    (Path(home) / "extra-openai-models.yaml").write_text(MODELS)

    def llm(*arguments: str) -> str:
        """What the command prints."""
        done = subprocess.run(
            ["llm", *arguments],
            env={**os.environ, "LLM_USER_PATH": home},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logged(count: int) -> list[dict]:
        """The newest entries of the log, oldest first."""
        entries = json.loads(llm("logs", "--json", "-n", str(count)))
        return sorted(entries, key=lambda entry: entry["datetime_utc"])

    streamed = llm("-m", "chat", QUESTION, *GREEDY)
    assert llm("-m", "chat", QUESTION, *GREEDY, "--no-stream") == streamed
    assert llm("-m", "text", "Once upon a time", *GREEDY).strip()
    parsed = json.loads(llm("-m", "chat", QUESTION, *GREEDY, "--schema", "apples int, enough bool"))
    assert type(parsed["apples"]) is int
    assert type(parsed["enough"]) is bool
    llm("-m", "chat", f"{QUESTION} As JSON.", *GREEDY, "-o", "json_object", "1")

    asked = played(call("weather", city="Paris"), "It is sunny there.")
    answer = llm("-m", "tools", asked, "--functions", WEATHER)
    assert answer.strip().splitlines() == ["asked for Paris", "It is sunny there."], answer
    *_, before, after = logged(2)
    assert before["tool_calls"][0]["arguments"] == {"city": "Paris"}
    assert after["tool_results"][0]["output"] == "sunny in Paris"

    llm("-m", "chat", QUESTION, *GREEDY)
    llm("-c", "And 5 more?", *GREEDY)
    first, again = logged(2)
    assert again["conversation_id"] == first["conversation_id"]
    assert again["input_tokens"] > first["input_tokens"] > 0 < first["output_tokens"]
print_versions("llm")
