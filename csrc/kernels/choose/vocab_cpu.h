#pragma once

/// Passes over one row of logits, and over lists of candidate tokens. A row is read as
/// sanitize(logit * scale); scale is 1 / temperature, or 1 for the logits themselves.

#include "kernels/choose/sample_math.h"
#include "kernels/common/simd_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace sm = ::openspec::sample_math;

struct Logits {
  const float* values;
  int64_t size;
  float scale = 1.0f;

  OPENSPEC_INLINE float at(int64_t id) const { return sm::sanitize(values[id] * scale); }
};

inline constexpr float kMinusInfinity = -__builtin_inff();

/// Largest value as it is read (-inf where there is none).
inline float max_logit(const Logits& logits) {
  Vf best[4];
  for (Vf& lane : best) lane = splat(kMinusInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= logits.size; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) best[j] = max(load(logits.values + i + j * kLanes), best[j]);
  }
  float result = max_lanes(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < logits.size; ++i) result = logits.values[i] > result ? logits.values[i] : result;
  return sm::sanitize(result * logits.scale);
}

/// Lowest id of the largest raw value; 0 where every value is -inf or NaN.
inline int32_t argmax(const Logits& logits) {
  const float best = max_logit({logits.values, logits.size});
  constexpr int64_t kBlock = 4 * kLanes;
  int64_t i = 0;
  if (best < 3.4e38f) {  // larger values were clamped
    const Vf wanted = splat(best);
    for (; i + kBlock <= logits.size; i += kBlock) {
      Vi found = load(logits.values + i) == wanted;
      for (int j = 1; j < 4; ++j) found |= load(logits.values + i + j * kLanes) == wanted;
      if (any(found)) break;
    }
  }
  for (; i < logits.size; ++i) {
    if (best > kMinusInfinity && sm::sanitize(logits.values[i]) == best) {
      return static_cast<int32_t>(i);
    }
  }
  return 0;
}

/// Ids of values >= threshold, in order; returns how many.
inline int64_t collect(const float* values, int64_t size, float threshold, int32_t* ids) {
  constexpr int64_t kBlock = 4 * kLanes;
  const Vf bound = splat(threshold);
  int64_t count = 0;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    Vi found = load(values + i) >= bound;
    for (int j = 1; j < 4; ++j) found |= load(values + i + j * kLanes) >= bound;
    if (!any(found)) continue;
    for (int64_t id = i; id < i + kBlock; ++id) {
      ids[count] = static_cast<int32_t>(id);
      count += values[id] >= threshold ? 1 : 0;
    }
  }
  for (; i < size; ++i) {
    ids[count] = static_cast<int32_t>(i);
    count += values[i] >= threshold ? 1 : 0;
  }
  return count;
}

/// The largest value v with mass(values >= v) >= wanted, by quickselect; permutes `values`. The
/// smallest value where the whole mass is less.
template <typename Mass>
inline float select_from_top(float* values, int64_t count, uint64_t wanted, const Mass& mass) {
  int64_t begin = 0;
  int64_t end = count;
  float pivot = kMinusInfinity;
  while (begin < end) {
    const float a = values[begin];
    const float b = values[begin + (end - begin) / 2];
    const float c = values[end - 1];
    pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
    // Larger values to the front, then equal ones, then smaller ones.
    int64_t larger = begin;
    int64_t smaller = end;
    uint64_t larger_mass = 0;
    uint64_t equal_mass = 0;
    for (int64_t i = begin; i < smaller;) {
      const float value = values[i];
      if (value > pivot) {
        larger_mass += mass(value);
        values[i++] = values[larger];
        values[larger++] = value;
      } else if (value < pivot) {
        values[i] = values[--smaller];
        values[smaller] = value;
      } else {
        equal_mass += mass(value);
        ++i;
      }
    }
    if (larger_mass >= wanted) {
      end = larger;
    } else if (larger_mass + equal_mass >= wanted) {
      return pivot;
    } else {
      wanted -= larger_mass + equal_mass;
      begin = smaller;
    }
  }
  return pivot;
}

