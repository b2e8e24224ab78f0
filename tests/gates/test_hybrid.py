"""Targets with a running state: the text is plain decoding's, whatever else goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product, repeat
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from openspec import _C
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import load_weights
from openspec.config import EMBEDDED_MODEL
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import ConfigError
from openspec.messages import SamplingParams, SpeculativeOptions
from openspec.specs.runner import RunnerConfig
from openspec.tools.quantize import write_quantized
from tests.gates import harness, hybrid_target
from tests.gates.grammars import KINDS, grammar_core
from tests.gates.harness import Job, Result, make_core, run, run_alone, texts
from tests.gates.workload import jobs

DTYPES = ("bfloat16",) if harness.DEVICE == "cuda" else ("float32", "bfloat16")
BATCHES = ((0, "bfloat16"), (3, "float32"), (15, "bfloat16"))
"""Numbers of drafts and formats that a commit runs."""


@pytest.fixture(autouse=True)
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder()))
    yield


def batch_of(num_jobs: int, kind: str = "mixed") -> list[Job]:
    return [dataclasses.replace(job) for job in jobs(kind, num_jobs)]


EXPECTED: dict[tuple[int, str], list[Result]] = {}


def expected(num_jobs: int, dtype: str = DTYPES[0]) -> list[tuple[list[int], str | None]]:
    """Texts of plain decoding, each job alone."""
    key = (num_jobs, dtype)
    if key not in EXPECTED:
        core = make_core(method="none", enable_prefix_caching=False, dtype=dtype)
        EXPECTED[key] = run_alone(core, batch_of(num_jobs))
    return texts(EXPECTED[key])


class PartlyRightDrafter(_C.Drafter):
    """Knows the plain texts, and is wrong at every so manieth token of a sequence."""

    def __init__(self, num_jobs: int, dtype: str = DTYPES[0], *, wrong: int = 5) -> None:
        super().__init__()
        answers = expected(num_jobs, dtype)
        self._texts = [
            [*job.prompt, *token_ids]
            for job, (token_ids, _) in zip(batch_of(num_jobs), answers, strict=True)
        ]
        self._wrong = wrong

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
        begin = len(token_ids)
        for text in self._texts:
            if text[:begin] == token_ids:
                drafts = text[begin : begin + num_wanted]
                return [
                    token ^ 1 if (begin + i) % self._wrong == 0 else token
                    for i, token in enumerate(drafts)
                ]
        return [7] * num_wanted


class BranchingDrafter(PartlyRightDrafter):
    """Adds a second guess to each, which makes a tree."""

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> Any:
        right = super().propose(slot, token_ids, num_wanted)
        nodes = [(right[0], -1), (7, -1), *((token, 0) for token in right[1:])]
        return nodes[:num_wanted]


def drafted(num_drafts: int, dtype: str = DTYPES[0], **settings: Any) -> EngineCore:
    """An engine with drafts, of which some are right; 0: without."""
    if num_drafts == 0:
        return make_core(method="none", dtype=dtype, **settings)
    return make_core(
        PartlyRightDrafter(16, dtype),
        num_speculative_tokens=num_drafts,
        adaptive_speculation=False,
        dtype=dtype,
        **settings,
    )


@pytest.mark.parametrize(
    ("num_drafts", "dtype"),
    [
        pair if pair in BATCHES else pytest.param(*pair, marks=pytest.mark.full)
        for pair in product((0, 1, 3, 15), DTYPES)
    ],
)
def test_drafts_in_a_batch(num_drafts: int, dtype: str) -> None:
    core = drafted(num_drafts, dtype)
    assert texts(run(core, batch_of(16))) == expected(16, dtype)
    stats = core.stats()
    assert (0 < stats.num_accepted_tokens < stats.num_draft_tokens) is (num_drafts > 0)


@pytest.mark.parametrize(
    "wrong",
    [
        wrong if wrong in (1, 2, 8, 15, 16, 18) else pytest.param(wrong, marks=pytest.mark.full)
        for wrong in range(1, 19)
    ],
)
def test_every_acceptance(wrong: int) -> None:
    """Runs of accepted drafts of each length, at each place of a block."""
    core = make_core(
        PartlyRightDrafter(16, wrong=wrong), num_speculative_tokens=15, adaptive_speculation=False
    )
    assert texts(run(core, batch_of(16))) == expected(16)


def test_trees_become_chains() -> None:
    core = make_core(BranchingDrafter(16), num_speculative_tokens=8, adaptive_speculation=False)
    assert texts(run(core, batch_of(16))) == expected(16)
    assert core.stats().num_accepted_tokens > 0


OTHER_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_min": 1},
    # Made for another target, so that few drafts are right.
    "eagle3": {"draft_model": str(EMBEDDED_MODEL / "eagle3"), "draft_noise": False},
    "dflash": {"draft_model": str(EMBEDDED_MODEL / "dflash")},
}


def with_drafter(method: str, **settings: Any) -> EngineCore:
    return make_core(
        method=method,
        num_speculative_tokens=3,
        adaptive_speculation=False,
        **OTHER_DRAFTERS[method],
        **settings,
    )


@pytest.mark.parametrize("method", OTHER_DRAFTERS)
def test_drafters_that_know_nothing_of_states(method: str) -> None:
    """Greedy and sampled; the second time from cached prefixes, some of other requests."""
    core = with_drafter(method)
    assert texts(run(core, batch_of(16))) == expected(16)
    assert texts(run(core, batch_of(16))) == expected(16)
    assert core.stats().prefix_cache_hits > 0 and core.stats().num_draft_tokens > 0


@pytest.mark.parametrize("method", OTHER_DRAFTERS)
def test_drafters_on_few_pages(method: str) -> None:
    """Preempted, and computed again with what the drafter keeps."""
    memory = pages_with_states(13, 5, lambda: with_drafter(method))
    core = with_drafter(method, kv_cache_memory=memory, max_model_len=200)
    assert texts(run(core, batch_of(16))) == expected(16)
    assert core.stats().num_preemptions > 0


def test_ngram_drafts_of_requests_with_their_own_say() -> None:
    """Draft, no draft, draft."""
    choices = (SpeculativeOptions(), SpeculativeOptions(enabled=False))
    batch = [
        dataclasses.replace(job, speculative=choices[i % 2]) for i, job in enumerate(batch_of(16))
    ]
    core = make_core(method="ngram", ngram_min=1, num_speculative_tokens=4)
    assert texts(run(core, batch)) == expected(16)


def tokens_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(4000), k=num_tokens))


CONTEXT = tokens_of(256)


def rows_of(runner: _C.Runner, chunks: Iterator[int], *, gives_up: bool = False) -> torch.Tensor:
    """Logits of CONTEXT's positions [tokens, vocabulary], computed in such chunks."""
    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=1, num_prompt_logprobs=0)
    slot = runner.add_sequence(CONTEXT, len(CONTEXT), params)
    rows, done = [], 0
    while done < len(CONTEXT):
        count = min(next(chunks), len(CONTEXT) - done)
        for is_last in (False, True) if gives_up else (True,):
            lease = runner.reserve([(slot, count, 0)])
            lease.launch()
            if is_last:
                lease.collect()
                rows.append(torch.tensor(runner.last_logits()))
                lease.commit()
            lease.close()
        done += count
    runner.remove_sequence(slot)
    runner.check_integrity()
    return torch.cat(rows)


