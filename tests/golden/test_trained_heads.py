"""Heads as torch trains them beside the references: what learns is what drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from openspec.adapt.heads import parts
from openspec.adapt.heads.dflash import DFLASH2, BlockHead, choose_anchors, choose_lengths
from openspec.adapt.heads.eagle3 import STEPS, Eagle3Head
from openspec.adapt.heads.parts import Lesson, ReadText
from openspec.adapt.train import write_head
from tests.golden import make_dflash, trainable
from tests.golden.dflash2_reference import DFlash2Reference
from tests.golden.dflash_reference import DFlashReference
from tests.golden.eagle3_reference import Eagle3Reference
from tests.golden.engine_runs import make_runner, prefill, step
from tests.golden.make_eagle3 import CHAIN, DATA, PROMPTS, TINY, cases, load
from tests.golden.peagle_reference import PEagleReference
from tests.golden.stored_cases import close, read_cases

ENDS = trainable.ends()
BLOCKS = ("dflash", "dspark", "dflash2")


def texts_of(lesson: Lesson) -> list[tuple[int, list[int], Tensor]]:
    """Begin, ids and captured states of each text of the row."""
    begin, found = 0, []
    for length in trainable.LENGTHS:
        end = begin + length
        found.append((begin, lesson.tokens[0, begin:end].tolist(), lesson.captured[0, begin:end]))
        begin = end
    return found


def test_training_time_test_is_a_forced_chain() -> None:
    """What a step learns from is what the same step of a chain sees, in rows of two texts."""
    head = trainable.shipped("eagle3")
    assert isinstance(head, Eagle3Head)
    reference = dict(cases())["code"].reference()
    lesson = trainable.lesson(head.capture_layers)
    states = list(head.states(lesson, ENDS, STEPS))
    for begin, ids, captured in texts_of(lesson):
        rows, cache = reference.extend(reference.empty(), ids[1:], captured[:-1])
        close(states[0][0, begin + 1 : begin + len(ids)], rows)
        state, seen = rows[3], cache.up_to(4)
        for number in range(1, STEPS):
            state, seen = reference.row(ids[4 + number], state, len(seen), seen)
            close(states[number][0, begin + 4], state)


def test_several_kv_heads_and_the_loss() -> None:
    """Grouped heads see their own keys; a loss is the cross-entropy of the draft vocabulary."""
    vocabulary = torch.arange(0, trainable.VOCABULARY, 2)
    made = trainable.plan(num_kv_heads=2, head_dim=64, vocabulary=vocabulary)
    head = trainable.random_head("eagle3", made)
    assert isinstance(head, Eagle3Head)
    reference = Eagle3Reference(head.config(), head.tensors(), ENDS.embedding)
    lesson = trainable.lesson(head.capture_layers)
    states = list(head.states(lesson, ENDS, 3))
    _, ids, captured = texts_of(lesson)[1]
    begin = trainable.LENGTHS[0]
    rows, cache = reference.extend(reference.empty(), ids[1:], captured[:-1])
    state, seen = rows[9], cache.up_to(10)
    close(states[0][0, begin + 10], state)
    for number in (1, 2):
        state, seen = reference.row(ids[10 + number], state, len(seen), seen)
        close(states[number][0, begin + 10], state)

    head.most_drafts = 1
    found = head.loss(lesson, ENDS, torch.Generator())
    logits = ENDS.logits(lesson.last)[0]
    truth = logits[:, head.vocabulary].softmax(-1)
    has_best = torch.isin(logits.argmax(-1), head.vocabulary)
    counted = has_best & lesson.learned[0] & (lesson.places[0] > 0)
    entropy = -(truth * head.logits(states[0])[0].log_softmax(-1)).sum(-1)
    assert int(counted.sum()) > 0
    torch.testing.assert_close(found, entropy[counted].mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dspark"])
def test_how_many_rows_are_scored_at_once_is_no_matter(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and what is learned of it, of three rows that differ."""
    vocabulary = torch.arange(0, trainable.VOCABULARY, 2)
    is_block = kind == "dspark"
    made = trainable.block_plan(kind) if is_block else trainable.plan(vocabulary=vocabulary)
    head = trainable.random_head(kind, made)
    head.requires_grad_(True)
    head.learn_for(3)
    one = trainable.lesson(head.capture_layers)
    lesson = Lesson(*(torch.cat((part, part, part)) for part in one))
    scale = torch.tensor([1.0, 0.5, 2.0])[:, None, None]
    lesson = lesson._replace(captured=lesson.captured * scale, last=lesson.last * scale.flip(0))
    found = []
    a_row = (
        made.num_anchors * head.most_drafts * trainable.VOCABULARY
        if is_block
        else lesson.tokens.shape[1] * len(vocabulary)
    )
    for most in (1, 2 * a_row, 1 << 40):
        monkeypatch.setattr(parts, "SCORES_AT_ONCE", most)
        head.zero_grad()
        loss = head.loss(lesson, ENDS, torch.Generator().manual_seed(1))
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        found.append((loss.detach(), gradient))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=1e-5)
        error = (gradient - found[0][1]).norm() / found[0][1].norm()
        assert error < 1e-4 and found[0][1].norm() > 0


