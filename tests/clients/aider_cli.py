"""aider: an edit of a whole file; it calls no tools. argv[2] is the scripted server's address."""

from agent import ASK, MADE, address, run_agent, version

output = run_agent(
    [
        *("aider", "--model", "openai/tiny", "--edit-format", "whole", "--no-git", "--yes-always"),
        *("--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty"),
        *("--message", ASK, MADE),
    ],
    OPENAI_API_BASE=f"{address()}/v1",
    OPENAI_API_KEY="unused",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)
assert "Applied edit to made.txt" in output, output
assert "I write the file." in output, "the thinking is not shown"
print(version("aider", "--version"))
