#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/choose/sample_math.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/token_pairs.h"

// Compile with -fmad=false (sample_math.h): the CPU's bits are promised for trees.

namespace openspec {
namespace {

namespace sm = ::openspec::sample_math;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlocksPerSm = 2;
constexpr int kTile = 16;     // rows of `second` that a warp holds
constexpr int kSegment = 32;  // columns that four lanes load of each
constexpr int kSegments = kMaxPairRank / kSegment;
constexpr int kGroup = 8;                              // sequences of a matrix instruction
constexpr int kMaxStates = 64;                         // of a block: as many groups as fit
constexpr int kStateStride = kMaxPairRank + kSegment;  // neighbours are half of all banks apart

/// A tile as the matrix instructions take it: lane 4 g + t has eight columns of each segment of
/// rows g and g + 8. Which of the columns stand for which k does not matter to a sum, as long as
/// the states' do so too.
struct Tile {
  uint4 rows[2][kSegments];

  __device__ __forceinline__ void load(const TokenPairs& pairs, int tile, int lane) {
    const int column = lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * kTile + half * 8 + lane / 4;
      const auto* from = reinterpret_cast<const uint4*>(row_of(pairs.second, row, pairs.rank));
#pragma unroll
      for (int i = 0; i < kSegments; ++i) {
        const int at = i * kSegment + column;
        const bool is_there = row < pairs.vocab_size && at < pairs.rank;
        rows[half][i] = is_there ? __ldg(from + at / 8) : uint4{};
      }
    }
  }
};

/// A warp takes tile after tile of `second`, which is all that takes time, and multiplies each by
/// the states of all sequences.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    block_step_kernel(const __grid_constant__ BlockStepParams params) {
  cuda::allow_next_kernel();
  __shared__ alignas(16) uint16_t states[kMaxStates * kStateStride];
  __shared__ int samples[kMaxStates];
  const TokenPairs& pairs = params.pairs;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % 32;
  const int num_tiles = (pairs.vocab_size + kTile - 1) / kTile;
  const int stride = static_cast<int>(gridDim.x) * kWarps;
  // Every other depth goes the other way: what was read last is still in L2.
  const auto tile_at = [&](int i) { return params.depth % 2 == 0 ? i : num_tiles - 1 - i; };
  int i = static_cast<int>(blockIdx.x) * kWarps + warp;
  Tile tile;
  if (i < num_tiles) tile.load(pairs, tile_at(i), lane);
  cuda::wait_for_previous_kernel();

  const int first_seq = static_cast<int>(blockIdx.y) * kMaxStates;
  const int num_states = min(params.num_seqs - first_seq, kMaxStates);
  const int num_groups = (num_states + kGroup - 1) / kGroup;
  bool has_drafts = false;
  for (int s = warp; s < num_groups * kGroup; s += kWarps) {
    const int seq = first_seq + s;
    int sample = -1;
    uint4 state = {};
    if (s < num_states && params.depth < params.num_drafts[seq]) {
      sample = params.first_sample[seq] + params.depth;
      const uint16_t* from;
      if (params.states != nullptr) {
        from = row_of(params.states, seq, pairs.rank);
      } else {
        const int32_t before = params.depth > 0 ? params.chosen[sample - 1]
                                                : last_token(params.table, params.seq[seq]);
        from = row_of(pairs.first, before, pairs.rank);
      }
      if (lane * 8 < pairs.rank) state = *reinterpret_cast<const uint4*>(from + lane * 8);
      has_drafts = true;
    }
    *reinterpret_cast<uint4*>(states + s * kStateStride + lane * 8) = state;
    if (lane == 0) {
      samples[s] = sample;
      if (s < num_states && blockIdx.x == 0) params.sample[seq] = sample;
    }
  }
  if (!__syncthreads_or(has_drafts)) return;