def test_a_parallel_chain_of_training_is_one_of_drafting(tmp_path: Path) -> None:
    """At one position of each text; and the written head drafts it in the engine."""
    head = trainable.random_head("peagle", trainable.plan())
    assert isinstance(head, Eagle3Head)
    write_head(tmp_path, head)
    embedding = ENDS.embedding
    reference = PEagleReference(*load(tmp_path), embedding=embedding)
    lesson = trainable.lesson(head.capture_layers)
    count = head.most_drafts
    states = list(head.states(lesson, ENDS, count))
    for begin, ids, captured in texts_of(lesson):
        rows, cache = reference.extend(reference.empty(), ids[1:], captured[:-1])
        close(states[0][0, begin + 1 : begin + len(ids)], rows)
        masked = reference.masked(cache.up_to(4), rows[3], count)
        close(torch.stack([state[0, begin + 4] for state in states]), masked)

    runner = make_runner((TINY, tmp_path), "peagle", count)
    _, prompt, captured = texts_of(lesson)[0]
    slot, known = prefill(runner, prompt)
    step(runner, slot, 1, count)
    rows, cache = reference.extend(reference.empty(), prompt[1:] + known, captured)
    assert runner.last_drafts() == [reference.chain(cache, rows[-1], count).tokens]


def block_head(kind: str) -> BlockHead:
    head = trainable.random_head(kind, trainable.block_plan(kind))
    assert isinstance(head, BlockHead)
    return head


def reference_of(head: BlockHead) -> DFlashReference:
    kind = DFlash2Reference if head.layout == DFLASH2 else DFlashReference
    weights = dict(head.state_dict())
    return kind(head.config(), weights, ENDS.embedding, ENDS.head, trainable.NUM_LAYERS)


