"""What trainable heads are made of, and what they are told of the target; plain torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH_OF_RATE, START_RATE = 320, 0.1

Tables: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of RoPE, [..., head_dim / 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of a head; hidden size and vocabulary are the target's."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    trained_length: int
    """Tokens of the longest texts that it learns from."""

    def keys(self) -> dict[str, Any]:
        """What all formats have in config.json."""
        return {
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.trained_length,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEnds:
    """What lies around the target's layers; heads read it and never change it."""

    embedding: Tensor  # [vocab_size, hidden]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab_size, hidden]
    rms_norm_eps: float

    def logits(self, residual: Tensor) -> Tensor:
        """The target's scores, from the residual stream after its last layer."""
        return F.linear(rms_norm(residual, self.norm, self.rms_norm_eps), self.head)


class Lesson(NamedTuple):
    """Packed rows of texts, and what the target computed at each of their tokens."""

    tokens: Tensor  # [n, t]
    places: Tensor  # [n, t]: positions, from 0 in every text
    generated: Tensor  # [n, t] bool: the target wrote this token
    captured: Tensor  # [n, t, layers * hidden]: residual streams after the head's layers
    last: Tensor  # [n, t, hidden]: residual stream after the target's last layer

    @property
    def learned(self) -> Tensor:
        """Positions whose next token the target wrote, in the same text, [n, t] bool."""
        inside = F.pad(self.places[:, 1:], (0, 1)) > 0
        return inside & F.pad(self.generated[:, 1:], (0, 1))


SCORES_AT_ONCE = 1 << 25
"""That are made together, of all tokens at all positions: the largest of what a lesson takes."""


