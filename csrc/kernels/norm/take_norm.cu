#include <cstdint>
#include <cstring>

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/mma.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/norm/row_order.cuh"
#include "kernels/norm/take_norm.h"

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
constexpr int kMaxSums = cuda::kMaxWidth / 16 / 32;         // of 32 chains
constexpr int kMaxChains = 32 * kMaxSums + kMaxBlocks * 2;  // with those of what is rounded up

// Sums that are waited for stay in registers together.
constexpr int max_registers(int num_sums) { return num_sums <= 4 ? 64 : 80; }
constexpr int max_threads(int num_sums) { return num_sums <= 4 ? 1024 : 768; }

/// What the kernel is told.
struct TakeParams : RmsNormParams {
  cuda::Inbox from;
  RoundForm form;
  int num_blocks = 1;  // of a row
  int section = 0;     // columns of a block, whole pairs of chains
  // Where rows have owners:
  int rank = 0, num_ranks = 1;
  OwnedRows everywhere = {};
  ExchangeState* states[kMaxRanks] = {};
};

/// Up to kMost sums of the thread's columns, taken from an inbox as they come and added in order.
/// `first`: those of the first sum.
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
  cuda::wait_until(inbox, [&] {
#pragma unroll
    for (int i = 0; i < kMost; ++i) cuda::load_missing(first + i * stride, words[i]);
    bool are_whole = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) are_whole &= cuda::is_whole(words[i]);
    return are_whole;
  });
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

/// Tells the other ranks that the cluster has stored a row everywhere. All threads call it.
__device__ __forceinline__ void tell_of_row(const TakeParams& params, int block, int row,
                                            uint64_t round) {
  if (params.num_blocks == 1) __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (params.num_blocks > 1) cuda::meet_in_cluster();
#endif
  if (block != 0) return;
#pragma unroll
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    const bool is_told = rank < params.num_ranks && rank != params.rank;
    if (is_told && threadIdx.x == rank) {
      cuda::give_sign(&params.states[rank]->owned_rows[row], round + 1);
    }
  }
}

/// kChain: columns of a chain. kMost: sums, at most. kOwns: rows have owners, and a cluster has one
/// of the rank's own.
template <int kChain, int kMost, bool kOwns>
__global__ void __maxnreg__(max_registers(kMost))
    take_norm_kernel(const __grid_constant__ TakeParams params, float inverse_width) {
  cuda::allow_next_kernel();
  constexpr int kLanes = kChain / kColumns;
  __shared__ Chains chains;
  const int width = params.width, num_blocks = params.num_blocks;
  const int num_warps = (width + kChain * 32 - 1) / (kChain * 32);
  const int block = static_cast<int>(blockIdx.x) % num_blocks;
  const int place = static_cast<int>(blockIdx.x) / num_blocks;  // row of a sum in the inbox
  const int in_section = static_cast<int>(threadIdx.x) * kColumns;
  const int wanted = block * params.section + in_section;
  const bool is_inside = in_section < params.section && wanted < width;
  const int column = min(wanted, width - kColumns);
  begin_chains(chains, num_blocks, params.section / kChain, num_warps);
  cuda::fetch_to_cache(params.weight + column);
  cuda::wait_for_previous_kernel();

  const cuda::Inbox& inbox = params.from;
  const int row = kOwns ? params.form.owners.row_of(params.rank, place) : place;
  const int64_t at = static_cast<int64_t>(row) * width + column;
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + at;
  Bf16Pack<kColumns> bits = cuda::load_pack<Bf16Pack<kColumns>>(residual);
  const uint64_t round = cuda::begin_taking(inbox);
  float* first =
      inbox.words + cuda::slot_begin(inbox, round) + static_cast<int64_t>(place) * width + column;
  const int64_t stride = static_cast<int64_t>(params.form.inbox_rows) * width;
  const int num_sums = params.form.num_sums(params.num_partials);
  FloatPack<kColumns> x{};
  if (is_inside) {
    const auto delta = cuda::round_to_bf16(take_sums<kMost>(inbox, first, stride, num_sums));
    x = cuda::to_floats(bits);
    cuda::add(x, delta);
    bits = cuda::to_bf16(x);
    x = cuda::to_floats(bits);
  }

  // The statistics are on their way before anything that nobody waits for.
  const float sum = chain_sum<kLanes>(x);
  const float next = __shfl_down_sync(cuda::kAllLanes, sum, kLanes);
  if (in_section < params.section && in_section % (2 * kChain) == 0) {
    give_chains(chains, num_blocks, wanted / kChain, sum, next);
  }
  const auto weight = cuda::load_pack<FloatPack<kColumns>>(params.weight + column);
  if (is_inside) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < num_sums) cuda::empty_words(first + i * stride);
    }
    cuda::store_pack(residual, bits);
    if constexpr (kOwns) {
      if (params.everywhere.residual[0] != nullptr) {
        store_everywhere(params.everywhere.residual, params.num_ranks, at, bits);
      }
    }
  }
  const float square_sum = sum_of_chains(chains, num_blocks, num_warps);
  const float scale = rsqrtf(fmaf(square_sum, inverse_width, params.eps));

