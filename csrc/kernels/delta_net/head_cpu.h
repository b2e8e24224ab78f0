#pragma once

/// The recurrence of one value head over one span, in the order of its blocks.

#include <cstring>

#include "kernels/common/simd_cpu.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/delta_net/workspace_cpu.h"

namespace openspec::OPENSPEC_ISA::gated_delta {

using namespace openspec::gated_delta;

/// A tile's columns of a row, as vectors.
struct Columns {
  static constexpr int kCount = kTileColumns / kLanes;
  Vf part[kCount] = {};

  static OPENSPEC_INLINE Columns of(const float* from) {
    Columns out;
    for (int i = 0; i < kCount; ++i) out.part[i] = load(from + i * kLanes);
    return out;
  }
  OPENSPEC_INLINE void put(float* to) const {
    for (int i = 0; i < kCount; ++i) store(to + i * kLanes, part[i]);
  }
  /// *this += x * from
  OPENSPEC_INLINE void add(float x, const Columns& from) {
    for (int i = 0; i < kCount; ++i) part[i] = fma(splat(x), from.part[i], part[i]);
  }
};

OPENSPEC_INLINE float dot(const float* x, const float* y) {
  Vf sum{};
  for (int i = 0; i < kDeltaHeadDim; i += kLanes) sum = fma(load(x + i), load(y + i), sum);
  return sum_lanes(sum);
}

/// 1 / |x|, with the reference's smallest norm.
OPENSPEC_INLINE float inverse_norm(const float* x) {
  return 1.0f / __builtin_sqrtf(dot(x, x) + 1e-6f);
}

OPENSPEC_INLINE float decay(float exponent) { return exp_nonpositive(splat(exponent))[0]; }

template <typename T>
class Head {
 public:
  Head(const DeltaNetParams& params, const float* convolved, const float* gates, int span, int head,
       HeadScratch& scratch)
      : params_(params),
        convolved_(convolved),
        gates_(gates),
        head_(head),
        k_head_(head / (params.shape.num_v_heads / params.shape.num_k_heads)),
        slot_(params.rows.span_seq[span]),
        first_row_(params.rows.span_begin[span]),
        begin_(params.rows.span_kv_len[span]),
        end_(begin_ + params.rows.span_begin[span + 1] - first_row_),
        folded_(params.folded_read[span]),
        folded_write_(params.folded_write[span]),
        at_(scratch) {}

  void run() {
    load_state();
    for (int position = folded_ * kDeltaBlock; position < begin_; ++position) recall(position);
    for (int block = begin_ / kDeltaBlock; block * kDeltaBlock < end_; ++block) {
      fold_up_to(folded_blocks(block * kDeltaBlock));
      first_ = max_of(begin_ - block * kDeltaBlock, 0);
      last_ = min_of(end_ - block * kDeltaBlock, kDeltaBlock);
      for (int t = first_; t < last_; ++t) take_row(block, t);
      for (int t = first_; t < last_; ++t) take_factors(block, t);
      for (int tile = 0; tile < kNumTiles; ++tile) settle(block, tile);
      for (int t = first_; t < last_; ++t) finish_row(block, t);
    }
    fold_up_to(folded_write_);
  }

 private:
  using Stored = typename T::Stored;
  static constexpr int kGroup = kNumRegisters / (4 * Columns::kCount);  // rows of products

  float* tile(const int32_t* pages, int tile) const {
    const int index = params_.layer * params_.shape.num_tiles() + head_ * kNumTiles + tile;
    return params_.states.tile(pages, slot_, index);
  }
  void load_state() {
    for (int i = 0; i < kNumTiles; ++i) {
      if (folded_ == 0) {
        std::memset(at_.z[i], 0, sizeof at_.z[i]);
      } else {
        std::memcpy(at_.z[i], tile(params_.states.read_pages, i), sizeof at_.z[i]);
      }
    }
  }
  void fold_up_to(int num_blocks) {
    while (folded_ < num_blocks) {
      fold(folded_ % kWindowBlocks);
      if (++folded_ != folded_write_) continue;
      for (int i = 0; i < kNumTiles; ++i) {
        std::memcpy(tile(params_.states.write_pages, i), at_.z[i], sizeof at_.z[i]);
      }
    }
  }
  void fold(int place) {
    const float total = at_.sum[place][kDeltaBlock - 1], kept = decay(total);
    for (int i = 0; i < kDeltaBlock; ++i) {
      const float weight = decay(total - at_.sum[place][i]) * at_.norm[place][i];
      for (int j = 0; j < kDeltaHeadDim; ++j) at_.folded_k[i][j] = weight * at_.k[place][i][j];
    }
    for (int tile = 0; tile < kNumTiles; ++tile) {
      for (int j = 0; j < kDeltaHeadDim; ++j) {
        Columns z = Columns::of(at_.z[tile][j]);
        for (Vf& part : z.part) part *= kept;
        for (int i = 0; i < kDeltaBlock; ++i) {
          z.add(at_.folded_k[i][j], Columns::of(at_.delta[place][i] + tile * kTileColumns));
        }
        z.put(at_.z[tile][j]);
      }
    }
  }

