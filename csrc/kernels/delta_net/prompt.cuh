#pragma once

/// Prompts and other long spans: a CTA has some columns of a head, and warps of four kinds that
/// work a block of 16 positions apart, with one barrier a block. At block b
///
///   state warps, 16 columns each, fold b - 1 and multiply with the rows of b + 1;
///   settling warps, a column a lane, make the deltas of b;
///   output warps make the outputs of b - 1 and the norms of b + 2;
///   aides load b + 4 and multiply k and q of b + 1 with each other.

#include <type_traits>

#include "kernels/common/launch.cuh"
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
        held(params.folded_read[at.span]),
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
      take(&slot.k[i][chunk_], is_new ? from + to_k : at.key(t + i) + chunk_, t + i < at.end);
      take(&slot.q[i][chunk_], from + to_q, is_new);
      if (chunk_ < kColumns) take(&slot.v[i][chunk_], from + to_v + chunk_, is_new);
    }
    if (tid_ >= 2 * kBlock) return;
    const int position = t + tid_ % kBlock;
    *to_gate = position >= at.begin && position < at.end ? *gates_of(position) : 0.0f;
    if (tid_ < kBlock && position < at.begin) slot.c[tid_] = at.sums(position)->x;
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

template <int kColumns>
class PromptState : PromptPlan<kColumns> {
 public:
  using Plan = PromptPlan<kColumns>;
  __device__ __forceinline__ PromptState(const Plan& plan, int warp)
      : Plan(plan), warp_(warp), tile_(static_cast<int>(blockIdx.x) * Plan::kStateWarps + warp) {}

  __device__ __forceinline__ void run() {
    load_state();
    __syncthreads();
    __syncthreads();
    __syncthreads();
    if (Plan::is_due()) fold(Plan::need - 1);
    multiply_all(b0);
    for (int b = b0; b <= b1; ++b) {
      __syncthreads();
      if (b > 0 && b < b1) {
        begin_fold(b - 1);
        clear();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          fold_.add(z_[step], Plan::slot(b - 1).k[0], step, lane);
          multiply(b + 1, step);
        }
        store_products(b + 1);
        end_fold();
      } else if (b < b1) {
        multiply_all(b + 1);
      } else if (held < at.params.folded_write[at.span]) {
        fold(b - 1);
      }
    }
    __syncthreads();
  }

 private:
  using Plan::at, Plan::b0, Plan::b1, Plan::held, Plan::lane, Plan::tq;

  __device__ __forceinline__ void load_state() {
    if (held == 0) {
#pragma unroll
      for (int i = 0; i < kOctets * 4; ++i) z_[i / 8][i / 4 % 2][i % 4] = 0.0f;
      return;
    }
    const float* from = at.tile(at.params.states.read_pages, tile_) + lane * 4;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) load4(z_[i / 2][i % 2], from + i * 128);
  }
  __device__ __forceinline__ void begin_fold(int block) {
    const auto& slot = Plan::slot(block);
    const float2 f0 = *reinterpret_cast<const float2*>(&slot.fold[2 * tq]);
    const float2 f1 = *reinterpret_cast<const float2*>(&slot.fold[2 * tq + 8]);
    const float factors[4] = {f0.x, f0.y, f1.x, f1.y};
    uint32_t delta[4];
    Plan::load_delta(delta, block, warp_);
    fold_.set(slot.decay, factors, delta);
  }
  __device__ __forceinline__ void end_fold() {
    if (++held != at.params.folded_write[at.span]) return;
    float* to = at.tile(at.params.states.write_pages, tile_) + lane * 4;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) store4(to + i * 128, z_[i / 2][i % 2]);
  }
  __device__ __forceinline__ void fold(int block) {
    begin_fold(block);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      fold_.add(z_[step], Plan::slot(block).k[0], step, lane);
    }
    end_fold();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 32; ++i) x_[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }
  __device__ __forceinline__ void multiply(int block, int step) {
    const auto& slot = Plan::slot(block);
    uint32_t high[4], low[4];
    split_state(z_[step], high, low);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t b[4];
      cuda::load_matrices(
          b, shared_address((lane < 16 ? &slot.k[0][0] : &slot.q[0][0]) +
                            (j * 8 + lane % 8) * kStride + 16 * step + (lane / 8 % 2) * 8));
      multiply_add(x_[j][0], high, b[0], b[1]);
      multiply_add(x_[j][1], high, b[2], b[3]);
      multiply_add(x_[j][2], low, b[0], b[1]);
      multiply_add(x_[j][3], low, b[2], b[3]);
    }
  }
  __device__ __forceinline__ void multiply_all(int block) {
    clear();
#pragma unroll
    for (int step = 0; step < 8; ++step) multiply(block, step);
    store_products(block);
  }
  static __device__ __forceinline__ float4 sum_of(const float (&a)[4], const float (&b)[4]) {
    return make_float4(__fadd_rn(a[0], b[0]), __fadd_rn(a[1], b[1]), __fadd_rn(a[2], b[2]),
                       __fadd_rn(a[3], b[3]));
  }
  __device__ __forceinline__ void store_products(int block) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      this->sh.with_k[block & 1][warp_][j][lane] = sum_of(x_[j][0], x_[j][2]);
      this->sh.with_q[block % 3][warp_][j][lane] = sum_of(x_[j][1], x_[j][3]);
    }
  }

  const int warp_, tile_;
  float z_[8][2][4];
  float x_[2][4][4];  // [8 rows each][k, q by the high half; k, q by the low one]
  Fold fold_;
};

