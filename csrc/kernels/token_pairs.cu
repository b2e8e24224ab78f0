#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/draft_tree.h"
#include "kernels/launch.cuh"
#include "kernels/linear_ring.cuh"
#include "kernels/packs.cuh"
#include "kernels/sample_math.h"
#include "kernels/token_pairs.h"

// Compile with -fmad=false (sample_math.h): the CPU's bits are promised for trees.

namespace openspec {
namespace {

namespace sm = ::openspec::sample_math;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kMinTemperature = 1e-5f;  // below this a temperature counts as 0

__device__ __forceinline__ const uint16_t* row_of(const void* table, int64_t token, int rank) {
  return static_cast<const uint16_t*>(table) + token * rank;
}

__device__ __forceinline__ int32_t last_token(const TableView& table, int slot) {
  return table.tokens[slot * table.tokens_stride + table.num_tokens[slot] - 1];
}

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlocksPerSm = 2;
constexpr int kTile = 16;                         // rows of `second` that a warp holds
constexpr int kSegment = 32;                      // columns that four lanes load of each
constexpr int kSegments = kMaxPairRank / kSegment;
constexpr int kGroup = 8;                         // sequences of a matrix instruction
constexpr int kMaxStates = 64;                    // of a block: as many groups as fit
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
      const int32_t before = params.depth > 0 ? params.chosen[sample - 1]
                                              : last_token(params.table, params.seq[seq]);
      if (lane * 8 < pairs.rank) {
        state = *reinterpret_cast<const uint4*>(row_of(pairs.first, before, pairs.rank) + lane * 8);
      }
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
        cuda::multiply_add(sums, {low.x, high.x, low.y, high.y}, {state.x, state.y});
        cuda::multiply_add(sums, {low.z, high.z, low.w, high.w}, {state.z, state.w});
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

/// A block for each position of each sequence, a warp for each token before it.
__global__ void __launch_bounds__(kMaxTreeTopK* kWarp)
    block_pairs_kernel(const __grid_constant__ BlockPairsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int seq = static_cast<int>(blockIdx.x), depth = static_cast<int>(blockIdx.y);
  const int a = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (depth >= params.num_depths[seq] || (depth == 0 && a > 0)) return;
  const TokenPairs& pairs = params.pairs;
  const int top_k = params.top_k, slot = params.seq[seq];
  const int64_t sample = int64_t{params.first_sample[seq]} + depth;
  const float temperature = params.sampling[slot].temperature;
  const float scale = temperature < kMinTemperature ? 1.0f : 1.0f / temperature;
  const int32_t before = depth == 0 ? last_token(params.table, slot)
                                    : params.tokens[(sample - 1) * top_k + a];
  // Lane b has candidate b; of a pair's terms eight.
  const bool is_candidate = lane < top_k;
  const int32_t own = is_candidate ? params.tokens[sample * top_k + lane] : 0;
  const float score = is_candidate ? params.scores[sample * top_k + lane] : sm::float_of(0xff800000u);
  using Pack = cuda::Bf16Pack<8>;
  const bool has_terms = lane * 8 < pairs.rank;
  Pack pack = {};
  if (has_terms) pack = cuda::load_pack<Pack>(row_of(pairs.first, before, pairs.rank) + lane * 8);
  const cuda::FloatPack<8> first = cuda::to_floats(pack);
  float worth = 0.0f;
  for (int b = 0; b < top_k; ++b) {
    const int32_t token = __shfl_sync(kAllLanes, own, b);
    if (has_terms) pack = cuda::load_pack<Pack>(row_of(pairs.second, token, pairs.rank) + lane * 8);
    const cuda::FloatPack<8> second = cuda::to_floats(pack);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += first.x[k] * second.x[k];
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    if (lane == b) worth = sum;
  }

  const float value = sm::sanitize(score + worth * scale);
  float maximum = fmaxf(0.0f, value);
  uint64_t known = sm::fixed_mass(sm::exp_f32(score));
#pragma unroll
  for (int offset = kMaxTreeTopK / 2; offset > 0; offset /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, offset));
    known += __shfl_xor_sync(kAllLanes, known, offset);
  }
  uint64_t total = sm::fixed_mass(sm::exp_f32(value - maximum));
#pragma unroll
  for (int offset = kMaxTreeTopK / 2; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, offset);
  }
  const float others = fmaxf(0.0f, 1.0f - sm::mass_to_float(known));
  total += sm::fixed_mass(others * sm::exp_f32(-maximum));
  const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));
  int rank = 0;
  for (int b = 0; b < top_k; ++b) {
    const float other = __shfl_sync(kAllLanes, value, b);
    rank += other > value || (other == value && b < lane) ? 1 : 0;
  }
  if (!is_candidate) return;
  const int64_t to = (sample * top_k + a) * top_k + rank;
  params.pair_ranks[to] = lane;
  params.pair_scores[to] = value > sm::float_of(0xff800000u)
                               ? fminf(0.0f, (value - maximum) - log_total)
                               : sm::float_of(0xff800000u);
}

bool can_run(const TokenPairs& pairs) {
  return pairs.rank % 8 == 0 && pairs.rank <= kMaxPairRank &&
         cuda::are_aligned(pairs.first, pairs.second);
}

}  // namespace

int block_step_cuda(const BlockStepParams& params, void* stream) {
  if (!can_run(params.pairs)) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  const int num_tiles = (params.pairs.vocab_size + kTile - 1) / kTile;
  const int most = cuda::num_sms() * kBlocksPerSm, wanted = (num_tiles + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(most < wanted ? most : wanted),
                  static_cast<unsigned>((params.num_seqs + kMaxStates - 1) / kMaxStates));
  return cuda::launch(block_step_kernel, grid, dim3(kThreads), 0, stream, params);
}

int block_pairs_cuda(const BlockPairsParams& params, void* stream) {
  if (!can_run(params.pairs)) return cudaErrorInvalidValue;
  if (params.top_k < 1 || params.top_k > kMaxTreeTopK) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(params.num_seqs), static_cast<unsigned>(params.max_depth));
  return cuda::launch(block_pairs_kernel, grid, dim3(params.top_k * kWarp), 0, stream, params);
}

}  // namespace openspec
