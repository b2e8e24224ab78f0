#pragma once

/// What the warps of a prompt's CTA share, and those of them that fetch and prepare: see
/// prompt.cuh.

#include "kernels/delta_net/math.cuh"

namespace openspec::gated_delta {

inline constexpr int kRing = 6;  // blocks b - 1 (to fold) .. b + 4 (on its way)
inline constexpr int kAides = 4;

template <int kColumns>
struct alignas(16) PromptSlot {  // what comes in of a block
  uint16_t k[kBlock][kStride], q[kBlock][kStride], v[kBlock][kColumns + 8];
  float g[kBlock], beta[kBlock], c[kBlock], norm_k[kBlock], norm_q[kBlock];
  float fold[kBlock];  // factors of k delta' in the block's fold
  float decay;
};
/// Of the rows t of a block with positions i of the block before (p) and of their own (c).
struct alignas(16) PromptFactors {
  uint16_t pk[2][kBlock][24], pq[2][kBlock][24], cq[2][kBlock][24];  // [high, low][t][i]
  float ck[kBlock][kBlock + 4];                                      // [i][t], 0 unless i < t
  float k[kBlock], q[kBlock];                                        // of Z'k and Z'q
};
template <int kColumns>
struct PromptShared {
  PromptSlot<kColumns> slot[kRing];
  PromptFactors factors[3];
  // Z'k and Z'q as a warp's sums: [tile][8 rows each][lane].
  float4 with_k[2][kColumns / 16][2][32], with_q[3][kColumns / 16][2][32];
  uint32_t delta[4][kColumns][10];  // pairs of positions
  float rest[kColumns / 32][32][kBlock + 4];
};

template <int kColumns>
struct PromptPlan {
  static constexpr int kStateWarps = kColumns / 16, kPairWarps = kColumns / 32;
  static constexpr int kThreads = (kStateWarps + kAides + 2 * kPairWarps) * 32;
  using Slot = PromptSlot<kColumns>;

  HeadPlace at;
  const Workspace& workspace;
  PromptShared<kColumns>& sh;
  int lane, gr, tq;
  int first_column;  // of the head
  int b0, b1;        // blocks of the first and the last row
  int need, held;    // blocks to fold before the first row; in the state that is read
  int first_block;   // that is read

  __device__ __forceinline__ PromptPlan(const DeltaNetParams& params, const Workspace& workspace,
                                        PromptShared<kColumns>& shared)
      : at(params, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)),
        workspace(workspace),
        sh(shared),
        lane(static_cast<int>(threadIdx.x) % 32),
        gr(lane / 4),
        tq(lane % 4),
        first_column(static_cast<int>(blockIdx.x) * kColumns),
        b0(at.begin / kBlock),
        b1((at.end - 1) / kBlock),
        need(b0 > 0 ? b0 - 1 : 0),
        held(at.folded_read),
        first_block(min(held, need)) {}

  __device__ __forceinline__ bool is_due() const { return held < need; }
  __device__ __forceinline__ Slot& slot(int block) const { return sh.slot[block % kRing]; }
  __device__ __forceinline__ PromptFactors& factors(int block) const {
    return sh.factors[block % 3];
  }
  /// Deltas of a block and 16 columns as an operand: columns 2 gr, 2 gr + 1 of positions 2 tq,
  /// 2 tq + 1, then of positions 8 further.
  __device__ __forceinline__ void load_delta(uint32_t (&to)[4], int block, int tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = sh.delta[block & 3][tile * 16 + 2 * gr + (i & 1)][tq + (i >> 1) * 4];
    }
  }
};

template <int kColumns>
class PromptAide : PromptPlan<kColumns> {
 public:
  using Plan = PromptPlan<kColumns>;
  __device__ __forceinline__ PromptAide(const Plan& plan, int aide)
      : Plan(plan),
        aide_(aide),
        tid_(aide * 32 + plan.lane),
        row_(tid_ / 16),
        chunk_(tid_ % 16 * 8) {}

  __device__ __forceinline__ void run() {
    for (int b = first_block; b <= min(b0 + 2, b1); ++b) load(b);
    end_copies();
    if (b0 + 3 <= b1) load(b0 + 3);
    end_copies();
    wait_copies<1>();
    __syncthreads();
    __syncthreads();
    take_factors(b0);
    __syncthreads();
    for (int b = b0; b <= b1; ++b) {
      wait_copies<1>();
      __syncthreads();
      if (b + 4 <= b1) load(b + 4);
      end_copies();
      if (b + 1 <= b1) take_factors(b + 1);
    }
    __syncthreads();
  }

 private:
  using Plan::at, Plan::b0, Plan::b1, Plan::first_block, Plan::gr, Plan::tq, Plan::lane;

