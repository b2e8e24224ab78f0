"""The recipe of the block drafters beside the reference: what learns is what drafts."""

from __future__ import annotations

import pytest
import torch
from bench.tiny_model.dflash.evaluate import Drafting, Text, tree_hits
from bench.tiny_model.dflash.export import load_head
from bench.tiny_model.dflash.head import AFTER_LAYERS, LAYOUTS, BlockHead, head_config
from bench.tiny_model.dflash.train import Trainer, choose_anchors, choose_lengths, mean_run, measure
from bench.tiny_model.eagle3.evaluate import TreeDrafts
from bench.tiny_model.eagle3.generate import load_target
from bench.tiny_model.eagle3.prompts import MODEL
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.dflash2_reference import DFlash2Reference
from tests.golden.dflash_reference import DFlashReference
from tests.golden.make_dflash import CHAIN, DATA, NODES, SHIPPED, TOP_K
from tests.golden.make_eagle3 import PROMPTS

TARGET = load_target(MODEL, torch.device("cpu"), torch.float32)


def random_head(name: str) -> BlockHead:
    """Untrained, but with no part that does nothing."""
    torch.manual_seed(1)
    head = BlockHead(LAYOUTS[name])
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return head.requires_grad_(False)


def reference_of(head: BlockHead) -> DFlashReference:
    embedding = TARGET.model.embed_tokens.weight
    kind = DFlash2Reference if head.layout.selector_rank else DFlashReference
    return kind(
        head_config(head.layout), head.state_dict(), embedding, embedding, len(TARGET.model.layers)
    )


def packed() -> tuple[Tensor, Tensor]:
    """A row of two texts."""
    tokens = torch.randint(0, 4000, (1, 48), generator=torch.Generator().manual_seed(0))
    return tokens, torch.cat((torch.arange(18), torch.arange(30)))[None]


@pytest.mark.parametrize("count", [4, 15])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_learn_what_they_will_draft(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of a packed row is the reference's block after its own text alone."""
    trainer = Trainer(TARGET, is_compiled=False, begin_with=None)
    head = random_head(name)
    tokens, places = packed()
    anchors = torch.tensor([[1, 9, 22, 40]])
    states: list[Tensor] = []

    def keep(head: BlockHead, x: Tensor, *rest: object) -> Tensor:
        states.append(head.drafting_rows(x))
        return measure(head, x, *rest)  # type: ignore[arg-type]

    trainer.measure = keep
    monkeypatch.setattr(torch, "autocast", lambda *_: torch.no_grad())  # all in fp32
    fields = trainer.lesson(tokens, places)
    trainer.run(head, fields, places, anchors, torch.full_like(anchors, count))
    reference = reference_of(head)
    for index, anchor in enumerate(anchors[0].tolist()):
        start = 0 if anchor < 18 else 18
        _, captured = TARGET.model(tokens[:, start:anchor], AFTER_LAYERS)
        context = reference.extend(reference.empty(), torch.cat(captured, -1)[0])
        expected = reference.block(context, int(tokens[0, anchor]), count)
        torch.testing.assert_close(states[0][0, index, :count], expected, rtol=1e-3, atol=1e-3)
        before = tokens[0, anchor]
        logits = head.logits(states[0][0, index, 0], before, TARGET.model.embed_tokens.weight)
        if isinstance(reference, DFlash2Reference):
            ids, scores = reference.scores(expected[0], int(before), 0, None)
            torch.testing.assert_close(logits[ids], scores, rtol=1e-3, atol=1e-2)
            assert int(logits.isfinite().sum()) == len(ids)
            continue
        expected_logits = reference.logits(expected[0], int(before))
        torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-2)
        if head.layout.markov_rank:
            found = head.confidence(states[0][0, index, 0], before).sigmoid()
            assert float(found) == pytest.approx(
                reference.confidence(expected[0], int(before)), abs=1e-3
            )


def test_a_selector_learns_to_choose_among_its_candidates() -> None:
    """The loss is the cross-entropy of the target's token, which stands in for the last candidate
    where it is none."""
    head = random_head("dflash2")
    selector, embedding = head.candidate_selector, TARGET.model.embed_tokens.weight
    random = torch.Generator().manual_seed(0)
    state = torch.randn(6, 320, generator=random)
    before = torch.tensor([5, 6, 7, 8, 9, 10])
    logits = state @ embedding.T
    order = logits.argsort(-1, descending=True)
    best = torch.stack([order[i, place] for i, place in enumerate((0, 3, 15, 16, 100, 4000))])
    loss, chosen = selector.lesson(state, before, logits, best)
    scores = head.logits(state, before, embedding)
    assert torch.equal(chosen, scores.argmax(-1))
    for i in range(6):
        ids = order[i, :16].tolist()
        if int(best[i]) not in ids:
            ids[-1] = int(best[i])
        context = selector.predecessor_codebook[before[i]] * selector.hidden_projection(state[i])
        values = logits[i, ids] + selector.successor_codebook[ids] @ context
        expected = values.logsumexp(-1) - values[ids.index(int(best[i]))]
        torch.testing.assert_close(loss[i], expected, rtol=1e-4, atol=1e-4)


