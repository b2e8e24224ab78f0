"""Codex CLI: a turn with a call of its shell tool, a second, a third after it compacted the first
two; argv[2] is the scripted server's address."""

from agent import ASK, DONE, HOME, address, run_agent, version

provider = f'{{name="openspec",base_url="{address()}/v1",wire_api="responses",env_key="KEY"}}'
options = ["-m", "tiny", "-c", 'model_provider="openspec"']
options += ["-c", f"model_providers.openspec={provider}"]
options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
resume = ["codex", "exec", "resume", "--last", *options]
output = run_agent(
    ["codex", "exec", *options, ASK],
    [*resume, "Is it there?"],
    [*resume, "-c", "model_auto_compact_token_limit=200", "Is it still there?"],
    KEY="unused",
    CODEX_HOME=HOME,
)
assert output.count(f"codex\n{DONE}") == 3, output
assert "I write it." in output, output
assert output.count("context compacted") == 1, output
print(version("codex", "--version"))