  std::byte* record(int position) const {
    return params_.records.at(slot_, position) + params_.record_offset;
  }
  Stored* delta_record(int position) const {
    return reinterpret_cast<Stored*>(record(position) + params_.shape.delta_offset(params_.dtype)) +
           head_ * kDeltaHeadDim;
  }
  float* sums_record(int position) const {
    return reinterpret_cast<float*>(record(position) + params_.shape.sums_offset(params_.dtype)) +
           2 * head_;
  }
  void recall(int position) {
    const int place = position / kDeltaBlock % kWindowBlocks, t = position % kDeltaBlock;
    const auto* k = reinterpret_cast<const Stored*>(record(position)) + k_head_ * kDeltaHeadDim;
    const Stored* delta = delta_record(position);
    for (int i = 0; i < kDeltaHeadDim; ++i) at_.k[place][t][i] = T::load(k[i]);
    for (int i = 0; i < kDeltaHeadDim; ++i) at_.delta[place][t][i] = T::load(delta[i]);
    at_.sum[place][t] = sums_record(position)[0];
    at_.norm[place][t] = sums_record(position)[1];
  }

  int row_of(int block, int t) const { return first_row_ + block * kDeltaBlock + t - begin_; }

  void take_row(int block, int t) {
    const DeltaShape& shape = params_.shape;
    const int64_t row = row_of(block, t);
    const float* from = convolved_ + row * shape.conv_width();
    const int place = block % kWindowBlocks;
    constexpr size_t kBytes = kDeltaHeadDim * sizeof(float);
    std::memcpy(at_.q[t], from + k_head_ * kDeltaHeadDim, kBytes);
    std::memcpy(at_.k[place][t], from + shape.k_width() + k_head_ * kDeltaHeadDim, kBytes);
    std::memcpy(at_.v[t], from + 2 * shape.k_width() + head_ * kDeltaHeadDim, kBytes);
    const float* gates = gates_ + row * 2 * shape.num_v_heads;
    at_.beta[t] = gates[head_];
    at_.sum[place][t] = (t == 0 ? 0.0f : at_.sum[place][t - 1]) + gates[shape.num_v_heads + head_];
    at_.norm[place][t] = inverse_norm(at_.k[place][t]);
  }

  // Of Z and of delta, in the sums of row t.
  void take_factors(int block, int t) {
    const int place = block % kWindowBlocks, before = (block + kWindowBlocks - 1) % kWindowBlocks;
    const float* k = at_.k[place][t];
    const float sum = at_.sum[place][t], norm_k = at_.norm[place][t];
    const float norm_q = inverse_norm(at_.q[t]) * 0.08838834764831845f;  // 128 ** -0.5
    const float total = block > 0 ? at_.sum[before][kDeltaBlock - 1] : 0.0f;
    at_.factor_k[t] = decay(total + sum) * norm_k;
    at_.factor_q[t] = decay(total + sum) * norm_q;
    const auto take = [&](int of, int i, float exponent, float* to_k, float* to_q) {
      const float rate = at_.norm[of][i] * decay(exponent);
      to_k[i] = dot(at_.k[of][i], k) * (norm_k * rate);
      to_q[i] = dot(at_.k[of][i], at_.q[t]) * (norm_q * rate);
    };
    for (int i = 0; block > 0 && i < kDeltaBlock; ++i) {
      take(before, i, (total - at_.sum[before][i]) + sum, at_.before_k[t], at_.before_q[t]);
    }
    for (int i = 0; i <= t; ++i) {
      take(place, i, sum - at_.sum[place][i], at_.own_k[t], at_.own_q[t]);
    }
  }