template <int kColumns>
class PromptDeltas : PromptPlan<kColumns> {
 public:
  using Plan = PromptPlan<kColumns>;
  __device__ __forceinline__ PromptDeltas(const Plan& plan, int warp)
      : Plan(plan), warp_(warp), column_(plan.first_column + warp * 32 + plan.lane) {}

  __device__ __forceinline__ void run() {
    recall();
    __syncthreads();
    __syncthreads();
    __syncthreads();
    for (int b = b0; b <= b1; ++b) {
      __syncthreads();
      begin(b);
      const int first = max(at.begin - b * kBlock, 0);
      uint32_t made[kBlock];  // bf16 in the upper half
      if (first == 0) {
        settle<false>(b, first, made);
      } else {
        settle<true>(b, first, made);
      }
      keep(b, first, made);
    }
    __syncthreads();
  }

 private:
  using Plan::at, Plan::b0, Plan::b1, Plan::gr, Plan::tq, Plan::lane, Plan::sh;

  __device__ __forceinline__ uint32_t* own_pairs(int block) const {
    return sh.delta[block & 3][warp_ * 32 + lane];
  }
  __device__ __forceinline__ void recall() {
    for (int b = Plan::first_block; b <= b0; ++b) {
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        const int t = b * kBlock + 2 * pair;
        const uint32_t low = t < at.begin ? at.delta(t)[column_] : 0u;
        const uint32_t high = t + 1 < at.begin ? at.delta(t + 1)[column_] : 0u;
        own_pairs(b)[pair] = low | high << 16;
      }
    }
  }

  /// What is left of v without the state and the block before.
  __device__ __forceinline__ void begin(int block) {
    const PromptFactors& factors = Plan::factors(block);
    float sums[2][2][4] = {};
    if (block > 0) {
      uint32_t delta[2][4];
      Plan::load_delta(delta[0], block - 1, 2 * warp_);
      Plan::load_delta(delta[1], block - 1, 2 * warp_ + 1);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t c0 = load_pair(&factors.pk[part][j * 8 + gr][2 * tq]);
          const uint32_t c1 = load_pair(&factors.pk[part][j * 8 + gr][2 * tq + 8]);
          multiply_add(sums[0][j], delta[0], c0, c1);
          multiply_add(sums[1][j], delta[1], c0, c1);
        }
      }
    }
    const auto& slot = Plan::slot(block);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int t = j * 8 + 2 * tq, c = tile * 16 + 2 * gr;
        const float4 x = sh.with_k[block & 1][2 * warp_ + tile][j][lane];
        const float2 f = *reinterpret_cast<const float2*>(&factors.k[t]);
        const uint32_t v0 = load_pair(&slot.v[t][warp_ * 32 + c]);
        const uint32_t v1 = load_pair(&slot.v[t + 1][warp_ * 32 + c]);
        const float (&sum)[4] = sums[tile][j];
        *reinterpret_cast<float2*>(&sh.rest[warp_][c][t]) =
            make_float2(__fsub_rn(low_of(v0), __fmaf_rn(f.x, x.x, sum[0])),
                        __fsub_rn(low_of(v1), __fmaf_rn(f.y, x.y, sum[1])));
        *reinterpret_cast<float2*>(&sh.rest[warp_][c + 1][t]) =
            make_float2(__fsub_rn(high_of(v0), __fmaf_rn(f.x, x.z, sum[2])),
                        __fsub_rn(high_of(v1), __fmaf_rn(f.y, x.w, sum[3])));
      }
    }
    __syncwarp();
  }

  /// The deltas of the lane's column; of rows before `first` the recorded ones.
  template <bool kIsPartial>
  __device__ __forceinline__ void settle(int block, int first, uint32_t (&made)[kBlock]) {
    const PromptFactors& factors = Plan::factors(block);
    float rest[kBlock], rate[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) {
      load4(rest + i, &sh.rest[warp_][lane][i]);
      load4(rate + i, &Plan::slot(block).beta[i]);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      made[i] = to_pair(0.0f, __fmul_rn(rate[i], rest[i]));
      if (kIsPartial && i < first) {
        const uint32_t pair = own_pairs(block)[i / 2];
        made[i] = i % 2 == 0 ? pair << 16 : pair & 0xffff0000u;
      }
      const float negative = -__uint_as_float(made[i]);
#pragma unroll
      for (int t = i / 4 * 4; t < kBlock; t += 4) {
        float c[4];
        load4(c, &factors.ck[i][t]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (t + e > i) rest[t + e] = __fmaf_rn(c[e], negative, rest[t + e]);
        }
      }
    }
  }

  __device__ __forceinline__ void keep(int block, int first, const uint32_t (&made)[kBlock]) {
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) {
      *reinterpret_cast<uint2*>(own_pairs(block) + i / 2) =
          make_uint2(highs(made[i], made[i + 1]), highs(made[i + 2], made[i + 3]));
    }
    const int ring = at.params.records.ring_size;
    if ((block + 1) * kBlock <= at.end - ring) return;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int position = block * kBlock + i;
      if (i >= first && position < at.end && position >= at.end - ring) {
        at.delta(position)[column_] = static_cast<uint16_t>(made[i] >> 16);
      }
    }
  }

  const int warp_, column_;
};

