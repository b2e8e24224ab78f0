"""Logits and layer outputs against transformers on the same checkpoint.

Float32: the largest error of a row is below 1e-4 of its largest logit, in prefill and in decode.
Bfloat16: the error against float32 is at most that of transformers in bfloat16. And a row's numbers
do not depend on how its tokens were cut into steps, bit for bit.

In bfloat16 a row of a mixture of experts may go to another expert than in float32, and is far off
from there on, as are rows after it. So each layer of a mixture is compared alone, with what our
layer before gave as input of all three; rows are left out whose choice is near, and listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.random_target import PUBLISHED, write_random_target

import openspec
from openspec import _C
from openspec.checkpoint.quantization.weight_format import WeightFormat
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import load_weights
from openspec.messages import SamplingParams
from openspec.specs.runner import RunnerConfig
from openspec.text.tokenizer import Tokenizer
from tests.gates import harness

transformers = harness.imported("transformers")

EMBEDDED = Path(openspec.__file__).parent / "models" / "tiny"
PROMPT_TOKENS = 73  # neither a multiple of the page nor of a chunk
DECODE_TOKENS = 12
MAX_LEN = 272
MAX_ROWS = 256  # of a step
MAX_ERROR = 1e-4
CHUNKS = (1, 7, 16, 64, PROMPT_TOKENS)

RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "untied-yarn": {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 168,
        "vocab_size": 515,
        "tie_word_embeddings": False,
        "max_position_embeddings": 160,
        # Positions beyond the trained 40, so that all three parts of the ramp matter.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
        },
    },
    "multi-head": {  # as many key heads as query heads, wider heads than hidden / heads
        "hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 100,
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "linear-rope": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "intermediate_size": 32,
        "vocab_size": 257,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}


def scaled(name: str, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    """A published config.json with few layers, heads and tokens; the switches stay as they are."""
    config = {
        **PUBLISHED[name],
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * 32,
        "intermediate_size": 168,
        "vocab_size": 515,
        "eos_token_id": 2,
        **changes,
    }
    return {key: value for key, value in config.items() if value != "absent"}


# Beyond the trained 40 positions, so that all three kinds of frequency matter.
LLAMA3 = PUBLISHED["llama-3.1-8b"]["rope_scaling"] | {"original_max_position_embeddings": 40}
LLAMA3_ROPE = {"rope_scaling": LLAMA3, "rope_theta": 500.0}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 72}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3": scaled("llama-3-8b", 4, 1),
    "llama-3.1": scaled("llama-3.1-8b", 4, 1, **LLAMA3_ROPE),
    "llama-3.2": scaled("llama-3.2-1b", 4, 1, hidden_size=256, **LLAMA3_ROPE),
    "llama-3.3": scaled("llama-3.3-70b", 8, 1, **LLAMA3_ROPE),
    "mistral-7b": scaled("mistral-7b-v0.3", 8, 2),
    "mistral-nemo": scaled("mistral-nemo-12b", 4, 2, hidden_size=160),
    "mistral-small": scaled("mistral-small-24b", 4, 1, hidden_size=160),
    "qwen2.5-tied": scaled("qwen2.5-0.5b", 7, 1),
    "qwen2.5": scaled("qwen2.5-14b", 5, 1),
    "qwen3-moe": scaled("qwen3-30b-a3b", 4, 2, head_dim=32, num_experts=16, **EXPERTS),
    # Weights as they are, and a layer without experts.
    "qwen3-moe-mixed": scaled(
        "qwen3-30b-a3b",
        4,
        2,
        head_dim=64,
        num_experts=5,
        mlp_only_layers=[0],
        norm_topk_prob="absent",
        **EXPERTS | {"num_experts_per_tok": 3},
    ),
}
NEAR_STEPS = 4
"""A choice is near if the last chosen expert's logit is at most so many steps of bfloat16 above the
next one's: one for rounding them, the others for what attention before the router rounds."""
LEFT_TO_FULL = ("llama-3", "llama-3.1", "llama-3.3", "mistral-7b", "mistral-small", "qwen2.5-tied")
"""Their switches show in the others too."""
MODELS = [
    pytest.param(name, marks=pytest.mark.full if name in LEFT_TO_FULL else ())
    for name in ("embedded", *RANDOM_MODELS, *FAMILIES)
]


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one token sequence."""

    logits: np.ndarray  # [num_tokens, vocab_size]
    layers: np.ndarray  # [num_layers, num_tokens, hidden_size]: the residual stream after each
    # Of layers of experts, [num_tokens]: by how much the last chosen one's logit is above the
    # next one's, in steps of bfloat16 at the row's greatest logit.
    margins: dict[int, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A checkpoint, a token sequence, and the float32 truth about it."""

    folder: Path
    token_ids: list[int]
    truth: Reference


