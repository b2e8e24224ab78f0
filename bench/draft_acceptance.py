"""How many drafts are accepted by step, for several settings of one method, on GSM8K.

    python -m bench.draft_acceptance --problems gsm8k_test.jsonl --method METHOD --json FILE \\
        num_speculative_tokens=7 num_speculative_tokens=7,draft_top_k=4,draft_tree_size=7

Drafts are made and verified at every step (no adaptive speculation), one request at a time. The
text must be that of plain decoding, or the program ends with status 1; with acceptance=rejection
sampled texts are others by design, which the figures then say, and only greedy ones are compared.
What it shows is acceptance: how long steps take is the question of `python -m openspec.bench`.
With --context-tokens, other problems and their solutions come before the question as earlier turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

from openspec.config import EngineConfig
from openspec.drafters import option_names, plain_method
from openspec.llm import LLM
from openspec.messages import (
    SamplingParams,
    SpecDecodeStats,
    acceptance_per_position,
    add_counters,
    mean_acceptance_length,
)
from openspec.text.outputs import RequestOutput
from openspec.text.tokenizer import Tokenizer


def read_settings(text: str) -> dict[str, Any]:
    """name=value,name=value; numbers are numbers, and true and false what they say."""
    words: dict[str, Any] = {"true": True, "false": False}
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {"method_options": options}
    for part in text.split(","):
        name, value = part.split("=", 1)
        place = options if name in option_names() else settings
        place[name] = int(value) if value.isdigit() else words.get(value, value)
    return settings


Turns = list[dict[str, Any]]


def conversations(problems: list[dict[str, str]], count: int, context_tokens: int) -> list[Turns]:
    """The first `count` questions, each behind solved ones of the others worth so many tokens."""
    tokenizer = Tokenizer.from_folder(EngineConfig().model_path)
    solved = itertools.cycle(problems[count:])
    result = []
    for problem in problems[:count]:
        turns: Turns = []
        num_tokens = 0
        while num_tokens < context_tokens:
            earlier = next(solved)
            answer = re.sub(r"<<.*?>>", "", earlier["answer"])
            turns.append({"role": "user", "content": earlier["question"]})
            turns.append({"role": "assistant", "content": answer})
            num_tokens += sum(len(tokenizer.encode(turn["content"])) for turn in turns[-2:])
        result.append([*turns, {"role": "user", "content": problem["question"]}])
    return result


def answers(
    settings: dict[str, Any], turns: list[Turns], sampling: dict[str, Any]
) -> list[RequestOutput]:
    """Of an engine with these settings, thinking off."""
    settings = {"adaptive_speculation": False, "copied_drafts": False, **settings}
    with LLM(max_num_seqs=1, stats_interval_s=0.0, **settings) as llm:
        return llm.chat(
            turns,
            [SamplingParams(seed=seed, **sampling) for seed in range(len(turns))],
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": False},
        )


def keeps_texts(settings: dict[str, Any], temperature: float) -> bool:
    """Whether the texts must be plain decoding's."""
    return temperature == 0.0 or settings.get("acceptance", "match") == "match"


def figures(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Of all answers together."""
    total = SpecDecodeStats()
    add_counters(total, [output.metrics.spec_decode or SpecDecodeStats() for output in outputs])
    return {
        "mean_acceptance_length": round(mean_acceptance_length(total), 3),
        "draft_tokens_per_step": round(total.num_draft_tokens / max(total.num_drafts, 1), 2),
        "accepted_at_depth": [round(share, 3) for share in acceptance_per_position(total)],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("settings", nargs="+", help="of the engine: name=value,name=value")
    parser.add_argument("--problems", type=Path, required=True, help="GSM8K's jsonl")
    parser.add_argument("--method", required=True)
    parser.add_argument("--count", type=int, default=48, help="problems")
    parser.add_argument("--context-tokens", default="0", help="before the question: N,N,...")
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--top-k", type=int, default=0, help="of sampled answers")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampled answers")
    parser.add_argument("--max-tokens", type=int, default=288)
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args()
    problems = [json.loads(line) for line in args.problems.read_text("utf-8").splitlines()]
    result: dict[str, Any] = {"command": " ".join(sys.argv[1:]), "contexts": {}}
    is_equal = True
    for context in map(int, args.context_tokens.split(",")):
        turns = conversations(problems, args.count, context)
        kinds: dict[str, Any] = {}
        result["contexts"][context] = kinds
        for temperature in map(float, args.temperatures.split(",")):
            sampling = {
                "temperature": temperature,
                "top_k": args.top_k,
                "top_p": args.top_p,
                "max_tokens": args.max_tokens,
            }
            plain = answers({"method": plain_method()}, turns, sampling)
            tokens = [output.outputs[0].token_ids for output in plain]
            kind: dict[str, Any] = {
                "prompt_tokens": sum(len(output.prompt_token_ids) for output in plain)
                // len(plain),
                "new_tokens": sum(map(len, tokens)),
            }
            kinds[f"temperature {temperature:g}"] = kind
            for settings in args.settings:
                given = read_settings(settings)
                outputs = answers({"method": args.method, **given}, turns, sampling)
                texts = [output.outputs[0].token_ids for output in outputs]
                kind[settings] = {
                    "text_is_plain_decodings": texts == tokens,
                    "new_tokens": sum(map(len, texts)),
                    **figures(outputs),
                }
                if keeps_texts(given, temperature):
                    is_equal = is_equal and texts == tokens
                else:
                    kind[settings]["text_may_differ"] = "acceptance by rejection, sampled"
                print(context, temperature, settings, json.dumps(kind[settings]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
