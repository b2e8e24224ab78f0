"""guidellm: a small load of its own making; argv[1] is the server's address."""

import importlib.metadata
import json

from load import MODEL, address, run_load

report = run_load(
    *("guidellm", "run", "--backend", f"kind=openai_http,target={address()},model=tiny"),
    *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
    *("--tokenizer", f"kind=hf_auto,model={MODEL}"),
    *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
    *("--output", "kind=json,path=report.json"),
)
(benchmark,) = json.loads(report["report.json"])["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (6, 0), totals
print("guidellm", importlib.metadata.version("guidellm"))