def choice_margins(logits: Any, top_k: int) -> np.ndarray:
    best = logits.float().topk(top_k + 1).values
    step = 2.0 ** (logits.float().abs().amax(-1).log2().floor() - 7)
    margins: np.ndarray = ((best[:, -2] - best[:, -1]) / step).numpy()
    return margins


def reference(
    folder: Path, token_ids: Sequence[int], dtype: Any, given: np.ndarray | None = None
) -> Reference:
    """`given`: what the layers are to have made, where the next layer reads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    layers: list[Any] = []
    margins: dict[int, np.ndarray] = {}

    def keep(_module: object, _inputs: object, output: Any) -> None:
        layers.append(
            (output[0] if isinstance(output, tuple) else output).float().reshape(len(token_ids), -1)
        )

    def keep_margins(gate: Any, inputs: Any, _output: object) -> None:
        logits = torch.nn.functional.linear(inputs[0], gate.weight)
        margins[len(layers)] = choice_margins(logits, model.config.num_experts_per_tok)

    def give(_module: object, inputs: Any) -> Any:
        if given is None or not layers:
            return inputs
        return torch.from_numpy(given[len(layers) - 1])[None].to(dtype), *inputs[1:]

    # hidden_states would give the last layer's output after the final norm.
    for layer in model.model.layers:
        layer.register_forward_pre_hook(give)
        layer.register_forward_hook(keep)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(keep_margins)
    model.model.norm.register_forward_pre_hook(give)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0].float()
    return Reference(logits.numpy(), torch.stack(layers).numpy(), margins)


def make_random_model(folder: Path, settings: dict[str, Any]) -> Path:
    torch.manual_seed(7)
    config = transformers.Qwen3Config(**settings)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones otherwise, which hides a norm that is left out
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 1.2 / weight.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    num_tokens = PROMPT_TOKENS + DECODE_TOKENS
    if request.param == "embedded":
        folder = EMBEDDED
        text = (
            "Natalia sold clips to 48 of her friends in April, and then she sold half as many "
            "clips in May. How many clips did Natalia sell altogether in April and May?\n"
            "def add(a, b):\n    return a + b\n" * 3
        )
        token_ids = Tokenizer.from_folder(folder).encode(text)[:num_tokens]
    else:
        folder = tmp_path_factory.mktemp("model")
        settings = FAMILIES.get(request.param) or RANDOM_MODELS[request.param]
        if request.param in FAMILIES:
            write_random_target(folder, settings)
        else:
            make_random_model(folder, settings)
        rng = np.random.default_rng(3)
        token_ids = rng.integers(0, settings["vocab_size"], num_tokens).tolist()
    assert len(token_ids) == num_tokens
    return Case(folder, token_ids, reference(folder, token_ids, torch.float32))


@dataclass(frozen=True)
class Rows:
    """What the runner computed, a row per token."""

    logits: np.ndarray  # [num_rows, vocab_size]
    layers: np.ndarray  # [num_layers, num_rows, hidden_size]


class Subject:
    """A runner with the checkpoint loaded, all layers captured."""

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        num_threads: int = 2,
        device: str = "cpu",
        tensor_parallel_size: int = 1,
        weight_format: WeightFormat | None = None,
    ) -> None:
        config = ModelConfig.from_folder(folder)
        weights = weight_format or WeightFormat()
        self.num_layers = config.num_layers
        self.runner = _C.Runner(
            RunnerConfig(
                target=dataclasses.replace(config.spec, quantized=weights.quantized),
                device=device,
                dtype=dtype,
                page_size=16,
                max_num_seqs=4,
                max_model_len=MAX_LEN,
                max_num_batched_tokens=MAX_ROWS,
                max_num_logits_rows=MAX_ROWS,
                num_threads=num_threads,
                tensor_parallel_size=tensor_parallel_size,
                max_draft_tokens=0,
                max_grammar_drafts=0,
                draft_depth=0,
                method="none",
                method_options={},
                acceptance="match",
                adaptive=False,
                enable_prefix_caching=False,
                cache_key=bytes(16),
            ),
            64,
        )
        load_weights(self.runner, folder, weight_format=weights)
        self.runner.set_capture(range(config.num_layers))

    def add(self, token_ids: Sequence[int], **params: Any) -> int:
        return self.runner.add_sequence(
            token_ids,
            len(token_ids),
            _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=DECODE_TOKENS, **params),
        )

    def add_scored(self, token_ids: Sequence[int]) -> int:
        """A sequence whose every row scores: that is what prompt log-probabilities need."""
        return self.add(token_ids, num_prompt_logprobs=0)

    def step(self, *spans: tuple[int, int]) -> Rows:
        """One committed step over (slot, number of tokens)."""
        lease = self.runner.reserve([(slot, num_new, 0) for slot, num_new in spans])
        lease.launch()
        lease.collect()
        logits = np.array(self.runner.last_logits(), dtype=np.float32)
        captured = np.array(self.runner.captured(), dtype=np.float32)
        lease.commit()
        self.runner.check_integrity()
        layers = captured.reshape(len(captured), self.num_layers, -1).transpose(1, 0, 2)
        return Rows(logits, layers)

    def score(self, token_ids: Sequence[int], *chunks: int) -> Rows:
        """A whole sequence in chunks of these lengths, the last one repeated to the end."""
        slot = self.add_scored(token_ids)
        parts: list[Rows] = []
        num_left = len(token_ids)
        while num_left > 0:
            chunk = min(chunks[min(len(parts), len(chunks) - 1)], num_left)
            parts.append(self.step((slot, chunk)))
            assert len(parts[-1].logits) == parts[-1].layers.shape[1] == chunk
            num_left -= chunk
        self.runner.remove_sequence(slot)
        return join(parts)


def join(parts: Sequence[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.layers for part in parts], axis=1),
    )


def assert_same_bits(found: Rows, expected: Rows) -> None:
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_array_equal(found.layers, expected.layers)


def split(rows: Rows, lengths: Sequence[int]) -> list[Rows]:
    ends = np.cumsum(lengths)[:-1]
    return [
        Rows(*both)
        for both in zip(np.split(rows.logits, ends), np.split(rows.layers, ends, 1), strict=True)
    ]


def check_company(subject: Subject, token_ids: Sequence[int], whole: Rows) -> None:
    """Three sequences in one step: chunks of different lengths beside single rows.

    Then four, with as many rows as a step has at most.
    """
    slots = [subject.add_scored(token_ids) for _ in range(3)]
    plans = ([40, 1, 1, 43], [1, 64, 10, 10], [7, 7, 1, 70])
    parts: list[list[Rows]] = [[], [], []]
    for lengths in zip(*plans, strict=True):
        rows = subject.step(*zip(slots, lengths, strict=True))
        for part, own in zip(parts, split(rows, lengths), strict=True):
            part.append(own)
    for slot, part in zip(slots, parts, strict=True):
        assert_same_bits(join(part), whole)
        subject.runner.remove_sequence(slot)
    num_tokens = len(token_ids)
    lengths = (num_tokens, num_tokens, num_tokens, MAX_ROWS - 3 * num_tokens)
    slots = [subject.add_scored(token_ids) for _ in lengths]
    for own in split(subject.step(*zip(slots, lengths, strict=True)), lengths):
        count = len(own.logits)
        assert_same_bits(own, Rows(whole.logits[:count], whole.layers[:, :count]))
    for slot in slots:
        subject.runner.remove_sequence(slot)


def worst_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Over all rows: the largest error, relative to the row's largest value."""
    return float((np.abs(found - truth).max(-1) / np.abs(truth).max(-1)).max())


