"""Codex CLI: a turn with a call of its shell tool; argv[2] is the scripted server's address."""

from agent import ASK, DONE, HOME, address, run_agent, version

provider = f'{{name="openspec",base_url="{address()}/v1",wire_api="responses",env_key="KEY"}}'
options = ["-m", "tiny", "-c", 'model_provider="openspec"']
options += ["-c", f"model_providers.openspec={provider}"]
options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
output = run_agent(["codex", "exec", *options, ASK], KEY="unused", CODEX_HOME=HOME)
assert DONE in output, output
assert "I write it." in output, output
print(version("codex", "--version"))
