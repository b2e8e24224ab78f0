#pragma once

/// What the kernels of Gated DeltaNet share: copies to shared memory, splits of fp32 into two bf16,
/// norms, a fold of the state.
///
/// The state of a value head and 16 columns (values) is a tile, [16 octets of keys][32 lanes][4]:
/// lane l has of keys 2 (l % 4) and the next of an octet the columns 2 (l / 4), then those of the
/// column after. So a tile lies as a warp's matrix instruction leaves it, where row m of the
/// instruction is column 2 m (m < 8) or 2 (m - 8) + 1: a lane's two columns are neighbours.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/mma.cuh"
#include "kernels/delta_net/delta_net.h"

namespace openspec::gated_delta {

using cuda::shared_address;

inline constexpr int kDim = kDeltaHeadDim, kBlock = kDeltaBlock;
inline constexpr int kStride = kDim + 8;  // of rows of k and q in shared memory: no bank conflicts
inline constexpr int kOctets = kDim / 8;  // of keys
inline constexpr float kQueryScale = 0.08838834764831845f;  // 128 ** -0.5

/// What kernels hand on: rows after the convolution, [num_rows, conv_width] bf16; beta and g,
/// [num_rows, 2, num_v_heads]; of prompts the sums of records, [num_rows, num_v_heads].
struct Workspace {
  uint16_t* x;
  float* gates;
  float2* sums;
};

template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
  }
}
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The barrier of a tile that a warp fetches, and the fetch, by all lanes.
__device__ __forceinline__ void init_tile_barrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  constexpr int kArrivals = 1;
#else
  constexpr int kArrivals = 32;
#endif
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(kArrivals)
               : "memory");
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void fetch_tile(float* to, const float* from, uint64_t* barrier,
                                           int lane) {
  constexpr uint32_t kBytes = DeltaStates::kTileBytes;
#if __CUDA_ARCH__ >= 900
  if (lane != 0) return;
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(kBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(kBytes), "r"(shared_address(barrier))
      : "memory");
#else
#pragma unroll
  for (uint32_t i = 0; i < kBytes / 4; i += 128)
    copy_async<16>(to + i + lane * 4, from + i + lane * 4);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
__device__ __forceinline__ void wait_for_tile(uint64_t* barrier) {
  uint32_t is_there = 0;
  while (is_there == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], 0;\n"
#endif
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(is_there)
        : "r"(shared_address(barrier))
        : "memory");
  }
}

/// As cuda::multiply_add, but free to move: what it reads are registers.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
/// Two values as a pair of bf16.
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
/// Two values, each as the sum of two bf16.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = to_pair(x, y);
  low = to_pair(__fsub_rn(x, low_of(high)), __fsub_rn(y, high_of(high)));
}
/// Two rows of pairs (columns 2 m, 2 m + 1) as pairs of rows: of column 2 m, and of 2 m + 1.
__device__ __forceinline__ uint32_t lows(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t highs(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}
__device__ __forceinline__ void load4(float* to, const float* from) {
  const float4 values = *reinterpret_cast<const float4*>(from);
  to[0] = values.x, to[1] = values.y, to[2] = values.z, to[3] = values.w;
}
__device__ __forceinline__ void store4(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
__device__ __forceinline__ uint32_t load_pair(const uint16_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ void store_pair(uint16_t* to, uint32_t pair) {
  *reinterpret_cast<uint32_t*>(to) = pair;
}

/// Sums v[0 .. kCount) over the warp in a fixed tree, neighbours first. v[0] of lane l is the sum
/// of that v whose highest bits of the index are l's lowest ones.
template <int kCount>
__device__ __forceinline__ void sum_over_warp(float (&v)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {
    if (count == 1) {
      v[0] = __fadd_rn(v[0], __shfl_xor_sync(~0u, v[0], mask));
      continue;
    }
    const int half = count / 2;
    const bool is_upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= half) continue;
      const float sent = is_upper ? v[i] : v[i + half], kept = is_upper ? v[i + half] : v[i];
      v[i] = __fadd_rn(kept, __shfl_xor_sync(~0u, sent, mask));
    }
    count = half;
  }
}
/// A lane's part, four columns, of a sum of squares.
__device__ __forceinline__ float square_sum(const uint16_t* columns) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(columns);
  const float x[4] = {low_of(pairs.x), high_of(pairs.x), low_of(pairs.y), high_of(pairs.y)};
  float sum = 0.0f;
#pragma unroll
  for (float value : x) sum = __fmaf_rn(value, value, sum);
  return sum;
}
__device__ __forceinline__ float key_norm(float sum) { return rsqrtf(__fadd_rn(sum, 1e-6f)); }
__device__ __forceinline__ float query_norm(float sum) {
  return __fmul_rn(rsqrtf(__fadd_rn(sum, 1e-6f)), kQueryScale);
}

