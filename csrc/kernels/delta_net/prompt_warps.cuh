#pragma once

/// The warps of a prompt's CTA that fold, settle and put out: see prompt.cuh.

#include "kernels/delta_net/prompt_plan.cuh"

namespace openspec::gated_delta {

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
      } else if (held < at.folded_write) {
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
    if (++held != at.folded_write) return;
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
        const uint32_t low = t < at.begin ? at.delta(at.record(t))[column_] : 0u;
        const uint32_t high = t + 1 < at.begin ? at.delta(at.record(t + 1))[column_] : 0u;
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
    // What is folded into the state nobody reads again. A block's records lie in one piece.
    const RecordView& records = at.params.records;
    const int begin = max(at.end - records.ring_size, at.folded_write * kBlock);
    if ((block + 1) * kBlock <= begin) return;
    std::byte* record = at.record(block * kBlock);
#pragma unroll
    for (int i = 0; i < kBlock; ++i, record += records.record_bytes) {
      const int position = block * kBlock + i;
      if (i >= first && position < at.end && position >= begin) {
        at.delta(record)[column_] = static_cast<uint16_t>(made[i] >> 16);
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
    if (at.begin > block * kBlock) {
      const int num_known = min(at.begin - block * kBlock, kBlock);  // whose c is recorded
      float sum = slot.c[num_known - 1];
      for (int i = num_known; i < kBlock; ++i) slot.c[i] = sum = __fadd_rn(sum, slot.g[i]);
      return;
    }
    float c[kBlock];  // all of g before the first c: the other warps wait for these
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) load4(c + i, &slot.g[i]);
    c[0] = __fadd_rn(0.0f, c[0]);
#pragma unroll
    for (int i = 1; i < kBlock; ++i) c[i] = __fadd_rn(c[i - 1], c[i]);
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) store4(&slot.c[i], c + i);
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
      if (blockIdx.x == 0 && t >= at.begin && t < at.end &&
          t >= at.end - at.params.records.ring_size) {
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
    const int width = at.params.shape.v_width();
    uint16_t* out = static_cast<uint16_t*>(at.params.out) + int64_t{at.first_row} * width +
                    at.head * kDim + this->first_column + warp_ * 32 + 2 * gr;
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
          store_pair(out + (t - at.begin) * width + tile * 16,
                     to_pair(__fmaf_rn(f, x[e], sums[tile][j][e]),
                             __fmaf_rn(f, x[2 + e], sums[tile][j][2 + e])));
        }
      }
    }
  }

  const int warp_;
};

}  // namespace openspec::gated_delta
