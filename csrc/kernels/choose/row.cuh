#pragma once

/// What the two kernels of `choose` (choose.cu) share: the row's workspace, what the row needs, and
/// one warp's walk over a group of its logits.

#include <cstdint>

#include "kernels/choose/choose.h"
#include "kernels/choose/sample_math.h"
#include "kernels/choose/sampling_rules.h"

namespace openspec::choosing {

namespace sm = ::openspec::sample_math;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A warp reads a row by chunks of 128 ids, two blocks of noise (noise_of_counter). Chunks are dealt
// out to the row's groups in turn, so that rows of any length keep all groups busy.
constexpr int kChunk = 128;
constexpr int kGroups = 256;

// Of the kernels that go over the rows, a warp to a group.
constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarp;

__device__ __forceinline__ float minus_infinity() { return sm::float_of(0xff800000u); }

/// Order of floats as order of integers; -0 comes before +0.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = sm::bits_of(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_ordered(uint32_t ordered) {
  return sm::float_of((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}
/// The float that `ordered` stands for; -inf for 0, which no number has.
__device__ __forceinline__ float value_of_order(uint32_t ordered) {
  return ordered == 0 ? minus_infinity() : float_of_ordered(ordered);
}
/// Order of floats as order of integers, -0 being equal to +0. Never 0, which stands for "none".
__device__ __forceinline__ uint32_t order_key(float x) { return ordered_bits(x + 0.0f); }

/// A candidate as one number: the larger value first, then the lower id. 0: none, and what -inf
/// comes to.
__device__ __forceinline__ uint64_t candidate_key(float value, int32_t id) {
  if (!(value > minus_infinity())) return 0;
  return static_cast<uint64_t>(order_key(value)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int32_t id_of(uint64_t key) {
  return key == 0 ? 0 : static_cast<int32_t>(~static_cast<uint32_t>(key));
}
__device__ __forceinline__ float value_of(uint64_t key) {
  return float_of_ordered(static_cast<uint32_t>(key >> 32));
}
__device__ __forceinline__ uint64_t max_key(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t value = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kAllLanes, value);
  const uint32_t low = value == best ? static_cast<uint32_t>(key) : 0;
  return static_cast<uint64_t>(best) << 32 | __reduce_max_sync(kAllLanes, low);
}

/// A row as the sampler reads it: sanitize(logit * scale).
struct View {
  const float* values;
  int size;
  float scale;

  __device__ __forceinline__ float at(float value) const { return sm::sanitize(value * scale); }
};

/// What a row needs, found once by the first kernel.
struct alignas(16) RowPlan {
  enum : int32_t {
    kIsReal = 1,  // not padding
    kIsScored = 2,
    kIsEdited = 4,  // bias, masks or penalties
    kIsDrawn = 8,   // temperature above 0
    kIsFiltered = 16,
    kIsReported = 32,
    kHasDraft = 64,  // that decides the choice
  };
  int32_t flags;
  int32_t row;
  int32_t slot;
  int32_t position;

  __device__ bool has(int32_t flag) const { return (flags & flag) != 0; }
};

/// One row's workspace, of the choice or of the best drafts (whose `edited` takes the logits with
/// noise). Nothing in it outlives a call, and nothing is expected of what it holds
/// before.
struct RowWorkspace {
  RowPlan* plan;
  uint64_t* best;     // [kGroups] candidate keys of the choice by group
  uint32_t* largest;  // [kGroups] ordered bits of the group's largest logit; 0: all NaN
  float* edited;      // [vocab_size] logits after bias, masks and penalties
  int32_t* counts;    // [vocab_size] occurrences of the ids that are edited
};

constexpr size_t kPlanBytes = 128;
constexpr size_t kRowHeaderBytes = kPlanBytes + kGroups * (sizeof(uint64_t) + sizeof(uint32_t));
__host__ __device__ constexpr size_t row_array_bytes(int vocab_size) {
  return (static_cast<size_t>(vocab_size) * sizeof(float) + 127) / 128 * 128;
}
/// `has_counts`: false where nothing is edited.
__host__ __device__ constexpr size_t row_workspace_bytes(int vocab_size, bool has_counts) {
  return kRowHeaderBytes + (has_counts ? 2 : 1) * row_array_bytes(vocab_size);
}

/// The sample whose turn it is; -1: none.
__device__ __forceinline__ int sample_at(const ChooseParams& params, int turn) {
  return params.samples == nullptr ? turn : params.samples[turn];
}

template <bool kHasCounts>
__device__ inline RowWorkspace row_workspace(const ChooseParams& params, int turn) {
  char* at = reinterpret_cast<char*>(params.workspace) +
             static_cast<size_t>(turn) * row_workspace_bytes(params.vocab_size, kHasCounts);
  char* best = at + kPlanBytes;
  char* largest = best + kGroups * sizeof(uint64_t);
  char* edited = at + kRowHeaderBytes;
  return {reinterpret_cast<RowPlan*>(at), reinterpret_cast<uint64_t*>(best),
          reinterpret_cast<uint32_t*>(largest), reinterpret_cast<float*>(edited),
          kHasCounts ? reinterpret_cast<int32_t*>(edited + row_array_bytes(params.vocab_size))
                     : nullptr};
}

__device__ inline const float* row_logits(const ChooseParams& params, int sample) {
  return params.logits + static_cast<int64_t>(sample) * params.vocab_size;
}

/// The token of a column of the logits. Candidates are columns until they are written, for their
/// order is that of their tokens.
__device__ __forceinline__ int32_t token_of_column(const int32_t* token_of, int32_t column) {
  return token_of == nullptr ? column : token_of[column];
}

template <bool kIsDraft>
__device__ inline RowPlan plan_row(const ChooseParams& params, int sample, int row) {
  const int32_t span = params.rows.row_span[row];
  RowPlan plan{RowPlan::kIsReal, row, params.rows.span_seq[span], params.rows.row_position[row]};
  const bool has_report = !kIsDraft && (params.logprobs != nullptr || params.ranks != nullptr);
  if (!kIsDraft && params.score_token != nullptr && params.score_token[sample] >= 0) {
    plan.flags |= RowPlan::kIsScored | (has_report ? RowPlan::kIsReported : 0);
    return plan;
  }
  const SamplingParams& sampling = params.sampling[plan.slot];
  if (!kIsDraft &&
      (sampling.num_bias > 0 || sampling.num_allowed > 0 || sampling.num_bad_words > 0 ||
       has_penalties(sampling) || row_mask_of(params, sample) != nullptr ||
       masks_stop_ids(sampling, plan.position, params.prompt_len[plan.slot]))) {
    plan.flags |= RowPlan::kIsEdited;
  }
  if (!(sampling.temperature < kMinTemperature)) {
    plan.flags |= RowPlan::kIsDrawn;
    const bool has_own_noise = kIsDraft && params.has_own_noise;
    if (has_filters(sampling, params.vocab_size) && !has_own_noise) {
      plan.flags |= RowPlan::kIsFiltered;
    }
    if (!kIsDraft && params.drafts.logits.values != nullptr &&
        row_mask_of(params, sample) == nullptr) {
      const int depth = plan.position + 1 - params.num_tokens[plan.slot];
      if (depth >= 0 && depth < params.drafts.counts[span]) plan.flags |= RowPlan::kHasDraft;
    }
  }
  if (sampling.num_logprobs >= 0 && has_report) plan.flags |= RowPlan::kIsReported;
  return plan;
}

/// The ids of a chunk that a lane holds: counter chunk * 32 + lane gives the noise of all four.
__device__ __forceinline__ int32_t chunk_id(int chunk, int lane, int word) {
  return chunk * kChunk + (lane & 16) * 4 + (lane & 15) + 16 * word;
}

/// A group's next chunks, one load after the other without waiting. Past the row's end: NaN.
struct Batch {
  static constexpr int kChunks = 5;  // all of a group up to 163840 ids
  float value[kChunks][4];

  __device__ __forceinline__ void load(const float* values, int size, int first_chunk, int lane) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int32_t id = chunk_id(first_chunk + i * kGroups, lane, word);
        value[i][word] = id < size ? values[id] : sm::float_of(0x7fffffffu);
      }
    }
  }
};