@pytest.mark.parametrize("count", [4, 15])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_learn_what_they_will_draft(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block of a packed row is the reference's block after its own text alone."""
    head = block_head(name)
    lesson = trainable.lesson(head.capture_layers)
    anchors = torch.tensor([[1, 9, 22, 40]])
    states: list[Tensor] = []
    whole = head.block_states

    def keep(*arguments: object) -> Tensor:
        states.append(whole(*arguments))  # type: ignore[arg-type]
        return states[0]

    monkeypatch.setattr(head, "block_states", keep)
    head.measure(lesson, ENDS, anchors, torch.full_like(anchors, count))
    reference = reference_of(head)
    for index, anchor in enumerate(anchors[0].tolist()):
        start = 0 if anchor < trainable.LENGTHS[0] else trainable.LENGTHS[0]
        context = reference.extend(reference.empty(), lesson.captured[0, start:anchor])
        expected = reference.block(context, int(lesson.tokens[0, anchor]), count)
        torch.testing.assert_close(states[0][0, index, :count], expected, rtol=1e-3, atol=1e-3)
        before = lesson.tokens[0, anchor]
        logits = head.logits(states[0][0, index, 0], before, ENDS)
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
    head = block_head("dflash2")
    selector = head.candidate_selector
    random = torch.Generator().manual_seed(0)
    state = torch.randn(6, trainable.HIDDEN, generator=random)
    before = torch.tensor([5, 6, 7, 8, 9, 10])
    logits = state @ ENDS.head.T
    order = logits.argsort(-1, descending=True)
    best = torch.stack([order[i, place] for i, place in enumerate((0, 3, 15, 16, 100, 4000))])
    loss, chosen = selector.lesson(state, before, logits, best)
    scores = head.logits(state, before, ENDS)
    assert torch.equal(chosen, scores.argmax(-1))
    for i in range(6):
        ids = order[i, :16].tolist()
        if int(best[i]) not in ids:
            ids[-1] = int(best[i])
        context = selector.predecessor_codebook[before[i]] * selector.hidden_projection(state[i])
        values = logits[i, ids] + selector.successor_codebook[ids] @ context
        expected = values.logsumexp(-1) - values[ids.index(int(best[i]))]
        torch.testing.assert_close(loss[i], expected, rtol=1e-4, atol=1e-4)


def test_drafts_are_the_selectors_choice() -> None:
    head = block_head("dflash2")
    reference = reference_of(head)
    assert isinstance(reference, DFlash2Reference)
    tokens = trainable.lesson(head.capture_layers).tokens[0, :24]
    text = ReadText(tokens, 22, trainable.captured(tokens.tolist(), head.capture_layers))
    chains = head.drafts(text, ENDS, make_dflash.CHAIN)
    for row, anchor in enumerate((22, 23)):
        context = reference.extend(reference.empty(), text.captured[:anchor])
        expected = reference.select(context, int(tokens[anchor]), make_dflash.CHAIN)
        assert chains[row].tolist() == expected.tokens


def row_of(tokens: Tensor, places: Tensor, generated: Tensor) -> Lesson:
    none = torch.zeros(*tokens.shape, trainable.HIDDEN)
    return Lesson(tokens, places, generated, none, none)


def test_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only generated tokens of the anchor's own text, up to the first that is none."""
    head = block_head("dflash")
    lesson = trainable.lesson(head.capture_layers)
    generated = torch.ones_like(lesson.generated)
    generated[0, 26] = False
    monkeypatch.setattr(head, "block_states", lambda *_: torch.randn(1, 4, 15, trainable.HIDDEN))
    anchors = torch.tensor([[4, 21, 40, 41]])
    lengths = torch.tensor([[15, 15, 15, 2]])
    _, sums = head.measure(lesson._replace(generated=generated), ENDS, anchors, lengths)
    # 13 tokens follow the first anchor in its text, 4 the second before the gap, 7 the third, and
    # the last block is short.
    assert sums[1].tolist() == [4.0] * 2 + [3.0] * 2 + [2.0] * 3 + [1.0] * 6 + [0.0] * 2


def test_lengths_are_within_the_block() -> None:
    anchors = torch.zeros(4, 500)
    lengths = choose_lengths(anchors, 15, torch.Generator().manual_seed(0))
    assert set(lengths.flatten().tolist()) == set(range(1, 16))
    assert 0.45 < float((lengths == 15).float().mean()) < 0.6


def test_anchors_are_generated_tokens() -> None:
    places = torch.arange(48)[None]
    generated = torch.zeros(1, 48, dtype=torch.bool)
    generated[0, 20:31] = True
    lesson = row_of(places, places, generated)
    random = torch.Generator().manual_seed(0)
    assert choose_anchors(lesson, 10, random).tolist() == [list(range(20, 30))]
    some = choose_anchors(lesson, 4, random)[0].tolist()
    assert len(set(some)) == 4 and set(some) <= set(range(20, 30))


@pytest.mark.parametrize("name", make_dflash.SHIPPED)
def test_shipped_block_heads_draft_what_is_stored(name: str) -> None:
    head = trainable.shipped(name)
    stored = load_file(make_dflash.DATA)
    for prompt in PROMPTS:
        case = f"{name}_{prompt}"
        tokens = stored[f"{case}.tokens"]
        captured = trainable.captured(tokens.tolist(), head.capture_layers)
        text = ReadText(tokens, int(stored[f"{case}.num_prefilled"]), captured)
        chains = head.drafts(text, ENDS, make_dflash.CHAIN)
        assert torch.equal(chains[[0, -1]], stored[f"{case}.chain_tokens"])


def test_the_shipped_chains_are_what_is_stored() -> None:
    head, stored = trainable.shipped("eagle3"), read_cases(DATA)
    for name in PROMPTS:
        case = stored[name]
        # The state of the last token is no input of its own entry.
        captured = torch.nn.functional.pad(case["captured"], (0, 0, 0, 1))
        text = ReadText(case["tokens"], int(case["num_prefilled"]), captured)
        assert torch.equal(head.drafts(text, ENDS, CHAIN)[[0, -1]], case["chain_tokens"])


LAYER = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")


def read_by_others(kind: str, num_layers: int) -> set[str]:
    """What SGLang's llama_eagle3.py and dflash.py and vLLM's llama_eagle3.py and qwen3_dflash.py
    load, which all pass over what they do not know: a name too many would be lost in silence.

    Embeddings, and the LM head of blocks, are the target's there.
    """
    if kind == "eagle3":
        inner = {f"midlayer.{name}" for name in (*LAYER, *ATTENTION, "hidden_norm")}
        inner |= {"midlayer.input_layernorm", "fc", "norm", "lm_head"}
        return {f"{name}.weight" for name in inner} | {"d2t", "t2d"}
    norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm")
    layers = {
        f"layers.{i}.{name}" for i in range(num_layers) for name in (*LAYER, *ATTENTION, *norms)
    }
    return {f"{name}.weight" for name in (*layers, "fc", "hidden_norm", "norm")}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_other_engines_read_every_tensor(kind: str) -> None:
    """By their source; of layers SGLang's counts outputs, vLLM's what is entered."""
    made = trainable.plan() if kind == "eagle3" else trainable.block_plan(kind)
    head = trainable.random_head(kind, made)
    tensors, config = head.tensors(), head.config()
    assert tensors.keys() == read_by_others(kind, config["num_hidden_layers"])
    hidden = config["hidden_size"]
    assert tensors["fc.weight"].shape == (hidden, len(made.capture_layers) * hidden)
    if kind == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert ids == list(made.capture_layers) and len(ids) == 3
        assert config["eagle_aux_hidden_state_layer_ids"] == [one + 1 for one in ids]
        assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
        assert len(tensors["d2t"]) == len(tensors["lm_head.weight"]) == config["draft_vocab_size"]
        assert not config["tie_word_embeddings"]
    else:
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["dflash_config"]["target_layer_ids"] == list(made.capture_layers)
