"""A drafter that was left out for some steps drafts as if it had not been."""

from __future__ import annotations

import pytest

from openspec.config import EMBEDDED_MODEL
from openspec.tokenizer import Tokenizer
from tests.gates import harness
from tests.golden.engine_runs import add, make_runner, prefill, step_all

NUM_DRAFTS = 4
PROMPTS = ("Tom has 3 apples and buys 4 more.", "The weather", "def add(a, b):\n    return")
METHODS = ("eagle3", "dflash", "dspark")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_plain", [1, 7, 32, 33, 50])
def test_drafts_do_not_depend_on_what_was_left_out(method: str, num_plain: int) -> None:
    folders = (EMBEDDED_MODEL, EMBEDDED_MODEL / method)
    options: dict[str, int | str] = {
        "device": harness.DEVICE,
        "max_model_len": 256,
        "max_num_seqs": 4,
    }
    runner = make_runner(folders, method, NUM_DRAFTS, **options)
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    texts: dict[int, list[int]] = {}
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        slot, known = prefill(runner, tokens)
        texts[slot] = tokens + known
    for _ in range(num_plain):
        added = step_all(runner, [(slot, 1, 0) for slot in texts])
        for slot, tokens in zip(texts, added, strict=True):
            texts[slot] += tokens
    # One sequence is left out once more, while the others draft.
    first, *others = texts
    known = step_all(runner, [(first, 1, 0)] + [(slot, 1, NUM_DRAFTS) for slot in others])
    drafts = [chain for chain in runner.last_drafts() if chain]
    texts[first] += known[0]
    step_all(runner, [(first, 1, NUM_DRAFTS)])
    drafts.insert(0, runner.last_drafts()[0])

    fresh = make_runner(folders, method, NUM_DRAFTS, **options)
    slots = [add(fresh, tokens) for tokens in texts.values()]
    for slot, tokens in zip(slots, texts.values(), strict=True):
        step_all(fresh, [(slot, len(tokens) - 1, 0)])
    expected = []
    for slot in slots:
        step_all(fresh, [(slot, 1, NUM_DRAFTS)])
        expected.append(fresh.last_drafts()[0])
    assert drafts == expected
    assert all(len(chain) == NUM_DRAFTS for chain in drafts)
