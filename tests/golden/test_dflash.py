"""The reference of the DFlash family: what it stored, and its conventions."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.golden.dflash_reference import DFlashReference, read_format
from tests.golden.make_dflash import CHAIN, DATA, NODES, SHIPPED, TOP_K, cases, make
from tests.golden.make_eagle3 import PROMPTS, TINY, load
from tests.golden.stored_cases import Stored, check_same, close, read_cases
from tests.heads import seeded
from tests.heads.seeded import BLOCK, BLOCK_SIZE

CASES = dict(cases())


@pytest.fixture(scope="module")
def stored() -> dict[str, Stored]:
    return read_cases(DATA)


@pytest.mark.parametrize("name", CASES)
def test_the_stored_cases_are_the_references(name: str, stored: dict[str, Stored]) -> None:
    check_same(make(CASES[name]), stored[name])


def test_the_stored_cases_are_all_of_them(stored: dict[str, Stored]) -> None:
    assert stored.keys() == set(CASES)
    shipped = {f"{head}_{prompt}" for head in SHIPPED for prompt in PROMPTS}
    assert {*seeded.DFLASH_KINDS, *shipped} == set(CASES)


def test_formats() -> None:
    formats = {
        dialect: read_format(seeded.dflash(dialect)[0], 8)
        for dialect in ("zlab", "jetspec", "deepspec", "dspark")
    }
    formats["speculators"] = CASES["speculators"].reference().format
    for dialect, found in formats.items():
        assert found.captured_layers == BLOCK.outputs and found.mask == BLOCK.mask
        assert found.num_drafts == CHAIN == BLOCK_SIZE - 1
        assert found.is_anchor_first == (dialect in ("deepspec", "dspark"))
        assert found.is_causal == (dialect == "jetspec")
        assert not any(found.slides)
    for kind in seeded.SLIDING:
        found = CASES[kind].reference().format
        assert found.window == seeded.WINDOW and not found.is_causal
        assert found.slides == [True, True, kind == "zlab_swa"]
        assert found.sliding_is_causal != kind.endswith("_full")
    published = {"block_size": 16, "num_hidden_layers": 5, "mask_token_id": 0}
    assert read_format(published, 36).captured_layers == [1, 9, 17, 25, 33]


def test_the_dialects_differ_in_what_they_say(stored: dict[str, Stored]) -> None:
    """The same layers under another layout are another drafter."""
    assert torch.equal(stored["zlab"]["logits"], stored["speculators"]["logits"])
    full, other = (stored[f"{name}_sliding_full"]["logits"] for name in ("zlab", "speculators"))
    assert torch.equal(full, other)
    moving, other = (stored[f"{name}_sliding"]["logits"] for name in ("zlab", "speculators"))
    assert not torch.allclose(moving, other)
    assert not torch.equal(stored["zlab"]["logits"], stored["zlab_sliding"]["logits"])
    full, causal = (stored[f"zlab_sliding{name}"]["chain_logprobs"] for name in ("_full", ""))
    assert not torch.allclose(full, causal)
    others = ["jetspec", "deepspec", "dspark"]
    for name in others:
        assert not torch.allclose(stored[name]["chain_logprobs"], stored["zlab"]["chain_logprobs"])
        assert not torch.equal(stored[name]["tree_tokens"], stored["zlab"]["tree_tokens"])


def context_of(name: str) -> tuple[DFlashReference, Tensor]:
    reference = CASES[name].reference()
    width = reference.weights["fc.weight"].shape[1]
    return reference, torch.randn(9, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", seeded.DFLASH_DIALECTS)
def test_the_context_may_come_in_parts(name: str) -> None:
    reference, captured = context_of(name)
    whole = reference.extend(reference.empty(), captured)
    parts = reference.empty()
    for part in captured.split(4):
        parts = reference.extend(parts, part)
    for one, other in zip(whole.keys + whole.values, parts.keys + parts.values, strict=True):
        close(one, other)


def test_rows_of_a_causal_block_do_not_see_later_ones() -> None:
    for name, is_equal in (("jetspec", True), ("zlab", False)):
        reference, captured = context_of(name)
        context = reference.extend(reference.empty(), captured)
        long, short = (reference.block(context, 3, count) for count in (CHAIN, 3))
        assert torch.allclose(long[:3], short, atol=1e-5) == is_equal


def test_layers_that_slide_see_the_last_tokens() -> None:
    """Six of nine; where a window follows the rows, which are causal, they see fewer and fewer."""
    for kind in seeded.SLIDING:
        reference, _ = context_of(kind)
        found = reference.format
        assert found.follows_rows == (kind in ("zlab_sliding", "zlab_swa", "dspark_sliding"))
        for layer, slides in enumerate(found.slides):
            seen = reference.seen(layer, 9, 3)
            first = [[0] * 3, [3] * 3, [4, 5, 6]][slides + (slides and found.follows_rows)]
            assert seen[:, :9].tolist() == [[token >= row for token in range(9)] for row in first]
            rows = torch.ones(3, 3, dtype=torch.bool)
            is_causal = slides and found.sliding_is_causal
            assert torch.equal(seen[:, 9:], rows.tril() if is_causal else rows)


def test_a_markov_head_bends_every_place() -> None:
    reference, captured = context_of("dspark")
    context = reference.extend(reference.empty(), captured)
    plain = DFlashReference(
        CASES["dspark"].head[0],
        {name: w for name, w in CASES["dspark"].head[1].items() if "_head.m" not in name},
        reference.embedding, reference.lm_head, 8,
    )  # fmt: skip
    chain = reference.chain(context, 3, CHAIN)
    states = reference.block(context, 3, CHAIN)
    before = [3, *chain.tokens[:-1]]
    w1, w2 = (reference.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    close(chain.logits, states @ reference.lm_head.T + w1[before] @ w2.T)
    assert not torch.allclose(chain.logits, torch.stack([plain.logits(s, 3) for s in states]))
    assert all(0 < confidence < 1 for confidence in chain.confidences)


@pytest.mark.parametrize("name", seeded.DFLASH_DIALECTS)
def test_trees(name: str) -> None:
    reference, captured = context_of(name)
    context = reference.extend(reference.empty(), captured)
    # One child per node: the chain, were it not for what a Markov head says of other tokens.
    line = reference.tree(context, 3, CHAIN, 1, CHAIN)
    assert line.parents == list(range(-1, CHAIN - 1))
    states = reference.block(context, 3, CHAIN)
    best = [int(reference.logits(states[0], 3).argmax())]
    best += [int(token) for token in (states[1:] @ reference.lm_head.T).argmax(-1)]
    assert line.tokens == best
    if name != "dspark":
        assert best == reference.chain(context, 3, CHAIN).tokens
    # The best paths of all there are: nothing left out beats what was taken.
    depth, top_k, nodes = 3, 4, 20
    states = reference.block(context, 3, depth)
    paths: dict[tuple[int, ...], float] = {}

    def walk(path: tuple[int, ...], score: float) -> None:
        logits = reference.lm_head @ states[len(path)] if path else reference.logits(states[0], 3)
        chance, tokens = logits.softmax(-1).topk(top_k)
        if name == "dspark" and path:
            bent = chance * reference.bias(path[-1])[tokens].exp()
            chance = bent / (bent.sum() + 1 - chance.sum())
        for probability, token in zip(chance, tokens, strict=True):
            longer = (*path, int(token))
            paths[longer] = score + float(probability.log())
            if len(longer) < depth:
                walk(longer, paths[longer])

    walk((), 0.0)
    tree = reference.tree(context, 3, depth, top_k, nodes)
    assert tree.scores == sorted(tree.scores, reverse=True)
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert len(found[node]) == tree.depths[node]
        assert tree.scores[node] == pytest.approx(paths[found[node]], abs=1e-4)
    best = sorted(paths, key=paths.__getitem__, reverse=True)[:nodes]
    assert set(found) == set(best)
    assert len(reference.tree(context, 3, CHAIN, TOP_K, NODES).tokens) == NODES


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_heads(name: str) -> None:
    config, weights = load(TINY / name)
    target, _ = load(TINY)
    for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"):
        assert config[key] == target[key]
    assert config["num_target_layers"] == target["num_hidden_layers"]
    found = read_format(config, target["num_hidden_layers"])
    assert found.captured_layers == [0, 1, 2, 3] and found.num_drafts == 15
    assert found.is_anchor_first == (name == "dspark") and not found.is_causal
    # The mask belongs to no token.
    text = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    assert Tokenizer.from_str(text).id_to_token(found.mask) is None
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["fc.weight"].shape == (320, 4 * 320)
    assert ("markov_head.markov_w1.weight" in weights) == (name == "dspark")
    assert (TINY / name / "model.safetensors").stat().st_size < 8_000_000
