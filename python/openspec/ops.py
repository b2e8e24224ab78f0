"""Kernels as functions on torch tensors: for tests, benchmarks and research code.

The engine calls the same kernels from C++ and never goes through here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openspec import _C  # noqa: F401  (loading it registers torch.ops.openspec)


def has_cuda() -> bool:
    """Whether the CUDA kernels were built and a CUDA device is there to run them."""
    built: bool = torch._C._dispatch_has_kernel_for_dispatch_key("openspec::ngram_lookup", "CUDA")
    return built and torch.cuda.is_available()


def ngram_lookup(
    tokens: Tensor,  # [max_num_seqs, max_len] int32: token history by slot
    num_tokens: Tensor,  # [max_num_seqs] int32: history length by slot
    seq: Tensor,  # [num_seqs] int32: slots to look up
    num_wanted: Tensor,  # [num_seqs] int32: drafts wanted, at most max_drafts; 0 skips
    *,
    max_drafts: int,
    ngram_min: int = 1,
    ngram_max: int = 4,
    max_lookback: int = 4096,
    earliest: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts by prompt lookup: what followed the longest earlier occurrence of the last tokens.

    The longest suffix of at least ngram_min tokens wins (lengths beyond ngram_max count as
    ngram_max); among equal lengths the most recent occurrence, or the earliest. Where the copy runs
    past the end of the history it goes on through the draft itself. Only the last max_lookback
    tokens count.

    Shapes: drafts [num_seqs, max_drafts] int32 (-1 past num_drafts), num_drafts [num_seqs] int32,
        match_len [num_seqs] int32 (0: no match).

    Raises: ValueError, TypeError for what does not fit. On CUDA the values inside the tensors are
        the caller's promise: reading them would stall the stream.

    Source: prompt lookup decoding; csrc/kernels/drafts/ngram_lookup.h.
    """
    drafts, num_drafts, match_len = torch.ops.openspec.ngram_lookup(
        tokens,
        num_tokens,
        seq,
        num_wanted,
        max_drafts,
        ngram_min,
        ngram_max,
        max_lookback,
        earliest,
    )
    return drafts, num_drafts, match_len


def delta_net(
    qkv: Tensor,  # [num_tokens, 256 * num_k_heads + 128 * num_v_heads] float32 or bfloat16
    z: Tensor,  # [num_tokens, num_v_heads * 128], as qkv: the gate of the output
    b: Tensor,  # [num_tokens, num_v_heads], as qkv
    a: Tensor,  # [num_tokens, num_v_heads], as qkv
    *,
    conv_weight: Tensor,  # [4, width of qkv] float32, the row's own tap last
    a_log: Tensor,  # [num_v_heads] float32
    dt_bias: Tensor,  # [num_v_heads] float32
    norm_weight: Tensor,  # [128] float32
    num_k_heads: int,
    eps: float = 1e-6,
    chunk: int = 64,
) -> Tensor:
    """Gated DeltaNet of one sequence from its first token, between its projections; on the CPU.

    Shapes: the output is [num_tokens, num_v_heads * 128], as qkv. `chunk` tokens run at a time: its
        bits do not depend on it.

    Raises: ValueError, TypeError for what does not fit.

    Source: csrc/kernels/delta_net/delta_net.h.
    """
    out: Tensor = torch.ops.openspec.delta_net(
        qkv, z, b, a, conv_weight, a_log, dt_bias, norm_weight, num_k_heads, eps, chunk
    )
    return out
