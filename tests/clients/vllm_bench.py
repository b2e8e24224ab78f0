"""`vllm bench serve` over completions and chat; argv[1] is the server's address.

Its package is installed without what only the engine needs.
"""

import importlib.metadata
import json

from load import MODEL, address, run_load

for backend, path in (("openai", "completions"), ("openai-chat", "chat/completions")):
    report = run_load(
        *("vllm", "bench", "serve", "--backend", backend, "--endpoint", f"/v1/{path}"),
        *("--base-url", address(), "--model", "tiny", "--tokenizer", str(MODEL)),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32"),
        *("--num-prompts", "8", "--temperature", "0", "--ignore-eos"),
        *("--save-result", "--result-filename", "report.json"),
    )
    result = json.loads(report["report.json"])
    assert (result["completed"], result["total_output_tokens"]) == (8, 8 * 32), result
    # It reads the server's counters of drafts by vLLM's names.
    assert result["spec_decode_num_drafts"] > 0, result
print("vllm", importlib.metadata.version("vllm"))