  // Z'k and Z'q of some rows and a tile's columns.
  template <int kRows>
  OPENSPEC_INLINE void multiply(int place, int tile, int t, Columns* with_k,
                                Columns* with_q) const {
    Columns k[kRows], q[kRows];
    for (int j = 0; j < kDeltaHeadDim; ++j) {
      const Columns z = Columns::of(at_.z[tile][j]);
      for (int r = 0; r < kRows; ++r) {
        k[r].add(at_.k[place][t + r][j], z);
        q[r].add(at_.q[t + r][j], z);
      }
    }
    for (int r = 0; r < kRows; ++r) with_k[t + r] = k[r], with_q[t + r] = q[r];
  }

  // delta and the output of the block's rows, in the columns of a tile.
  void settle(int block, int tile) {
    const int place = block % kWindowBlocks, before = (block + kWindowBlocks - 1) % kWindowBlocks;
    const int column = tile * kTileColumns;
    Columns with_k[kDeltaBlock], with_q[kDeltaBlock];
    int t = first_;
    for (; t + kGroup <= last_; t += kGroup) multiply<kGroup>(place, tile, t, with_k, with_q);
    for (; t < last_; ++t) multiply<1>(place, tile, t, with_k, with_q);
    for (t = first_; t < last_; ++t) {
      Columns sum_k, sum_q;
      for (int i = 0; block > 0 && i < kDeltaBlock; ++i) {
        const Columns delta = Columns::of(at_.delta[before][i] + column);
        sum_k.add(at_.before_k[t][i], delta);
        sum_q.add(at_.before_q[t][i], delta);
      }
      sum_k.add(at_.factor_k[t], with_k[t]);
      Columns rest = Columns::of(at_.v[t] + column);
      for (int i = 0; i < Columns::kCount; ++i) rest.part[i] -= sum_k.part[i];
      for (int i = 0; i < t; ++i) {
        const Columns delta = Columns::of(at_.delta[place][i] + column);
        rest.add(-at_.own_k[t][i], delta);
        sum_q.add(at_.own_q[t][i], delta);
      }
      float* made = at_.delta[place][t] + column;
      for (Vf& part : rest.part) part *= at_.beta[t];
      rest.put(made);
      for (int i = 0; i < kTileColumns; ++i) made[i] = T::round(made[i]);
      sum_q.add(at_.own_q[t][t], Columns::of(made));
      sum_q.add(at_.factor_q[t], with_q[t]);
      sum_q.put(at_.out[t] + column);
    }
  }

  // Norm and gate of the output, and what the head itself leaves in the ring.
  void finish_row(int block, int t) {
    const int64_t row = row_of(block, t), column = head_ * kDeltaHeadDim;
    float* o = at_.out[t];
    for (int i = 0; i < kDeltaHeadDim; ++i) o[i] = T::round(o[i]);
    const float scale = 1.0f / __builtin_sqrtf(dot(o, o) / kDeltaHeadDim + params_.eps);
    const auto* z = static_cast<const Stored*>(params_.z) + row * params_.z_stride + column;
    auto* out = static_cast<Stored*>(params_.out) + row * params_.shape.v_width() + column;
    for (int i = 0; i < kDeltaHeadDim; i += kLanes) {
      float gate[kLanes];
      for (int j = 0; j < kLanes; ++j) gate[j] = T::load(z[i + j]);
      store(gate, silu(load(gate)));
      for (int j = 0; j < kLanes; ++j) {
        const float normed = T::round(T::round(o[i + j] * scale) * params_.norm_weight[i + j]);
        out[i + j] = T::store(normed * gate[j]);
      }
    }
    const int position = block * kDeltaBlock + t, place = block % kWindowBlocks;
    if (end_ - position > params_.records.ring_size) return;
    Stored* delta = delta_record(position);
    for (int i = 0; i < kDeltaHeadDim; ++i) delta[i] = T::store(at_.delta[place][t][i]);
    sums_record(position)[0] = at_.sum[place][t];
    sums_record(position)[1] = at_.norm[place][t];
  }

  const DeltaNetParams& params_;
  const float* convolved_;
  const float* gates_;
  const int head_, k_head_, slot_;
  const int first_row_, begin_, end_;  // row and positions of the span
  int folded_;                         // blocks in at_.z
  const int folded_write_;
  int first_ = 0, last_ = 0;  // rows of the span in the block, counted from its begin
  HeadScratch& at_;
};

}  // namespace openspec::OPENSPEC_ISA::gated_delta