  __device__ __forceinline__ const uint16_t* row_of(int position) const {
    return this->workspace.x + at.row_at(position) * at.params.shape.conv_width();
  }
  __device__ __forceinline__ const float* gates_of(int position) const {
    const int heads = at.params.shape.num_v_heads;
    return this->workspace.gates + at.row_at(position) * 2 * heads + at.head +
           (tid_ < kBlock ? heads : 0);
  }
  __device__ __forceinline__ void load(int block) {
    auto& slot = Plan::slot(block);
    const DeltaShape& shape = at.params.shape;
    const int t = block * kBlock;
    const int to_q = at.k_head * kDim + chunk_, to_k = to_q + shape.k_width();
    const int to_v = 2 * shape.k_width() + at.head * kDim + this->first_column;
    float* to_gate = (tid_ < kBlock ? slot.g : slot.beta) + tid_ % kBlock;
    if (t >= at.begin && t + kBlock <= at.end) {
      const int width = shape.conv_width();
      const uint16_t* from = row_of(t + row_);
#pragma unroll
      for (int i = 0; i < kBlock; i += 8) {
        copy_async<16>(&slot.k[row_ + i][chunk_], from + i * width + to_k);
        copy_async<16>(&slot.q[row_ + i][chunk_], from + i * width + to_q);
      }
      const int v_row = tid_ / (kColumns / 8), v_chunk = tid_ % (kColumns / 8) * 8;
      if (v_row < kBlock)
        copy_async<16>(&slot.v[v_row][v_chunk], row_of(t + v_row) + to_v + v_chunk);
      if (tid_ < 2 * kBlock) copy_async<4>(to_gate, gates_of(t + tid_ % kBlock));
      return;
    }
    // The first or the last block, and those before the span: what is not there is zero.
    const auto take = [](uint16_t* to, const uint16_t* from, bool is_there) {
      if (is_there) {
        copy_async<16>(to, from);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    };
    for (int i = row_; i < kBlock; i += 8) {
      const bool is_new = t + i >= at.begin && t + i < at.end;
      const uint16_t* from = is_new ? row_of(t + i) : nullptr;
      take(&slot.k[i][chunk_], is_new ? from + to_k : at.key(at.record(t + i)) + chunk_,
           t + i < at.end);
      take(&slot.q[i][chunk_], from + to_q, is_new);
      if (chunk_ < kColumns) take(&slot.v[i][chunk_], from + to_v + chunk_, is_new);
    }
    if (tid_ >= 2 * kBlock) return;
    const int position = t + tid_ % kBlock;
    *to_gate = position >= at.begin && position < at.end ? *gates_of(position) : 0.0f;
    if (tid_ < kBlock && position < at.begin) slot.c[tid_] = at.sums(at.record(position))->x;
  }

  /// Products of a block's 16 k and 16 q with 8 positions: (block before, own block) x halves, one
  /// an aide.
  __device__ __forceinline__ void take_factors(int block) {
    const bool is_own = (aide_ & 1) != 0;
    if (!is_own && block == 0) return;
    const auto& own = Plan::slot(block);
    const auto& other = is_own ? own : Plan::slot(block + kRing - 1);
    const int half = aide_ >> 1, from = (lane % 16) * kStride + (lane / 16) * 8;
    float kk[4] = {0, 0, 0, 0}, qk[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < 8; s += 2) {
      uint32_t b[4], k0[4], k1[4], q0[4], q1[4];
      cuda::load_matrices(b,
                          shared_address(&other.k[half * 8 + lane % 8][16 * s + (lane / 8) * 8]));
      cuda::load_matrices(k0, shared_address(&own.k[0][0] + from + 16 * s));
      cuda::load_matrices(q0, shared_address(&own.q[0][0] + from + 16 * s));
      cuda::load_matrices(k1, shared_address(&own.k[0][0] + from + 16 * s + 16));
      cuda::load_matrices(q1, shared_address(&own.q[0][0] + from + 16 * s + 16));
      multiply_add(kk, k0, b[0], b[1]);
      multiply_add(qk, q0, b[0], b[1]);
      multiply_add(kk, k1, b[2], b[3]);
      multiply_add(qk, q1, b[2], b[3]);
    }
    store_factors(block, is_own, half, kk, qk);
  }
  __device__ __forceinline__ void store_factors(int block, bool is_own, int half,
                                                const float (&kk)[4], const float (&qk)[4]) {
    PromptFactors& to = Plan::factors(block);
    const auto& own = Plan::slot(block);
    const auto& other = is_own ? own : Plan::slot(block + kRing - 1);
    const float total = block > 0 ? Plan::slot(block + kRing - 1).c[kBlock - 1] : 0.0f;
    float ck[4], cq[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int t = gr + (e >> 1) * 8, i = half * 8 + 2 * tq + (e & 1);
      const bool is_seen = !is_own || i <= t;
      const float sum = is_own ? __fsub_rn(own.c[t], own.c[i])
                               : __fadd_rn(__fsub_rn(total, other.c[i]), own.c[t]);
      const float decay = __fmul_rn(other.norm_k[i], expf(is_seen ? sum : 0.0f));
      const bool is_before = is_seen && (!is_own || i < t);
      ck[e] = is_before ? __fmul_rn(kk[e], __fmul_rn(own.norm_k[t], decay)) : 0.0f;
      cq[e] = is_seen ? __fmul_rn(qk[e], __fmul_rn(own.norm_q[t], decay)) : 0.0f;
      if (is_own) to.ck[i][t] = ck[e];
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int t = gr + upper * 8, i = half * 8 + 2 * tq;
      uint32_t high, low;
      split(cq[2 * upper], cq[2 * upper + 1], high, low);
      uint16_t (*q)[kBlock][24] = is_own ? to.cq : to.pq;
      store_pair(&q[0][t][i], high), store_pair(&q[1][t][i], low);
      if (is_own) continue;
      split(ck[2 * upper], ck[2 * upper + 1], high, low);
      store_pair(&to.pk[0][t][i], high), store_pair(&to.pk[1][t][i], low);
    }
  }

  const int aide_, tid_, row_, chunk_;
};

}  // namespace openspec::gated_delta
