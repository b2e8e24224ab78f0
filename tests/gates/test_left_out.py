"""A drafter that was left out for some steps drafts as if it had not been."""

from __future__ import annotations

import pytest

from openspec.config import EMBEDDED_MODEL
from openspec.text.tokenizer import Tokenizer
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


@pytest.mark.parametrize("method", METHODS)
def test_what_waits_outlasts_steps_that_are_given_up(method: str) -> None:
    folders = (EMBEDDED_MODEL, EMBEDDED_MODEL / method)
    options: dict[str, int | str] = {"device": harness.DEVICE, "max_model_len": 256}
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    runner = make_runner(folders, method, NUM_DRAFTS, **options)
    slot, known = prefill(runner, tokenizer.encode(PROMPTS[0]))
    text = tokenizer.encode(PROMPTS[0]) + known
    for num_plain, num_given_up in ((7, 1), (5, 2), (3, 0)):
        for _ in range(num_plain):
            text += step_all(runner, [(slot, 1, 0)])[0]
        for _ in range(min(num_given_up, 1 + runner.num_steps_ahead)):
            lease = runner.reserve([(slot, 1, 0)])
            lease.launch()
            lease.close()
    fresh = make_runner(folders, method, NUM_DRAFTS, **options)
    drafts = []
    for each, taken in ((runner, slot), (fresh, add(fresh, text))):
        if each is fresh:
            step_all(each, [(taken, len(text) - 1, 0)])
        step_all(each, [(taken, 1, NUM_DRAFTS)])
        drafts.append(each.last_drafts()[0])
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == NUM_DRAFTS


@pytest.mark.parametrize("method", METHODS)
def test_what_waited_for_a_sequence_that_left_spoils_no_others_prefix(method: str) -> None:
    folders = (EMBEDDED_MODEL, EMBEDDED_MODEL / method)
    options: dict[str, int | str] = {"device": harness.DEVICE, "max_model_len": 256}
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    shared = tokenizer.encode(" ".join(PROMPTS) * 4)[:80]
    runner = make_runner(folders, method, NUM_DRAFTS, **options)
    slot, _ = prefill(runner, shared)
    runner.remove_sequence(slot)
    slot, _ = prefill(runner, tokenizer.encode(PROMPTS[1]))
    for _ in range(25):
        step_all(runner, [(slot, 1, 0)])
    runner.remove_sequence(slot)

    # Its slot goes to one whose prefix is cached at the positions that waited.
    reused = add(runner, shared)
    assert reused == slot
    assert runner.kv_len(reused) >= 32
    fresh = make_runner(folders, method, NUM_DRAFTS, **options)
    drafts = []
    for each, taken in ((runner, reused), (fresh, add(fresh, shared))):
        step_all(each, [(taken, len(shared) - 1 - each.kv_len(taken), 0)])
        step_all(each, [(taken, 1, NUM_DRAFTS)])
        drafts.append(each.last_drafts()[0])
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == NUM_DRAFTS


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_was_left_in_plain_steps_is_taken_up_again(method: str) -> None:
    """What waits when a sequence leaves is in no page that is handed on."""
    folders = (EMBEDDED_MODEL, EMBEDDED_MODEL / method)
    options: dict[str, int | str] = {"device": harness.DEVICE, "max_model_len": 256}
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    prompt = tokenizer.encode(" ".join(PROMPTS))
    runner = make_runner(folders, method, NUM_DRAFTS, **options)
    slot, known = prefill(runner, prompt)
    text = prompt + known
    for _ in range(60):
        text += step_all(runner, [(slot, 1, 0)])[0]
    runner.remove_sequence(slot)
    taken_up, fresh = runner, make_runner(folders, method, NUM_DRAFTS, **options)
    drafts = []
    for each in (taken_up, fresh):
        slot = add(each, text)
        assert (each.kv_len(slot) >= len(prompt)) == (each is taken_up)
        step_all(each, [(slot, len(text) - 1 - each.kv_len(slot), 0)])
        step_all(each, [(slot, 1, NUM_DRAFTS)])
        logits = each.last_draft_logits() if harness.DEVICE == "cpu" else []
        drafts.append((each.last_drafts()[0], logits))
    assert drafts[0] == drafts[1]
    assert len(drafts[0][0]) == NUM_DRAFTS
