"""A target that ranks share writes the text of one rank, and has its logits bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.random_target import PUBLISHED, write_random_target

from openspec import _C
from openspec.config import EMBEDDED_MODEL
from openspec.drafters import available_drafters
from openspec.errors import ConfigError
from openspec.messages import SamplingParams
from tests.gates import harness, other_targets
from tests.gates.conftest import (
    PARTS_OF_VOCABULARY,
    PYTHON_DRAFTERS,
    SELECTORS,
    STRANGER,
    VARIANTS,
    Reference,
    drafter_settings,
)
from tests.gates.grammars import KINDS, grammar_core, grammar_jobs, plain, tokens
from tests.gates.harness import Job, kv_memory, make_core, run, texts
from tests.gates.pairs import EMBEDDED
from tests.gates.test_faults import STAGES, Fault
from tests.gates.test_logits import Subject, assert_same_bits
from tests.gates.workload import jobs
from tests.heads.formats import (
    Block,
    Sizes,
    dflash_zlab,
    eagle3_classic,
    eagle3_deepspec,
    markov_tensors,
)
from tests.heads.seeded import drawn, write
from tests.heads.untrained import GAINS, ONES

FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""
SIZES = Sizes(
    hidden=128,
    mlp=300,  # splits of one and of two units, the last one not whole
    q_heads=8,
    kv_heads=2,
    head_dim=32,
    vocab=4100,  # ranks' columns of the logits are not alike
    draft_vocab=4100,
    target_layers=3,
)
"""A target that eight ranks can share."""

FULL = pytest.mark.full
FEW_DRAFTERS = ("ngram", "eagle3 tree")
"""A commit runs all in `test_crowded`, and these in the other gates."""
DRAFTERS_OF_RANKS = [
    name
    for name in (*available_drafters(), *VARIANTS, *PYTHON_DRAFTERS)
    if name not in PARTS_OF_VOCABULARY
]
EACH_DRAFTER = [
    name if name in FEW_DRAFTERS else pytest.param(name, marks=FULL) for name in DRAFTERS_OF_RANKS
]


ON_GPUS = (
    "test_crowded",
    "test_copies",
    "test_faults",
    "test_prefix_hits_in_bfloat16",
    "test_grammars",
    "test_log_probabilities",
)
"""Of targets that CUDA computes, in numbers of ranks that are given."""


@pytest.fixture(autouse=True)
def a_device_for_each_rank(request: pytest.FixtureRequest) -> None:
    if harness.DEVICE == "cpu":
        return
    if request.function.__name__ not in ON_GPUS:
        pytest.skip("for ranks on CPU threads")
    num_ranks = request.node.callspec.params["num_ranks"]
    if num_ranks > len(_C.cuda_device_names()):
        pytest.skip(f"needs {num_ranks} CUDA devices")


def new_folder() -> Path:
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="openspec-"))
    return Path(FOLDERS[-1].name)


@cache
def eight_heads(num_kv_heads: int, name: str = "qwen3-0.6b", vocab_size: int = SIZES.vocab) -> Path:
    """A random target of that family's switches."""
    changes = {
        "hidden_size": SIZES.hidden,
        "num_hidden_layers": SIZES.target_layers,
        "num_attention_heads": SIZES.q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": SIZES.head_dim,
        "intermediate_size": SIZES.mlp,
        "vocab_size": vocab_size,
        "eos_token_id": 2,
    }
    return write_random_target(new_folder(), PUBLISHED[name] | changes)


