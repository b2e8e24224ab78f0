"""What a target checkpoint is: config.json and generation_config.json, checked key by key."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openspec.checkpoint.folder import find_file, open_folder
from openspec.checkpoint.strict_json import JsonKeys, read_json_object
from openspec.checkpoint.targets.families import MAX_LAYERS, Family, family_of, refuse_windows
from openspec.checkpoint.targets.rope import MAX_POSITIONS, RopeConfig, read_rope
from openspec.errors import ConfigError

if TYPE_CHECKING:
    from openspec._C import TargetConfig

logger = logging.getLogger(__name__)

MAX_DIM = 1 << 20
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The checkpoint's own sampling advice (generation_config.json); None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """The advice that there is, by field of `SamplingParams`."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry and token ids of one checkpoint of a target."""

    folder: Path
    family: Family
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; more than the tokenizer has tokens."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_model_len: int
    """Tokens that the position encoding is made for: with scaling, more than it was trained on."""
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads and checks a Hugging Face folder.

        Raises:
            ConfigError: the key, the value found and the remedy.
        """
        path = open_folder(folder)
        file = find_file(path, "config.json")
        if file is None:
            found = "only params.json, in Mistral's own format" * (path / "params.json").exists()
            raise ConfigError(
                f"{path} has {found or 'no config.json'}; give the folder of a Hugging Face "
                "checkpoint, with config.json"
            )
        keys = JsonKeys(read_json_object(file), str(path / "config.json"))
        generation_file = find_file(path, "generation_config.json")
        generation = JsonKeys(
            read_json_object(generation_file) if generation_file else {},
            str(path / "generation_config.json"),
        )
        return _parse(path, keys, generation)

    def with_eos_token(self, token_id: int | None) -> ModelConfig:
        """The same model, ending at the tokenizer's eos_token too, as in vLLM and SGLang.

        Models tuned for chats from a base model often keep its generation_config.json, which does
        not name the token that ends their turns.
        """
        if token_id is None or token_id in self.eos_token_ids or token_id >= self.vocab_size:
            return self
        return dataclasses.replace(self, eos_token_ids=(*self.eos_token_ids, token_id))

    def target_config(self) -> TargetConfig:
        """The same geometry for the C++ core."""
        from openspec._C import TargetConfig

        return TargetConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            has_qk_norm=self.family.has_qk_norm,
            has_qkv_bias=self.family.has_qkv_bias,
            inv_freq=self.rope.inv_freq,
            rope_scale=self.rope.scale,
        )


def _parse(folder: Path, keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    family = family_of(keys)
    check_layers(keys)
    if keys.get("auto_map") is not None:
        logger.warning("%s: auto_map is ignored: no code of a checkpoint is run", keys.source)
    vocab_size = keys.integer("vocab_size", 2, 1 << 24)
    num_q_heads = keys.integer("num_attention_heads", 1, 4096)
    num_kv_heads = keys.integer("num_key_value_heads", 1, 4096)
    if num_q_heads % num_kv_heads:
        keys.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    hidden_size = keys.integer("hidden_size", 1, MAX_DIM)
    head_dim = _parse_head_dim(keys, family, hidden_size, num_q_heads)
    max_positions = keys.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = read_rope(keys, head_dim)
    max_model_len = rope.length or max_positions
    refuse_windows(keys, family, max_model_len)
    dtype = keys.get("dtype") or keys.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in (
        "bfloat16",
        "float16",
        "float32",
    ):
        name = "dtype" if keys.get("dtype") else "torch_dtype"
        keys.refuse(name, '"bfloat16", "float16" or "float32"; save the checkpoint in one of them')
    return ModelConfig(
        folder=folder,
        family=family,
        hidden_size=hidden_size,
        num_layers=keys.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size", 1, MAX_DIM),
        vocab_size=vocab_size,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        max_model_len=max_model_len,
        rope=rope,
        eos_token_ids=generation.token_ids("eos_token_id", vocab_size)
        or keys.token_ids("eos_token_id", vocab_size),
        sampling=_parse_sampling(generation),
    )


def _parse_head_dim(keys: JsonKeys, family: Family, hidden_size: int, num_heads: int) -> int:
    name, default = "head_dim", family.head_dim
    if keys.get(name) is None and default is None:
        if hidden_size % num_heads:
            keys.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
        name, default = "hidden_size", hidden_size // num_heads
    head_dim = keys.integer("head_dim", 2, 4096, default)
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        needed = f"a multiple of 32 up to {MAX_HEAD_DIM}, as the kernels need"
        heads = f"{num_heads} heads of " if name == "hidden_size" else ""
        keys.refuse(name, heads + needed)
    return head_dim


def _parse_sampling(keys: JsonKeys) -> SamplingDefaults:
    temperature = keys.optional_number("temperature", 0.0, 100.0)
    if keys.get("do_sample") is False:
        temperature = 0.0
    top_k = None if keys.get("top_k") is None else keys.integer("top_k", -1, 2**31 - 1)
    top_p = keys.optional_number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        keys.refuse("top_p", "a number in (0, 1]")
    repetition_penalty = keys.optional_number("repetition_penalty", 0.0, 100.0)
    if repetition_penalty == 0.0:
        keys.refuse("repetition_penalty", "a number in (0, 100]")
    return SamplingDefaults(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=keys.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=repetition_penalty,
    )


def check_layers(keys: JsonKeys) -> None:
    """Refuses what would make the decoder layers of a model, or of a head on it, different ones."""
    if keys.get("quantization_config") is not None:
        remedy = "quantised weights are not supported; give the unquantised checkpoint"
        keys.refuse("quantization_config", "no such key", remedy)
    for name in ("attention_bias", "mlp_bias"):
        if keys.boolean(name, False):
            also = ", o_proj's here" if name == "attention_bias" else ""
            keys.refuse(name, "false", f"layers with such biases{also}, are not supported")
    if keys.get("hidden_act") not in (None, "silu"):
        keys.refuse("hidden_act", '"silu"', "other activations are not supported")
