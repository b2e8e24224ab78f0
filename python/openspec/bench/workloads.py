"""What the benchmark asks: built-in prompt sets, drawn by seed, and prompts from a file.

The built-in texts are of the kind that the embedded model was trained for (word problems, small
Python, plays, copying) and were written for this purpose.
"""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from openspec.errors import ConfigError

_FOLDER = Path(__file__).parent / "prompts"
_REPEAT = (
    "Repeat the following text exactly:\n\n{text}",
    "Repeat the text below word for word.\n\n{text}",
    "{text}\n\nRepeat the text above exactly.",
    "Copy this text without any change:\n\n{text}",
)
_RENAME = "Rewrite this code with `{old}` renamed to `{new}`:\n\n```python\n{text}\n```"
_QUOTE = '{text}\n\nQuote the passage from "{start}" to the end.'
_NEW_NAMES = ("data", "entry", "result", "first", "number")


@dataclass(frozen=True)
class Prompt:
    """One request's question; exactly one of the three forms is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    user: str | None = None
    """A chat turn, laid out by the model's own template."""
    thinking: bool = True

    def endpoint(self) -> str:
        """The path that takes this form."""
        return "/v1/completions" if self.user is None else "/v1/chat/completions"

    def fields(self) -> dict[str, object]:
        """The prompt's own fields of the request body."""
        if self.user is None:
            return {"prompt": self.text if self.token_ids is None else self.token_ids}
        fields: dict[str, object] = {"messages": [{"role": "user", "content": self.user}]}
        if not self.thinking:
            fields["chat_template_kwargs"] = {"enable_thinking": False}
        return fields


@dataclass(frozen=True)
class Workload:
    """A named list of prompts."""

    name: str
    prompts: list[Prompt]
    ignore_eos: bool = False
    """Run to the token limit; set where the end of the text means nothing."""


class _Entry(msgspec.Struct, frozen=True):
    kind: str
    text: str


