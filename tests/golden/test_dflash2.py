"""DFlash2: the reference and its conventions, and the engine's drafts against it, in float32."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from openspec import _C
from openspec.messages import SamplingParams
from tests.golden.dflash2_reference import DFlash2Reference, Draw
from tests.golden.dflash_reference import Context, DFlashReference
from tests.golden.engine_runs import (
    Folders,
    MakeRunner,
    check_chains,
    check_commits,
    check_together,
    check_tree,
    check_trees,
    last_tree,
    make_runner,
    prompt_of,
    step,
)
from tests.golden.make_dflash import CHAIN, NODES, TOP_K
from tests.golden.make_dflash2 import DATA, cases, make, reference_of
from tests.golden.noise import gumbel
from tests.golden.stored_cases import check_same, close, read_cases, target_says
from tests.golden.target_reference import forward
from tests.heads import seeded
from tests.heads.seeded import write_pairs

CASES = dict(cases())
STORED = read_cases(DATA)
NAMES = [*CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    heads = {name: seeded.dflash2(name) for name in NAMES}
    return {**write_pairs(root, heads)}


def drafting(name: str, folders: dict[str, Folders], **options: int | str) -> MakeRunner:
    """Engines with the head of a case."""
    return functools.partial(make_runner, folders[name], "dflash", **options)


def context_of(name: str, num_tokens: int = 9) -> tuple[DFlash2Reference, Context]:
    reference = reference_of(CASES[name])
    width = reference.weights["fc.weight"].shape[1]
    captured = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(0))
    return reference, reference.extend(reference.empty(), captured)


# ---- The reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_cases_are_the_references(name: str) -> None:
    assert STORED.keys() == set(NAMES)
    check_same(make(CASES[name]), STORED[name])


def test_a_convolution_that_only_copies_is_none() -> None:
    reference, context = context_of("zlab2")
    for name, weight in reference.weights.items():
        if name.endswith("base_kernel"):
            reference.weights[name] = torch.zeros_like(weight)
            reference.weights[name][:, 0] = 1
        elif name.endswith("kernel_projection.weight"):
            reference.weights[name] = torch.zeros_like(weight)
    config, weights = CASES["zlab2"].head
    plain = DFlashReference(config, weights, reference.embedding, reference.lm_head, 8)
    close(reference.block(context, 3, CHAIN), plain.block(context, 3, CHAIN))
    convolved, context = context_of("zlab2")
    rows = convolved.block(context, 3, CHAIN)
    assert not torch.allclose(rows, plain.block(context, 3, CHAIN), atol=0.1)


def test_a_tree_without_siblings_is_the_chain_and_others_hold_the_best_paths() -> None:
    reference, context = context_of("speculators2")
    for draw in (None, Draw(0.7, 5)):
        line = reference.grow(context, 3, CHAIN, 1, CHAIN, draw)
        assert line.tokens == reference.select(context, 3, CHAIN, draw).tokens
        depth, children, nodes = 3, 4, 20
        states = reference.block(context, 3, depth)
        paths: dict[tuple[int, ...], float] = {}

        def walk(path: tuple[int, ...], score: float) -> None:
            before = path[-1] if path else 3
            ids, values = reference.scores(states[len(path)], before, 10 + len(path), draw)  # noqa: B023
            chances, best = values.softmax(-1).topk(children)  # noqa: B023
            for chance, at in zip(chances.tolist(), best.tolist(), strict=True):
                longer = (*path, ids[at])
                paths[longer] = score + math.log(chance)  # noqa: B023
                if len(longer) < depth:  # noqa: B023
                    walk(longer, paths[longer])  # noqa: B023

        walk((), 0.0)
        tree = reference.grow(context, 3, depth, children, nodes, draw)
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        assert set(found) == set(sorted(paths, key=paths.__getitem__, reverse=True)[:nodes])


def test_what_the_selector_reads() -> None:
    """It changes drafts, by the token before and by the state of the place."""
    reference, context = context_of("zlab2")
    states = reference.block(context, 3, CHAIN)
    best = [int(token) for token in (states @ reference.lm_head.T).argmax(-1)]
    assert reference.select(context, 3, CHAIN).tokens != best
    ids, values = reference.scores(states[0], 3, 10, None)
    others = [reference.scores(states[0], 4, 10, None), reference.scores(states[1], 3, 11, None)]
    assert others[0][0] == ids and not torch.allclose(others[0][1], values)
    assert others[1][0] != ids


# ---- The engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(name: str, chunk: int, folders: dict[str, Folders]) -> None:
    check_chains(drafting(name, folders), STORED[name], chunk, CHAIN)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_joins_the_context(name: str, folders: dict[str, Folders]) -> None:
    check_commits(drafting(name, folders), STORED[name])


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_references(name: str, folders: dict[str, Folders]) -> None:
    runner = drafting(name, folders)(CHAIN, draft_top_k=TOP_K, draft_tree_size=NODES)
    check_trees(runner, STORED[name], NODES)


def test_several_sequences_at_once(folders: dict[str, Folders]) -> None:
    case = STORED["zlab2"]
    prompts = [prompt_of(case), case["tokens"].tolist()[:-1]]
    check_together(drafting("zlab2", folders), prompts, case["chain_tokens"].tolist())


@pytest.mark.parametrize("has_noise", [True, False])
@pytest.mark.parametrize("top_k", [1, TOP_K])
def test_sampled_requests_draft_with_the_noise_of_their_places(
    top_k: int, has_noise: bool, folders: dict[str, Folders]
) -> None:
    """And filters bound the target's choice, not the candidates."""
    case = CASES["speculators2"]
    reference = reference_of(case)
    options = {"draft_top_k": top_k, "draft_tree_size": NODES} if top_k > 1 else {}
    num_drafts = NODES if top_k > 1 else CHAIN
    runner = drafting("speculators2", folders)(CHAIN, draft_noise=has_noise, **options)
    differing = 0
    for seed in range(6):
        draw = Draw(0.9, 1000 + seed)
        sampling = SamplingParams(temperature=draw.temperature, seed=draw.seed, top_k=3)
        slot = runner.add_sequence(
            case.prompt, len(case.prompt), _C.SequenceParams(sampling, max_tokens=64)
        )
        (token,) = step(runner, slot, len(case.prompt) - runner.kv_len(slot), 0)
        _, captured = target_says(case.target, reference.format.captured_layers, case.prompt)
        context = reference.extend(reference.empty(), captured)
        step(runner, slot, 1, num_drafts)
        drawn = draw if has_noise else None
        chain = reference.select(context, token, CHAIN, drawn).tokens
        differing += chain != reference.select(context, token, CHAIN).tokens
        if top_k == 1:
            assert runner.last_drafts() == [chain]
        else:
            tree = reference.grow(context, token, CHAIN, top_k, NODES, drawn)
            paths: list[tuple[int, ...]] = []
            for at, parent in zip(tree.tokens, tree.parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), at))
            check_tree(last_tree(runner), dict(zip(map(str, paths), tree.scores, strict=True)))
        runner.remove_sequence(slot)
    assert (differing > 0) == has_noise


def test_the_noise_is_the_choices(folders: dict[str, Folders]) -> None:
    """The target's own choices come out of the reference's noise."""
    case = CASES["zlab2"]
    runner = drafting("zlab2", folders)(CHAIN)
    logits, _ = forward(*case.target, case.prompt)
    for seed in (3, -4, 1 << 40):
        params = _C.SequenceParams(SamplingParams(temperature=1.5, seed=seed), max_tokens=4)
        slot = runner.add_sequence(case.prompt, len(case.prompt), params)
        noise = [gumbel(seed, len(case.prompt), token) for token in range(logits.shape[-1])]
        expected = int((logits[-1] / 1.5 + torch.tensor(noise)).argmax())
        num_new = len(case.prompt) - runner.kv_len(slot)
        assert step(runner, slot, num_new, 0) == [expected]
        runner.remove_sequence(slot)