def bare_runner(dtype: str) -> _C.Runner:
    """Room for one sequence whose every row has its logits."""
    folder = hybrid_target.folder()
    config = RunnerConfig(
        target=ModelConfig.from_folder(folder).spec,
        device=harness.DEVICE,
        dtype=dtype,
        page_size=16,
        max_num_seqs=2,
        max_model_len=320,
        max_num_batched_tokens=256,
        max_num_logits_rows=256,
        num_threads=harness.NUM_THREADS,
        max_draft_tokens=0,
        max_grammar_drafts=0,
        draft_depth=0,
        method="none",
        method_options={},
        acceptance="match",
        adaptive=False,
        enable_prefix_caching=False,
        cache_key=bytes(16),
    )
    runner = _C.Runner(config, 64)
    load_weights(runner, folder, other_parts={"mtp.": "it drafts"})
    return runner


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row(dtype: str) -> None:
    """The same in chunks of any size, and after steps that were given up."""
    runner = bare_runner(dtype)
    whole = rows_of(runner, repeat(len(CONTEXT)))
    sizes = random.Random(4)
    for chunks in (*map(repeat, (1, 5, 16, 17, 64)), iter(lambda: sizes.randrange(1, 40), 0)):
        assert torch.equal(rows_of(runner, chunks), whole)
    for chunks in map(repeat, (7, 16, 33)):
        assert torch.equal(rows_of(runner, chunks, gives_up=True), whole)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1, 9))
def test_bits_of_a_row_among_others(first: int) -> None:
    """In steps of every number of rows, to 256."""
    runner = bare_runner("bfloat16")
    whole = rows_of(runner, repeat(len(CONTEXT)))
    for num_rows in range(first, len(CONTEXT), 8):
        assert torch.equal(rows_of(runner, repeat(num_rows)), whole)


@pytest.mark.parametrize("num_rows", [33, 97])
@pytest.mark.parametrize("num_drafts", [0, 7])
def test_chunks_beside_others(num_drafts: int, num_rows: int) -> None:
    core = drafted(num_drafts, max_num_batched_tokens=num_rows)
    assert texts(run(core, batch_of(16))) == expected(16)


