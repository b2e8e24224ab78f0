"""opencode: a turn with a call of its bash tool; argv[2] is the scripted server's address."""

import json

from agent import ASK, DONE, address, run_agent, version

provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "openspec",
    "options": {"baseURL": f"{address()}/v1", "apiKey": "unused"},
    "models": {"tiny": {"name": "tiny", "limit": {"context": 100_000, "output": 4096}}},
}
config = {
    "model": "openspec/tiny",
    "small_model": "openspec/tiny",
    "permission": {"*": "allow"},
    "provider": {"openspec": provider},
    "autoupdate": False,
    "share": "disabled",
}
output = run_agent(
    ["opencode", "run", ASK],
    OPENCODE_CONFIG_CONTENT=json.dumps(config),
    OPENCODE_DISABLE_MODELS_FETCH="1",
)
assert DONE in output, output
print("opencode", version("opencode", "--version"))