@cache
def head(method: str) -> Path:
    """One for it. Those that draft blocks read its embedding and its LM head, which ranks share."""
    if method == "draft_model":
        return with_tokenizer(eight_heads(8))
    given = {}
    if method == "eagle3":
        config, shapes = eagle3_deepspec(SIZES, [0, 1, 2])
    elif method == "peagle":
        captured = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        config, shapes = eagle3_classic(SIZES, eagle_config=captured)
        config |= {"parallel_drafting": True, "ptd_token_id": 271}
        shapes["mask_hidden"] = [1, 1, 3 * SIZES.hidden]
        given = {name: torch.zeros(SIZES.vocab, dtype=torch.int64) for name in SIZES.token_map()}
        given["t2d"] = torch.ones(SIZES.vocab, dtype=torch.bool)
    else:
        block = Block(num_layers=2, mask=271, outputs=[0, 2])
        config, shapes = dflash_zlab(SIZES, block, 8)
    if method == "dspark":
        config["markov_rank"] = 16
        shapes |= markov_tensors(SIZES, 16)
    return write(new_folder(), (config, drawn(shapes, 0, GAINS, ONES, given)))


def with_tokenizer(folder: Path) -> Path:
    """The folder, with the embedded model's: a draft model is compared with its target by it."""
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", folder)
    return folder


def crowded(name: str, num_ranks: int) -> dict[str, Any]:
    """Prompts in chunks, far too few pages, and drafts at every step."""
    settings = drafter_settings(name) | {
        "adaptive_speculation": False,
        "tensor_parallel_size": num_ranks,
    }
    if name in PARTS_OF_VOCABULARY:  # which ranks do not share
        settings["draft_vocab_size"] = 0
    limits = {"max_num_batched_tokens": 48, "max_model_len": 200}
    return settings | limits | {"kv_cache_memory": kv_memory(14, **settings)}


@pytest.mark.by_turns
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_crowded(drafter_name: str, target_name: str, num_ranks: int, reference: Reference) -> None:
    """Chunks, preemptions, and requests that are called off."""
    if target_name in other_targets.ON_ONE_RANK:
        pytest.skip("runs on one rank")
    batch = jobs("mixed", 12)
    leaving = [
        dataclasses.replace(job, abort_after=2 + i) if i % 4 == 3 else job
        for i, job in enumerate(batch)
    ]
    core = make_core(**crowded(drafter_name, num_ranks))
    for job, found, expected in zip(leaving, run(core, leaving), reference(batch), strict=True):
        if job.abort_after is None:
            assert found.text == expected.text
        else:
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    stats = core.stats()
    assert stats.num_preemptions > 0
    # Heads with a selector are random: they guess what other targets say by luck only.
    is_lucky = drafter_name in SELECTORS and target_name != EMBEDDED
    if drafter_name not in ("none", "(garbage)", STRANGER) and not is_lucky:
        assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=FULL)])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", EACH_DRAFTER)
def test_faults(name: str, stage: str, num_ranks: int, reference: Reference) -> None:
    core = make_core(**drafter_settings(name), tensor_parallel_size=num_ranks)
    fault = Fault(core, stage, every=3)
    batch = jobs("mixed", 4)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_step_failures == fault.num_raised > 3


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=FULL), 4])
@pytest.mark.parametrize("name", EACH_DRAFTER)
def test_prefix_hits_in_bfloat16(name: str, num_ranks: int) -> None:
    batch = jobs("mixed", 6)
    plain_texts = texts(run(make_core(method="none", dtype="bfloat16"), batch))
    settings = drafter_settings(name) | {"dtype": "bfloat16"}
    core = make_core(**settings, tensor_parallel_size=num_ranks)
    assert texts(run(core, batch)) == plain_texts
    before = core.stats().prefix_cache_hits
    assert texts(run(core, batch)) == plain_texts
    assert core.stats().prefix_cache_hits > before


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=FULL), 4])
@pytest.mark.parametrize(
    ("name", "grammar"),
    [
        pytest.param(name, grammar, marks=() if name == "eagle3 tree" else FULL)
        for name in DRAFTERS_OF_RANKS
        for grammar in KINDS
    ],
)
def test_grammars(name: str, grammar: str, num_ranks: int) -> None:
    batch = grammar_jobs(grammar, "mixed", 3)
    core = grammar_core(**drafter_settings(name), tensor_parallel_size=num_ranks)
    assert texts(run(core, batch)) == texts(plain(batch))


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["eagle3", "eagle3 tree", "draft_model", "draft_model tree"])
def test_copies(name: str, num_ranks: int, reference: Reference) -> None:
    """Of the text's own past, and of answers, beside chains and trees."""
    batch = jobs("mixed", 8, 60)
    settings = drafter_settings(name) | {"adaptive_speculation": False, "draft_memory": 1 << 18}
    core = make_core(**settings, tensor_parallel_size=num_ranks)
    assert texts(run(core, batch)) == texts(reference(batch))
    num_first = core.stats().num_accepted_copied_tokens
    assert num_first > 0
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_accepted_copied_tokens > 2 * num_first


