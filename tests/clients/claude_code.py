"""Claude Code: a turn with a call of its Bash tool; argv[2] is the scripted server's address."""

from agent import ASK, DONE, address, run_agent, version

output = run_agent(
    ["claude", "-p", ASK, "--model", "tiny", "--allowedTools", "Bash"],
    ANTHROPIC_BASE_URL=address(),
    ANTHROPIC_API_KEY="unused",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
)
assert DONE in output, output
print("claude-code", version("claude", "--version"))
