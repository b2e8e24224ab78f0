"""promptfoo: an evaluation with providers of the four APIs, and one with a JSON schema."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from playing import EMBEDDED, MODEL

SCHEMA = {
    "type": "object",
    "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["apples"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
KEY = {"apiKey": "unused", "temperature": 0, "max_tokens": 256}
OPENAI = {**KEY, "apiBaseUrl": f"{EMBEDDED}/v1"}
PROVIDERS = {
    "chat": ("openai:chat", OPENAI),
    "chat without thinking": ("openai:chat", {**OPENAI, "showThinking": False}),
    "schema": ("openai:chat", {**OPENAI, "showThinking": False, "response_format": FORMAT}),
    "responses": ("openai:responses", {**OPENAI, "max_output_tokens": 256}),
    "completion": ("openai:completion", {**OPENAI, "stop": ["."]}),
    "messages": ("anthropic:messages", {**KEY, "apiBaseUrl": EMBEDDED}),
}


def evaluated() -> dict[str, dict]:
    """What promptfoo says of each provider."""
    providers = [
        {"id": f"{kind}:{MODEL}", "label": label, "config": config}
        for label, (kind, config) in PROVIDERS.items()
    ]
    config = {
        "prompts": ["Tom has {{n}} apples and buys 4 more. How many?"],
        "providers": providers,
        "tests": [{"vars": {"n": 3}}],
    }
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "promptfooconfig.json", Path(folder) / "output.json"
        file.write_text(json.dumps(config))
        quiet = ("PROMPTFOO_DISABLE_TELEMETRY", "PROMPTFOO_DISABLE_UPDATE")
        done = subprocess.run(
            ["promptfoo", "eval", "-c", file, "-o", output, "--no-cache", "--no-table"],
            env={**os.environ, "PROMPTFOO_CONFIG_DIR": folder, **dict.fromkeys(quiet, "1")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads(output.read_text())["results"]["results"]
    return {one["provider"]["label"]: one["response"] for one in results}


answers = evaluated()
assert answers.keys() == PROVIDERS.keys()
for label, answer in answers.items():
    usage = answer["tokenUsage"]
    assert usage["prompt"] > 0 and usage["total"] == usage["prompt"] + usage["completion"], label
text = answers["chat without thinking"]["output"]
assert text and "Thinking" not in text
assert answers["chat without thinking"]["tokenUsage"]["completionDetails"]["reasoning"] > 0
assert answers["responses"]["output"] == text
assert 0 <= answers["schema"]["output"]["apples"] <= 99
assert answers["messages"]["output"].count("Thinking: ") == 1
# It reads the thinking of a chat under both of its names, and shows it twice.
assert answers["chat"]["output"].count("Thinking: ") == 2
assert answers["chat"]["output"].endswith(text)
print("promptfoo", subprocess.check_output(["promptfoo", "--version"], text=True).strip())