def pages_with_states(
    num_pages: int, num_states: int, make: Callable[[], EngineCore] = lambda: drafted(0)
) -> int:
    """Bytes of so many pages and of those of so many running states, of such an engine."""
    plan = make().info.memory_plan
    num_base_pages = (plan["sequence_bytes"] - plan["state_bytes"] // 16) // plan["page_bytes"]
    return (num_pages + num_states * num_base_pages) * plan["page_bytes"]


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_preemption(num_drafts: int) -> None:
    """Far too few pages, of which running states take some."""
    core = drafted(num_drafts, kv_cache_memory=pages_with_states(13, 5), max_model_len=200)
    assert texts(run(core, batch_of(16))) == expected(16)
    assert core.stats().num_preemptions > 0


def test_grammars() -> None:
    """Which force drafts of their own, and hold sequences whose masks are not there in time."""
    batch = [
        dataclasses.replace(job, grammar=KINDS[i % len(KINDS)])
        for i, job in enumerate(batch_of(10))
    ]
    plain = texts(run_alone(grammar_core(method="none", enable_prefix_caching=False), batch))
    core = grammar_core(method="ngram", ngram_min=1, num_speculative_tokens=4)
    assert texts(run(core, batch)) == plain
    assert core.stats().num_forced_tokens > 0


def test_cancellation() -> None:
    batch = [
        dataclasses.replace(job, abort_after=(1 + i) if i % 2 else None)
        for i, job in enumerate(batch_of(16))
    ]
    core = drafted(4)
    for job, result, (token_ids, reason) in zip(batch, run(core, batch), expected(16), strict=True):
        is_aborted = result.finish_reason == "abort"
        assert is_aborted or result.text == (token_ids, reason)
        assert not is_aborted or result.token_ids == token_ids[: len(result.token_ids)]
        assert job.abort_after is not None or not is_aborted


@pytest.mark.parametrize(
    ("num_drafts", "page_size"),
    [
        (0, 16),
        (4, 32),
        pytest.param(0, 32, marks=pytest.mark.full),
        pytest.param(4, 16, marks=pytest.mark.full),
    ],
)
def test_prefix_hits(num_drafts: int, page_size: int) -> None:
    """Of prompts, and of answers; then of prefixes whose pages or states made room for others."""
    core = drafted(num_drafts, page_size=page_size)
    batch, plain = batch_of(16), expected(16)
    assert texts(run(core, batch)) == plain
    before = core.stats().prefix_cache_hits
    assert texts(run(core, batch)) == plain
    assert core.stats().prefix_cache_hits > before
    longer = [
        dataclasses.replace(job, prompt=job.prompt + tuple(tokens))
        for job, (tokens, _) in zip(batch, plain, strict=True)
    ]
    alone = make_core(method="none", enable_prefix_caching=False)
    before = core.stats().prefix_cache_hits
    assert texts(run(core, longer)) == texts(run_alone(alone, longer))
    assert core.stats().prefix_cache_hits > before
    core.reset_prefix_cache()
    assert texts(run(core, batch)) == plain


def test_prompts_that_share_their_first_part() -> None:
    """The second one leaves a snapshot where their pages part, and the third one begins there."""
    shared = tokens_of(100)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    batch = [
        Job(prompt=(*shared, 5 + i, *range(9 * i, 9 * i + 30)), sampling=sampling) for i in range(4)
    ]
    plain = texts(run_alone(make_core(method="none", enable_prefix_caching=False), batch))
    core = make_core(method="none")
    hits = []
    for job, expected_text in zip(batch, plain, strict=True):
        before = core.stats().prefix_cache_hits
        assert texts(run(core, [job])) == [expected_text]
        hits.append(core.stats().prefix_cache_hits - before)
    assert hits == [0, 0, 96, 96]


def check_hits(core: EngineCore, batch: list[Job], hits: list[int]) -> None:
    """One after another: so many tokens from the prefix cache each, and the texts of none."""
    alone = make_core(
        method="none", enable_prefix_caching=False, max_model_len=core.info.max_model_len
    )
    found = []
    for job, expected_text in zip(batch, texts(run_alone(alone, batch)), strict=True):
        before = core.stats().prefix_cache_hits
        assert texts(run(core, [job])) == [expected_text]
        found.append(core.stats().prefix_cache_hits - before)
    assert found == hits


def going_on_from(prompt: tuple[int, ...], *lengths: int) -> list[Job]:
    """The prompt itself, then others that share so many of its tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [prompt, *((*prompt[:n], 4000 + i, *range(30)) for i, n in enumerate(lengths))]
    return [Job(prompt=one, sampling=sampling) for one in prompts]


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_hits_around_a_snapshot(num_drafts: int) -> None:
    """Before it, at it, after it; the one before left another one, and others' pages stay."""
    prompt = tokens_of(120)
    batch = going_on_from(prompt, 100, 112, 119, 100, 111)
    check_hits(drafted(num_drafts), batch, [0, 0, 112, 112, 96, 96])


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.full), 4])
def test_hits_in_an_answer(num_drafts: int) -> None:
    """At the end of its last block: its last token was written and never read."""
    job = Job(tokens_of(41), SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True))
    alone = make_core(method="none", enable_prefix_caching=False)
    [(answer, _)] = texts(run_alone(alone, [job]))
    batch = [job, *(dataclasses.replace(job, prompt=(*job.prompt, *answer, n)) for n in (7, 8))]
    check_hits(drafted(num_drafts), batch, [0, 96, 96])


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_snapshot_that_made_room(num_drafts: int) -> None:
    """Its pages are there still; whoever comes leaves another one."""
    batch = [going_on_from(tokens_of(70, seed))[0] for seed in (0, 0, 1, 2, 0, 0)]
    check_hits(drafted(num_drafts, max_num_seqs=1), batch, [0, 64, 0, 0, 0, 64])