  const int g = lane / 4, t = lane % 4;
  while (i < num_tiles) {
    const int row = tile_at(i) * kTile + g;
    i += stride;
    for (int group = 0; group < num_groups; ++group) {
      float sums[4] = {};
#pragma unroll
      for (int k = 0; k < kSegments; ++k) {
        const uint4 state = *reinterpret_cast<const uint4*>(
            states + (group * kGroup + g) * kStateStride + k * kSegment + t * 8);
        const uint4 &low = tile.rows[0][k], &high = tile.rows[1][k];
        cuda::multiply_add(sums, {low.x, high.x, low.y, high.y}, state.x, state.y);
        cuda::multiply_add(sums, {low.z, high.z, low.w, high.w}, state.z, state.w);
      }
      if (group + 1 == num_groups && i < num_tiles) tile.load(pairs, tile_at(i), lane);
      // This lane's sums are those of rows g and g + 8 with the group's sequences 2 t and 2 t + 1.
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int sample = samples[group * kGroup + 2 * t + c];
        if (sample < 0) continue;
        float* logits = params.logits + int64_t{sample} * pairs.vocab_size + row;
        const bool has_low = row < pairs.vocab_size, has_high = row + 8 < pairs.vocab_size;
        const float low = has_low ? logits[0] : 0.0f, high = has_high ? logits[8] : 0.0f;
        if (has_low) logits[0] = low + sums[c];
        if (has_high) logits[8] = high + sums[2 + c];
      }
    }
  }
}

constexpr int kPairWarps = 16;
constexpr int kOwn = kMaxTopDrafts / kWarp;  // candidates of a lane: lane, lane + 32
static_assert(kOwn == 2);

/// Over the candidates of all lanes.
template <typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T x, const Combine& combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

using Terms = cuda::Bf16Pack<8>;  // of a pair's a lane has eight

/// The lane's terms of a row.
__device__ __forceinline__ Terms terms_of(const void* table, int64_t token, int rank, int lane) {
  if (lane * 8 >= rank) return {};
  return cuda::load_pack<Terms>(row_of(table, token, rank) + lane * 8);
}

/// The lane's terms of the first token at one sample.
template <bool kHasTerms>
__device__ __forceinline__ cuda::FloatPack<8> first_terms(const TokenPairs& pairs,
                                                          const PairTerms& terms, int64_t sample,
                                                          int32_t token, int lane) {
  auto first = cuda::to_floats(terms_of(pairs.first, token, pairs.rank, lane));
  if constexpr (kHasTerms) {
    const auto factors = cuda::to_floats(terms_of(terms.factors, sample, pairs.rank, lane));
#pragma unroll
    for (int k = 0; k < 8; ++k) first.x[k] *= factors.x[k];
    first = cuda::round_to_bf16(first);
  }
  return first;
}

/// What a candidate counts for, `score` being its own and `noise` that of its place (0: none).
template <bool kHasTerms>
__device__ __forceinline__ float value_of(float score, float worth, float scale, float noise) {
  if constexpr (kHasTerms) {
    return sm::sanitize((score + worth) * scale + noise);
  } else {
    return sm::sanitize(score + worth * scale);
  }
}

/// What a pair is worth, in all lanes.
__device__ __forceinline__ float worth_of(const cuda::FloatPack<8>& first, const Terms& second) {
  const cuda::FloatPack<8> other = cuda::to_floats(second);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) sum += first.x[k] * other.x[k];
  return warp_reduce(sum, [](float x, float y) { return x + y; });
}

constexpr int kPathWarps = 16;
constexpr int kPathOwn = kMaxTopDrafts / kPathWarps;  // candidates of a warp: warp, warp + 16, ...
constexpr int kSuccessorsOwn = kNumSuccessors / kPathWarps;  // successors of a warp

/// Asks for the rows of the tables that drafts from `first_depth` on may need.
__device__ __forceinline__ void fetch_rows(const TokenPairs& pairs, const int32_t* tokens,
                                           int top_k, int first_depth, int num_drafts,
                                           const int32_t* successors) {
  constexpr int kLine = 64;  // bf16 of a cache line
  for (int i = first_depth * top_k + static_cast<int>(threadIdx.x); i < num_drafts * top_k;
       i += kPathWarps * kWarp) {
    const int32_t token = tokens[i];
    for (int at = 0; at < pairs.rank; at += kLine) {
      if (i >= (first_depth + 1) * top_k) cuda::fetch_to_cache(second_row(pairs, token) + at);
      if (i < (num_drafts - 1) * top_k) {
        cuda::fetch_to_cache(row_of(pairs.first, token, pairs.rank) + at);
      }
    }
    if (successors != nullptr && i < (num_drafts - 1) * top_k) {
      cuda::fetch_to_cache(successors + int64_t{token} * kNumSuccessors);
    }
  }
}

