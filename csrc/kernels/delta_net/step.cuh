#pragma once

/// Spans of steps: at most 16 rows, a CTA a head, a warp 16 of its columns.
///
/// The records of the window and the rows come first, then the state; while it is on its way the
/// factors of the records are made. One pass over the state folds, stores and multiplies; then the
/// rows settle, in order. Rows go by groups of four, whose k and q are one operand of eight.

#include "kernels/common/launch.cuh"
#include "kernels/delta_net/math.cuh"

namespace openspec::gated_delta {

inline constexpr int kStepWarps = kDim / 16;
inline constexpr int kStepThreads = kStepWarps * 32;

template <int kGroups>
struct StepShared {
  static constexpr int kRows = 4 * kGroups;
  static constexpr int kWindow = (3 * kBlock - 1 + kRows + 7) / 8 * 8;

  float z[kStepWarps][kOctets][32][4];
  uint16_t k[kWindow][kStride];  // positions from the first that is read
  uint16_t q[kRows][kStride];
  uint16_t v[kRows][kStride];  // later the output
  uint16_t gate[kRows][kDim];
  float weights[kDim];   // of the norm
  float2 sums[kWindow];  // c, 1 / |k|
  float g[kRows], beta[kRows], norm_q[kRows], factor_k[kRows], factor_q[kRows];
  // Factors of delta: [4 rows][block][high, low][rows of k, then of q][pairs of 16 positions].
  uint32_t factors[kGroups][3][2][8][12];
  float own[kBlock][kRows];  // of earlier positions of the row's own block
  uint64_t barrier[kStepWarps];
};

template <int kGroups>
class Step {
 public:
  using Shared = StepShared<kGroups>;

  __device__ __forceinline__ Step(const HeadPlace& place, const Workspace& workspace,
                                  Shared& shared)
      : at_(place),
        workspace_(workspace),
        sh_(shared),
        tid_(static_cast<int>(threadIdx.x)),
        warp_(tid_ / 32),
        lane_(tid_ % 32),
        gr_(lane_ / 4),
        tq_(lane_ % 4) {}

  __device__ __forceinline__ void run() {
    begin();
    load_rows();
    load_deltas();
    load_state();
    wait_copies<0>();  // the state's are of no group
    __syncthreads();
    take_norms();
    take_keys(0);
    __syncthreads();
    take_factors();
    multiply_state();
    __syncthreads();
    settle();
    store_output();
    __syncthreads();
    finish_rows();
  }

 private:
  __device__ __forceinline__ void begin() {
    b0_ = at_.begin / kBlock, b1_ = (at_.end - 1) / kBlock;
    need_ = b0_ > 0 ? b0_ - 1 : 0;
    rows_ = at_.num_rows();
    held_ = at_.folded_read;
    // Early, for the page's number is slow to come.
    if (held_ > 0) state_ = at_.tile(at_.params.states.read_pages, warp_);
    is_due_ = held_ < need_;
    crosses_ = b1_ > b0_ && b0_ > 0;
    w0_ = (is_due_ ? need_ - 1 : need_) * kBlock;
    ring_ = at_.params.records.at(at_.slot, 0) + at_.params.record_offset;
    first_place_ = w0_ % at_.params.records.ring_size;
    num_ = at_.end - w0_, known_ = at_.begin - w0_, off_ = need_ * kBlock - w0_;
  }

  /// Of a position, counted from the window's first; which is short of a ring.
  __device__ __forceinline__ std::byte* record(int i) const {
    const int size = at_.params.records.ring_size, place = first_place_ + i;
    const auto bytes = static_cast<uint32_t>(at_.params.records.record_bytes);
    return ring_ + uint64_t{static_cast<uint32_t>(place < size ? place : place - size)} * bytes;
  }