inline float kth_largest(float* values, int64_t count, int64_t k) {
  return select_from_top(values, count, static_cast<uint64_t>(k),
                         [](float) { return uint64_t{1}; });
}

/// A value that at least k others (k <= size) reach and few more than k: the k-th largest among the
/// maxima of some 4 k groups. -inf where there are fewer groups than k. `work`: size floats.
inline float bound_of_kth_largest(const float* values, int64_t size, int64_t k, float* work) {
  const int64_t num_vectors = size / kLanes;
  const int64_t num_chunks = min_of(num_vectors, ceil_div(4 * k, kLanes));
  int64_t num_groups = 0;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    Vf best = splat(kMinusInfinity);
    const int64_t end = num_vectors * (chunk + 1) / num_chunks;
    for (int64_t v = num_vectors * chunk / num_chunks; v < end; ++v) {
      best = max(load(values + v * kLanes), best);
    }
    store(work + num_groups, best);
    num_groups += kLanes;
  }
  for (int64_t i = num_vectors * kLanes; i < size; ++i) {
    work[num_groups++] = values[i] == values[i] ? values[i] : kMinusInfinity;
  }
  return num_groups < k ? kMinusInfinity : kth_largest(work, num_groups, k);
}

/// weights[i] = e^(logit - maximum); returns their fixed-point sum. `weights` may be null.
inline uint64_t exponentiate(const Logits& logits, float maximum, float* weights) {
  constexpr int64_t kBlock = 64;
  uint64_t total = 0;
  for (int64_t i = 0; i < logits.size; i += kBlock) {
    float block[kBlock];
    const int64_t count = min_of(kBlock, logits.size - i);
    float* to = weights == nullptr ? block : weights + i;
    if (count == kBlock) {
      for (int64_t j = 0; j < kBlock; ++j) to[j] = sm::exp_f32(logits.at(i + j) - maximum);
      for (int64_t j = 0; j < kBlock; ++j) total += sm::fixed_mass(to[j]);
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] = sm::exp_f32(logits.at(i + j) - maximum);
      for (int64_t j = 0; j < count; ++j) total += sm::fixed_mass(to[j]);
    }
  }
  return total;
}

/// Fixed-point sum of the weights >= threshold.
inline uint64_t mass_from(const float* weights, int64_t size, float threshold) {
  uint64_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    total += sm::fixed_mass(weights[i] >= threshold ? weights[i] : 0.0f);
  }
  return total;
}

/// What the noise of a row's columns depends on; with a table, the columns' rising token ids.
struct Noise {
  uint64_t seed;
  int32_t position;
  const int32_t* token_of;
};

/// argmax of logit + gumbel over the whole row, lowest id among equals; 0 where all are -inf.
///
/// The noise rises with its bits, so a block's largest logit and largest bits bound its scores;
/// most blocks cannot win and need no logarithms.
template <bool kHasTable>
inline int32_t draw(const Logits& logits, const Noise& noise) {
  constexpr int kBlock = 64;       // ids of 16 Philox calls
  constexpr float kSlack = 1e-4f;  // far above the error of gumbel_of_bits
  Vf best = splat(kMinusInfinity);
  Vi best_id = {};
  Vi lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  float best_of_all = kMinusInfinity;
  for (int64_t base = 0; base < logits.size; base += kBlock) {
    const float* from = logits.values + base;
    float padded[kBlock];
    if (logits.size - base < kBlock) {
      for (int i = 0; i < kBlock; ++i) {
        padded[i] = i < logits.size - base ? from[i] : kMinusInfinity;
      }
      from = padded;
    }
    float scores[kBlock];
    uint32_t bits[kBlock];
    for (int i = 0; i < kBlock; ++i) scores[i] = sm::sanitize(from[i] * logits.scale);
    if constexpr (kHasTable) {
      int32_t tokens[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        tokens[i] = noise.token_of[min_of(base + i, logits.size - 1)];
      }
      for (int i = 0; i < kBlock; ++i) {
        bits[i] = sm::noise_bits(noise.seed, noise.position, tokens[i]);
      }
    } else {
      for (int i = 0; i < 16; ++i) {
        const sm::Philox philox =
            sm::noise_of_counter(noise.seed, noise.position, static_cast<uint32_t>(base / 4 + i));
        for (int word = 0; word < 4; ++word) bits[word * 16 + i] = philox.word[word];
      }
    }
    Vf largest = load(scores);
    for (int i = kLanes; i < kBlock; i += kLanes) largest = max(load(scores + i), largest);
    uint32_t most_bits = 0;
    for (int i = 0; i < kBlock; ++i) most_bits = max_of(most_bits, bits[i]);
    if (max_lanes(largest) + (sm::gumbel_of_bits(most_bits) + kSlack) < best_of_all) continue;

    for (int i = 0; i < kBlock; ++i) scores[i] += sm::gumbel_of_bits(bits[i]);
    for (int i = 0; i < kBlock; i += kLanes) {
      const Vf score = load(scores + i);
      const Vi is_better = score > best;
      best = is_better ? score : best;
      best_id = is_better ? lane + static_cast<int32_t>(base + i) : best_id;
    }
    best_of_all = max_lanes(best);
  }
  float result = kMinusInfinity;
  int32_t id = 0;
  for (int i = 0; i < kLanes; ++i) {
    if (best[i] > result || (best[i] == result && result > kMinusInfinity && best_id[i] < id)) {
      result = best[i];
      id = best_id[i];
    }
  }
  return id;
}