/// Largest logit of a group (ordered bits; 0: all NaN) and its best candidate for the choice.
struct GroupBest {
  uint32_t largest;
  uint64_t best;
};

/// Goes over a group with one warp. `batch` holds its first chunks. `noise` is null for argmax of
/// the logits, else the sequence whose seed the choice is drawn with. Unless null, `copy` takes the
/// logits that `mask` (null: all) allows and -inf for the others, or -inf throughout, and `drawn`
/// the logits with noise; `token_of` is that of the parameters.
struct GroupWalk {
  View view;
  const SamplingParams* noise;
  int32_t position;  // of the chosen token
  float* copy;
  bool copies_nothing;  // -inf instead of the logits
  const int32_t* token_of = nullptr;
  float* drawn = nullptr;
  uint64_t other_noise = 0;  // kDraftNoise, or that of the seed itself
  const int32_t* mask = nullptr;

  __device__ __forceinline__ GroupBest run(Batch& batch, int group, int lane) const {
    float largest = sm::float_of(0x7fffffffu);
    float best = minus_infinity();
    int32_t best_id = 0;
    const auto add = [&](float score, int32_t id) {  // a lane meets its ids in rising order
      if (score > best) {
        best = score;
        best_id = id;
      }
    };
    const uint64_t seed = noise == nullptr ? 0 : noise->seed ^ other_noise;
    const int num_chunks = (view.size + kChunk - 1) / kChunk;
    for (int first = group; first < num_chunks;) {
#pragma unroll
      for (int i = 0; i < Batch::kChunks; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float value = batch.value[i][word];
          const int32_t id = chunk_id(first + i * kGroups, lane, word);
          largest = fmaxf(largest, value);  // NaN gives way
          if (noise == nullptr) add(sm::sanitize(value), id);
          if (copy != nullptr && id < view.size)
            copy[id] = copies_nothing || !(mask == nullptr || is_allowed_by(mask, id))
                           ? minus_infinity()
                           : value;
        }
      }
      if (noise != nullptr) {
        // Rolled up, for the code is long; the logits come from the L1 cache this time.
#pragma unroll 1
        for (int i = 0; i < Batch::kChunks; ++i) {
          const int chunk = first + i * kGroups;
          if (chunk >= num_chunks) break;
          float value[4];
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            const int32_t id = chunk_id(chunk, lane, word);
            value[word] = id < view.size ? view.at(view.values[id]) : minus_infinity();
          }
          sm::Philox philox;
          if (token_of == nullptr) {
            philox = sm::noise_of_counter(
                seed, position, static_cast<uint32_t>(chunk) * kWarp + static_cast<uint32_t>(lane));
          } else {
#pragma unroll
            for (int word = 0; word < 4; ++word) {
              const int32_t id = chunk_id(chunk, lane, word);
              const int32_t token = id < view.size ? token_of[id] : 0;
              philox.word[word] = sm::noise_bits(seed, position, token);
            }
          }
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            const int32_t id = chunk_id(chunk, lane, word);
            const float score = value[word] + sm::gumbel_of_bits(philox.word[word]);
            add(score, id);
            if (drawn != nullptr && id < view.size) drawn[id] = score;
          }
        }
      }
      first += Batch::kChunks * kGroups;
      if (first < num_chunks) batch.load(view.values, view.size, first, lane);
    }
    const uint32_t ordered = largest == largest ? ordered_bits(largest) : 0;
    return {__reduce_max_sync(kAllLanes, ordered), warp_max(candidate_key(best, best_id))};
  }
};

}  // namespace openspec::choosing