@pytest.mark.parametrize("num_threads", [3, 6, pytest.param(16, marks=FULL)])
def test_threads(num_threads: int, reference: Reference) -> None:
    """Fewer than ranks, more, which are not shared out evenly, and many."""
    batch = jobs("mixed", 4)
    core = make_core(method="ngram", tensor_parallel_size=4, num_threads=num_threads)
    assert texts(run(core, batch)) == texts(reference(batch))


# ---- Eight ranks --------------------------------------------------------------------------------

DRAFTERS = (
    "ngram",
    "eagle3",
    "eagle3 tree",
    "peagle",
    "dflash",
    "dflash tree",
    "dspark",
    "dspark tree",
    "draft_model",
)
"""A commit runs the first, a tree, and one that reads the target's LM head."""


def on_eight_heads(name: str, num_kv_heads: int = 2) -> dict[str, Any]:
    """Settings of a drafter for the target of eight heads that drafts at every step."""
    method, _, is_tree = name.partition(" ")
    target = with_tokenizer(eight_heads(num_kv_heads))
    settings: dict[str, Any] = {"model": str(target), "method": method}
    if method != "ngram":
        settings["draft_model"] = str(head(method))
    if is_tree:
        settings["draft_top_k"] = 4
    return settings | {"num_speculative_tokens": 4, "adaptive_speculation": False}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("ngram", "eagle3 tree", "dflash") else pytest.param(name, marks=FULL)
        for name in DRAFTERS
    ],
)
@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks"),
    [(2, 8), *(pytest.param(*each, marks=FULL) for each in ((2, 4), (8, 4), (8, 8)))],
)
def test_eight_heads(name: str, num_kv_heads: int, num_ranks: int) -> None:
    batch = jobs("mixed", 8)
    expected = run(make_core(model=str(eight_heads(num_kv_heads)), method="none"), batch)
    settings = on_eight_heads(name, num_kv_heads) | {"max_num_batched_tokens": 64}
    core = make_core(**settings, tensor_parallel_size=num_ranks)
    assert texts(run(core, batch)) == texts(expected)
    before = core.stats().prefix_cache_hits
    assert texts(run(core, batch)) == texts(expected)
    assert core.stats().prefix_cache_hits > before
    assert core.stats().num_draft_tokens > 0


@pytest.mark.parametrize("stage", ["reserve", *(pytest.param(s, marks=FULL) for s in STAGES[1:])])
@pytest.mark.parametrize("name", ["eagle3 tree", pytest.param("dspark", marks=FULL)])
def test_eight_ranks_with_few_pages_and_faults(name: str, stage: str) -> None:
    batch = jobs("mixed", 10)
    expected = run(make_core(model=str(eight_heads(2)), method="none"), batch)
    settings = on_eight_heads(name) | {"tensor_parallel_size": 8, "max_model_len": 200}
    core = make_core(**settings, kv_cache_memory=kv_memory(14, **settings))
    fault = Fault(core, stage, every=5)
    assert texts(run(core, batch)) == texts(expected)
    assert core.stats().num_step_failures == fault.num_raised > 3
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "grammar", [kind if kind == "regex" else pytest.param(kind, marks=FULL) for kind in KINDS]
)
def test_eight_ranks_with_grammars(grammar: str) -> None:
    batch = grammar_jobs(grammar, "mixed", 3)
    _, vocab_size, _ = tokens()
    folder = str(eight_heads(2, vocab_size=vocab_size))
    expected = run(grammar_core(model=folder, method="none"), batch)
    assert all(job.token_ids for job in expected)
    settings = on_eight_heads("ngram") | {"model": folder, "tensor_parallel_size": 8}
    assert texts(run(grammar_core(**settings), batch)) == texts(expected)


