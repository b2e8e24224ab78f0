"""Prompts with repetition, with free text and with neither, sharing some prefixes."""

from __future__ import annotations

import random
from functools import cache

from openspec.messages import SamplingParams
from tests.gates.harness import Job, chat_prompt, tokenizer

VERSE = (
    "Now is the winter of our discontent made glorious summer by this sun of York, and all the "
    "clouds that lowered upon our house in the deep bosom of the ocean buried."
)
CODE = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
    "    return result\n"
)
QUESTION = (
    "A farmer has {a} cows and {b} sheep. He sells {c} sheep and buys twice as many cows as he "
    "has. How many animals does he have now?"
)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """16 prompts of 20 to 150 tokens."""
    texts = [
        f"Repeat the following text exactly:\n\n{VERSE}",
        f"Repeat the following text exactly:\n\n{CODE}",
        f"Repeat the following text exactly:\n\n{CODE}{CODE}",
        f"Rewrite this code with `value` renamed to `item`:\n\n```python\n{CODE}```",
        *(QUESTION.format(a=a, b=3 * a + 1, c=a // 2) for a in (7, 12, 30, 41)),
        "Write a Python function `clamp(value, low, high)`.",
        "Hello! How are you today?",
        "Continue this scene:\n\nROMEO:\nBut soft, what light through yonder window breaks?",
    ]
    made = [chat_prompt(text) for text in texts]
    made += [tuple(tokenizer().encode(text)) for text in (f"import os\n\n\n{CODE}", "KING HENRY:")]
    noise = random.Random(5)
    made += [tuple(noise.randrange(300, 4000) for _ in range(length)) for length in (1, 33, 64)]
    return tuple(made)


def sampling(kind: str, index: int, max_tokens: int) -> SamplingParams:
    """Greedy, sampled, or by turns."""
    is_greedy = kind == "greedy" or (kind == "mixed" and index % 2 == 0)
    if is_greedy:
        return SamplingParams(temperature=0.0, seed=index, max_tokens=max_tokens)
    return SamplingParams(
        temperature=0.6 + 0.2 * (index % 3),
        top_p=(1.0, 0.9)[index % 2],
        top_k=(0, 20)[index // 2 % 2],
        seed=1000 + index,
        max_tokens=max_tokens,
    )


@cache
def jobs(kind: str, num_jobs: int, max_tokens: int = 40) -> tuple[Job, ...]:
    """Jobs with staggered arrivals and budgets."""
    return tuple(
        Job(
            prompt=prompts()[index % len(prompts())],
            sampling=sampling(kind, index, max_tokens - index % 5),
            arrives_at=(index * 3) % 11,
        )
        for index in range(num_jobs)
    )
