#include <cstdint>
#include <cstring>

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/norm/cluster_norm.h"
#include "kernels/norm/row_order.cuh"

namespace openspec {
namespace {

using cuda::Bf16Pack;
using cuda::FloatPack;

// A block of the cluster has a section of the row, a thread four columns of that: a warp reads
// whole lines, and all sums of a thread's columns are under way together. One multiprocessor alone
// would take 64 bytes of a row's 160 KB (hidden size 5120, eight sums) at a time, and empty as
// many.
constexpr int kColumns = 4;
constexpr int kMaxBlocks = 8;
constexpr int kBlockColumns = 1024;                         // of one block of several, at most
constexpr int kMaxSums = cuda::kMaxWidth / 16 / 32;         // of 32 chains
constexpr int kMaxChains = 32 * kMaxSums + kMaxBlocks * 2;  // with those of what is rounded up

// Without clusters a block has the whole row, a thread several such pieces of it, one after the
// other.
constexpr int kMaxPieces = 4;
constexpr int kMaxThreads = cuda::kMaxWidth / kColumns / kMaxPieces;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kPieces = kMaxPieces;
#else
constexpr int kPieces = 1;
#endif

enum class From { kPartials, kInbox, kOwned };

// Sums that are waited for stay in registers together.
constexpr int max_registers(int num_sums, From from) {
  if (kPieces > 1) return 128;
  return num_sums <= 4 || from != From::kInbox ? 64 : 80;
}

/// What the kernel is told.
struct ClusterParams : RmsNormParams {
  int num_blocks = 1;  // of a row
  int section = 0;     // columns of a block, whole pairs of chains
  // Where sums come through an inbox:
  cuda::Inbox from = {};
  RoundForm form = {};
  // Where rows have owners:
  int rank = 0, num_ranks = 1;
  OwnedRows everywhere = {};
};

/// Up to kMost terms, in order.
template <int kMost>
__device__ __forceinline__ FloatPack<kColumns> ordered_sum(const uint4 (&words)[kMost],
                                                           int num_sums) {
  FloatPack<kColumns> sum;
  memcpy(sum.x, &words[0], sizeof sum.x);
#pragma unroll
  for (int i = 1; i < kMost; ++i) {
    FloatPack<kColumns> term;
    memcpy(term.x, &words[i], sizeof term.x);
    if (i < num_sums) cuda::add(sum, term);
  }
  return sum;
}

/// Up to kMost partial sums of the thread's columns, added in order. `first`: those of the first.
template <int kMost>
__device__ __forceinline__ FloatPack<kColumns> load_sums(const float* first, int64_t stride,
                                                         int num_sums) {
  uint4 words[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    words[i] = cuda::load_pack<uint4>(first + min(i, num_sums - 1) * stride);
  }
  return ordered_sum(words, num_sums);
}

/// As load_sums, of sums that are taken from an inbox as they come.
template <int kMost>
__device__ __forceinline__ FloatPack<kColumns> take_sums(const cuda::Inbox& inbox,
                                                         const float* first, int64_t stride,
                                                         int num_sums) {
  uint4 words[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const uint32_t word = i < num_sums ? cuda::kEmptyWord : 0;
    words[i] = make_uint4(word, word, word, word);
  }
  cuda::wait_until(inbox, blockIdx.x == 0 && threadIdx.x == 0, [&] {
#pragma unroll
    for (int i = 0; i < kMost; ++i) cuda::load_missing(first + i * stride, words[i]);
    bool are_whole = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) are_whole &= cuda::is_whole(words[i]);
    return are_whole;
  });
  return ordered_sum(words, num_sums);
}

/// The sum of the squares of a chain, whose columns kLanes neighbouring lanes have; known to all of
/// these.
template <int kLanes>
__device__ __forceinline__ float chain_sum(const FloatPack<kColumns>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kLanes; ++turn) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum = fmaf(x.x[c], x.x[c], sum);
    if constexpr (kLanes > 1) {
      sum = __shfl_sync(cuda::kAllLanes, sum, turn, kLanes);
    }
  }
  return sum;
}

/// Where the chains of a row meet: every block of the cluster has them all.
struct Chains {
  alignas(8) float sums[kMaxChains];
  float warp_sums[kMaxSums];
  uint64_t barrier;
};

/// Before anything is sent. Chains that nobody has are zeros.
__device__ __forceinline__ void begin_chains(Chains& chains, int num_blocks, int block_chains,
                                             int num_warps) {
  for (int i = num_blocks * block_chains + static_cast<int>(threadIdx.x); i < 32 * num_warps;
       i += static_cast<int>(blockDim.x)) {
    chains.sums[i] = 0.0f;
  }
#if __CUDA_ARCH__ >= 900
  if (num_blocks > 1) {
    if (threadIdx.x == 0) {
      const uint32_t barrier = cuda::shared_address(&chains.barrier);
      cuda::init_barrier(barrier, 1);
      cuda::publish_barriers();
      cuda::expect_bytes(barrier, num_blocks * block_chains * static_cast<uint32_t>(sizeof(float)));
    }
    __syncthreads();
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
  }
#endif
}

