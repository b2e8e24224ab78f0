"""evalscope: loads of chats and responses, streamed and whole; argv[1] is the server's address."""

import importlib.metadata
import json

from load import address, run_load

PROMPT = "Tom has 3 apples and buys 4 more. How many?"
for api, path in (("openai", "/v1/chat/completions"), ("openai_responses", "/v1/responses")):
    for streams in ("--stream", "--no-stream"):
        report = run_load(
            *("evalscope", "perf", "--api", api, "--url", f"{address()}{path}", "--model", "tiny"),
            *("--prompt", PROMPT, "--max-tokens", "64", "--temperature", "0", streams),
            *("--parallel", "2", "--number", "4", "--outputs-dir", "out", "--no-timestamp"),
        )
        summary = json.loads(report["out/tiny/parallel_2_number_4/benchmark_summary.json"])
        assert (summary["Success Requests"], summary["Failed Requests"]) == (4, 0), summary
        assert 0 < summary["Avg Output Tokens"] <= 64 and summary["Avg Input Tokens"] > 0
        if streams == "--stream":
            assert 0 < summary["Spec. Accept Rate"] < 1, summary
print("evalscope", importlib.metadata.version("evalscope"))
