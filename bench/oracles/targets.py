"""Target models: logits of transformers' own decoders beside openspec's, on random weights.

Each case has a published config.json with two layers. Widths are the published ones; where the
checkpoint would exceed 3 GB, the vocabulary (and one MLP) is cut, and the result says so.

Float32: the largest error of a row is below 1e-4 of its largest logit. Bfloat16: the error against
float32 is at most that of transformers in bfloat16.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.oracles.case import Case, DiffersError, Sources
from bench.random_target import PUBLISHED, write_random_target

if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_TOKENS, NUM_LAYERS, SEED = 64, 2, 5
MAX_ERROR = 1e-4


def upcast_linears(model: nn.Module) -> None:
    """Float32 arithmetic over bfloat16 weights, a matrix at a time, which spares memory."""
    import torch
    from torch.nn import functional

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):

            def forward(x: Tensor, linear: torch.nn.Linear = module) -> Tensor:
                bias = None if linear.bias is None else linear.bias.float()
                return functional.linear(x, linear.weight.float(), bias)

            module.forward = forward  # type: ignore[method-assign]
        else:  # experts have weights of their own and modules
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()


def logits_of_transformers(folder: Path, token_ids: list[int], *, is_exact: bool) -> Tensor:
    """Of every position [tokens, vocabulary]; exact: in float32, else in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    if is_exact:
        upcast_linears(model)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def logits_of_openspec(
    folder: Path, token_ids: list[int], dtype: str, device: str = "cpu"
) -> Tensor:
    """Logits of every position [len(token_ids), vocab_size], as the engine computes them."""
    import torch

    from openspec import _C
    from openspec.checkpoint.targets.config import ModelConfig
    from openspec.checkpoint.weights import load_weights
    from openspec.drafters import parts_of_targets
    from openspec.messages import SamplingParams
    from openspec.specs.runner import RunnerConfig

    config = RunnerConfig(
        target=ModelConfig.from_folder(folder).spec,
        device=device,
        dtype=dtype,
        page_size=16,
        max_num_seqs=1,
        max_model_len=NUM_TOKENS + 16,
        max_num_batched_tokens=NUM_TOKENS,
        max_num_logits_rows=NUM_TOKENS,
        num_threads=1,
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
    num_pages = NUM_TOKENS // 16 + 1 + _C.memory_plan(config).num_base_pages
    runner = _C.Runner(config, num_pages)
    load_weights(runner, folder, other_parts=parts_of_targets())
    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=1, num_prompt_logprobs=0)
    slot = runner.add_sequence(token_ids, len(token_ids), params)
    lease = runner.reserve([(slot, len(token_ids), 0)])
    lease.launch()
    lease.collect()
    logits = torch.tensor(runner.last_logits())
    lease.commit()
    return logits


def compare(folder: Path, config: dict[str, Any], note: str) -> str:
    """What both compute, in a few words."""
    write_random_target(folder, config, SEED)
    numbers = random.Random(SEED)
    token_ids = [numbers.randrange(config["vocab_size"]) for _ in range(NUM_TOKENS)]
    truth = logits_of_transformers(folder, token_ids, is_exact=True)

    def rms_error(found: Tensor) -> float:
        return float(((found - truth).square().mean() / truth.square().mean()).sqrt())

    found = logits_of_openspec(folder, token_ids, "float32")
    worst = float(((found - truth).abs().amax(-1) / truth.abs().amax(-1)).max())
    theirs = rms_error(logits_of_transformers(folder, token_ids, is_exact=False))
    ours = rms_error(logits_of_openspec(folder, token_ids, "bfloat16"))
    said = f"fp32 logits within {worst:.0e}, bf16 error {ours / theirs:.2f} of transformers'"
    if worst >= MAX_ERROR or ours > theirs:
        raise DiffersError(said)
    return f"{said}; {note}"


def target_case(name: str, shape: str, note: str = "", **changes: Any) -> Case:
    """A family that is read, by a published shape."""
    config = {**PUBLISHED[shape], "num_hidden_layers": NUM_LAYERS, "eos_token_id": 2, **changes}
    if "vocab_size" in changes:
        note = f"{note}{changes['vocab_size']} tokens, "
    note = f"{note}{NUM_LAYERS} layers of {shape}"

    def run(folder: Path, _sources: Sources) -> str:
        return compare(folder, config, note)

    return Case(kind="target", format=name, oracle="transformers", run=run)


def refused_case(name: str, model_type: str, **changes: Any) -> Case:
    """A family that is refused: config.json as transformers writes it."""

    def run(folder: Path, _sources: Sources) -> str:
        from transformers import AutoConfig

        from openspec.checkpoint.targets.config import ModelConfig
        from openspec.checkpoint.targets.refusals import SUPPORTED
        from openspec.errors import ConfigError

        AutoConfig.for_model(model_type, **changes).save_pretrained(folder)
        try:
            ModelConfig.from_folder(folder)
        except ConfigError as error:
            return str(error).split("; ", 1)[1].removesuffix(f"; {SUPPORTED}")
        raise DiffersError("it is read")

    return Case(kind="target", format=name, reading="refused", oracle="none", run=run)


CASES = (
    target_case("Llama 3.0", "llama-3-8b", vocab_size=16384),
    target_case("Llama 3.1", "llama-3.1-8b", vocab_size=16384),
    target_case("Llama 3.2 (tied, head_dim 64)", "llama-3.2-1b"),
    target_case(
        "Llama 3.3 (70B's shape)",
        "llama-3.3-70b",
        "half the MLP, ",
        vocab_size=4096,
        intermediate_size=14336,
    ),
    target_case("Qwen2.5 (tied, bias)", "qwen2.5-0.5b"),
    target_case("Qwen2.5 (untied, bias)", "qwen2.5-7b", vocab_size=16384),
    target_case("Mistral 7B v0.3", "mistral-7b-v0.3"),
    target_case("Mistral Nemo", "mistral-nemo-12b", vocab_size=16384),
    target_case("Mistral Small 24B", "mistral-small-24b", vocab_size=8192),
    target_case("Qwen3 (tied)", "qwen3-4b", vocab_size=16384),
    target_case("Qwen3 (untied)", "qwen3-8b", vocab_size=16384),
    target_case("Qwen3 MoE", "qwen3-30b-a3b", "32 experts, ", vocab_size=16384, num_experts=32),
    refused_case("Mixtral", "mixtral"),
    refused_case("Qwen2 MoE", "qwen2_moe"),
    refused_case("Qwen3-Next", "qwen3_next"),
    refused_case("gpt-oss", "gpt_oss"),
    refused_case("Mistral 7B v0.1", "mistral", sliding_window=4096),
    refused_case("Ministral 8B", "ministral"),
    refused_case("Ministral 3", "ministral3"),
    refused_case("Mistral Small 3.1 and newer", "mistral3"),
    refused_case("Llama with biases", "llama", attention_bias=True),
    refused_case("4-bit weights", "llama", quantization_config={"quant_method": "awq"}),
    refused_case("Gemma 2", "gemma2"),
    refused_case("Qwen2.5-VL", "qwen2_5_vl"),
    refused_case("Phi 3", "phi3"),
)