def rms_error(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2)))


def check_bfloat16(subject: Subject, folder: Path, token_ids: Sequence[int]) -> None:
    """Our errors are no larger than transformers', in every layer and in the logits of three texts.

    One text's logits have too few errors to tell: from text to text the ratio differs by a fifth.
    """
    shuffled = np.random.default_rng(5).permutation(token_ids).tolist()
    texts = [list(token_ids), list(token_ids)[::-1], shuffled]
    ours, theirs = zip(*(errors_in_bfloat16(subject, folder, text) for text in texts), strict=True)
    assert np.mean(np.square(ours)) <= np.mean(np.square(theirs)), (ours, theirs)


def errors_in_bfloat16(
    subject: Subject, folder: Path, token_ids: Sequence[int]
) -> tuple[float, float]:
    """Of a text's logits, ours first. Our errors are no larger in every layer."""
    ours = subject.score(token_ids, len(token_ids))
    truth = reference(folder, token_ids, torch.float32)
    given = ours.layers if truth.margins else None
    if given is not None:
        truth = reference(folder, token_ids, torch.float32, given)
    theirs = reference(folder, token_ids, torch.bfloat16, given)
    triples = zip(ours.layers, theirs.layers, truth.layers, strict=True)
    for index, (our_layer, their_layer, true_layer) in enumerate(triples):
        rows = np.full(len(true_layer), True)
        if index in truth.margins:
            rows = truth.margins[index] > NEAR_STEPS
            near = [f"row {i}: {truth.margins[index][i]:.1f} steps" for i in np.flatnonzero(~rows)]
            print(f"layer {index}: {len(near)} of {len(rows)} choices are near", *near, sep="\n")
            assert len(near) < len(rows) / 3
            # One that went elsewhere would be far off.
            errors = np.linalg.norm(our_layer - true_layer, axis=-1)
            errors /= np.linalg.norm(true_layer, axis=-1)
            assert errors[rows].max() < 4 * np.median(errors), f"layer {index}"
        our_error, their_error = (
            rms_error(one[rows], true_layer[rows]) for one in (our_layer, their_layer)
        )
        assert our_error <= their_error * 1.05, f"layer {index}"
    return rms_error(ours.logits, truth.logits), rms_error(theirs.logits, truth.logits)


