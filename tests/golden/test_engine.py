"""The engine's EAGLE-3 drafter against the reference's stored cases, in float32.

Prefill, chain, verification by the target, re-extension by what was committed, chain again: logits
within 1e-4 of the largest one, and the very same drafts.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.golden.engine_runs import (
    Folders,
    MakeRunner,
    add,
    check_chains,
    check_commits,
    check_logits,
    check_together,
    check_tree,
    check_trees,
    last_tree,
    make_runner,
    prefill,
    prompt_of,
    step,
)
from tests.golden.make_eagle3 import CHAIN, DATA, DEPTH, NODES, PROMPTS, TINY, TOP_K
from tests.golden.stored_cases import read_cases
from tests.heads import seeded

STORED = read_cases(DATA)
NAMES = [*PROMPTS, *seeded.EAGLE3_DIALECTS]
VARIANTS = [*seeded.EAGLE3_VARIANTS]
TREE = {"draft_top_k": TOP_K, "draft_tree_size": NODES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    random = seeded.write_pairs(
        root,
        {name: seeded.eagle3(name) for name in seeded.EAGLE3_DIALECTS}
        | {name: seeded.eagle3_variant(name) for name in VARIANTS},
    )
    return {**random, **dict.fromkeys(PROMPTS, (TINY, TINY / "eagle3"))}


def drafting(name: str, folders: dict[str, Folders]) -> MakeRunner:
    """Engines with the head of a case."""
    return functools.partial(make_runner, folders[name], "eagle3")


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(name: str, chunk: int, folders: dict[str, Folders]) -> None:
    check_chains(drafting(name, folders), STORED[name], chunk, CHAIN)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_teaches_the_head(name: str, folders: dict[str, Folders]) -> None:
    check_commits(drafting(name, folders), STORED[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_draft_as_the_reference(name: str, folders: dict[str, Folders]) -> None:
    """Prompts in chunks, whose rows meet the entries of those before in every layer."""
    make, case = drafting(name, folders), STORED[name]
    check_chains(make, case, 7, CHAIN)
    check_commits(make, case)
    check_trees(make(DEPTH, **TREE), case, NODES)


@pytest.mark.parametrize("name", NAMES)
def test_a_short_chain_begins_a_long_one(name: str, folders: dict[str, Folders]) -> None:
    case = STORED[name]
    runner = drafting(name, folders)(1)
    slot, _ = prefill(runner, prompt_of(case))
    step(runner, slot, 1, 1)
    assert runner.last_drafts() == [case["chain_tokens"][0].tolist()[:1]]


def test_a_prefix_hit_loses_nothing(folders: dict[str, Folders]) -> None:
    """The token before the first new one runs again for its states."""
    case = STORED["problem"]
    prompt = prompt_of(case)
    assert len(prompt) > 17
    runner = drafting("problem", folders)(1)
    for is_cached in (False, True):
        slot = add(runner, prompt)
        assert (runner.kv_len(slot) >= 15) is is_cached
        runner.remove_sequence(slot)
        slot, _ = prefill(runner, prompt)
        step(runner, slot, 1, 1)
        check_logits(runner.last_draft_logits(), case["logits"][0])
        runner.remove_sequence(slot)
        runner.check_integrity()


def test_window(folders: dict[str, Folders]) -> None:
    """One that holds the context changes no bit; a short one leaves tokens out."""
    prompt = prompt_of(STORED["problem"])
    assert len(prompt) > 33
    logits = []
    for window in (0, len(prompt), 16):
        runner = drafting("problem", folders)(1, draft_window=window)
        slot, _ = prefill(runner, prompt)
        step(runner, slot, 1, 1)
        logits.append(runner.last_draft_logits())
    assert logits[0] == logits[1]
    assert logits[0] != logits[2]


def test_several_sequences_at_once(folders: dict[str, Folders]) -> None:
    cases = [STORED[name] for name in ("problem", "copy")]
    chains = [case["chain_tokens"][0].tolist() for case in cases]
    check_together(drafting("problem", folders), [prompt_of(case) for case in cases], chains)


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_references(name: str, folders: dict[str, Folders]) -> None:
    check_trees(drafting(name, folders)(DEPTH, **TREE), STORED[name], NODES)


@pytest.mark.parametrize("name", PROMPTS)
def test_verified_trees_teach_the_head(name: str, folders: dict[str, Folders]) -> None:
    """What a tree had accepted stood among what was not; the next tree is that after a prompt."""
    prompt = prompt_of(STORED[name])
    runner, fresh = (drafting(name, folders)(DEPTH, **TREE) for _ in range(2))
    slot, known = prefill(runner, prompt)
    known = prompt + known
    num_moved = 0
    for _ in range(8):
        added = step(runner, slot, 1, NODES)
        (tokens,) = runner.last_drafts()
        num_moved += added[:-1] != tokens[: len(added) - 1]
        again, following = prefill(fresh, known[:-1])
        assert following == [known[-1]]
        step(fresh, again, 1, NODES)
        check_tree(last_tree(runner), last_tree(fresh))
        fresh.remove_sequence(again)
        known += added
        if runner.kv_len(slot) > 90:
            break
    assert num_moved > 0


@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
def test_a_head_without_lm_head_drafts_with_the_targets(
    options: dict[str, int], folders: dict[str, Folders], tmp_path: Path
) -> None:
    """As one whose own is the target's, but for one row, does."""
    target, head = folders["deepspec"]
    config = json.loads((head / "config.json").read_text())
    tensors, weights = (load_file(one / "model.safetensors") for one in (head, target))
    own = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone()
    own[-1] = 0
    without = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    found = []
    for name, given in (("own", without | {"lm_head.weight": own}), ("none", without)):
        (tmp_path / name).mkdir()
        folder = seeded.write(tmp_path / name, (config, given))
        runner = make_runner((target, folder), "eagle3", DEPTH, **options)
        slot, _ = prefill(runner, prompt_of(STORED["deepspec"]))
        step(runner, slot, 1, NODES if options else DEPTH)
        found.append((runner.last_drafts(), runner.last_draft_logits()))
    (drafts, logits), (others, other_logits) = found
    assert drafts == others and len(drafts[0]) >= DEPTH
    last = seeded.VOCAB - 1
    pairs = enumerate(zip(logits, other_logits, strict=True))
    assert {i % seeded.VOCAB for i, (one, other) in pairs if one != other} == {last}
