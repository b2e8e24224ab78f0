"""An engine that another program drives, of whichever openspec the interpreter finds.

    python bench/measure/task_engine.py SETTINGS

Of each line of standard input, a JSON object of conversations, max_tokens and drafts, it answers
with a line: the answers' tokens, the time they took and what became of the drafts. It answers one
conversation after the other, or all at once. SETTINGS is a JSON object of LLM's.
"""

from __future__ import annotations

import json
import sys
import time

from openspec import LLM, SamplingParams
from openspec.messages import SpeculativeOptions


def main() -> None:
    """Until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with LLM(**json.loads(sys.argv[1])) as llm:
        for line in sys.stdin:
            job = json.loads(line)
            params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
            drafts = SpeculativeOptions(enabled=job["drafts"])
            jobs = job["conversations"]
            before, wall, processor = llm.stats(), time.perf_counter(), time.process_time()
            outputs = [
                output.outputs[0]
                for batch in ([jobs] if job["at_once"] else [[one] for one in jobs])
                for output in llm.chat(batch, params, use_tqdm=False, speculative=drafts)
            ]
            after = llm.stats()
            answer = {
                "wall_s": time.perf_counter() - wall,
                "processor_s": time.process_time() - processor,
                "token_ids": [list(output.token_ids) for output in outputs],
                "texts": [output.text for output in outputs],
                "drafted": after.num_draft_tokens - before.num_draft_tokens,
                "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
                "steps": after.num_steps - before.num_steps,
            }
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