def test_the_evaluation_selects_as_the_reference() -> None:
    head = random_head("dflash2")
    drafting = Drafting(head, TARGET.model.embed_tokens.weight)
    reference = reference_of(head)
    assert isinstance(reference, DFlash2Reference)
    tokens = packed()[0][0, :24]
    _, captured = TARGET.model(tokens[None], AFTER_LAYERS)
    text = Text(tokens, 22, torch.cat(captured, -1)[0])
    chains, trees = drafting.chains(text, CHAIN), drafting.trees(text, CHAIN, TOP_K, NODES)
    for row, anchor in enumerate((22, 23)):
        context = reference.extend(reference.empty(), text.captured[:anchor])
        token = int(tokens[anchor])
        assert chains[row].tolist() == reference.select(context, token, CHAIN).tokens
        tree = reference.grow(context, token, CHAIN, TOP_K, NODES)
        assert trees.tokens[row].tolist() == tree.tokens
        assert trees.parents[row].tolist() == tree.parents


def test_what_counts() -> None:
    """Only generated tokens of the anchor's own text, up to the first that is none."""
    head = random_head("dflash")
    tokens, places = packed()
    learned = torch.ones(1, 48, dtype=torch.bool)
    learned[0, 17] = learned[0, 47] = False  # the ends of the texts
    learned[0, 25] = False
    truth = torch.zeros(1, 48, 4096)
    x = torch.randn(1, 4, 16, 320)
    fields = (tokens, truth, truth, tokens, learned)
    anchors = torch.tensor([[4, 21, 40, 41]])
    lengths = torch.tensor([[15, 15, 15, 2]])
    embedding = TARGET.model.embed_tokens.weight
    sums = measure(head, x, embedding, fields, places, anchors, lengths)
    # 13 tokens follow the first anchor in its text, 4 the second before the gap, 7 the third, and
    # the last block is short.
    assert sums[3].tolist() == [4.0] * 2 + [3.0] * 2 + [2.0] * 3 + [1.0] * 6 + [0.0] * 2


def test_runs_end_with_the_first_wrong_draft() -> None:
    """A head that repeats the text has runs as long as the text allows."""
    head = random_head("dflash")
    embedding = torch.randn(4096, 320, generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.functional.normalize(embedding)
    tokens, places = torch.arange(100, 148)[None], torch.arange(48)[None]
    learned = torch.ones(1, 48, dtype=torch.bool)
    learned[0, -1] = False
    anchors = torch.tensor([[10, 40]])
    at = (anchors[..., None] + torch.arange(16)).clamp(max=47)
    x = embedding[tokens[0, at]]
    head.norm.weight.fill_(1.0)
    truth = torch.zeros(1, 48, 4096)
    fields = (tokens, truth, truth, tokens, learned)
    whole = (embedding, fields, places, anchors, torch.tensor([[15, 15]]))
    assert mean_run(measure(head, x, *whole)) == (15 + 7) / 2
    x[0, 0, 5] = -x[0, 0, 5]
    assert mean_run(measure(head, x, *whole)) == (4 + 7) / 2


def test_lengths_are_within_the_block() -> None:
    anchors = torch.zeros(4, 500)
    lengths = choose_lengths(anchors, 15, 0.5, torch.Generator().manual_seed(0))
    assert set(lengths.flatten().tolist()) == set(range(1, 16))
    assert 0.45 < float((lengths == 15).float().mean()) < 0.6


def test_anchors_are_generated_tokens() -> None:
    tokens, _ = packed()
    tokens[0, :20] |= 1 << 15  # a prompt
    learned = torch.ones(1, 48, dtype=torch.bool)
    learned[0, 30:] = False
    random = torch.Generator().manual_seed(0)
    chosen = choose_anchors(tokens, learned, 10, random)
    assert chosen.tolist() == [list(range(20, 30))]
    some = choose_anchors(tokens, learned, 4, random)[0].tolist()
    assert len(set(some)) == 4 and set(some) <= set(range(20, 30))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_evaluation_drafts_the_same(name: str) -> None:
    drafting = Drafting(load_head(LAYOUTS[name], MODEL / name), TARGET.model.embed_tokens.weight)
    stored = load_file(DATA)
    for prompt in PROMPTS:
        case = f"{name}_{prompt}"
        tokens = stored[f"{case}.tokens"]
        with torch.no_grad():
            _, captured = TARGET.model(tokens[None], AFTER_LAYERS)
            text = Text(tokens, int(stored[f"{case}.num_prefilled"]), torch.cat(captured, -1)[0])
            chains = drafting.chains(text, CHAIN)
            trees = drafting.trees(text, CHAIN, TOP_K, NODES)
        at = [0, -1]
        assert torch.equal(chains[at], stored[f"{case}.chain_tokens"])
        assert torch.equal(trees.tokens[at], stored[f"{case}.tree_tokens"])
        assert torch.equal(trees.parents[at], stored[f"{case}.tree_parents"])


def test_hits_of_trees() -> None:
    text = Text(torch.tensor([9, 1, 2, 3, 4]), 1, torch.zeros(5, 1))
    # After 1: 2 and 3, the second 3 below the first 2; after 2: a wrong start, then 3 alone.
    tokens = torch.tensor([[7, 2, 3, 3], [4, 3, 3, 5], [4, 4, 4, 4], [0, 0, 0, 0]])
    parents = torch.tensor([[-1, -1, 0, 1], [-1, 0, -1, 2], [-1, 0, 1, 2], [-1, 0, 1, 2]])
    hits = tree_hits(text, TreeDrafts(tokens, parents), (1, 2, 3, 4))
    assert hits[1].tolist() == [0, 0, 1, 0]
    assert hits[2].tolist() == [1, 0, 1, 0]
    assert hits[3].tolist() == [1, 1, 1, 0]
    assert hits[4].tolist() == [2, 1, 1, 0]
