"""bench/widen_checkpoint.py: widened checkpoints compute what the small ones do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import widen_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.dflash_reference import DFlashReference
from tests.golden.eagle3_reference import Eagle3Reference, captured_layers
from tests.golden.make_eagle3 import TINY, load
from tests.golden.target_reference import forward

DRAFT_VOCAB = load(TINY / "eagle3")[0]["draft_vocab_size"]
TOKENS = [7, 1, 900, 33, 2048, 5, 5, 61, 4072, 300, 12, 777]
# Twice the embedded model, once with a shared LM head and once with its own.
SHAPES = {
    tied: widen_checkpoint.Shape(640, 6, 8, 2, 2432, tied, vocab_size=5000)
    for tied in (True, False)
}

pytestmark = pytest.mark.slow


def load_shards(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights.update(load_file(path))
    return json.loads((folder / "config.json").read_text()), weights


@pytest.mark.parametrize("tied", [True, False])
def test_widened_computes_the_same(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(widen_checkpoint.SHAPES, "double", SHAPES[tied])
    widen_checkpoint.widen(TINY, tmp_path, "double")
    widen_checkpoint.widen_eagle3(TINY / "eagle3", tmp_path / "eagle3", tmp_path, DRAFT_VOCAB + 428)

    small, big = load(TINY), load_shards(tmp_path)
    small_logits, small_states = forward(*small, TOKENS)
    big_logits, big_states = forward(*big, TOKENS)
    torch.testing.assert_close(big_logits[:, :4096], small_logits, rtol=1e-4, atol=1e-3)
    assert torch.equal(big_logits.argmax(-1), small_logits.argmax(-1))
    # The added rows have no share worth a mention, were they as many as Qwen3's.
    added = big_logits[:, 4096:].amax(-1) + math.log(147_840) - small_logits.logsumexp(-1)
    assert float(added.max()) < math.log(1e-2)

    heads = load(TINY / "eagle3"), load_shards(tmp_path / "eagle3")
    assert heads[1][0]["draft_vocab_size"] == len(heads[1][1]["d2t"]) == DRAFT_VOCAB + 428
    drafts = []
    for head, target, states in ((heads[0], small, small_states), (heads[1], big, big_states)):
        layers = captured_layers(head[0], target[0]["num_hidden_layers"])
        captured = torch.cat([states[layer] for layer in layers], -1)
        reference = Eagle3Reference(*head, embedding=target[1]["model.embed_tokens.weight"])
        rows, cache = reference.extend(reference.empty(), TOKENS[1:], captured[:-1])
        chain = reference.chain(cache, rows[-1], 6)
        drafts.append((chain, reference.tree(cache, rows[-1], 4, 4, 15), reference.logits(rows)))
    (chain, tree, logits), (big_chain, big_tree, big_draft_logits) = drafts
    torch.testing.assert_close(big_draft_logits[:, :DRAFT_VOCAB], logits, rtol=1e-4, atol=1e-3)
    # The added rows do not shift what a tree compares.
    added = big_draft_logits.logsumexp(-1) - logits.logsumexp(-1)
    assert float(added.abs().max()) < 1e-2
    assert big_chain.tokens == chain.tokens
    assert big_tree.tokens == tree.tokens and big_tree.parents == tree.parents


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_widened_block_heads_draft_the_same(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(widen_checkpoint.SHAPES, "double", SHAPES[tied])
    widen_checkpoint.widen(TINY, tmp_path, "double")
    widen_checkpoint.widen_block_head(TINY / name, tmp_path / name, tmp_path, 5, 80)
    drafts = []
    for target, head in (
        (load(TINY), load(TINY / name)),
        (load_shards(tmp_path), load_shards(tmp_path / name)),
    ):
        config, weights = target
        embedding = weights["model.embed_tokens.weight"]
        lm_head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        reference = DFlashReference(*head, embedding, lm_head, config["num_hidden_layers"])
        _, states = forward(*target, TOKENS[:-1])
        captured = torch.cat([states[i] for i in reference.format.captured_layers], -1)
        context = reference.extend(reference.empty(), captured)
        drafts.append(reference.chain(context, TOKENS[-1], 15))
        tree = reference.tree(context, TOKENS[-1], 15, 4, 15)
        drafts[-1].tokens.extend(tree.tokens)
    small, big = drafts
    torch.testing.assert_close(big.logits[:, :4096], small.logits, rtol=1e-4, atol=1e-3)
    assert big.tokens == small.tokens
    assert big.confidences == pytest.approx(small.confidences, abs=1e-4)
    config, weights = load_shards(tmp_path / name)
    assert config["num_hidden_layers"] == 5 and "layers.4.mlp.up_proj.weight" in weights
    if name == "dspark":
        assert config["markov_rank"] == 80 == weights["markov_head.markov_w1.weight"].shape[1]


def test_draft_ids_of_added_rows_have_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(widen_checkpoint.SHAPES, "double", SHAPES[True])
    widen_checkpoint.widen(TINY, tmp_path, "double")
    widen_checkpoint.widen_eagle3(TINY / "eagle3", tmp_path / "eagle3", tmp_path, DRAFT_VOCAB + 428)
    _, weights = load_shards(tmp_path / "eagle3")
    ids = torch.arange(DRAFT_VOCAB + 428) + weights["d2t"]
    assert torch.equal(weights["t2d"].nonzero()[:, 0], ids)
    assert ids[DRAFT_VOCAB:].tolist() == list(range(4096, 4096 + 428))
    with pytest.raises(SystemExit, match="at most"):
        widen_checkpoint.widen_eagle3(TINY / "eagle3", tmp_path / "x", tmp_path, DRAFT_VOCAB + 905)


def test_states_keep_the_published_names_where_they_can() -> None:
    assert widen_checkpoint.state_names([0, 1, 2], [1, 12, 23, 34], 36) == [1, 17, 32]
    # The second default would be the state after another layer of the small model.
    assert widen_checkpoint.state_names([0, 1, 2], [1, 20, 23, 34], 36) == [1, 20, 23]
    assert widen_checkpoint.state_names([0, 1], [1, 12, 23, 34], 36) == [1, 12]