#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.x[c] *= scale;
  x = cuda::round_to_bf16(x);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.x[c] *= weight.x[c];
  const int64_t out_at = row * params.out_stride + column;
  if constexpr (kOwns) {
    if (is_inside) {
      store_everywhere(params.everywhere.out, params.num_ranks, out_at, cuda::to_bf16(x));
    }
    tell_of_row(params, block, row, round);
  } else {
    if (is_inside) cuda::store_pack(static_cast<uint16_t*>(params.out) + out_at, cuda::to_bf16(x));
  }
}

/// Waits for the rows of all other ranks. A thread to a row.
__global__ void __launch_bounds__(kMaxRowsToOwners)
    await_rows_kernel(cuda::Inbox inbox, RowOwners owners, int rank, int num_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int row = static_cast<int>(threadIdx.x);
  if (row >= num_rows || owners.rank_of(row) == rank) return;
  const uint64_t value = inbox.state->taking + 1;
  const uint64_t* sign = &inbox.state->owned_rows[row];
  cuda::wait_until(inbox, [&] { return cuda::load_sign(sign) == value; });
}

template <int kChain, bool kOwns>
int launch_rows(const TakeParams& params, int num_rows, void* stream) {
  auto* kernel = params.form.num_sums(params.num_partials) <= 4
                     ? take_norm_kernel<kChain, 4, kOwns>
                     : take_norm_kernel<kChain, kMostSums, kOwns>;
  const int warps = (params.section + 32 * kColumns - 1) / (32 * kColumns);
  return cuda::launch_clusters(params.num_blocks, kernel, num_rows * params.num_blocks, 32 * warps,
                               0, stream, params, 1.0f / static_cast<float>(params.width));
}

template <bool kOwns>
int launch_rows(const TakeParams& params, int num_rows, void* stream) {
  switch (cuda::chain_columns(params.width)) {
    case 4:
      return launch_rows<4, kOwns>(params, num_rows, stream);
    case 8:
      return launch_rows<8, kOwns>(params, num_rows, stream);
    default:
      return launch_rows<16, kOwns>(params, num_rows, stream);
  }
}

}  // namespace

int take_norm_cuda(const RmsNormParams& params, void* stream) {
  const Exchange& exchange = *params.exchange;
  TakeParams take = {params, cuda::own_inbox(exchange),
                     round_form(exchange, params.num_partials, params.num_rows)};
  take.rank = exchange.rank;
  take.num_ranks = exchange.num_ranks;
  const int pair = 2 * cuda::chain_columns(params.width);
  const auto section = [&](int num_blocks) {
    return (params.width + num_blocks * pair - 1) / (num_blocks * pair) * pair;
  };
  take.num_blocks = exchange.plan.norm_blocks;
  const int num_sums = take.form.num_sums(params.num_partials);
  while (section(take.num_blocks) > max_threads(num_sums) * kColumns) take.num_blocks *= 2;
  take.section = section(take.num_blocks);
  if (!take.form.owners.exist()) return launch_rows<false>(take, params.num_rows, stream);
  take.everywhere = *params.owned;
  for (int i = 0; i < exchange.num_ranks; ++i) take.states[i] = cuda::state_of(exchange, i);
  const int num_own = take.form.owners.rows_of(exchange.rank, params.num_rows);
  if (num_own > 0) {
    const int error = launch_rows<true>(take, num_own, stream);
    if (error != cudaSuccess) return error;
  }
  return cuda::launch(await_rows_kernel, 1, kMaxRowsToOwners, 0, stream, take.from,
                      take.form.owners, exchange.rank, params.num_rows);
}

}  // namespace openspec