/// A tile's part of 16 keys as the two halves of an operand.
__device__ __forceinline__ void split_state(const float (&z)[2][4], uint32_t (&high)[4],
                                            uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    split(z[i >> 1][(i & 1) * 2], z[i >> 1][(i & 1) * 2 + 1], high[i], low[i]);
}

/// What a block adds to a tile of the state.
class Fold {
 public:
  /// `factors` of positions 2 q, 2 q + 1, 2 q + 8, 2 q + 9, q = lane % 4; `delta` as an operand.
  __device__ __forceinline__ void set(float decay, const float (&factors)[4],
                                      const uint32_t (&delta)[4]) {
    decay_ = decay;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(__fmul_rn(factors[(i >> 1) * 2], low_of(delta[i])),
            __fmul_rn(factors[(i >> 1) * 2 + 1], high_of(delta[i])), high_[i], low_[i]);
    }
  }
  /// To keys 16 step .. 16 step + 15; `k`: the block's rows, kStride apart.
  __device__ __forceinline__ void add(float (&z)[2][4], const uint16_t* k, int step,
                                      int lane) const {
    uint32_t b[4];
    cuda::load_matrices_transposed(
        b, shared_address(k + (lane % 16) * kStride + step * 16 + (lane / 16) * 8));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (float& value : z[u]) value = __fmul_rn(decay_, value);
      multiply_add(z[u], high_, b[2 * u], b[2 * u + 1]);
      multiply_add(z[u], low_, b[2 * u], b[2 * u + 1]);
    }
  }

 private:
  float decay_ = 0.0f;
  uint32_t high_[4] = {}, low_[4] = {};
};

/// Where a head of a span finds what it reads, and leaves what it makes.
struct HeadPlace {
  const DeltaNetParams& params;
  int slot, head, k_head;
  int first_row, begin, end;      // of the span; positions
  int folded_read, folded_write;  // blocks in the state before and after

  __device__ __forceinline__ HeadPlace(const DeltaNetParams& params, int span, int head)
      : params(params),
        slot(params.rows.span_seq[span]),
        head(head),
        k_head(head / (params.shape.num_v_heads / params.shape.num_k_heads)),
        first_row(params.rows.span_begin[span]),
        begin(params.rows.span_kv_len[span]),
        end(begin + params.rows.span_begin[span + 1] - first_row),
        folded_read(params.folded_read[span]),
        folded_write(params.folded_write[span]) {}

  __device__ __forceinline__ int num_rows() const { return end - begin; }
  __device__ __forceinline__ int64_t row_at(int position) const {
    return first_row + position - begin;
  }
  __device__ __forceinline__ std::byte* record(int position) const {
    return params.records.at(slot, position) + params.record_offset;
  }
  /// The head's parts of a record.
  __device__ __forceinline__ const uint16_t* key(const std::byte* record) const {
    return reinterpret_cast<const uint16_t*>(record) + k_head * kDim;
  }
  __device__ __forceinline__ uint16_t* delta(std::byte* record) const {
    return reinterpret_cast<uint16_t*>(record + params.shape.delta_offset(DType::kBF16)) +
           head * kDim;
  }
  __device__ __forceinline__ float2* sums(std::byte* record) const {
    return reinterpret_cast<float2*>(record + params.shape.sums_offset(DType::kBF16)) + head;
  }
  __device__ __forceinline__ float* tile(const int32_t* pages, int tile) const {
    const int index = params.layer * params.shape.num_tiles() + head * (kDim / 16) + tile;
    return params.states.tile(pages, slot, index);
  }
};

/// Norm, by `weights`, and gate of a row's output in one head, by a warp: `o` and `z` are the
/// lane's four columns.
__device__ __forceinline__ uint2 gated_norm(const float* weights, float eps, uint2 o, uint2 z,
                                            int lane) {
  const float x[4] = {low_of(o.x), high_of(o.x), low_of(o.y), high_of(o.y)};
  const float gate[4] = {low_of(z.x), high_of(z.x), low_of(z.y), high_of(z.y)};
  float sum[1] = {0.0f};
#pragma unroll
  for (float value : x) sum[0] = __fmaf_rn(value, value, sum[0]);
  sum_over_warp(sum, lane);
  const float scale = rsqrtf(__fmaf_rn(sum[0], 1.0f / kDim, eps));
  float weight[4], out[4];
  load4(weight, weights + lane * 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float normed = __bfloat162float(__float2bfloat16_rn(__fmul_rn(x[i], scale)));
    const float weighted = __bfloat162float(__float2bfloat16_rn(__fmul_rn(normed, weight[i])));
    const float silu = __fdiv_rn(gate[i], __fadd_rn(1.0f, expf(-gate[i])));
    out[i] = __fmul_rn(weighted, silu);
  }
  return make_uint2(to_pair(out[0], out[1]), to_pair(out[2], out[3]));
}

}  // namespace openspec::gated_delta