@pytest.mark.full
def test_snapshots_within_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk's end from every 8,192nd token on."""
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder(max_position_embeddings=16384)))
    prompt = tokens_of(9000)
    core = make_core(method="none", max_model_len=9100)
    check_hits(core, going_on_from(prompt, 8150, 8192, 8500), [0, 0, 8192, 8192])


def test_prefixes_make_room() -> None:
    """A few sequences' pages, so that snapshots, states and pages go one after another."""
    core = drafted(
        3,
        kv_cache_memory=pages_with_states(16, 3 if harness.DEVICE == "cuda" else 2),
        max_model_len=200,
        max_num_seqs=2,
    )
    for _ in range(3):
        assert texts(run(core, batch_of(16))) == expected(16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 16}, "at most 15 drafts"),
        (
            {"method": "eagle3", "draft_model": str(EMBEDDED_MODEL / "eagle3"), "draft_top_k": 4},
            "chains of drafts, not trees: set draft_top_k to 1",
        ),
        ({"tensor_parallel_size": 2}, "run on one device"),
        ({"page_size": 2}, "raise page_size"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    if harness.DEVICE == "cuda":
        pytest.skip("what a device refuses besides would come first")
    with pytest.raises(ConfigError, match=message):
        make_core(**settings)


def publish(folder: Path, tmp_path: Path) -> Path:
    """Blocks of codes as Qwen publishes them, beside parts in codes that do not run."""
    root = tmp_path / "published"
    shutil.copytree(folder, root)
    tensors = safetensors.torch.load_file(root / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[f"{name}_inv"] = tensors.pop(name).to(torch.bfloat16)
    tensors["mtp.fc.weight"] = torch.ones(128, 128).to(torch.float8_e4m3fn)
    tensors["mtp.fc.weight_scale_inv"] = torch.ones(1, 1)
    safetensors.torch.save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [
            "lm_head",
            "model.visual.merger",
            *(
                name.removesuffix(".weight")
                for name in tensors
                if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight"))
            ),
        ],
    }
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize("wanted", ["fp8", "fp8_per_block"])
def test_weights_in_codes(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made at load, written before, and as published: one text each, with drafts and without."""
    batch = batch_of(4)
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder(nested=True)))
    core = make_core(method="none", quantization=wanted)
    plain = texts(run_alone(core, batch))
    assert plain != expected(16)[:4]
    written = tmp_path / "written"
    write_quantized(hybrid_target.folder(nested=True), written, wanted)
    folders = [written]
    if wanted == "fp8_per_block":
        folders.append(publish(written, tmp_path))
    for folder in folders:
        monkeypatch.setattr(harness, "MODEL", str(folder))
        drafting = make_core(method="ngram", ngram_min=1, num_speculative_tokens=4)
        found = texts(run(drafting, batch))
        if folder == written:
            assert found == plain
        else:  # whose scales are rounded
            assert found == texts(run_alone(make_core(method="none"), batch))


def test_a_model_that_reads_images_as_well(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is that of the text model alone."""
    batch = batch_of(4)
    plain = expected(16)[:4]
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder(nested=True)))
    with caplog.at_level(logging.INFO):
        core = make_core(method="none")
    assert texts(run(core, batch)) == plain
    assert "model.visual.merger.norm.weight is ignored: it reads images" in caplog.text
    assert "7 more are ignored: --method mtp drafts with it" in caplog.text
    assert "(a sequence takes" in caplog.text and "pages with it, and a token" in caplog.text
