"""Qwen3.5's kind in plain PyTorch: layers of Gated DeltaNet, of gated attention, and the MTP head.

Formulas and parameter names: transformers' Qwen3_5ForCausalLM, and the published `mtp.*` tensors.
Norms have weights less 1. The recurrence of DeltaNet is computed in chunks: within one, the rows of
delta solve a triangular system; the state passes from one to the next.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batches import IGNORED
from ..model import MLP, RMSNorm, TinyConfig, TinyQwen3, rotary_tables, rotate
from ..train import token_loss

CHUNK = 64  # tokens
HEAD = 128  # of DeltaNet: numbers of a key or a value
NUM_TAPS = 4
MTP_STEPS = 3
MTP_DECAY = 0.8  # weight of a step against the one before
MTP_SHARE = 0.3  # of the loss, beside the target's own

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HybridConfig(TinyConfig):
    """Six layers of DeltaNet and two of attention."""

    hidden_size: int = 128
    num_hidden_layers: int = 8
    num_attention_heads: int = 1
    head_dim: int = 256
    intermediate_size: int = 64
    rope_theta: float = 10_000_000
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 2

    @property
    def rotary_dim(self) -> int:
        """A quarter of a head."""
        return self.head_dim // 4

    def is_full(self, layer: int) -> bool:
        """Every fourth layer has attention."""
        return layer % 4 == 3

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of config.json."""
        kinds = ["full" if self.is_full(i) else "linear" for i in range(self.num_hidden_layers)]
        rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                "partial_rotary_factor": 0.25, "rope_theta": self.rope_theta}  # fmt: skip
        config = super().to_hugging_face() | asdict(self)
        for key in ("max_window_layers", "sliding_window", "use_sliding_window", "rope_theta",
                    "rope_scaling", "torch_dtype"):  # fmt: skip
            del config[key]
        return config | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "linear_conv_kernel_dim": NUM_TAPS,
            "linear_key_head_dim": HEAD,
            "linear_value_head_dim": HEAD,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": rope,
        }


class CentredNorm(RMSNorm):
    """x / rms(x) * (1 + weight), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1 + self.weight)).to(x.dtype)


def inverse_of(system: Tensor) -> Tensor:
    """Of matrices [..., CHUNK, CHUNK] of ones on the diagonal and `system` below it.

    By blocks, each time twice as large: of (A 0, C D) it is (a 0, -d C a, d).
    """
    inverse = torch.eye(CHUNK, device=system.device)
    for power in range(CHUNK.bit_length() - 1):
        block = torch.arange(CHUNK, device=system.device) >> power
        is_corner = (block[:, None] % 2 == 1) & (block[:, None] == block + 1)
        inverse = inverse - inverse @ (system * is_corner) @ inverse
    return inverse


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated DeltaNet's recurrence from a state of zeros.

    query, key, value [batch, heads, length, 128]; decay (a logarithm, at most 0) and beta
    [batch, heads, length]; the length a multiple of CHUNK. Returns the shape of `value`, in fp32.
    """
    query, key, value = (x.float().unflatten(2, (-1, CHUNK)) for x in (query, key, value))
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query * HEAD**-0.5
    passed = decay.float().unflatten(2, (-1, CHUNK)).cumsum(-1)  # since the chunk began
    beta = beta.float().unflatten(2, (-1, CHUNK))[..., None]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).triu(1)
    between = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
    from_start = passed.exp()[..., None]
    inverse = inverse_of(beta * key @ key.mT * between)
    own, seen = inverse @ (beta * value), inverse @ (beta * key * from_start)
    scores = query @ key.mT * between
    query = query * from_start
    to_end = (passed[..., -1:] - passed).exp()[..., None] * key
    state = query.new_zeros(*query.shape[:2], HEAD, HEAD)
    out = []
    for chunk in range(query.shape[2]):
        delta = own[:, :, chunk] - seen[:, :, chunk] @ state
        out.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ delta)
        state = from_start[:, :, chunk, -1:] * state + to_end[:, :, chunk].mT @ delta
    return torch.cat(out, 2)