template <int kColumns>
class PromptOutput : PromptPlan<kColumns> {
 public:
  using Plan = PromptPlan<kColumns>;
  __device__ __forceinline__ PromptOutput(const Plan& plan, int warp) : Plan(plan), warp_(warp) {}

  __device__ __forceinline__ void run() {
    __syncthreads();
    for (int b = Plan::first_block; b <= min(b0 + 1, b1); ++b) take_norms(b);
    __syncthreads();
    for (int b = Plan::first_block; b <= b0; ++b) take_row_factors(b, b == b0);
    __syncthreads();
    __syncthreads();
    for (int b = b0; b <= b1; ++b) {
      if (b + 1 <= b1) take_row_factors(b + 1, true);
      if (b + 2 <= b1) take_norms(b + 2);
      if (b > b0) store_output(b - 1);
      __syncthreads();
    }
    store_output(b1);
  }

 private:
  using Plan::at, Plan::b0, Plan::b1, Plan::gr, Plan::tq, Plan::lane, Plan::sh;
  static constexpr int kWarps = Plan::kPairWarps;
  static constexpr int kRows = kBlock / kWarps;  // of a block, for the norms of a warp

  __device__ __forceinline__ void take_norms(int block) {
    auto& slot = Plan::slot(block);
    float n[2 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      n[r] = square_sum(&slot.k[warp_ * kRows + r][lane * 4]);
      n[kRows + r] = square_sum(&slot.q[warp_ * kRows + r][lane * 4]);
    }
    sum_over_warp(n, lane);
    int r = 0;  // which one came out here
#pragma unroll
    for (int i = 0, bit = kRows / 2; bit > 0; ++i, bit /= 2) r += (lane >> (i + 1) & 1) * bit;
    if (lane < 2 * kRows) {
      if ((lane & 1) == 0) {
        slot.norm_k[warp_ * kRows + r] = key_norm(n[0]);
      } else {
        slot.norm_q[warp_ * kRows + r] = query_norm(n[0]);
      }
    }
    if (warp_ != kWarps - 1 || lane != 31) return;
    const int num_known = min(max(at.begin - block * kBlock, 0), kBlock);  // whose c is recorded
    float sum = num_known > 0 ? slot.c[num_known - 1] : 0.0f;
    for (int i = num_known; i < kBlock; ++i) slot.c[i] = sum = __fadd_rn(sum, slot.g[i]);
  }

