#pragma once

/// The recurrence of one value head over one span, in the order of its blocks.

#include <cstring>

#include "kernels/common/row_ops_cpu.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/delta_net/workspace_cpu.h"

namespace openspec::OPENSPEC_ISA::gated_delta {

using namespace openspec::gated_delta;

/// A row's columns of tiles that lie side by side, as vectors.
template <int kTiles>
struct Columns {
  static constexpr int kCount = kTiles * kTileColumns / kLanes;
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
using TileColumns = Columns<1>;

/// A state before the first fold.
alignas(64) inline constexpr float kZeroTile[kDeltaHeadDim * kTileColumns] = {};

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
OPENSPEC_INLINE void decay(float (&exponents)[kDeltaBlock]) {
  for (int i = 0; i < kDeltaBlock; i += kLanes) {
    store(exponents + i, exp_nonpositive(load(exponents + i)));
  }
}

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
    find_state();
    for (int position = folded_ * kDeltaBlock; position < begin_; ++position) recall(position);
    for (int block = begin_ / kDeltaBlock; block * kDeltaBlock < end_; ++block) {
      fold_up_to(folded_blocks(block * kDeltaBlock));
      first_ = max_of(begin_ - block * kDeltaBlock, 0);
      last_ = min_of(end_ - block * kDeltaBlock, kDeltaBlock);
      for (int t = first_; t < last_; ++t) take_row(block, t);
      for (int t = first_; t < last_; ++t) take_factors(block, t);
      for (int t = first_; t < last_;) t += multiply_some<kChains>(block, t);
      for (int tile = 0; tile < kNumTiles; tile += kChains) settle(block, tile);
      for (int t = first_; t < last_; ++t) finish_row(block, t);
    }
    fold_up_to(folded_write_);
  }

 private:
  using Stored = typename T::Stored;
  // Sums of a row's tile that are under way at once, with k and with q: enough that no
  // multiply-add waits for the one before it.
  static constexpr int kChains = kNumRegisters / (4 * TileColumns::kCount);
  static_assert(kChains >= 1 && kNumTiles % kChains == 0);
  static constexpr int kFolded = 2 * kChains;  // rows of a tile that are folded at once

  float* tile(const int32_t* pages, int tile) const {
    const int index = params_.layer * params_.shape.num_tiles() + head_ * kNumTiles + tile;
    return params_.states.tile(pages, slot_, index);
  }
  // It is read where it lies, and copied by a fold alone.
  void find_state() {
    for (int i = 0; i < kNumTiles; ++i) {
      z_[i] = folded_ == 0 ? kZeroTile : tile(params_.states.read_pages, i);
    }
  }
  void fold_up_to(int num_blocks) {
    while (folded_ < num_blocks) {
      const int place = folded_ % kWindowBlocks;
      fold(place, ++folded_ == folded_write_);
    }
  }
  void fold(int place, bool is_written) {
    const float total = at_.sum[place][kDeltaBlock - 1], kept = decay(total);
    float weight[kDeltaBlock];
    for (int i = 0; i < kDeltaBlock; ++i) weight[i] = total - at_.sum[place][i];
    decay(weight);
    for (int i = 0; i < kDeltaBlock; ++i) {
      weight[i] *= at_.norm[place][i];
      for (int j = 0; j < kDeltaHeadDim; ++j) at_.folded_k[j][i] = weight[i] * at_.k[place][i][j];
    }
    for (int i = 0; i < kNumTiles; ++i) {
      float* to = is_written ? tile(params_.states.write_pages, i) : at_.z[i];
      for (int j = 0; j < kDeltaHeadDim; j += kFolded) {
        fold_rows(kept, at_.folded_k[j], at_.delta[place][0] + i * kTileColumns,
                  z_[i] + j * kTileColumns, to + j * kTileColumns);
      }
      z_[i] = to;
    }
  }
  // kFolded rows of a tile. `k` [kFolded][16], `delta` a tile's columns of the block's rows.
  static OPENSPEC_INLINE void fold_rows(float kept, const float* k, const float* delta,
                                        const float* from, float* to) {
    TileColumns z[kFolded];
    for (int r = 0; r < kFolded; ++r) {
      z[r] = TileColumns::of(from + r * kTileColumns);
      for (Vf& part : z[r].part) part *= kept;
    }
    for (int i = 0; i < kDeltaBlock; ++i) {
      const TileColumns of_row = TileColumns::of(delta + i * kDeltaHeadDim);
      for (int r = 0; r < kFolded; ++r) z[r].add(k[r * kDeltaBlock + i], of_row);
    }
    for (int r = 0; r < kFolded; ++r) z[r].put(to + r * kTileColumns);
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
    // Of the first `count` of a block, whose sums of g go on to `end` and by `more`.
    const auto take = [&](int of, int count, float end, float more, float* to_k, float* to_q) {
      float rate[kDeltaBlock];
      for (int i = 0; i < kDeltaBlock; ++i) rate[i] = (end - at_.sum[of][i]) + more;
      decay(rate);
      for (int i = 0; i < count; ++i) {
        rate[i] *= at_.norm[of][i];
        to_k[i] = dot(at_.k[of][i], k) * (norm_k * rate[i]);
        to_q[i] = dot(at_.k[of][i], at_.q[t]) * (norm_q * rate[i]);
      }
    };
    if (block > 0) take(before, kDeltaBlock, total, sum, at_.before_k[t], at_.before_q[t]);
    take(place, t + 1, sum, 0.0f, at_.own_k[t], at_.own_q[t]);
  }