class DeltaNet(nn.Module):
    """Convolution, recurrence, a norm gated by z. Memories last 6 to 50 tokens at the start."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        width = HEAD * (2 * config.linear_num_key_heads + heads)
        self.in_proj_qkv = nn.Linear(hidden, width, bias=False)
        self.in_proj_z = nn.Linear(hidden, HEAD * heads, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, NUM_TAPS, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.linspace(1, 8, heads).log())
        self.dt_bias = nn.Parameter(torch.full((heads,), 0.02).expm1().log())
        self.norm = RMSNorm(HEAD, config.rms_norm_eps)
        self.out_proj = nn.Linear(HEAD * heads, hidden, bias=False)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """[batch, length, hidden] -> same."""
        del tables
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % CHUNK))
        taps = self.conv1d.weight.squeeze(1).to(x.dtype)
        rows = F.pad(self.in_proj_qkv(x), (0, 0, NUM_TAPS - 1, 0))
        mixed = F.silu(sum(rows[:, i : i + x.shape[1]] * taps[:, i] for i in range(NUM_TAPS)))
        width = HEAD * self.config.linear_num_key_heads
        query, key, value = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in mixed.split((width, width, mixed.shape[-1] - 2 * width), -1)
        )
        group = value.shape[1] // query.shape[1]
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(
                query.repeat_interleave(group, 1), key.repeat_interleave(group, 1), value,
                decay.mT, self.in_proj_b(x).sigmoid().mT,
            )  # fmt: skip
        gate = F.silu(self.in_proj_z(x).float().unflatten(-1, (-1, HEAD)))
        gated = self.norm(out.transpose(1, 2).to(x.dtype)) * gate
        return self.out_proj(gated.to(x.dtype).flatten(2)[:, :length])


class GatedAttention(nn.Module):
    """Causal attention, the first quarter of a head turned, what comes out gated."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, 2 * config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)
        self.q_norm = CentredNorm(width, config.rms_norm_eps)
        self.k_norm = CentredNorm(width, config.rms_norm_eps)

    def project(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [batch, heads, length, head_dim]; gates [batch, length, -1]."""
        width, turned = self.config.head_dim, self.config.rotary_dim

        def turn(heads: Tensor) -> Tensor:
            first, rest = heads.transpose(1, 2).split((turned, width - turned), -1)
            return torch.cat((rotate(first, tables), rest), -1)

        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * width)).chunk(2, -1)
        key, value = (p(x).unflatten(-1, (-1, width)) for p in (self.k_proj, self.v_proj))
        return (turn(self.q_norm(query)), turn(self.k_norm(key)), value.transpose(1, 2),
                gate.flatten(2).sigmoid())  # fmt: skip

    def output(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Mixed values [batch, heads, length, head_dim] and gates -> [batch, length, hidden]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2) * gate)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """[batch, length, hidden] -> same."""
        query, key, value, gate = self.project(x, tables)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed, gate)


class HybridLayer(nn.Module):
    """One pre-norm residual block."""

    def __init__(self, config: HybridConfig, is_full: bool, dropout: float) -> None:
        super().__init__()
        if is_full:
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = DeltaNet(config)
        self.mlp = MLP(config)
        self.input_layernorm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.is_full = is_full
        self.dropout = nn.Dropout(dropout)

    def feed(self, x: Tensor) -> Tensor:
        """The MLP's part."""
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """[batch, length, hidden] -> same."""
        mixer = self.self_attn if self.is_full else self.linear_attn
        return self.feed(x + self.dropout(mixer(self.input_layernorm(x), tables)))


class Mtp(nn.Module):
    """The head that drafts: entry i joins token i + 1 with the state of i and predicts token i + 2.

    Further steps put the head's own output in the state's place; a chain sees the first entries up
    to where it began, and its own.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = CentredNorm(size, eps)
        self.pre_fc_norm_hidden = CentredNorm(size, eps)
        self.layers = nn.ModuleList([HybridLayer(config, is_full=True, dropout=0.0)])
        self.norm = CentredNorm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> list[Tensor]:
        """Embedded tokens and the target's final states -> the states of every step, normed.

        Row i of step k is of use while token i + 2 + k is there.
        """
        length = hidden.shape[1]
        layer = self.layers[0]
        cos, sin = rotary_tables(self.config, length + MTP_STEPS, hidden.device)
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        keys, values, states = [], [], []
        for step in range(MTP_STEPS):
            token = embedded.roll(-1 - step, 1)
            x = self.fc(
                torch.cat((self.pre_fc_norm_embedding(token), self.pre_fc_norm_hidden(hidden)), -1)
            )
            tables = cos[step : step + length], sin[step : step + length]
            query, key, value, gate = layer.self_attn.project(layer.input_layernorm(x), tables)
            keys.append(key)
            values.append(value)
            first = (query @ keys[0].mT).masked_fill(later, -torch.inf)
            own = [(query * one).sum(-1, keepdim=True) for one in keys[1:]]
            weights = torch.cat((first, *own), -1).float() * self.config.head_dim**-0.5
            weights = weights.softmax(-1).to(value.dtype)
            mixed = weights[..., :length] @ values[0]
            for index, one in enumerate(values[1:]):
                mixed = mixed + weights[..., length + index, None] * one
            hidden = self.norm(layer.feed(x + layer.self_attn.output(mixed, gate)))
            states.append(hidden)
        return states


class TinyHybrid(TinyQwen3):
    """The target and its MTP head."""

    def __init__(self, dropout: float = 0.0) -> None:
        config = HybridConfig()
        super().__init__(config, dropout)
        self.model.layers = nn.ModuleList(
            HybridLayer(config, config.is_full(i), dropout) for i in range(config.num_hidden_layers)
        )
        self.model.norm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.mtp = Mtp(config)
        self.initialise()

    def drafts(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Scores of the target; of step k of the head, row i of which is for token i + 2 + k."""
        hidden = self.model(tokens)
        states = self.mtp(self.model.embed_tokens(tokens), hidden)
        return self.logits(hidden), [self.logits(state) for state in states]


def is_counted(targets: Tensor, step: int) -> Tensor:
    """Rows of a step whose token is there and learned."""
    rolled = targets.roll(-1 - step, 1)
    rolled[:, -1 - step :] = IGNORED
    return rolled != IGNORED


def distance(scores: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy of each row against the distribution of other scores, without a constant."""
    wide = scores.float()
    return wide.logsumexp(-1) - (truth.float().softmax(-1) * wide).sum(-1)


def joint_loss(model: TinyHybrid, inputs: Tensor, targets: Tensor) -> Tensor:
    """The target's loss, and the distance of each step of its head from the target's own scores."""
    logits, drafts = model.drafts(inputs)
    loss, truth = token_loss(logits, targets), logits.detach()
    weights = [MTP_DECAY**step for step in range(MTP_STEPS)]
    for step, scores in enumerate(drafts):
        counted = is_counted(targets, step)
        mean = (distance(scores, truth.roll(-1 - step, 1)) * counted).sum() / counted.sum()
        loss = loss + MTP_SHARE * weights[step] / sum(weights) * mean
    return loss


@torch.no_grad()
def agreement(model: TinyHybrid, inputs: Tensor, targets: Tensor) -> list[float]:
    """Shares of the chains whose first 1, 2, 3 drafts are what the target likes best."""
    logits, drafts = model.drafts(inputs)
    best = logits.argmax(-1)
    counted = is_counted(targets, MTP_STEPS - 1)
    right, shares = counted, []
    for step, scores in enumerate(drafts):
        right = right & (scores.argmax(-1) == best.roll(-1 - step, 1))
        shares.append(float(right.sum() / counted.sum()))
    return shares