/// Successors of the token before, as far as they are better than the best candidate. `value_alone`
/// says what a token counts for without the one before.
template <typename ValueAlone>
__device__ __forceinline__ void try_successors(const TokenPairs& pairs, const int32_t* successors,
                                               int32_t best_token, float best_score, int depth,
                                               const cuda::FloatPack<8>& first, float scale,
                                               const ValueAlone& value_alone, float& best,
                                               int& at) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % 32;
  const float none = sm::float_of(0xff800000u);
  const float best_alone = value_alone(depth, column_of(pairs, best_token), best_token);
#pragma unroll
  for (int i = 0; i < kSuccessorsOwn; ++i) {
    const int s = warp + i * kPathWarps;
    const int32_t token = successors[s];
    const int32_t column = column_of(pairs, token);
    const Terms second = terms_of(pairs.second, column, pairs.rank, lane);
    const float alone = value_alone(depth, column, token);
    const float own = alone > none ? fminf(0.0f, (alone - best_alone) + best_score) : none;
    const float value = value_of<false>(own, worth_of(first, second), scale, 0.0f);
    if (value > best) {
      best = value;
      at = kMaxTopDrafts + s;
    }
  }
}

/// A sequence. Which rows of the tables its drafts may need is known before the first of them is
/// chosen: all are asked for at once, and only the L2's latency is left between two drafts.
template <bool kHasTerms>
__global__ void __launch_bounds__(kPathWarps* kWarp)
    block_path_kernel(const __grid_constant__ BlockPathParams params) {
  cuda::allow_next_kernel();
  // By the depth's parity: who is late may still read the one before.
  __shared__ float best_value[2][kPathWarps];
  __shared__ int best_at[2][kPathWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % 32;
  const int seq = static_cast<int>(blockIdx.x), top_k = params.top_k;
  const TokenPairs& pairs = params.pairs;
  cuda::wait_for_previous_kernel();
  const int num_drafts = params.num_drafts[seq], slot = params.seq[seq];
  if (num_drafts <= 0) return;
  const int64_t first_sample = params.first_sample[seq];
  const int32_t* tokens = params.tokens + first_sample * top_k;
  const float* scores = params.scores + first_sample * top_k;
  const SamplingParams& sampling = params.sampling[slot];
  const float scale = pair_scale(sampling);
  const bool has_noise = kHasTerms && sampling.temperature >= kMinTemperature;
  const uint64_t seed = has_noise ? sampling.seed : 0;
  const int32_t position = kHasTerms ? params.terms.table.num_tokens[slot] : 0;
  const float none = sm::float_of(0xff800000u);

  const int32_t* successors = kHasTerms ? nullptr : params.successors;
  const bool is_drawn = sampling.temperature >= kMinTemperature;
  const auto value_alone = [&](int depth, int32_t column, int32_t token) {
    const float logit = params.logits[(first_sample + depth) * pairs.vocab_size + column];
    const float value = sm::sanitize(logit * scale);
    if (!is_drawn) return value;
    return value + sm::gumbel(sampling.seed, params.table.num_tokens[slot] + depth, token);
  };

  Terms terms[kPathOwn];
  float score[kPathOwn], noise[kPathOwn];
  const auto load = [&](int depth) {
#pragma unroll
    for (int i = 0; i < kPathOwn; ++i) {
      const int b = warp + i * kPathWarps;
      terms[i] = {};
      score[i] = none;
      noise[i] = 0.0f;
      if (b >= top_k) continue;
      const int32_t token = tokens[depth * top_k + b];
      score[i] = scores[depth * top_k + b];
      terms[i] = terms_of(pairs.second, column_of(pairs, token), pairs.rank, lane);
      if (has_noise) noise[i] = sm::gumbel(seed, position + depth, token);
    }
  };
  constexpr int kFirstDepth = kHasTerms ? 0 : 1;  // before it all is known
  int32_t before;
  if constexpr (kHasTerms) {
    before = last_token(params.terms.table, slot);
  } else {
    before = tokens[0];
    if (threadIdx.x == 0) params.chosen[first_sample] = before;
    if (num_drafts == 1) return;
  }
  load(kFirstDepth);
  fetch_rows(pairs, tokens, top_k, kFirstDepth, num_drafts, successors);

  for (int depth = kFirstDepth; depth < num_drafts; ++depth) {
    const auto first =
        first_terms<kHasTerms>(pairs, params.terms, first_sample + depth, before, lane);
    float best = none;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kPathOwn; ++i) {
      const float worth = worth_of(first, terms[i]);
      const float value = value_of<kHasTerms>(score[i], worth, scale, noise[i]);
      if (value > best) {
        best = value;
        at = warp + i * kPathWarps;
      }
    }
    if constexpr (!kHasTerms) {
      if (successors != nullptr) {
        try_successors(pairs, successors + int64_t{before} * kNumSuccessors, tokens[depth * top_k],
                       scores[depth * top_k], depth, first, scale, value_alone, best, at);
      }
    }
    const int parity = depth % 2;
    if (lane == 0) {
      best_value[parity][warp] = best;
      best_at[parity][warp] = at;
    }
    if (depth + 1 < num_drafts) load(depth + 1);
    __syncthreads();
    best = best_value[parity][lane % kPathWarps];
    at = best_at[parity][lane % kPathWarps];
#pragma unroll
    for (int offset = kPathWarps / 2; offset > 0; offset /= 2) {
      const float value = __shfl_xor_sync(kAllLanes, best, offset);
      const int other = __shfl_xor_sync(kAllLanes, at, offset);
      if (value > best || (value == best && other < at)) {
        best = value;
        at = other;
      }
    }
    before = at < kMaxTopDrafts ? tokens[depth * top_k + at]
                                : successors[int64_t{before} * kNumSuccessors + at - kMaxTopDrafts];
    if (threadIdx.x == 0) params.chosen[first_sample + depth] = before;
  }
}