@pytest.fixture(scope="module")
def subject(case: Case) -> Subject:
    return Subject(case.folder)


@pytest.fixture(scope="module")
def whole(case: Case, subject: Subject) -> Rows:
    return subject.score(case.token_ids, len(case.token_ids))


def test_prefill_logits(case: Case, whole: Rows) -> None:
    assert worst_error(whole.logits, case.truth.logits) < MAX_ERROR


def test_layer_outputs(case: Case, whole: Rows) -> None:
    assert whole.layers.shape == case.truth.layers.shape
    for found, truth in zip(whole.layers, case.truth.layers, strict=True):
        assert worst_error(found, truth) < MAX_ERROR


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_change_no_bit(case: Case, subject: Subject, whole: Rows, chunk: int) -> None:
    assert_same_bits(subject.score(case.token_ids, chunk), whole)
    assert_same_bits(subject.score(case.token_ids, chunk, 1), whole)


def test_threads_change_no_bit(case: Case, whole: Rows) -> None:
    for num_threads in (1, 3):
        other = Subject(case.folder, num_threads=num_threads)
        assert_same_bits(other.score(case.token_ids, 50), whole)


def test_company_changes_no_bit(case: Case, subject: Subject, whole: Rows) -> None:
    check_company(subject, case.token_ids, whole)


def test_greedy_decode(case: Case, subject: Subject) -> None:
    prompt = case.token_ids[:PROMPT_TOKENS]
    slot = subject.add(prompt)
    rows = [subject.step((slot, PROMPT_TOKENS))]
    rows += [subject.step((slot, 1)) for _ in range(DECODE_TOKENS - 1)]
    token_ids = subject.runner.token_ids(slot)
    subject.runner.remove_sequence(slot)
    assert token_ids[:PROMPT_TOKENS] == prompt
    assert len(token_ids) == PROMPT_TOKENS + DECODE_TOKENS
    logits = np.concatenate([part.logits for part in rows])
    assert logits.shape == (DECODE_TOKENS, case.truth.logits.shape[1])
    assert token_ids[PROMPT_TOKENS:] == logits.argmax(-1).tolist()
    truth = reference(case.folder, token_ids, torch.float32)
    assert worst_error(logits, truth.logits[PROMPT_TOKENS - 1 : -1]) < MAX_ERROR
    # The rows that decoded are, to the bit, those of a prefill over the same tokens.
    again = subject.score(token_ids, len(token_ids))
    np.testing.assert_array_equal(logits, again.logits[PROMPT_TOKENS - 1 : -1])


def test_bfloat16_is_no_worse_than_the_reference(case: Case) -> None:
    check_bfloat16(Subject(case.folder, dtype="bfloat16"), case.folder, case.token_ids)


def test_bfloat16_chunks_change_no_bit(case: Case) -> None:
    subject = Subject(case.folder, dtype="bfloat16")
    whole = subject.score(case.token_ids, len(case.token_ids))
    for chunk in (1, 7, 16):
        assert_same_bits(subject.score(case.token_ids, chunk), whole)
