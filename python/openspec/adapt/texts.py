"""What a head learns from: texts of prompts or of records, and rows packed of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from openspec.errors import ConfigError, RequestError
from openspec.llm import LLM
from openspec.messages import SamplingParams
from openspec.records.shards import read_records, target_identity
from openspec.settings.setting import named, number

TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # drawn for each answer
HELD_OUT_SHARE = 16  # one of so many prompts is measured with and never learned from
BASE_HELD_OUT_SHARE = 8
# A user's turn begins with nothing given, or with one of these, and the model goes on: as Magpie
# (arXiv 2406.08464) has it; a first word keeps small models from asking much the same.
FIRST_WORDS = (
    *("", "", "", "Write", "What", "How", "Explain", "I", "Can you", "Describe", "Give", "Imagine"),
    *("Please", "Compose", "Why", "Which", "Given", "You", "Create", "Is"),
)
OWN_PROMPT = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=128)
FEWEST_CHARS = 12
MAX_HELD_OUT = 64
BASE_SHARE = 3
"""Texts to learn from, for each of the base."""


@dataclass(frozen=True)
class SourceConfig:
    """Settings that say which texts there are."""

    prompts: str | None = named(None, "FILE")
    """Prompts to learn from, a JSON object on each line: prompt, messages, turns or question. One
    of 16 is measured with instead."""
    own_prompts: int = number(0, 0, 1 << 24)
    """Prompts that the model writes itself in a user's place, beside those of --prompts or without
    any."""
    records: str | None = named(None, "DIR")
    """Texts that a server kept with --capture-dir, instead of prompts and new answers."""
    base: str | None = named(None, "FILE")
    """Prompts unlike those, a fourth of what is learned, so that a head that was trained already
    forgets nothing."""
    held_out: str | None = named(None, "FILE")
    """Prompts to measure with, instead of one of 16."""
    answer_tokens: int = number(384, 2, 1 << 16)
    """Tokens of an answer, at most."""
    text_length: int = number(1024, 16, 1 << 20)
    """Tokens of the rows that the head learns from, and of the longest text."""
    training_seed: int = number(1, 0, 1 << 31)
    """Of prompts, answers and the head's first numbers."""

    def check_sources(self) -> None:
        """Refuses what does not go together.

        Raises:
            ConfigError: with the remedy.
        """
        has_prompts = self.prompts is not None or self.own_prompts > 0
        if has_prompts == (self.records is not None):
            raise ConfigError(
                "--prompts is needed, or --own-prompts, or --records without any of them"
            )
        if self.records is not None and self.held_out is not None:
            raise ConfigError("--records: --held-out is for prompts; drop it")


class Text(NamedTuple):
    """Token ids, of which the first `prompt` were given to the target and it wrote the others."""

    tokens: list[int]
    prompt: int
    temperature: float = 0.0


class Texts(NamedTuple):
    """All that a training reads; no prompt is both learned from and held out."""

    traffic: list[Text]
    base: list[Text]
    """Of prompts unlike the traffic."""
    held_out: list[Text]
    """Of the traffic."""
    base_held_out: list[Text]

    @property
    def learned(self) -> list[Text]:
        """Of both."""
        return [*self.traffic, *self.base]