  // Z'k and Z'q of some rows and tiles.
  template <int kRows>
  OPENSPEC_INLINE void multiply(int place, int t, int tile) {
    constexpr int kTiles = kChains / kRows;
    const float *of_k = at_.k[place][t], *of_q = at_.q[t];
    TileColumns k[kRows][kTiles], q[kRows][kTiles];
    for (int j = 0; j < kDeltaHeadDim; ++j) {
      for (int i = 0; i < kTiles; ++i) {
        const TileColumns z = TileColumns::of(z_[tile + i] + j * kTileColumns);
        for (int r = 0; r < kRows; ++r) {
          k[r][i].add(of_k[r * kDeltaHeadDim + j], z);
          q[r][i].add(of_q[r * kDeltaHeadDim + j], z);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kTiles; ++i) {
        k[r][i].put(at_.state_k[t + r] + (tile + i) * kTileColumns);
        q[r][i].put(at_.out[t + r] + (tile + i) * kTileColumns);
      }
    }
  }
  // Of as many rows as are there, kRows at most; how many.
  template <int kRows>
  int multiply_some(int block, int t) {
    if constexpr (kRows > 1) {
      if (last_ - t < kRows) return multiply_some<kRows / 2>(block, t);
    }
    for (int tile = 0; tile < kNumTiles; tile += kChains / kRows) {
      multiply<kRows>(block % kWindowBlocks, t, tile);
    }
    return kRows;
  }

  // delta and the output of the block's rows, in the columns of kChains tiles.
  void settle(int block, int tile) {
    const int place = block % kWindowBlocks, before = (block + kWindowBlocks - 1) % kWindowBlocks;
    const int first = tile * kTileColumns;
    using Wide = Columns<kChains>;
    for (int t = first_; t < last_; ++t) {
      float *made = at_.delta[place][t] + first, *out = at_.out[t] + first;
      Wide sum_k, sum_q;
      for (int i = 0; block > 0 && i < kDeltaBlock; ++i) {
        const Wide delta = Wide::of(at_.delta[before][i] + first);
        sum_k.add(at_.before_k[t][i], delta);
        sum_q.add(at_.before_q[t][i], delta);
      }
      sum_k.add(at_.factor_k[t], Wide::of(at_.state_k[t] + first));
      Wide rest = Wide::of(at_.v[t] + first);
      for (int i = 0; i < Wide::kCount; ++i) rest.part[i] -= sum_k.part[i];
      for (int i = 0; i < t; ++i) {
        const Wide delta = Wide::of(at_.delta[place][i] + first);
        rest.add(-at_.own_k[t][i], delta);
        sum_q.add(at_.own_q[t][i], delta);
      }
      for (Vf& part : rest.part) part = T::round(part * at_.beta[t]);
      rest.put(made);
      sum_q.add(at_.own_q[t][t], rest);
      sum_q.add(at_.factor_q[t], Wide::of(out));
      sum_q.put(out);
    }
  }

  // Norm and gate of the output, and what the head itself leaves in the ring.
  void finish_row(int block, int t) {
    const int64_t row = row_of(block, t), column = head_ * kDeltaHeadDim;
    float* o = at_.out[t];
    for (int i = 0; i < kDeltaHeadDim; i += kLanes) store(o + i, T::round(load(o + i)));
    const float scale = 1.0f / __builtin_sqrtf(dot(o, o) / kDeltaHeadDim + params_.eps);
    const int64_t z = row * params_.z_stride + column;
    auto* out = static_cast<Stored*>(params_.out) + row * params_.shape.v_width() + column;
    for (int i = 0; i < kDeltaHeadDim; i += kLanes) {
      const Vf normed = T::round(T::round(load(o + i) * scale) * load(params_.norm_weight + i));
      store(o + i, normed * silu(load_floats(params_.dtype, params_.z, z + i)));
    }
    for (int i = 0; i < kDeltaHeadDim; ++i) out[i] = T::store(o[i]);
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
  int folded_;                         // blocks in z_
  const int folded_write_;
  int first_ = 0, last_ = 0;   // rows of the span in the block, counted from its begin
  const float* z_[kNumTiles];  // the state's tiles
  HeadScratch& at_;
};

}  // namespace openspec::OPENSPEC_ISA::gated_delta
