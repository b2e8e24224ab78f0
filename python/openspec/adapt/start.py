"""A head that exists already, to go on from in its own format: the same folder, other numbers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from openspec.adapt.heads.parts import Geometry, HeadPlan, TrainableHead, VocabularyHead
from openspec.checkpoint.draft_model import DraftCheckpoint, open_draft_checkpoint
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.token_map import TOKEN_MAP, TOKEN_MASK
from openspec.checkpoint.weights import SINGLE_FILE, DraftModel
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.specs.layers import AttentionSpec, DenseMlpSpec

MAPS = (TOKEN_MAP, TOKEN_MASK)


@dataclass(frozen=True, slots=True)
class Start:
    """A draft checkpoint as the engine reads it."""

    model: DraftModel
    checkpoint: DraftCheckpoint

    def plan(self, target: ModelConfig, trained_length: int, num_anchors: int) -> HeadPlan:
        """What a head of the same sizes is made from.

        Raises:
            ConfigError: its layers compute something that is not trained here, with its name.
        """
        spec = self.model.head
        layer = spec.layers[0]
        assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, DenseMlpSpec)
        others = {
            "normed captured states": spec.capture_norm != "none",
            "norm_before_residual": spec.norm_before_residual,
            "norm_output": spec.norm_output,
            "a sliding window": any(one.window for one in spec.layers),
            "causal blocks": spec.is_causal,
            "scaled RoPE": layer.mixer.rope_scale != 1.0,
        }
        if named := [name for name, is_there in others.items() if is_there]:
            raise ConfigError(f"--draft-model: heads with {named[0]} cannot be trained yet")
        return HeadPlan(
            geometry=Geometry(
                hidden_size=target.hidden_size,
                num_heads=layer.mixer.num_q_heads,
                num_kv_heads=layer.mixer.num_kv_heads,
                head_dim=layer.mixer.head_dim,
                intermediate_size=layer.mlp.intermediate_size,
                num_layers=len(spec.layers),
                vocab_size=target.vocab_size,
                rms_norm_eps=spec.rms_norm_eps,
                rope_theta=_theta_of(layer.mixer),
                trained_length=self.model.trained_length or trained_length,
            ),
            capture_layers=spec.capture_layers,
            num_target_layers=target.num_layers,
            vocabulary=self._vocabulary(),
            mask_token=max(spec.mask_token, 0),
            block_size=spec.block_size,
            num_anchors=num_anchors,
        )

    def _vocabulary(self) -> Tensor:
        ids = torch.arange(self.model.head.draft_vocab_size)
        return ids + self.checkpoint.values(TOKEN_MAP) if self.model.head.has_token_map else ids

    def load(self, head: TrainableHead) -> None:
        """Gives the head the checkpoint's numbers.

        Raises:
            ConfigError: it has other tensors, or of other shapes, than can be trained here.
        """
        names = self.model.tensor_names
        tensors = {
            names[name]: self.checkpoint.values(name).float()
            for name in names
            if names[name] != TOKEN_MAP
        }
        wanted = {name: tensor.shape for name, tensor in head.state_dict().items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        differing = sorted({name for name, _ in wanted.items() ^ found.items()})
        if differing:
            raise ConfigError(
                f"--draft-model: {differing[0]} of {self.model.folder}: heads with it, without it "
                "or of that shape cannot be trained yet"
            )
        head.load(tensors)

    def write(self, folder: Path, head: TrainableHead) -> None:
        """The same config.json and tensors of the same names and types."""
        trained = head.tensors()
        tensors = {name: self.checkpoint.values(name) for name in self.checkpoint.tensors}
        written = dict(self.model.tensor_names)
        if isinstance(head, VocabularyHead):
            written |= {name: name for name in MAPS if name in tensors}
            if head.vocabulary.cpu().equal(self._vocabulary()):  # maps stay as they were written
                written = {k: name for k, name in written.items() if name not in MAPS}
        for name, of_head in written.items():
            tensors[name] = trained[of_head].to("cpu", tensors[name].dtype)
        partial = folder / f"{SINGLE_FILE}.partial"
        save_file({name: one.contiguous() for name, one in tensors.items()}, partial)
        partial.replace(folder / SINGLE_FILE)
        shutil.copyfile(self.model.folder / "config.json", folder / "config.json")


def read_start(config: EngineConfig, target: ModelConfig) -> Start | None:
    """The checkpoint that `--draft-model` names.

    Raises:
        ConfigError: it is none for this target and method.
    """
    return None if config.draft_model is None else read_head(config, target)


def read_head(config: EngineConfig, target: ModelConfig) -> Start:
    """The checkpoint that the engine would draft with: the one named, or the target's own.

    Raises:
        ConfigError: there is none for this target and method.
    """
    setup, spec = config.draft_setup(target), config.drafter
    spec.validate(setup)
    assert spec.read_draft_model is not None
    return Start(spec.read_draft_model(setup), open_draft_checkpoint(setup.draft_folder))


def _theta_of(attention: AttentionSpec) -> float:
    """The base of frequencies without scaling."""
    width = attention.head_dim
    theta = float(round(attention.inv_freq[1] ** (-width / 2)))
    expected = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    if not torch.allclose(torch.tensor(list(attention.inv_freq)), expected, rtol=1e-4):
        raise ConfigError("--draft-model: heads with scaled RoPE cannot be trained yet")
    return theta