# ---- Logits, log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_ranks", "dtype"),
    [
        pytest.param(EMBEDDED, 2, "float32", marks=FULL),
        (EMBEDDED, 4, "float32"),
        (EMBEDDED, 2, "bfloat16"),
        pytest.param(EMBEDDED, 4, "bfloat16", marks=FULL),
        ("qwen3-0.6b", 8, "float32"),
        pytest.param("qwen3-0.6b", 8, "bfloat16", marks=FULL),
        ("qwen2.5-0.5b", 8, "bfloat16"),  # with biases
    ],
)
def test_logits_have_the_bits_of_one_rank(name: str, num_ranks: int, dtype: str) -> None:
    """And of its layers' outputs, in steps of 1 to 64 rows."""
    folder = EMBEDDED_MODEL if name == EMBEDDED else eight_heads(2, name)
    prompt = [300 + 7 * i % 3000 for i in range(90)]
    whole = Subject(folder, dtype).score(prompt, len(prompt))
    assert np.isfinite(whole.logits).all()
    shared = Subject(folder, dtype, tensor_parallel_size=num_ranks)
    for chunks in ((1,), (2, 3, 64), (5, 16, 1), (33,), (90,)):
        assert_same_bits(shared.score(prompt, *chunks), whole)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=FULL), 4])
@pytest.mark.parametrize("name", EACH_DRAFTER)
def test_log_probabilities(name: str, num_ranks: int) -> None:
    """Of the prompt and of the answer, with the best beside them."""
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=5, prompt_logprobs=3)
    batch = [Job(prompt=job.prompt, sampling=sampling) for job in jobs("greedy", 3)]
    settings = drafter_settings(name)
    one, all_ranks = (
        run(make_core(**settings, tensor_parallel_size=n), batch) for n in (1, num_ranks)
    )
    assert texts(one) == texts(all_ranks)
    assert [job.logprobs for job in one] == [job.logprobs for job in all_ranks]
    assert [job.prompt_logprobs for job in one] == [job.prompt_logprobs for job in all_ranks]
    assert all(job.prompt_logprobs for job in one)


# ---- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        ({"num_attention_heads": 28, "num_key_value_heads": 4}, 8, "divide the model's 28 query"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "the model's 3 KV heads"),
        ({"intermediate_size": 128}, 8, "down_proj allows, which has sums of 4 parts; choose 4"),
        ({"vocab_size": 250}, 8, "needs at least 256 tokens, the model has 250"),
    ],
)
def test_what_ranks_cannot_share(changes: dict[str, int], num_ranks: int, reason: str) -> None:
    folder = eight_heads(2)
    config = json.loads((folder / "config.json").read_text()) | changes
    other = new_folder()
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason) as raised:
        make_core(model=str(other), method="none", tensor_parallel_size=num_ranks)
    assert str(num_ranks) in str(raised.value)


def test_only_powers_of_two() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1, 2, 4 or 8, got 3"):
        make_core(tensor_parallel_size=3)


def test_a_rank_has_its_part_of_the_memory() -> None:
    one, four = (make_core(method="none", tensor_parallel_size=n).info.memory_plan for n in (1, 4))
    assert four["page_bytes"] == one["page_bytes"]  # the only KV head lies on every rank
    assert four["weight_bytes"] < 0.6 * one["weight_bytes"]
    assert four["available_bytes"] < 0.5 * one["available_bytes"]