  __device__ __forceinline__ void load_rows() {
    const DeltaShape& shape = at_.params.shape;
    const int c = tid_ % 16 * 8;
    for (int i = tid_ / 16; i < num_; i += kStepThreads / 16) {
      copy_async<16>(&sh_.k[i][c], at_.key(record(i)) + c);
    }
    for (int i = tid_ / 16; i < rows_; i += kStepThreads / 16) {
      const int64_t row = at_.first_row + i;
      const uint16_t* x = workspace_.x + row * shape.conv_width() + c;
      copy_async<16>(&sh_.q[i][c], x + at_.k_head * kDim);
      copy_async<16>(&sh_.v[i][c], x + 2 * shape.k_width() + at_.head * kDim);
      copy_async<16>(&sh_.gate[i][c], static_cast<const uint16_t*>(at_.params.z) +
                                          row * at_.params.z_stride + at_.head * kDim + c);
    }
    if (tid_ < known_) copy_async<8>(&sh_.sums[tid_], at_.sums(record(tid_)));
    if (tid_ < rows_) {
      const float* gates =
          workspace_.gates + int64_t{at_.first_row + tid_} * 2 * shape.num_v_heads + at_.head;
      copy_async<4>(&sh_.beta[tid_], gates);
      copy_async<4>(&sh_.g[tid_], gates + shape.num_v_heads);
    }
    if (tid_ < kDim / 4) copy_async<16>(sh_.weights + tid_ * 4, at_.params.norm_weight + tid_ * 4);
    end_copies();
  }

  /// Position of a block, of its 16, that part n of the lane's delta is of.
  __device__ __forceinline__ int place_of(int n) const { return 2 * tq_ + (n & 1) + (n >> 1) * 8; }
  __device__ __forceinline__ int column() const { return warp_ * 16 + 2 * gr_; }

  /// Of the lane's two columns.
  __device__ __forceinline__ void load_deltas() {
    const auto load = [&](int row) {
      return known_ == 0 ? 0u
                         : load_pair(at_.delta(record(max(min(row, known_ - 1), 0))) + column());
    };
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (is_due_) old_[n] = load(place_of(n));
      pairs_[0][n] = load(off_ + place_of(n));
      if (b0_ > 0) pairs_[1][n] = load(off_ + kBlock + place_of(n));
    }
  }

  __device__ __forceinline__ void load_state() {
    if (held_ == 0) {
      const float none[4] = {};
#pragma unroll
      for (int i = 0; i < kOctets; ++i) store4(sh_.z[warp_][i][lane_], none);
      return;
    }
    if (lane_ == 0) init_tile_barrier(&sh_.barrier[warp_]);
    __syncwarp();
    fetch_tile(sh_.z[warp_][0][0], state_, &sh_.barrier[warp_], lane_);
  }

  __device__ __forceinline__ void take_norms() {
    for (int r = warp_; r < rows_; r += kStepWarps) {
      float v[2] = {square_sum(&sh_.k[known_ + r][lane_ * 4]), square_sum(&sh_.q[r][lane_ * 4])};
      sum_over_warp(v, lane_);
      if (lane_ == 0) sh_.sums[known_ + r].y = key_norm(v[0]);
      if (lane_ == 1) sh_.norm_q[r] = query_norm(v[0]);
    }
    if (tid_ != kStepThreads - 1) return;
    float sum = at_.begin % kBlock == 0 ? 0.0f : sh_.sums[known_ - 1].x;
    for (int r = 0; r < rows_; ++r) {
      if ((at_.begin + r) % kBlock == 0) sum = 0.0f;
      sh_.sums[known_ + r].x = sum = __fadd_rn(sum, sh_.g[r]);
    }
  }

  /// Of a group: four rows of k, four of q.
  __device__ __forceinline__ void take_keys(int group) {
    const int r = min(group * 4 + lane_ % 4, rows_ - 1);
    const uint16_t* from = (lane_ % 8 < 4 ? sh_.k[known_ + r] : sh_.q[r]) + (lane_ / 8) * 8;
#pragma unroll
    for (int s = 0; s < 8; s += 2) {
      uint32_t part[4];
      cuda::load_matrices(part, shared_address(from + 16 * s));
      kq_[s][0] = part[0], kq_[s][1] = part[1], kq_[s + 1][0] = part[2], kq_[s + 1][1] = part[3];
    }
  }

