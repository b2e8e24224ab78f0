"""Memory of published models and of heads for them: the engine's own plan, from config.json alone.

Nothing is loaded and no GPU is needed. `bench/make_tables.py` puts the tables into pages.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.random_target import PUBLISHED

from openspec import _C
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import TENSOR_PARALLEL_SIZES, EngineConfig
from openspec.engine.memory import CUDA, DeviceMemory, plan_memory
from openspec.engine.plan import MAX_GRAMMAR_DRAFTS
from openspec.errors import ConfigError
from openspec.specs.head import HeadSpec
from openspec.specs.runner import RunnerConfig

GB = 10**9
NAMES = sorted(
    (name for name, config in PUBLISHED.items() if "num_experts" not in config),
    key=lambda name: not name.startswith("qwen3"),
)
CARDS = (24, 48, 80, 141)
"""Memory of GPUs as it is sold, in GB."""
HEADS = ("qwen3-4b", "qwen3-8b", "llama-3.1-8b")
"""Models for which heads are shown."""
DEFAULTS = EngineConfig(method="none")
DRAFT_VOCAB = 32000
"""Tokens that published EAGLE-3 heads know."""


def model_of(name: str) -> ModelConfig:
    """A published model, from its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED[name]))
        return ModelConfig.from_folder(folder)


def runner_config(model: ModelConfig, num_ranks: int = 1) -> RunnerConfig:
    """What the engine plans for on GPUs with default settings, without drafts."""
    config = DEFAULTS
    num_rows = CUDA.choose_num_rows(None, config.min_num_batched_tokens)
    return RunnerConfig(
        target=model.spec,
        device=CUDA.name,
        dtype=CUDA.choose_dtype(config.dtype),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=num_rows,
        max_num_logits_rows=CUDA.choose_num_logits_rows(config.max_num_seqs, model.vocab_size),
        num_threads=1,
        tensor_parallel_size=num_ranks,
        max_grammar_drafts=MAX_GRAMMAR_DRAFTS,
    )


def with_head(model: ModelConfig, method: str) -> RunnerConfig:
    """The same with a head of published size: EAGLE-3 of one layer, or DFlash of five."""
    layer, config = model.spec.layers[0], runner_config(model)
    is_block = method == "dflash"
    num_drafts = 15 if is_block else 3
    mixer = replace(layer.mixer, has_qk_norm=is_block, has_qkv_bias=False)
    head = HeadSpec(
        layers=(replace(layer, mixer=mixer),) * (5 if is_block else 1),
        rms_norm_eps=1e-6,
        capture_layers=(1, 9, 17, 25, 31) if is_block else (1, 15, 28),
        draft_vocab_size=model.vocab_size if is_block else DRAFT_VOCAB,
        has_embedding=False,
        has_head=not is_block,
        has_token_map=not is_block,
        block_size=num_drafts + 1 if is_block else 0,
        mask_token=0 if is_block else -1,
    )
    num_logits = config.max_num_seqs * (1 + num_drafts)
    return replace(
        config,
        method=method,
        head=head,
        draft_depth=num_drafts,
        max_draft_tokens=num_drafts,
        max_num_logits_rows=CUDA.choose_num_logits_rows(num_logits, model.vocab_size),
    )


def num_kv_tokens(model: ModelConfig, card: int, num_ranks: int = 1) -> int:
    """Tokens that the KV pages hold with `card` GB of memory a rank; 0: the model does not fit."""
    budget = int(card * GB * DEFAULTS.gpu_memory_utilization)
    memory = DeviceMemory(budget_bytes=budget, free_bytes=budget)
    plan = _C.memory_plan(runner_config(model, num_ranks))
    try:
        return plan_memory(DEFAULTS, plan, model.max_model_len, CUDA, memory).num_kv_tokens
    except ConfigError:
        return 0


def shown_name(name: str) -> str:
    """As the hub spells it: "qwen3-0.6b" is Qwen3-0.6B."""
    return re.sub(r"^[a-z]|(?<=-)[ns]|(?<=\d)b\b", lambda found: found[0].upper(), name)


def shown_tokens(number: int) -> str:
    """Thousands."""
    return f"{number // 1000:,} k" if number else "no"


def models() -> list[list[str]]:
    """A row for each model: its weights, KV of a token, tokens of KV on each card."""
    rows = [["model", "weights", "KV of a token", *(f"{card} GB" for card in CARDS)]]
    for name in NAMES:
        model = model_of(name)
        plan = _C.memory_plan(runner_config(model))
        rows.append(
            [
                shown_name(name),
                f"{plan.weight_bytes / GB:.1f} GB",
                f"{plan.page_bytes // DEFAULTS.page_size // 1024} KiB",
                *(shown_tokens(num_kv_tokens(model, card)) for card in CARDS),
            ]
        )
    return rows


def ranks() -> list[list[str]]:
    """A row for each model: weights and tokens of KV, where several GPUs of 80 GB share it."""
    rows = [["model", *(f"T = {num_ranks}" for num_ranks in TENSOR_PARALLEL_SIZES)]]
    for name in NAMES:
        cells, model = dict.fromkeys(TENSOR_PARALLEL_SIZES, ""), model_of(name)
        for num_ranks in cells:
            with contextlib.suppress(ValueError):  # heads or matrices do not divide so
                weights = _C.memory_plan(runner_config(model, num_ranks)).weight_bytes / GB
                tokens = shown_tokens(num_kv_tokens(model, 80, num_ranks))
                cells[num_ranks] = f"{weights:.1f} GB, {tokens}"
        rows.append([shown_name(name), *cells.values()])
    return rows


def heads() -> list[list[str]]:
    """A row for each model and kind of head: what it adds."""
    rows = [["model", "head", "weights and scratch", "more KV of a token"]]
    for name in HEADS:
        model = model_of(name)
        alone = _C.memory_plan(runner_config(model))
        for method, label in (("eagle3", "EAGLE-3, 3 drafts"), ("dflash", "DFlash, 15 drafts")):
            plan = _C.memory_plan(with_head(model, method))
            fixed = plan.draft_fixed_bytes + plan.scratch_bytes - alone.scratch_bytes
            share = plan.page_bytes / alone.page_bytes - 1
            rows.append([shown_name(name), label, f"{fixed / GB:.1f} GB", f"{share:.0%}"])
    return rows
