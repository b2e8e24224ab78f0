"""lm-eval over completions and chat: answers with and without drafts; argv[1] is the address.

Its public tasks are downloaded data sets, so that the tasks here are of a few lines each.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
os.environ |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

NAMES = ["Tom", "Ann", "Sam", "Eva", "Max", "Lea"]
problems = [
    {
        "question": f"{name} has {count} apples and buys {count + 2} more. How many are there?",
        "answer": f"#### {2 * count + 2}",
    }
    for count, name in enumerate(NAMES, 3)
]
days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
choices = [
    {"question": f"After {day} comes", "choices": days, "answer": (i + 1) % 7}
    for i, day in enumerate(days)
]
for name, rows in (("problems", problems), ("choices", choices)):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
common = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
task: {name}
"""
generates = """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], max_gen_toks: 512}
metric_list:
  - metric: exact_match
"""
chooses = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
"""
for name, rest in (("problems", generates), ("choices", chooses)):
    text = common.format(folder=folder, name=name) + rest
    (folder / f"{name}.yaml").write_text(text)


def evaluated(kind: str, task: str, drafts: bool) -> dict:
    """What lm-eval makes of one task: its results, and the answers."""
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"model": "tiny", "base_url": f"{sys.argv[1]}/v1/{path}", "num_concurrent": 4}
    done = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template="chat" in kind,
        gen_kwargs={"speculative": {"enabled": drafts}} if task == "problems" else None,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(done["samples"][task], key=lambda sample: sample["doc_id"])
    return {"results": done["results"][task], "answers": [s["resps"] for s in samples]}


for kind in ("local-completions", "local-chat-completions"):
    with_drafts, plain = (evaluated(kind, "problems", drafts) for drafts in (True, False))
    assert with_drafts == plain, (with_drafts, plain)
    assert any(answer[0][0].strip() for answer in plain["answers"]), plain
chosen = evaluated("local-completions", "choices", drafts=True)
assert len(chosen["answers"]) == len(days)
assert all(len(one) == len(days) for one in chosen["answers"])
print("lm_eval", importlib.metadata.version("lm_eval"))