def build_workload(
    name: str, count: int, seed: int, *, vocab_size: int, input_len: int
) -> Workload:
    """The first `count` prompts of a built-in workload; equal arguments give equal prompts.

    Raises:
        ConfigError: there is no such workload.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        known = ", ".join(sorted((*_MAKERS, "random")))
        if name != "random":
            raise ConfigError(f"--workload: there is no {name!r}; choose from {known}")
        return Workload(name, random_prompts(count, seed, vocab_size, input_len), ignore_eos=True)
    rng = random.Random(f"{name}/{seed}")
    prompts: list[Prompt] = []
    for index in range(count):
        prompt = maker(index, rng)
        for _ in range(20):  # The set is small: duplicates are drawn again, within reason.
            if prompt not in prompts:
                break
            prompt = maker(index, rng)
        prompts.append(prompt)
    return Workload(name, prompts)


def workload_names() -> list[str]:
    """All built-in workloads."""
    return [*_MAKERS, "random"]


def random_prompts(count: int, seed: int, vocab_size: int, length: int) -> list[Prompt]:
    """Uniformly random token ids: nothing to look up, so the worst case of a method that copies.

    They come from the first 95 % of the vocabulary; special tokens and padding stand at its end.
    """
    rng = random.Random(f"random/{seed}")
    vocab_size = max(1, vocab_size * 95 // 100)
    return [
        Prompt(token_ids=[rng.randrange(vocab_size) for _ in range(length)]) for _ in range(count)
    ]


def _repeat_prompt(index: int, rng: random.Random) -> Prompt:
    """Quote, rewrite or repeat a text that stands in the prompt."""
    passages = _passages()
    passage = passages[index % len(passages)]
    kind, draw = passage.kind, rng.random()
    text = passage.text
    if kind == "code" and draw < 0.5:
        names = sorted(
            word
            for word in set(re.findall(r"\b[a-z_]{4,}\b", text))
            if not keyword.iskeyword(word) and len(re.findall(rf"\b{word}\b", text)) > 2
        )
        new = rng.choice([word for word in _NEW_NAMES if word not in text] or ["renamed"])
        user = _RENAME.format(old=rng.choice(names), new=new, text=text)
    elif kind != "code" and draw < 0.3:
        lines = [line for line in re.split(r"\n|(?<=\.) ", text) if len(line.split()) > 3]
        line = rng.choice(lines[: max(1, len(lines) // 2)])
        user = _QUOTE.format(text=text, start=" ".join(line.split()[:3]))
    else:
        user = rng.choice(_REPEAT).format(text=text)
    return Prompt(user=user, thinking=False)


def _question(kinds: tuple[str, ...], index: int, rng: random.Random) -> Prompt:
    questions = [entry for entry in _questions() if entry.kind in kinds]
    question = questions[index % len(questions)]
    slots = {name: rng.choice(words) for name, words in _slots().items()}
    slots |= {"Noun": slots["noun"].capitalize()}
    numbers = {"a": rng.randint(6, 19), "b": rng.randint(20, 95), "c": rng.randint(2, 5)}
    return Prompt(user=question.text.format(**slots, **numbers))


def _chat_prompt(index: int, rng: random.Random) -> Prompt:
    """A question or an instruction."""
    return _question(("problem", "code", "verse", "talk"), index, rng)


def _mixed_prompt(index: int, rng: random.Random) -> Prompt:
    """Every other request copies, the others write prose and verse."""
    if index % 2 == 0:
        return _repeat_prompt(index // 2, rng)
    return _question(("verse", "problem"), index // 2, rng)


def _agent_prompt(index: int, rng: random.Random) -> Prompt:
    """A turn of an agent, which comes back to twenty tasks again and again."""
    task = rng.randrange(20)
    question = _chat_prompt(task, random.Random(f"task {task}")).user
    return Prompt(user=f"{question}\n\nThis is turn {index + 1}.", thinking=False)


_MAKERS: dict[str, Callable[[int, random.Random], Prompt]] = {
    "repeat": _repeat_prompt,
    "chat": _chat_prompt,
    "mixed": _mixed_prompt,
    "agent": _agent_prompt,
}


@cache
def _passages() -> list[_Entry]:
    return _entries("passages.jsonl")


@cache
def _questions() -> list[_Entry]:
    return _entries("questions.jsonl")


@cache
def _slots() -> dict[str, list[str]]:
    return msgspec.json.decode((_FOLDER / "slots.json").read_bytes(), type=dict[str, list[str]])


def _entries(name: str) -> list[_Entry]:
    return msgspec.json.Decoder(_Entry).decode_lines((_FOLDER / name).read_bytes())


class _Row(msgspec.Struct):
    """A line of a data set; the first field present, in this order, is the prompt."""

    prompt: str | list[int] | None = None
    turns: list[str] | None = None
    question: str | None = None


def load_dataset(path: Path, count: int, seed: int) -> Workload:
    """`count` prompts of a JSON lines file, shuffled by seed and repeated if there are too few.

    A line has `prompt` (text or token ids, completed as it is), `turns` (the first is asked) or
    `question` (both asked as chat).

    Raises:
        ConfigError: the file cannot be read, or a line has none of the fields.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset: cannot read {path}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--dataset: {path}, line {number}: {error}") from error
        prompt = _prompt_of(row)
        if prompt is None:
            raise ConfigError(
                f"--dataset: {path}, line {number}: needs `prompt`, `turns` or `question`"
            )
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"--dataset: {path} has no lines")
    random.Random(seed).shuffle(prompts)
    return Workload(path.stem, [prompts[index % len(prompts)] for index in range(count)])


def _prompt_of(row: _Row) -> Prompt | None:
    if isinstance(row.prompt, str):
        return Prompt(text=row.prompt)
    if row.prompt is not None:
        return Prompt(token_ids=row.prompt)
    if row.turns:
        return Prompt(user=row.turns[0])
    return Prompt(user=row.question) if row.question is not None else None
