"""Qwen Code: a turn with a call of its shell tool; argv[2] is the scripted server's address."""

from agent import ASK, DONE, address, run_agent, version

options = ["--auth-type", "openai", "--approval-mode", "yolo", "--telemetry", "false"]
output = run_agent(
    ["qwen", *options, "-p", ASK],
    OPENAI_BASE_URL=f"{address()}/v1",
    OPENAI_API_KEY="unused",
    OPENAI_MODEL="tiny",
)
assert DONE in output, output
print("qwen-code", version("qwen", "--version"))