def read_prompts(path: Path, llm: LLM, most_tokens: int) -> list[list[int]]:
    """Token ids of the prompts of a JSONL file, those of more than `most_tokens` left out.

    A line has `prompt` (a text, or token ids), `messages`, or, as two data sets have it, `turns` or
    `question`, whose first turn is asked.

    Raises:
        ConfigError: the file, or a line of it, is none such.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    prompts = []
    for place, line in enumerate(lines, 1):
        try:
            ids = _prompt_of(json.loads(line), llm)
        except (ValueError, TypeError, LookupError, RequestError) as error:
            raise ConfigError(
                f"{path}:{place}: {error}; a line is an object with prompt, messages, turns or "
                "question"
            ) from None
        if 0 < len(ids) <= most_tokens:
            prompts.append(ids)
    if len(prompts) < 2:
        raise ConfigError(f"{path}: {len(prompts)} prompts of at most {most_tokens} tokens; give 2")
    return prompts


def _prompt_of(line: Any, llm: LLM) -> list[int]:
    if "messages" in line:
        return llm.tokenizer.render_chat(line["messages"]).token_ids
    if "turns" in line or "question" in line:
        asked = line["turns"][0] if "turns" in line else line["question"]
        return llm.tokenizer.render_chat([{"role": "user", "content": asked}]).token_ids
    prompt = line["prompt"]
    if isinstance(prompt, str):
        return llm.tokenizer.encode(prompt, parse_special=True, add_special_tokens=True)
    llm.tokenizer.check_token_ids(prompt)
    return list(prompt)


def own_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Chats of what the model itself would ask; fewer than `count`, for no question comes twice.

    Raises:
        ConfigError: it asks too little.
    """
    mark = "0MARK0"
    before = llm.tokenizer.render_chat([{"role": "user", "content": mark}]).text.partition(mark)[0]
    head = llm.tokenizer.encode(before, parse_special=True, add_special_tokens=False)
    words = random.Random(seed).choices(FIRST_WORDS, k=count)
    begun = [
        [*head, *llm.tokenizer.encode(word, parse_special=False, add_special_tokens=False)]
        for word in words
    ]
    params = [msgspec.structs.replace(OWN_PROMPT, seed=seed + i) for i in range(count)]
    outputs = [one.outputs[0] for one in llm.generate(begun, params, use_tqdm=False)]
    asked = {
        (word + output.text).strip(): None
        for word, output in zip(words, outputs, strict=True)
        if output.finish_reason == "stop"
    }
    texts = [text for text in asked if len(text) >= FEWEST_CHARS]
    if len(texts) < 2:
        raise ConfigError(f"--own-prompts: the model asked {len(texts)} questions; give --prompts")
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [llm.tokenizer.render_chat(one).token_ids for one in messages]