  /// Products of the rows' k and q with the window's k, 8 positions a tile, and what follows from
  /// them.
  __device__ __forceinline__ void take_factors() {
#pragma unroll 1
    for (int unit = warp_; unit < (b1_ - need_ + 1) * 2 * kGroups; unit += kStepWarps) {
      if (unit % kGroups * 4 < rows_) take_unit(unit % kGroups, unit / kGroups);
    }
    if (tid_ >= rows_) return;
    const int block = (at_.begin + tid_) / kBlock;
    const float2 sums = sh_.sums[known_ + tid_];
    const float total =
        block > 0 ? sh_.sums[off_ + (block - 1 - need_) * kBlock + kBlock - 1].x : 0.0f;
    const float decay = expf(__fadd_rn(total, sums.x));
    sh_.factor_k[tid_] = __fmul_rn(decay, sums.y);
    sh_.factor_q[tid_] = __fmul_rn(decay, sh_.norm_q[tid_]);
    *at_.sums(record(known_ + tid_)) = sums;
  }
  __device__ __forceinline__ void take_unit(int group, int tile) {
    const int row = min(group * 4 + gr_ % 4, rows_ - 1), t = at_.begin + row;
    const int at = off_ + tile * 8 + 2 * tq_, block = need_ + tile / 2;
    const bool is_own = block == t / kBlock, is_before = block == t / kBlock - 1;
    const float sum = sh_.sums[known_ + row].x;
    const float norm = gr_ < 4 ? sh_.sums[known_ + row].y : sh_.norm_q[row];
    float dots[4] = {0, 0, 0, 0};
    if (off_ + tile * 8 < num_) {
      if (kGroups > 1) take_keys(group);
#pragma unroll
      for (int s = 0; s < 8; s += 2) {
        uint32_t b[4];
        cuda::load_matrices(
            b, shared_address(&sh_.k[off_ + tile * 8 + lane_ % 8][16 * s + (lane_ / 8) * 8]));
        const uint32_t first[4] = {kq_[s][0], 0u, kq_[s][1], 0u};
        const uint32_t second[4] = {kq_[s + 1][0], 0u, kq_[s + 1][1], 0u};
        multiply_add(dots, first, b[0], b[1]);
        multiply_add(dots, second, b[2], b[3]);
      }
    }
    const float end = is_before ? sh_.sums[off_ + (tile / 2) * kBlock + kBlock - 1].x : 0.0f;
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool is_seen = (is_own && w0_ + at + e <= t) || is_before;
      const float2 of = sh_.sums[min(at + e, Shared::kWindow - 1)];
      const float between = is_own ? __fsub_rn(sum, of.x) : __fadd_rn(__fsub_rn(end, of.x), sum);
      const float rate = __fmul_rn(norm, __fmul_rn(of.y, expf(is_seen ? between : 0.0f)));
      factor[e] = is_seen ? __fmul_rn(dots[e], rate) : 0.0f;
    }
    if (gr_ < 4 && is_own) {
      if (group * 4 + gr_ < rows_) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sh_.own[(tile & 1) * 8 + 2 * tq_ + e][row] = w0_ + at + e < t ? factor[e] : 0.0f;
        }
      }
      factor[0] = factor[1] = 0.0f;
    }
    uint32_t high, low;
    split(factor[0], factor[1], high, low);
    sh_.factors[group][tile / 2][0][gr_][(tile & 1) * 4 + tq_] = high;
    sh_.factors[group][tile / 2][1][gr_][(tile & 1) * 4 + tq_] = low;
  }

  static __device__ __forceinline__ void as_operand(uint32_t (&to)[4], const uint32_t (&pairs)[4]) {
    to[0] = lows(pairs[0], pairs[1]), to[1] = highs(pairs[0], pairs[1]);
    to[2] = lows(pairs[2], pairs[3]), to[3] = highs(pairs[2], pairs[3]);
  }
  /// Of the block whose positions start at row `first` of the window.
  __device__ __forceinline__ void begin_fold(Fold& fold, int first, const uint32_t (&pairs)[4]) {
    const float total = sh_.sums[first + kBlock - 1].x;
    float factors[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 of = sh_.sums[first + place_of(n)];
      factors[n] = __fmul_rn(expf(__fsub_rn(total, of.x)), of.y);
    }
    uint32_t delta[4];
    as_operand(delta, pairs);
    fold.set(expf(total), factors, delta);
  }
  /// Sums by the high and by the low half of a part of the state.
  __device__ __forceinline__ void multiply(const float (&z)[2][4], int step,
                                           float (&to)[kGroups][2][4]) {
    uint32_t high[4], low[4];
    split_state(z, high, low);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[2] = {kq_[step][0], kq_[step][1]};
      if (kGroups > 1) {
        if (group * 4 >= rows_) break;
        const int r = min(group * 4 + lane_ % 4, rows_ - 1);
        cuda::load_matrices(b, shared_address((lane_ % 8 < 4 ? sh_.k[known_ + r] : sh_.q[r]) +
                                              (lane_ / 8 % 2) * 8 + 16 * step));
      }
      multiply_add(to[group][0], high, b[0], b[1]);
      multiply_add(to[group][1], low, b[0], b[1]);
    }
  }

  /// Z'k and Z'q; rows of the later block read the state folded once more.
  __device__ __forceinline__ void multiply_state() {
    const float (*from)[32][4] = sh_.z[warp_];
    float now[kGroups][2][4] = {}, later[kGroups][2][4] = {};
    if (held_ > 0) wait_for_tile(&sh_.barrier[warp_]);
    const auto take = [&](float (&z)[2][4], int step) {
      load4(z[0], from[2 * step][lane_]);
      load4(z[1], from[2 * step + 1][lane_]);
    };
    if (!is_due_ && !crosses_) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        float z[2][4];
        take(z, step);
        multiply(z, step, now);
      }
    } else {
      Fold first, second;
      float* to = nullptr;
      if (is_due_) begin_fold(first, 0, old_);
      if (crosses_) begin_fold(second, off_, pairs_[0]);
      if (is_due_ && at_.folded_write > held_) {
        to = at_.tile(at_.params.states.write_pages, warp_) + lane_ * 4;
      }
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        float z[2][4];
        take(z, step);
        if (is_due_) {
          first.add(z, sh_.k[0], step, lane_);
          if (to != nullptr) store4(to + 256 * step, z[0]), store4(to + 256 * step + 128, z[1]);
        }
        multiply(z, step, now);
        if (crosses_) {
          second.add(z, sh_.k[off_], step, lane_);
          multiply(z, step, later);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) {
      const int group = i / 4, e = i % 4;
      const int row = group * 4 + (2 * tq_ + (e & 1)) % 4;
      const bool is_later = crosses_ && (at_.begin + row) / kBlock > b0_;
      product_[group][e] = is_later ? __fadd_rn(later[group][0][e], later[group][1][e])
                                    : __fadd_rn(now[group][0][e], now[group][1][e]);
    }
  }

  /// Deltas in order of position, and the sums over them.
  __device__ __forceinline__ void settle() {
#pragma unroll 1
    for (int block = need_; block <= b1_; ++block) {
      uint32_t own[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bool is_known = block * kBlock - w0_ + place_of(n) < known_;
        own[n] = !is_known ? 0u : block == need_ ? pairs_[0][n] : pairs_[1][n];
      }
      if (block >= b0_) {
        const int first = block * kBlock - at_.begin;
        const int r0 = max(first, 0), r1 = min(first + kBlock, rows_);  // rows of this block
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (group * 4 < r1 && group * 4 + 4 > r0) settle_group(group, first, r0, r1, own);
        }
      }
      uint32_t delta[4];
      as_operand(delta, own);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (kGroups > 1 && group * 4 >= rows_) break;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint32_t* factors = sh_.factors[group][block - need_][part][gr_];
          multiply_add(sums_[group], delta, factors[tq_], factors[tq_ + 4]);
        }
      }
    }
  }
  static __device__ __forceinline__ void subtract(const float2& factor, uint32_t pair,
                                                  float (&from)[4]) {
    const float d0 = -low_of(pair), d1 = -high_of(pair);
    from[0] = __fmaf_rn(factor.x, d0, from[0]), from[1] = __fmaf_rn(factor.y, d0, from[1]);
    from[2] = __fmaf_rn(factor.x, d1, from[2]), from[3] = __fmaf_rn(factor.y, d1, from[3]);
  }
  __device__ __forceinline__ float2 own_factors(int i, int row) const {
    return *reinterpret_cast<const float2*>(&sh_.own[i][row]);
  }
  /// Rows r0 .. r1 of the block at row `first`, as far as they are of the group; `own`: deltas of
  /// the block.
  __device__ __forceinline__ void settle_group(int group, int first, int r0, int r1,
                                               uint32_t (&own)[4]) {
    const int mine = group * 4 + 2 * (tq_ & 1);  // first of the lane's two rows
    const float2 rate = *reinterpret_cast<const float2*>(&sh_.beta[mine]);
    const float2 factor =
        *reinterpret_cast<const float2*>(&(tq_ < 2 ? sh_.factor_k : sh_.factor_q)[mine]);
    float rest[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t v = load_pair(&sh_.v[mine + e][column()]);
      const float f = e == 0 ? factor.x : factor.y;
      rest[e] = __fsub_rn(low_of(v), __fmaf_rn(f, product_[group][e], sums_[group][e]));
      rest[2 + e] =
          __fsub_rn(high_of(v), __fmaf_rn(f, product_[group][2 + e], sums_[group][2 + e]));
    }
    // Earlier positions of the block: recorded, or of an earlier group.
    const int num_before = max(group * 4, r0) - first;
#pragma unroll
    for (int i = 0; i < kBlock - 1; ++i) {
      if (i >= num_before) break;
      const uint32_t pair =
          __shfl_sync(~0u, own[(i & 1) + (i >> 3) * 2], (lane_ & ~3) | (i % 8 / 2));
      subtract(own_factors(i, mine), pair, rest);
    }
#pragma unroll
    for (int e4 = 0; e4 < 4; ++e4) {
      const int r = group * 4 + e4, i = r - first, e = e4 % 2;
      if (r < r0 || r >= r1) continue;
      const float f = e == 0 ? rate.x : rate.y;
      const uint32_t made = to_pair(__fmul_rn(f, rest[e]), __fmul_rn(f, rest[2 + e]));
      const uint32_t pair = __shfl_sync(~0u, made, (lane_ & ~3) | (e4 / 2));
      subtract(own_factors(i, mine), pair, rest);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (i == place_of(n)) own[n] = pair;
      }
      if (tq_ == 0) store_pair(at_.delta(record(known_ + r)) + column(), pair);
    }
  }

  /// To shared memory, in the place of v.
  __device__ __forceinline__ void store_output() {
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = group * 4 + 2 * (tq_ & 1) + e;
        if (tq_ < 2 || r >= rows_) continue;
        const float f = sh_.factor_q[r];
        store_pair(&sh_.v[r][column()],
                   to_pair(__fmaf_rn(f, product_[group][e], sums_[group][e]),
                           __fmaf_rn(f, product_[group][2 + e], sums_[group][2 + e])));
      }
    }
  }
  __device__ __forceinline__ void finish_rows() {
    for (int r = warp_; r < rows_; r += kStepWarps) {
      const uint2 o = *reinterpret_cast<const uint2*>(&sh_.v[r][lane_ * 4]);
      const uint2 z = *reinterpret_cast<const uint2*>(&sh_.gate[r][lane_ * 4]);
      uint16_t* out = static_cast<uint16_t*>(at_.params.out) +
                      int64_t{at_.first_row + r} * at_.params.shape.v_width() + at_.head * kDim;
      *reinterpret_cast<uint2*>(out + lane_ * 4) =
          gated_norm(sh_.weights, at_.params.eps, o, z, lane_);
    }
  }

  const HeadPlace at_;
  const Workspace& workspace_;
  Shared& sh_;
  const int tid_, warp_, lane_, gr_, tq_;
  // Blocks of the first and the last row, and the first one that is not read from the state.
  int b0_, b1_, need_;
  int rows_, held_;  // rows of the span; blocks in the state that is read
  std::byte* ring_;  // the slot's records, and the place in it of the window's first
  int first_place_;
  const float* state_ = nullptr;  // the warp's tile of it
  bool is_due_, crosses_;         // a fold before the first row; one between rows
  int w0_, num_, known_;  // the window: its first position, its length, those before the span
  int off_;               // where block need_ begins in it
  uint32_t old_[4] = {}, pairs_[2][4] = {};  // deltas of the block to fold, and of the two after
  uint32_t kq_[8][2];
  float product_[kGroups][4];  // [column: rows of k and q 2 tq, 2 tq + 1; the next: the same]
  float sums_[kGroups][4] = {};
};

/// Spans of at most `step_rows` rows, 4 * kGroups or fewer. Heads along blockIdx.x, spans along
/// blockIdx.y.
template <int kGroups>
__global__ void __launch_bounds__(kStepThreads, 2)
    run_steps(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
              int step_rows) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int span = static_cast<int>(blockIdx.y);
  // All that is read of the span is asked for before any of it decides.
  const HeadPlace place(params, span, static_cast<int>(blockIdx.x));
  if (place.num_rows() == 0 || place.num_rows() > step_rows) return;
  Step<kGroups>(place, workspace, *reinterpret_cast<StepShared<kGroups>*>(shared_bytes)).run();
}

}  // namespace openspec::gated_delta