/// Gives all blocks a pair of neighbouring chains, the first of which is `chain`.
__device__ __forceinline__ void give_chains(Chains& chains, int num_blocks, int chain, float first,
                                            float second) {
  if (num_blocks == 1) {
    *reinterpret_cast<float2*>(&chains.sums[chain]) = {first, second};
    return;
  }
#if __CUDA_ARCH__ >= 900
  const uint32_t at = cuda::shared_address(&chains.sums[chain]);
  const uint32_t barrier = cuda::shared_address(&chains.barrier);
#pragma unroll
  for (int block = 0; block < kMaxBlocks; ++block) {
    if (block < num_blocks) {
      cuda::send(cuda::address_in(at, block), first, second, cuda::address_in(barrier, block));
    }
  }
#endif
}

/// The sum of all chains, known to every thread of every block.
__device__ __forceinline__ float sum_of_chains(Chains& chains, int num_blocks, int num_warps) {
  if (num_blocks == 1) __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (num_blocks > 1) cuda::wait_for_bytes(cuda::shared_address(&chains.barrier), 0);
#endif
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int warp = static_cast<int>(threadIdx.x) / 32; warp < num_warps;
       warp += static_cast<int>(blockDim.x) / 32) {
    const float sum = cuda::lane_sum(chains.sums[warp * 32 + lane]);
    if (lane == 0) chains.warp_sums[warp] = sum;
  }
  __syncthreads();
  return cuda::ordered_sum(chains.warp_sums, num_warps);
}

/// Stores a pack at the same place of every rank's rows.
template <typename Pack>
__device__ __forceinline__ void store_everywhere(void* const (&rows)[kMaxRanks], int num_ranks,
                                                 int64_t at, const Pack& pack) {
#pragma unroll
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (rank < num_ranks) cuda::store_pack(static_cast<uint16_t*>(rows[rank]) + at, pack);
  }
}

/// kChain: columns of a chain. kMost: sums, at most. kFrom: where they come from; of kOwned rows
/// have owners, and a cluster has one of the rank's own.
template <int kChain, int kMost, From kFrom>
__global__ void __maxnreg__(max_registers(kMost, kFrom))
    cluster_norm_kernel(const __grid_constant__ ClusterParams params, float inverse_width) {
  cuda::allow_next_kernel();
  constexpr bool kTakes = kFrom == From::kInbox, kOwns = kFrom == From::kOwned;
  constexpr int kLanes = kChain / kColumns;
  __shared__ Chains chains;
  const int width = params.width, num_blocks = params.num_blocks;
  const int num_warps = (width + kChain * 32 - 1) / (kChain * 32);
  const int block = static_cast<int>(blockIdx.x) % num_blocks;
  const int place = static_cast<int>(blockIdx.x) / num_blocks;  // row of a sum
  const auto in_section = [&](int piece) {
    return static_cast<int>(piece * blockDim.x + threadIdx.x) * kColumns;
  };
  const auto wanted = [&](int piece) { return block * params.section + in_section(piece); };
  const auto is_inside = [&](int piece) {
    return in_section(piece) < params.section && wanted(piece) < width;
  };
  const auto column = [&](int piece) { return min(wanted(piece), width - kColumns); };
  begin_chains(chains, num_blocks, params.section / kChain, num_warps);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) cuda::fetch_to_cache(params.weight + column(p));
  cuda::wait_for_previous_kernel();

  const int row = kOwns ? params.form.owners.row_of(params.rank, place) : place;
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + static_cast<int64_t>(row) * width;
  int num_sums = params.num_partials;
  int64_t stride = static_cast<int64_t>(params.num_rows) * width;
  int64_t from = static_cast<int64_t>(place) * width;
  if constexpr (kTakes || kOwns) {
    [[maybe_unused]] const uint64_t round = cuda::begin_taking(params.from);
    num_sums = params.form.num_sums(num_sums);
    stride = static_cast<int64_t>(params.form.inbox_rows) * width;
    from += kOwns ? cuda::owned_begin(params.from) : cuda::slot_begin(params.from, round);
  }
  FloatPack<kColumns> x[kPieces] = {};
  Bf16Pack<kColumns> bits[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    bits[p] = cuda::load_pack<Bf16Pack<kColumns>>(residual + column(p));
    if (!is_inside(p)) continue;
    FloatPack<kColumns> delta;
    if constexpr (kTakes) {
      float* first = params.from.words + from + column(p);
      delta = take_sums<kMost>(params.from, first, stride, num_sums);
    } else {
      const float* sums = kOwns ? params.from.words : params.delta_partials;
      delta = load_sums<kMost>(sums + from + column(p), stride, num_sums);
    }
    x[p] = cuda::to_floats(bits[p]);
    cuda::add(x[p], cuda::round_to_bf16(delta));
    bits[p] = cuda::to_bf16(x[p]);
    x[p] = cuda::to_floats(bits[p]);
  }

  // The statistics are on their way before anything that nobody waits for.
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const float sum = chain_sum<kLanes>(x[p]);
    const float next = __shfl_down_sync(cuda::kAllLanes, sum, kLanes);
    if (in_section(p) < params.section && in_section(p) % (2 * kChain) == 0) {
      give_chains(chains, num_blocks, wanted(p) / kChain, sum, next);
    }
  }
  FloatPack<kColumns> weight[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    weight[p] = cuda::load_pack<FloatPack<kColumns>>(params.weight + column(p));
    if (!is_inside(p)) continue;
    if constexpr (kTakes) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < num_sums) cuda::empty_words(params.from.words + from + column(p) + i * stride);
      }
    }
    cuda::store_pack(residual + column(p), bits[p]);
    if constexpr (kOwns) {
      const int64_t at = static_cast<int64_t>(row) * width + column(p);
      if (params.everywhere.residual[0] != nullptr) {
        store_everywhere(params.everywhere.residual, params.num_ranks, at, bits[p]);
      }
    }
  }
  const float square_sum = sum_of_chains(chains, num_blocks, num_warps);
  const float scale = rsqrtf(fmaf(square_sum, inverse_width, params.eps));

