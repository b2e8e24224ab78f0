"""What a grammar costs an engine that has one in its steps: tokens per second with and without.

    python -m bench.grammar_overhead --model MODEL --runs none eagle3:HEAD:3 dflash:HEAD:15

The grammar allows every text, so both sides say the same, which is checked. A run is a method, its
draft model and its number of drafts. Beside `all` requests with a grammar there is a round with
`one` among the rest. Sides take turns, and of each the best round counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from openspec import _grammar
from openspec.bench.environment import environment
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig, config_from_settings
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.load import load_engine
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions
from openspec.text.tokenizer import Tokenizer
from openspec.text.vocabulary import spelling_of

EVERYTHING = r"[\x00-\U0010ffff]*"
QUESTIONS = (
    "A farmer has {n} cows and 37 sheep and sells {n} sheep. How many animals does he have now?",
    "What comes after Tuesday? Count {n} days on.",
    "Write a Python function that adds {n} to each value of a list.",
    "Repeat the following text exactly:\n\nNow is the winter of our discontent, {n} times over.",
)


def vocabulary_of(
    folder: Path, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[list[bytes], _grammar.Vocabulary]:
    """The model's tokens, special ones without bytes, and the same for grammars."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spell = spelling_of(backend)
    special = {one.content for one in backend.get_added_tokens_decoder().values()}
    tokens = [b""] * vocab_size
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        # A special token that ends nothing is text here: the model may say it.
        tokens[index] = token.encode() if token in special else spell(token)
    return tokens, _grammar.Vocabulary(tokens, vocab_size, list(eos_token_ids))


def engine_of(
    name: str, model: Path | None, max_num_seqs: int
) -> tuple[EngineCore, _grammar.Vocabulary, EngineConfig]:
    """The engine of a run, METHOD[:DRAFT_MODEL:NUM_DRAFTS], and what it takes grammars for."""
    method, _, rest = name.partition(":")
    draft_model, _, num_drafts = rest.rpartition(":")
    settings: dict[str, object] = {
        "method": method,
        "max_num_seqs": max_num_seqs,
        "stats_interval_s": 0.0,
        "enable_prefix_caching": False,
    }
    if model is not None:
        settings["model"] = str(model)
    if draft_model:
        settings["draft_model"] = draft_model
    if num_drafts:
        settings["num_speculative_tokens"] = int(num_drafts)
    config = config_from_settings(settings)
    core = load_engine(config)
    ends = list(ModelConfig.from_folder(config.model_path).eos_token_ids)
    tokens, vocabulary = vocabulary_of(config.model_path, ends, core.info.vocab_size)
    core.set_vocabulary(tokens, core.info.vocab_size, ends)
    return core, vocabulary, config


def prompts_of(config: EngineConfig, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and what ends their answers."""
    tokenizer = Tokenizer.from_folder(config.model_path)
    prompts = [
        tokenizer.render_chat([{"role": "user", "content": question.format(n=n)}]).token_ids
        for n in range(3, 3 + count // len(QUESTIONS) + 1)
        for question in QUESTIONS
    ]
    return prompts, list(ModelConfig.from_folder(config.model_path).eos_token_ids)


class Side:
    """One engine, and the requests that both sides get."""

    def __init__(
        self, core: EngineCore, prompts: list[list[int]], ends: list[int], most: int
    ) -> None:
        self.core, self.prompts, self.ends, self.most = core, prompts, ends, most
        self.num_rounds = 0

    def _add(self, index: int, grammar: str, is_plain: bool) -> None:
        sampling = SamplingParams(
            temperature=0.0, seed=index, max_tokens=self.most, stop_token_ids=self.ends
        )
        self.core.add_request(
            EngineRequest(
                request_id=f"{self.num_rounds}-{index}",
                prompt_token_ids=self.prompts[index % len(self.prompts)],
                sampling=sampling,
                speculative=SpeculativeOptions(enabled=not is_plain),
                grammar=grammar,
            )
        )

    def stream(
        self, count: int, grammars: Sequence[str], is_plain: bool
    ) -> tuple[float, list[list[int]]]:
        """Tokens per second while `count` requests run, and the texts of all; one a grammar.

        One that ends makes room for the next. Without a next one the clock stops, for what is left
        is as fast as its longest request.
        """
        self.num_rounds += 1
        texts: list[list[int]] = [[] for _ in grammars]
        for index in range(count):
            self._add(index, grammars[index], is_plain)
        num_added, num_tokens, start, end = count, 0, time.perf_counter(), 0.0
        while self.core.has_work:
            for output in self.core.step():
                texts[int(output.request_id.partition("-")[2])] += output.token_ids
                num_tokens += len(output.token_ids)
                if output.finish_reason is None:
                    continue
                if num_added < len(grammars):
                    self._add(num_added, grammars[num_added], is_plain)
                    num_added += 1
                elif end == 0.0:
                    end, num_counted = time.perf_counter(), num_tokens
        return num_counted / (end - start), texts

    def round(self, count: int, grammars: Sequence[str]) -> tuple[float, list[list[int]]]:
        """Tokens per second of those without a grammar (all, if each has one), and all texts.

        The first requests have the grammars.
        """
        self.num_rounds += 1
        texts: list[list[int]] = [[] for _ in range(count)]
        for index in range(count):
            self._add(index, grammars[index] if index < len(grammars) else "", is_plain=False)
        counted = range(len(grammars) if len(grammars) < count else 0, count)
        start, end = time.perf_counter(), 0.0
        while self.core.has_work:
            for output in self.core.step():
                index = int(output.request_id.partition("-")[2])
                texts[index] += output.token_ids
                if index in counted:
                    end = time.perf_counter()
        return sum(len(texts[index]) for index in counted) / (end - start), texts


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All rounds of one run."""
    core, vocabulary, config = engine_of(name, arguments.model, max(arguments.concurrency))
    core.load_grammar("everything", _grammar.compile_regex(vocabulary, EVERYTHING))
    side = Side(core, *prompts_of(config, max(arguments.concurrency)), arguments.max_tokens)
    rows: list[dict[str, object]] = []
    for count in arguments.concurrency:
        kinds = {"none": 0, "all": count} | ({"one": 1} if count > 1 else {})
        best = dict.fromkeys(kinds, 0.0)
        said: dict[str, list[list[int]]] = {}
        for _ in range(1 + arguments.repeats):  # the first records graphs and reads the grammar
            for kind, with_grammar in kinds.items():
                rate, said[kind] = side.round(count, ["everything"] * with_grammar)
                best[kind] = max(best[kind], rate)
        row: dict[str, object] = {"run": name, "concurrency": count}
        row |= {f"{kind}_tokens_per_second": round(rate, 1) for kind, rate in best.items()}
        # Beside one with a grammar the others are counted: their share of all without.
        shares = {"all": 1.0, "one": (count - 1) / count}
        row |= {
            f"{kind}_ratio": round(rate / best["none"] / shares[kind], 4)
            for kind, rate in best.items()
            if kind != "none"
        }
        row["is_equal"] = all(texts == said["none"] for texts in said.values())
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--runs", nargs="+", default=["none"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for name in arguments.runs for row in measure(name, arguments)]
    if arguments.json:
        flags = {"runs": arguments.runs, "max_tokens": arguments.max_tokens}
        report = {"environment": environment(flags, {}), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