/// Some of the tokens before a position of a sequence, a warp for each.
template <bool kHasTerms>
__global__ void __launch_bounds__(kPairWarps* kWarp)
    block_pairs_kernel(const __grid_constant__ BlockPairsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int seq = static_cast<int>(blockIdx.x), depth = static_cast<int>(blockIdx.y);
  const int a = static_cast<int>(blockIdx.z) * kPairWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_before = depth == 0 ? 1 : params.top_k;
  if (depth >= params.num_depths[seq] || a >= num_before) return;
  const TokenPairs& pairs = params.pairs;
  const int top_k = params.top_k, slot = params.seq[seq];
  const int64_t sample = int64_t{params.first_sample[seq]} + depth;
  const SamplingParams& sampling = params.sampling[slot];
  const float scale = pair_scale(sampling);
  if (!kHasTerms && depth == 0) {
    for (int b = lane; b < top_k; b += kWarp) {
      params.pair_ranks[sample * top_k * top_k + b] = b;
      params.pair_scores[sample * top_k * top_k + b] = params.scores[sample * top_k + b];
    }
    return;
  }
  const int32_t before = kHasTerms && depth == 0 ? last_token(params.terms.table, slot)
                                                 : params.tokens[(sample - 1) * top_k + a];
  const float none = sm::float_of(0xff800000u);
  int32_t token[kOwn];
  float score[kOwn], worth[kOwn] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int b = lane + i * kWarp;
    token[i] = b < top_k ? params.tokens[sample * top_k + b] : 0;
    score[i] = b < top_k ? params.scores[sample * top_k + b] : none;
  }
  const auto first = first_terms<kHasTerms>(pairs, params.terms, sample, before, lane);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll 4
    for (int b = 0; b < kWarp; ++b) {
      if (b + i * kWarp >= top_k) break;
      const int32_t other = __shfl_sync(kAllLanes, token[i], b);
      const float sum =
          worth_of(first, terms_of(pairs.second, column_of(pairs, other), pairs.rank, lane));
      if (lane == b) worth[i] = sum;
    }
  }

  float value[kOwn], maximum = kHasTerms ? none : 0.0f;
  uint64_t known = 0, total = 0;
  const bool has_noise = kHasTerms && sampling.temperature >= kMinTemperature;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float noise = 0.0f;
    if (has_noise && lane + i * kWarp < top_k) {
      noise = sm::gumbel(sampling.seed, params.terms.table.num_tokens[slot] + depth, token[i]);
    }
    value[i] = value_of<kHasTerms>(score[i], worth[i], scale, noise);
    maximum = fmaxf(maximum, value[i]);
    if (!kHasTerms) known += sm::fixed_mass(sm::exp_f32(score[i]));
  }
  maximum = warp_reduce(maximum, [](float x, float y) { return fmaxf(x, y); });
  if (kHasTerms && maximum == none) maximum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) total += sm::fixed_mass(sm::exp_f32(value[i] - maximum));
  const auto add = [](uint64_t x, uint64_t y) { return x + y; };
  total = warp_reduce(total, add);
  if constexpr (!kHasTerms) {
    known = warp_reduce(known, add);
    const float others = fmaxf(0.0f, 1.0f - sm::mass_to_float(known));
    total += sm::fixed_mass(others * sm::exp_f32(-maximum));
  }
  const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));

  int rank[kOwn] = {};
  for (int other = 0; other < top_k; ++other) {
    const float theirs =
        __shfl_sync(kAllLanes, other < kWarp ? value[0] : value[kOwn - 1], other % kWarp);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool is_lower = other < lane + i * kWarp;
      rank[i] += theirs > value[i] || (theirs == value[i] && is_lower) ? 1 : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int b = lane + i * kWarp;
    if (b >= top_k) continue;
    const int64_t to = (sample * top_k + a) * top_k + rank[i];
    params.pair_ranks[to] = b;
    params.pair_scores[to] = value[i] > none ? fminf(0.0f, (value[i] - maximum) - log_total) : none;
  }
}