def split(
    prompts: Sequence[list[int]], share: int = HELD_OUT_SHARE
) -> tuple[list[list[int]], list[list[int]]]:
    """Those to learn from and one of `share` to measure with; equal ones are on the same side.

    A prompt's own hash decides, so that another file or order holds the same ones out.
    """
    distinct = {tuple(prompt): _hash(prompt) for prompt in prompts}
    ranked = sorted(distinct, key=distinct.__getitem__)
    count = min(MAX_HELD_OUT, max(1, len(ranked) // share))
    held_out = set(ranked[:count])
    return (
        [prompt for prompt in prompts if tuple(prompt) not in held_out],
        [list(prompt) for prompt in ranked[:count]],
    )


def _hash(prompt: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()


def answers(
    llm: LLM,
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int,
) -> list[Text]:
    """The target's answers to prompts, each drawn with its temperature and a seed of its own."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + number)
        for number, temperature in enumerate(temperatures)
    ]
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [
        Text([*prompt, *output.outputs[0].token_ids], len(prompt), temperature)
        for prompt, output, temperature in zip(prompts, outputs, temperatures, strict=True)
        if len(output.outputs[0].token_ids) > 1
    ]


def answer_for(
    llm: LLM,
    prompts: Sequence[list[int]],
    seconds: float,
    max_tokens: int,
    seed: int,
    report: Callable[[int, int], None],
) -> list[Text]:
    """Answers made in about `seconds`, at least one round; prompts come again and again.

    `report` is told of each round how many texts and generated tokens there are.
    """
    drawn, begin = random.Random(seed), time.monotonic()
    texts: list[Text] = []
    num_tokens = num_asked = 0
    order: list[list[int]] = []
    round_size = min(2 * llm.engine.info.max_num_seqs, len(prompts))
    while not texts or time.monotonic() - begin < seconds:
        while len(order) < round_size:
            order += drawn.sample(list(prompts), len(prompts))
        asked, order = order[:round_size], order[round_size:]
        temperatures = drawn.choices(TEMPERATURES, k=round_size)
        made = answers(llm, asked, max_tokens, temperatures, seed + num_asked)
        num_asked += round_size
        texts += made
        num_tokens += sum(len(text.tokens) - text.prompt for text in made)
        report(len(texts), num_tokens)
    return texts


def gather(
    llm: LLM,
    own: SourceConfig,
    seconds: float | None,
    report: Callable[[int, int], None],
    few: int | None = None,
) -> Texts:
    """Texts of the records, or of the prompts, answered in about `seconds`.

    Without `seconds` only those held out are answered. With `few` there are at most so many held
    out of the traffic and of the base, and four times as many others.

    Raises:
        ConfigError: they are too few or too long, with the remedy.
    """
    longest = min(own.text_length, llm.engine.info.max_model_len - 1)  # a replay adds a token
    room = longest - own.answer_tokens
    if room < 1 and (own.records is None or own.base):
        raise ConfigError(
            f"--answer-tokens {own.answer_tokens}: leaves no room for a prompt in texts of "
            f"{longest} tokens; lower it, or raise --text-length and --max-model-len"
        )

    most_learned = None if few is None else 4 * few

    def greedy(prompts: Sequence[list[int]]) -> list[Text]:
        some = prompts[:few]
        return answers(llm, some, own.answer_tokens, [0.0] * len(some), own.training_seed)

    base: list[list[int]] = []
    apart: list[list[int]] = []
    if own.base is not None:
        base, apart = split(read_prompts(Path(own.base), llm, room), BASE_HELD_OUT_SHARE)
    if own.records is not None:
        traffic, held_out = _recorded(llm, Path(own.records), longest)
        traffic, held_out = traffic[:most_learned], held_out[:few]
        some = _share_of(base, len(traffic) if seconds is not None else 0)
        drawn = random.Random(own.training_seed).choices(TEMPERATURES, k=len(some))
        others = answers(llm, some, own.answer_tokens, drawn, own.training_seed)
        return Texts(traffic, others, held_out, greedy(apart))
    given = [] if own.prompts is None else read_prompts(Path(own.prompts), llm, room)
    if own.own_prompts:
        written = own_prompts(llm, own.own_prompts, own.training_seed)
        given += [prompt for prompt in written if len(prompt) <= room]
    asked, measured = split(given)
    if own.held_out is not None:
        measured = read_prompts(Path(own.held_out), llm, room)[:MAX_HELD_OUT]
        asked = [prompt for prompt in asked if prompt not in measured]
    held_out, learned = greedy(measured), []
    if not held_out:
        raise ConfigError("the answers to all held-out prompts are empty; give others")
    if seconds is not None:
        asked = asked[:most_learned]
        asked += _share_of(base, len(asked))
        learned = answer_for(llm, asked, seconds, own.answer_tokens, own.training_seed, report)
    known = set(map(tuple, base))
    is_base = [tuple(text.tokens[: text.prompt]) in known for text in learned]
    return Texts(
        [text for text, other in zip(learned, is_base, strict=True) if not other],
        list(itertools.compress(learned, is_base)),
        held_out,
        greedy(apart),
    )


def _share_of(base: Sequence[list[int]], num_others: int) -> list[list[int]]:
    """As many base prompts as belong to so many others, again and again where they are few."""
    return list(itertools.islice(itertools.cycle(base), num_others // BASE_SHARE)) if base else []


def _recorded(llm: LLM, folder: Path, most: int) -> tuple[list[Text], list[Text]]:
    """Texts of a server's records, those of some prompts apart."""
    kept = [
        Text(record.tokens[:most], record.prompt, record.temperature)
        for record in read_records(folder, target_identity(llm.model_config.folder))
        if record.prompt + 1 < min(len(record.tokens), most)
    ]
    asked, held_out = split([text.tokens[: text.prompt] for text in kept])
    if not asked:
        raise ConfigError(f"--records {folder}: has no texts of two prompts; record more")
    apart = set(map(tuple, held_out))
    learned = [text for text in kept if tuple(text.tokens[: text.prompt]) not in apart]
    measured = [text for text in kept if tuple(text.tokens[: text.prompt]) in apart]
    return learned, measured[:MAX_HELD_OUT]


def draft_vocabulary(texts: Sequence[Text], always: Sequence[int], rows: int, size: int) -> Tensor:
    """The `size` target ids that were generated most often, and `always`, in rising order."""
    generated = [token for text in texts for token in text.tokens[text.prompt :]]
    counts = torch.bincount(torch.tensor(generated), minlength=rows)
    counts[list(always)] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def unused_token(texts: Sequence[Text], num_tokens: int, rows: int, special: Sequence[int]) -> int:
    """An id that no text has: the first row of the embedding without a token, else a special one.

    Raises:
        ConfigError: every special token stands in some text.
    """
    if num_tokens < rows:
        return num_tokens
    used = {token for text in texts for token in text.tokens}
    free = [token for token in special if token not in used]
    if not free:
        raise ConfigError("--mask-token: every special token stands in some text; name an id")
    return free[-1]


class Rows(NamedTuple):
    """Texts end to end, [n, t] each."""

    tokens: Tensor
    places: Tensor  # positions in their texts; past the last one 0
    generated: Tensor  # bool


def packed(texts: Sequence[Text], length: int, seed: int) -> Rows:
    """Rows of `length` tokens.

    A text that reaches over the end of a row goes on in no other: a cut-off rest would miss its
    beginning.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    rows: list[list[Text]] = []
    filled = length
    for index in order:
        text = texts[index]
        size = min(len(text.tokens), length)
        if filled + min(size, length // 4) > length:
            rows.append([])
            filled = 0
        size = min(size, length - filled)
        rows[-1].append(Text(text.tokens[:size], text.prompt))
        filled += size
    shape = (len(rows), length)
    tokens, places = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    generated = torch.zeros(shape, dtype=torch.bool)
    for row, parts in enumerate(rows):
        at = 0
        for text in parts:
            end = at + len(text.tokens)
            tokens[row, at:end] = torch.tensor(text.tokens)
            places[row, at:end] = torch.arange(len(text.tokens))
            generated[row, at + text.prompt : end] = True
            at = end
    return Rows(tokens, places, generated)


def batches(texts: Sequence[Text], length: int, size: int, first: int) -> Iterator[Rows]:
    """Batches of `size` packed rows without end, from number `first` on; each epoch packs anew."""
    epoch = 0
    while True:
        rows = packed(texts, length, epoch)
        number = -(-len(rows.tokens) // size)
        for part in range(first, number):
            at = torch.arange(part * size, (part + 1) * size) % len(rows.tokens)
            yield Rows(*(values[at] for values in rows))
        first, epoch = max(0, first - number), epoch + 1


def save_texts(path: Path, texts: Texts) -> None:
    """All of them in one file."""
    every = list(itertools.chain(*texts))
    tensors = {
        "tokens": torch.tensor(
            [token for text in every for token in text.tokens], dtype=torch.int32
        ),
        "lengths": torch.tensor([len(text.tokens) for text in every]),
        "prompts": torch.tensor([text.prompt for text in every]),
        "temperatures": torch.tensor([text.temperature for text in every], dtype=torch.float64),
        "sizes": torch.tensor([len(some) for some in texts]),
    }
    save_file(tensors, path)


def load_texts(path: Path) -> Texts:
    """What `save_texts` wrote."""
    with safe_open(path, framework="torch") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    parts = [part.tolist() for part in read["tokens"].split(read["lengths"].tolist())]
    numbers = (read["prompts"].tolist(), read["temperatures"].tolist())
    every = map(Text, parts, *numbers)
    return Texts(*(list(itertools.islice(every, size)) for size in read["sizes"].tolist()))