def in_parts(scores: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of the tensors, each of so many scores, a few at a time."""
    size = max(1, SCORES_AT_ONCE // scores)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def descended(loss_of: Callable[..., Tensor], state: Tensor, *others: object) -> Tensor:
    """`loss_of(state, ...)`, one number, its gradients made at once.

    So nothing that is made on the way stays until the whole loss is there, nor is made twice. What
    parameters get is added to their gradients; the number itself leads back to `state` alone, and
    its weight in the whole loss must be in it already.
    """
    leaf = state.detach().requires_grad_()
    loss = loss_of(leaf, *others)
    with torch.autocast(state.device.type, enabled=False):
        loss.backward()
    assert leaf.grad is not None
    return loss.detach() + ((state - leaf.detach()) * leaf.grad).sum()


class ReadText(NamedTuple):
    """One finished text, and what the head may read of it."""

    tokens: Tensor  # [t]
    prompt: int  # tokens that were given
    captured: Tensor  # [t, layers * hidden]


class TrainableHead(nn.Module, ABC):
    """A head as torch trains it; its parameters have the names of published checkpoints."""

    capture_layers: tuple[int, ...]
    """Layers of the target, from 0, whose outputs it reads, rising."""
    most_drafts: int
    """Drafts that training is about."""
    is_chain = False
    """Whether fewer drafts are the first of more."""

    @abstractmethod
    def begin_as(self, ends: TargetEnds) -> None:
        """Where a part has a counterpart in the target, it begins as that."""

    @abstractmethod
    def loss(self, lesson: Lesson, ends: TargetEnds, random: torch.Generator) -> Tensor:
        """One number to descend from."""

    @abstractmethod
    def drafts(self, text: ReadText, ends: TargetEnds, count: int) -> Tensor:
        """`count` drafts after each position from text.prompt on, [rows, count] target ids."""

    def learn_for(self, num_drafts: int) -> None:
        """Learns no further ahead than drafts will go, where that saves time; blocks do not."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint, in bfloat16."""
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.state_dict().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors of a checkpoint that `tensors` made.

        Raises:
            RuntimeError: names or shapes are others, with both.
        """
        self.load_state_dict(tensors)


class VocabularyHead(TrainableHead):
    """A head that drafts a part of the target's tokens alone."""

    vocabulary: Tensor  # [draft_vocab_size] target ids, rising where it was made here
    lm_head: nn.Linear  # a row for each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """A kind of head that can be trained."""

    name: str
    method: str
    """The method that drafts with it."""
    make: Callable[[HeadPlan], TrainableHead]
    default_capture_layers: Callable[[int, int], tuple[int, ...]]
    """Of a target's number of layers and the head's."""
    num_layers: int
    """By default."""
    has_more_layers: bool = True
    """Whether it may have others than by default."""
    has_vocabulary: bool = False
    """Whether it drafts a part of the target's tokens alone."""
    num_extra_rows: int = 0
    """Rows of a block that draft nothing."""
    rate: float
    """Learning rate of a new head of width 320."""

    def rate_of(self, width: int, is_new: bool) -> float:
        """Wider heads take less, and so do those that have learned already."""
        by_width = math.sqrt(WIDTH_OF_RATE / width)
        return self.rate * by_width * (1.0 if is_new else START_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """What a method makes a new head from."""

    geometry: Geometry
    capture_layers: tuple[int, ...]
    num_target_layers: int
    vocabulary: Tensor  # [draft_vocab_size] rising target ids; all of them where the head has none
    mask_token: int
    """Stands at positions whose token is not known; an id that no text has."""
    block_size: int
    num_anchors: int
    """Blocks that begin in a row of texts, in training."""


def mixed_precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU; on a CPU all is float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last axis, computed in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x`."""
        return rms_norm(x, self.weight, self.eps)


def rotary_tables(geometry: Geometry, positions: Tensor) -> Tables:
    """Cosines and sines at `positions` [...], without scaling: [..., head_dim / 2]."""
    width = geometry.head_dim
    half = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * geometry.rope_theta ** (-half / width)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """RoPE of heads [..., heads, width], dimension j paired with j + width / 2."""
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in tables)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        size, inner = geometry.hidden_size, geometry.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Projections(nn.Module):
    """Queries, keys and values of grouped heads, from inputs `num_inputs` times as wide."""

    def __init__(self, geometry: Geometry, num_inputs: int = 1, has_norms: bool = False) -> None:
        super().__init__()
        size, width = geometry.hidden_size, geometry.head_dim
        self.num_kv_heads, self.width = geometry.num_kv_heads, width
        self.q_proj = nn.Linear(num_inputs * size, geometry.num_heads * width, bias=False)
        self.k_proj = nn.Linear(num_inputs * size, geometry.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(num_inputs * size, geometry.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(geometry.num_heads * width, size, bias=False)
        if has_norms:
            self.q_norm = RMSNorm(width, geometry.rms_norm_eps)
            self.k_norm = RMSNorm(width, geometry.rms_norm_eps)
        self.has_norms = has_norms

    def query(self, x: Tensor, tables: Tables) -> Tensor:
        """Rotated queries [..., kv heads, heads of each, width]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.width))
        query = rotate(self.q_norm(query) if self.has_norms else query, tables)
        grouped: Tensor = query.unflatten(-2, (self.num_kv_heads, -1))
        return grouped

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., kv heads, width]."""
        key = self.k_proj(x).unflatten(-1, (-1, self.width))
        key = rotate(self.k_norm(key) if self.has_norms else key, tables)
        return key, self.v_proj(x).unflatten(-1, (-1, self.width))


def softmax(scores: Tensor) -> Tensor:
    """Computed in float32, and in the scores' own type before and after."""
    with torch.autocast(scores.device.type, enabled=False):
        return scores.softmax(-1)


def joint_softmax(shared: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of one softmax over two sets of scores [..., entries]; -inf: not seen."""
    sizes = shared.shape[-1], own.shape[-1]
    fill = -sum(sizes) % 8  # rows of a multiple of 16 bytes are what fast products take
    both = torch.cat((shared, F.pad(own, (0, fill), value=-torch.inf)), -1)
    weights = softmax(both)
    return weights[..., : sizes[0]], weights[..., sizes[0] : sum(sizes)]


def init_matrices(head: nn.Module, residual_std: float = 0.02, left_out: str = "!") -> None:
    """Normal numbers; less where a matrix writes into the residual stream, `left_out` as it is."""
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2 and left_out not in name:
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual_std if into_stream else 0.02)
