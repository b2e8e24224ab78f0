"""aiperf over completions and chat; argv[1] is the server's address."""

import importlib.metadata
import json

from load import MODEL, address, run_load

for kind in ("completions", "chat"):
    report = run_load(
        *("aiperf", "profile", "--model", "tiny", "--url", address()),
        *("--endpoint-type", kind, "--streaming", "--request-count", "8", "--concurrency", "4"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32"),
        *("--tokenizer", str(MODEL), "--use-server-token-count", "--ui", "none"),
        *("--artifact-dir", "artifacts", "--extra-inputs", "ignore_eos:true"),
        # Offline it takes a folder for a name on the hub, which it has not cached.
        offline=False,
    )
    result = json.loads(report["artifacts/profile_export_aiperf.json"])
    assert result["request_count"]["avg"] == 8, result
    assert "error_request_count" not in result, result
    assert result["output_sequence_length"]["avg"] == 32, result
print("aiperf", importlib.metadata.version("aiperf"))