  /// Of a block's fold and, with `has_rows`, of its rows.
  __device__ __forceinline__ void take_row_factors(int block, bool has_rows) {
    auto& slot = Plan::slot(block);
    if (warp_ == 0 && lane < kBlock && has_rows) {
      PromptFactors& factors = Plan::factors(block);
      const float total = block > 0 ? Plan::slot(block + kRing - 1).c[kBlock - 1] : 0.0f;
      const float decay = expf(__fadd_rn(total, slot.c[lane]));
      factors.k[lane] = __fmul_rn(decay, slot.norm_k[lane]);
      factors.q[lane] = __fmul_rn(decay, slot.norm_q[lane]);
      const int t = block * kBlock + lane;
      if (blockIdx.x == 0 && t >= at.begin && t < at.end) {
        this->workspace.sums[at.row_at(t) * at.params.shape.num_v_heads + at.head] =
            make_float2(slot.c[lane], slot.norm_k[lane]);
      }
    }
    if (warp_ == kWarps - 1 && lane < kBlock) {
      const float sum = slot.c[kBlock - 1];
      slot.fold[lane] = __fmul_rn(expf(__fsub_rn(sum, slot.c[lane])), slot.norm_k[lane]);
      if (lane == 0) slot.decay = expf(sum);
    }
  }

  __device__ __forceinline__ void store_output(int block) {
    const PromptFactors& factors = Plan::factors(block);
    float sums[2][2][4] = {};
    const auto add = [&](const uint16_t (&c)[2][kBlock][24], int of) {
      uint32_t delta[2][4];
      Plan::load_delta(delta[0], of, 2 * warp_);
      Plan::load_delta(delta[1], of, 2 * warp_ + 1);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t c0 = load_pair(&c[part][j * 8 + gr][2 * tq]);
          const uint32_t c1 = load_pair(&c[part][j * 8 + gr][2 * tq + 8]);
          multiply_add(sums[0][j], delta[0], c0, c1);
          multiply_add(sums[1][j], delta[1], c0, c1);
        }
      }
    };
    if (block > 0) add(factors.pq, block - 1);
    add(factors.cq, block);
    uint16_t* out = static_cast<uint16_t*>(at.params.out) + at.head * kDim + this->first_column +
                    warp_ * 32 + 2 * gr;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 x4 = sh.with_q[block % 3][2 * warp_ + tile][j][lane];
        const float x[4] = {x4.x, x4.y, x4.z, x4.w};
        const float2 f2 = *reinterpret_cast<const float2*>(&factors.q[j * 8 + 2 * tq]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int t = block * kBlock + j * 8 + 2 * tq + e;
          const float f = e == 0 ? f2.x : f2.y;
          if (t < at.begin || t >= at.end) continue;
          store_pair(out + at.row_at(t) * at.params.shape.v_width() + tile * 16,
                     to_pair(__fmaf_rn(f, x[e], sums[tile][j][e]),
                             __fmaf_rn(f, x[2 + e], sums[tile][j][2 + e])));
        }
      }
    }
  }

  const int warp_;
};

/// Spans of more than `step_rows` rows, their outputs before norm and gate. Parts of a head along
/// blockIdx.x, heads along y, spans along z.
template <int kColumns, int kMinBlocks>
__global__ void __launch_bounds__(PromptPlan<kColumns>::kThreads, kMinBlocks)
    run_prompts(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
                int step_rows) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  using Plan = PromptPlan<kColumns>;
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int span = static_cast<int>(blockIdx.z);
  if (params.rows.span_begin[span + 1] - params.rows.span_begin[span] <= step_rows) return;
  const Plan plan(params, workspace, *reinterpret_cast<PromptShared<kColumns>*>(shared_bytes));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kFirstPair = Plan::kStateWarps + kAides;
  if (warp < Plan::kStateWarps) {
    PromptState<kColumns>(plan, warp).run();
  } else if (warp < kFirstPair) {
    PromptAide<kColumns>(plan, warp - Plan::kStateWarps).run();
  } else if (warp < kFirstPair + Plan::kPairWarps) {
    PromptDeltas<kColumns>(plan, warp - kFirstPair).run();
  } else {
    PromptOutput<kColumns>(plan, warp - kFirstPair - Plan::kPairWarps).run();
  }
}

}  // namespace openspec::gated_delta