#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (!is_inside(p)) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[p].x[c] *= scale;
    if (!params.rounds_once) x[p] = cuda::round_to_bf16(x[p]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[p].x[c] *= weight[p].x[c];
    const int64_t out_at = row * params.out_stride + column(p);
    if constexpr (kOwns) {
      store_everywhere(params.everywhere.out, params.num_ranks, out_at, cuda::to_bf16(x[p]));
    } else {
      cuda::store_pack(static_cast<uint16_t*>(params.out) + out_at, cuda::to_bf16(x[p]));
    }
  }
}

/// Whether the code that runs here was made for clusters.
bool has_clusters() {
  static const bool has = [] {
    cudaFuncAttributes attributes = {};
    auto* kernel = cluster_norm_kernel<16, 4, From::kInbox>;
    return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  return has;
}

/// Blocks to a row, a cluster. As many as few rows are fastest with; for many rows of 5120 columns
/// half as many would save up to 2.5 % of a product and its norm, and less elsewhere.
int blocks_of(int width) {
  int num_blocks = 1;
  while (has_clusters() && num_blocks * kBlockColumns < width) num_blocks *= 2;
  return num_blocks;
}

template <int kChain, From kFrom>
int launch_rows(ClusterParams params, int num_rows, void* stream) {
  constexpr int kPair = 2 * kChain, kWarpColumns = 32 * kColumns;
  params.num_blocks = blocks_of(params.width);
  const int pairs = params.num_blocks * kPair;
  params.section = (params.width + pairs - 1) / pairs * kPair;
  const int num_threads = (params.section + kWarpColumns - 1) / kWarpColumns * 32;
  auto* kernel = params.form.num_sums(params.num_partials) <= 4
                     ? cluster_norm_kernel<kChain, 4, kFrom>
                     : cluster_norm_kernel<kChain, kMostSums, kFrom>;
  return cuda::launch_clusters(params.num_blocks, kernel, num_rows * params.num_blocks,
                               num_threads < kMaxThreads ? num_threads : kMaxThreads, 0, stream,
                               params, 1.0f / static_cast<float>(params.width));
}

template <From kFrom>
int launch_rows(const ClusterParams& params, int num_rows, void* stream) {
  switch (cuda::chain_columns(params.width)) {
    case 4:
      return launch_rows<4, kFrom>(params, num_rows, stream);
    case 8:
      return launch_rows<8, kFrom>(params, num_rows, stream);
    default:
      return launch_rows<16, kFrom>(params, num_rows, stream);
  }
}

}  // namespace

bool suits_cluster_norm(const RmsNormParams& params) {
  constexpr int kMostRows = 256;  // of a step that decodes
  // Of narrower rows a thread of the one block has eight columns at most, and it is as fast.
  return params.delta_partials != nullptr && params.num_partials <= kMostSums &&
         params.num_rows <= kMostRows && !params.starts_residual &&
         cuda::chain_columns(params.width) == 16 && has_clusters();
}

int cluster_norm_cuda(const RmsNormParams& params, void* stream) {
  ClusterParams of_rows = {params};
  if (params.exchange == nullptr) {
    return launch_rows<16, From::kPartials>(of_rows, params.num_rows, stream);
  }
  const Exchange& exchange = *params.exchange;
  of_rows.from = cuda::own_inbox(exchange);
  of_rows.form = round_form(exchange.num_ranks, params.num_partials, params.num_rows, params.width);
  const RowOwners& owners = of_rows.form.owners;
  if (!owners.exist()) return launch_rows<From::kInbox>(of_rows, params.num_rows, stream);
  of_rows.rank = exchange.rank;
  of_rows.num_ranks = exchange.num_ranks;
  of_rows.everywhere = *params.owned;
  int error = meet_cuda(exchange, /*lets_next_begin=*/false, stream);  // all sums are there
  if (error != cudaSuccess) return error;
  error =
      launch_rows<From::kOwned>(of_rows, owners.rows_of(exchange.rank, params.num_rows), stream);
  if (error != cudaSuccess) return error;
  return meet_cuda(exchange, /*lets_next_begin=*/true, stream);  // all results are
}

}  // namespace openspec
