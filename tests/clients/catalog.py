"""The clients: the program of each, what must be installed for it, and which server it needs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.clients.scripted import Script, call


@dataclass(frozen=True)
class Client:
    """One program and what must be installed for it."""

    program: str
    packages: tuple[str, ...]
    npm: bool = False
    script: Script | None = None
    """Of the server that answers instead of the embedded model, or beside it."""
    bare: tuple[str, ...] = ()
    """Packages without those that they need."""
    refusals: tuple[str, ...] = ()
    """Codes of refusals by the scripted server that the client answers by itself."""


def framework(program: str, *packages: str, npm: bool = False, **options: object) -> Client:
    """A framework, whose program plays its own answers on the scripted server."""
    return Client(f"frameworks/{program}", packages, npm, script=Script(), **options)


COMMAND = "echo hello > made.txt"
WHOLE_FILE = "I write the file.\n\nmade.txt\n```\nhello\n```\n"
SGLANG = tuple(
    "aiohttp datasets jinja2 msgspec numpy orjson pillow psutil pybase64 pydantic pyzmq requests "
    "tqdm transformers".split()
)
VLLM = tuple(
    "torch==2.13.0 aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance msgspec numpy "
    "openai openai-harmony orjson partial-json-parser pillow prometheus-client psutil py-cpuinfo "
    "pybase64 pydantic pyzmq regex requests tqdm transformers uvicorn uvloop watchfiles "
    "xgrammar".split()
)
"""What the load generators of two engines import, without the engines' own needs."""

SDKS = {
    "openai-python": Client("openai_python.py", ("openai",)),
    "anthropic-python": Client("anthropic_python.py", ("anthropic",)),
    "openai-node": Client("openai_node.mjs", ("openai",), npm=True),
    "anthropic-node": Client("anthropic_node.mjs", ("@anthropic-ai/sdk",), npm=True),
    "langchain": Client("langchain_chat.py", ("langchain-openai", "langchain-anthropic")),
    "litellm": Client("litellm_sdk.py", ("litellm",)),
    "llama-index": Client("llama_index_chat.py", ("llama-index-llms-openai-like",)),
}
AGENTS = {
    "claude-code": Client(
        "claude_code.py",
        ("@anthropic-ai/claude-code",),
        npm=True,
        script=call("Bash", command=COMMAND, description="Write a file"),
    ),
    "codex": Client(
        "codex_cli.py", ("@openai/codex",), npm=True, script=call("exec_command", cmd=COMMAND)
    ),
    "opencode": Client(
        "opencode_cli.py",
        ("opencode-ai",),
        npm=True,
        script=call("bash", command=COMMAND, description="Write a file"),
    ),
    "qwen-code": Client(
        "qwen_code_cli.py",
        ("node@22", "@qwen-code/qwen-code@latest"),
        npm=True,
        script=call("run_shell_command", command=COMMAND, is_background=False),
    ),
    "aider": Client("aider_cli.py", ("aider-chat",), script=Script(without_tools=WHOLE_FILE)),
}
LOADS = {
    "lm-eval": Client("lm_eval_harness.py", ("lm_eval[api]",)),
    "guidellm": Client("guidellm_bench.py", ("guidellm",)),
    "aiperf": Client("aiperf_bench.py", ("aiperf",)),
    "evalscope": Client("evalscope_bench.py", ("evalscope[perf]",)),
    "vllm-bench": Client("vllm_bench.py", VLLM, bare=("vllm",)),
    "sglang-bench": Client("sglang_bench.py", SGLANG, bare=("sglang",)),
}
FRAMEWORKS = {
    "anthropic-tools": framework(
        "anthropic_tools.py", "anthropic", refusals=("thread_unsupported_request",)
    ),
    "instructor": framework("instructor_modes.py", "instructor", "openai", "anthropic"),
    "pydantic-ai": framework("pydantic_ai_agents.py", "pydantic-ai-slim[openai,anthropic]"),
    "openai-agents": framework("openai_agents.py", "openai-agents"),
    "smolagents": framework("smolagents_agents.py", "smolagents[openai]"),
    "haystack": framework("haystack_generators.py", "haystack-ai"),
    "dspy": framework("dspy_modules.py", "dspy"),
    "autogen": framework("autogen_client.py", "autogen-ext[openai]", "autogen-agentchat"),
    "semantic-kernel": framework("semantic_kernel_agents.py", "semantic-kernel"),
    "crewai": framework("crewai_crews.py", "crewai[anthropic]"),
    "llm": framework("llm_cli.py", "llm"),
    "outlines": framework("outlines_models.py", "outlines", "openai"),
    "guidance": framework("guidance_programs.py", "guidance", "openai"),
    "mirascope": framework("mirascope_calls.py", "mirascope[openai,anthropic]"),
    "magentic": framework("magentic_prompts.py", "magentic"),
    "strands": framework("strands_agents.py", "strands-agents[openai,anthropic]"),
    "google-adk": framework("google_adk_agents.py", "google-adk", "litellm"),
    "inspect-ai": framework("inspect_evals.py", "inspect_ai", "openai", "anthropic"),
    "marvin": framework("marvin_tasks.py", "marvin", "pydantic-ai<1.86"),
    "ai-sdk": framework(
        "ai_sdk.mjs",
        "node@22",
        "ai@latest",
        "@ai-sdk/openai@latest",
        "@ai-sdk/openai-compatible@latest",
        "@ai-sdk/anthropic@latest",
        "zod",
        npm=True,
    ),
    "baml": framework("baml_functions.py", "baml-py", "pydantic"),
    "gptme": framework("gptme_cli.py", "gptme"),
    "promptfoo": framework("promptfoo_eval.py", "node@22", "promptfoo@latest", npm=True),
    "ragas": framework("ragas_metrics.py", "ragas", "langchain-community<0.4"),
}
CLIENTS = {**SDKS, **AGENTS, **LOADS, **FRAMEWORKS}