/// argmax of logit + gumbel over a list of (id, logit), lowest id among equals; 0 where all are
/// -inf.
template <bool kHasTable>
inline int32_t draw_from(const int32_t* ids, const float* logits, int64_t count,
                         const Noise& noise) {
  constexpr int64_t kBlock = 32;
  float best = kMinusInfinity;
  int32_t best_id = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    float scores[kBlock];
    const int64_t block = min_of(kBlock, count - begin);
    for (int64_t i = 0; i < block; ++i) {
      const int32_t id = ids[begin + i];
      const int32_t token = kHasTable ? noise.token_of[id] : id;
      scores[i] = logits[begin + i] + sm::gumbel(noise.seed, noise.position, token);
    }
    for (int64_t i = 0; i < block; ++i) {
      const int32_t id = ids[begin + i];
      if (scores[i] > best || (scores[i] == best && best > kMinusInfinity && id < best_id)) {
        best = scores[i];
        best_id = id;
      }
    }
  }
  return best_id;
}

/// The best n by (value, lower id first), kept sorted while candidates come in any order.
class Best {
 public:
  static constexpr int kMost = 64;

  explicit Best(int capacity) : capacity_(capacity) {}

  void add(int32_t id, float value) {
    if (count_ == capacity_ && !comes_before(id, value, ids_[count_ - 1], values_[count_ - 1])) {
      return;
    }
    int at = count_ < capacity_ ? count_++ : count_ - 1;
    for (; at > 0 && comes_before(id, value, ids_[at - 1], values_[at - 1]); --at) {
      ids_[at] = ids_[at - 1];
      values_[at] = values_[at - 1];
    }
    ids_[at] = id;
    values_[at] = value;
  }
  /// Fills up with the lowest ids that are not there, at -inf; with -1 past the vocabulary.
  void fill(int64_t vocab_size) {
    const int num_given = count_;
    for (int32_t id = 0; count_ < capacity_; ++id) {
      bool is_there = false;
      for (int i = 0; i < num_given; ++i) is_there = is_there || ids_[i] == id;
      if (is_there) continue;
      ids_[count_] = id < vocab_size ? id : -1;
      values_[count_++] = kMinusInfinity;
    }
  }
  int32_t id(int i) const { return ids_[i]; }
  float value(int i) const { return values_[i]; }

 private:
  static bool comes_before(int32_t id, float value, int32_t other_id, float other_value) {
    return value > other_value || (value == other_value && id < other_id);
  }

  int capacity_;
  int count_ = 0;
  int32_t ids_[kMost] = {};
  float values_[kMost] = {};
};

}  // namespace openspec::OPENSPEC_ISA
