"""The reference of EAGLE-3 heads: what it stored, and its conventions."""

from __future__ import annotations

import pytest
import torch
from bench.tiny_model.tokenizer import ADDED_TOKENS

from tests.golden.eagle3_reference import captured_layers
from tests.golden.make_eagle3 import (
    CHAIN,
    DATA,
    DEPTH,
    NODES,
    PROMPTS,
    TINY,
    TOP_K,
    cases,
    load,
    make,
)
from tests.golden.stored_cases import Stored, check_same, close, read_cases
from tests.heads import seeded

CASES = dict(cases())


@pytest.fixture(scope="module")
def stored() -> dict[str, Stored]:
    return read_cases(DATA)


@pytest.mark.parametrize("name", CASES)
def test_the_stored_cases_are_the_references(name: str, stored: dict[str, Stored]) -> None:
    check_same(make(CASES[name]), stored[name])


def test_the_stored_cases_are_all_of_them(stored: dict[str, Stored]) -> None:
    assert stored.keys() == set(CASES)
    random = (*seeded.EAGLE3_DIALECTS, *seeded.EAGLE3_VARIANTS)
    assert {*PROMPTS, *random} == set(CASES)
    # Somewhere the whole chain was accepted, somewhere not.
    committed = [len(stored[n]["tokens"]) - 1 - stored[n]["num_prefilled"] for n in CASES]
    assert {1, CHAIN + 1} <= {int(count) for count in committed}


@pytest.mark.parametrize("name", CASES)
def test_only_distances_of_positions_matter(name: str, stored: dict[str, Stored]) -> None:
    classic = CASES[name].reference(first=0)
    tokens, captured = stored[name]["tokens"].tolist(), stored[name]["captured"]
    states, cache = classic.extend(classic.empty(), tokens[1:], captured)
    close(states, stored[name]["states"])
    at = [int(stored[name]["num_prefilled"]) - 1, -1]
    close(classic.logits(states[at]), stored[name]["logits"])
    tree = classic.tree(cache, states[-1], DEPTH, TOP_K, NODES)
    assert tree.tokens == stored[name]["tree_tokens"][1].tolist()


@pytest.mark.parametrize("dialect", [*seeded.EAGLE3_DIALECTS, *seeded.EAGLE3_VARIANTS])
def test_trees(dialect: str) -> None:
    reference = CASES[dialect].reference()
    num_states = reference.weights["fc.weight"].shape[1]
    captured = torch.randn(6, num_states, generator=torch.Generator().manual_seed(0))
    states, cache = reference.extend(reference.empty(), [3, 1, 4, 1, 5, 9], captured)
    # One child per node: the chain.
    line = reference.tree(cache, states[-1], CHAIN, 1, CHAIN)
    chain = reference.chain(cache, states[-1], CHAIN)
    assert line.tokens == chain.tokens and line.parents == list(range(-1, CHAIN - 1))
    assert line.scores == pytest.approx(torch.tensor(chain.logprobs).cumsum(0).tolist(), abs=1e-4)
    # Every node's score is what a chain forced along its path gives.
    tree = reference.tree(cache, states[-1], DEPTH, TOP_K, NODES)
    draft_ids = {reference.token(i): i for i in range(len(reference.weights["lm_head.weight"]))}
    for node in range(NODES):
        path = [node]
        while tree.parents[path[0]] >= 0:
            assert tree.parents[path[0]] < path[0]
            path.insert(0, tree.parents[path[0]])
        assert len(path) == tree.depths[node] <= DEPTH
        score, state, seen = 0.0, states[-1], cache
        for step in path:
            token = tree.tokens[step]
            score += float(reference.logits(state).log_softmax(-1)[draft_ids[token]])
            state, seen = reference.row(token, reference.fed_back(state), len(seen), seen)
        assert tree.scores[node] == pytest.approx(score, abs=1e-4)


def test_captured_layers() -> None:
    assert captured_layers({}, 36) == [1, 17, 32]
    assert captured_layers(seeded.eagle3("classic")[0], 8) == [1, 3, 4]
    assert captured_layers(seeded.eagle3("speculators")[0], 8) == [0, 2, 7]
    assert captured_layers(seeded.eagle3("deepspec")[0], 8) == [0, 2, 3, 5, 6]
    assert captured_layers(load(TINY / "eagle3")[0], 4) == [0, 1, 2]


def test_the_shipped_head() -> None:
    config, weights = load(TINY / "eagle3")
    target, _ = load(TINY)
    for key in ("hidden_size", "head_dim", "num_attention_heads", "vocab_size", "rope_theta"):
        assert config[key] == target[key]
    assert {str(w.dtype) for n, w in weights.items() if n not in ("d2t", "t2d")} == {
        "torch.bfloat16"
    }
    assert weights["fc.weight"].shape == (320, 3 * 320)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (512, 2 * 320)
    assert weights["lm_head.weight"].shape == (config["draft_vocab_size"], 320)
    ids = torch.arange(config["draft_vocab_size"]) + weights["d2t"]
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    assert torch.equal(weights["t2d"].nonzero()[:, 0], ids)
    assert set(ADDED_TOKENS.values()) <= set(ids.tolist())
    assert (TINY / "eagle3" / "model.safetensors").stat().st_size < 8_000_000