bool can_run(const TokenPairs& pairs, int top_k = 1, const PairTerms& terms = {}) {
  if (terms.factors != nullptr &&
      (terms.dtype != DType::kBF16 || !cuda::are_aligned(terms.factors))) {
    return false;
  }
  return top_k >= 1 && top_k <= kMaxTopDrafts && pairs.rank % 8 == 0 &&
         pairs.rank <= kMaxPairRank && cuda::are_aligned(pairs.first, pairs.second);
}

}  // namespace

int block_step_cuda(const BlockStepParams& params, void* stream) {
  if (!can_run(params.pairs) || !cuda::are_aligned(params.states)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_seqs == 0) return cudaSuccess;
  const int num_tiles = (params.pairs.vocab_size + kTile - 1) / kTile;
  const int most = cuda::num_sms() * kBlocksPerSm, wanted = (num_tiles + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(most < wanted ? most : wanted),
                  static_cast<unsigned>((params.num_seqs + kMaxStates - 1) / kMaxStates));
  return cuda::launch(block_step_kernel, grid, dim3(kThreads), 0, stream, params);
}

int block_path_cuda(const BlockPathParams& params, void* stream) {
  if (!can_run(params.pairs, params.top_k, params.terms)) return cudaErrorInvalidValue;
  if (params.successors != nullptr &&
      (params.terms.factors != nullptr || params.logits == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_seqs == 0) return cudaSuccess;
  auto* kernel =
      params.terms.factors != nullptr ? block_path_kernel<true> : block_path_kernel<false>;
  return cuda::launch(kernel, params.num_seqs, kPathWarps * kWarp, 0, stream, params);
}

int block_pairs_cuda(const BlockPairsParams& params, void* stream) {
  if (!can_run(params.pairs, params.top_k, params.terms)) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  const int num_warps = params.top_k < kPairWarps ? params.top_k : kPairWarps;
  const dim3 grid(static_cast<unsigned>(params.num_seqs), static_cast<unsigned>(params.max_depth),
                  static_cast<unsigned>((params.top_k + kPairWarps - 1) / kPairWarps));
  auto* kernel =
      params.terms.factors != nullptr ? block_pairs_kernel<true> : block_pairs_kernel<false>;
  return cuda::launch(kernel, grid, dim3(num_warps * kWarp), 0, stream, params);
}

}  // namespace openspec
