"""What a target checkpoint is: config.json and generation_config.json, checked key by key."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openspec.checkpoint.folder import find_file, open_folder
from openspec.checkpoint.quantization.declared import Declared, read_declared
from openspec.checkpoint.strict_json import JsonKeys, read_json_object
from openspec.checkpoint.targets import kind_of
from openspec.checkpoint.targets.rope import RopeConfig
from openspec.errors import ConfigError
from openspec.specs.target import TargetSpec

logger = logging.getLogger(__name__)


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
    spec: TargetSpec
    """Its geometry, for the compiled core."""
    rope: RopeConfig
    max_model_len: int
    """Tokens that the position encoding is made for: with scaling, more than it was trained on."""
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    quantization: Declared | None = None
    """What the folder's lists say of quantised weights; None: nothing."""

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
        """This model, ending at the tokenizer's eos_token too, as in vLLM and SGLang.

        Models tuned for chats from a base model often keep its generation_config.json, which does
        not name the token that ends their turns.
        """
        if token_id is None or token_id in self.eos_token_ids or token_id >= self.vocab_size:
            return self
        return dataclasses.replace(self, eos_token_ids=(*self.eos_token_ids, token_id))

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.spec.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return self.spec.num_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; more than the tokenizer has tokens."""
        return self.spec.vocab_size


def _parse(folder: Path, keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    target = kind_of(keys).read(keys)
    if keys.get("auto_map") is not None:
        logger.warning("%s: auto_map is ignored: no code of a checkpoint is run", keys.source)
    text = keys.object("text_config") or keys
    dtype = keys.get("dtype") or keys.get("torch_dtype") or text.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in (
        "bfloat16",
        "float16",
        "float32",
    ):
        name = "dtype" if keys.get("dtype") else "torch_dtype"
        keys.refuse(name, '"bfloat16", "float16" or "float32"; save the checkpoint in one of them')
    vocab_size = target.spec.vocab_size
    return ModelConfig(
        folder=folder,
        spec=target.spec,
        rope=target.rope,
        max_model_len=target.max_model_len,
        eos_token_ids=generation.token_ids("eos_token_id", vocab_size)
        or text.token_ids("eos_token_id", vocab_size),
        sampling=_parse_sampling(generation),
        quantization=read_declared(folder, keys),
    )


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
