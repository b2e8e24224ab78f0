#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>

#include "kernels/common/launch.cuh"
#include "kernels/exchange/exchange.cuh"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceBytes = 16;

struct SharePlan {
  cuda::Inbox own;
  int num_ranks, rank;
  ExchangeState* states[kMaxRanks] = {};
};
struct ColumnsPlan {
  SharePlan share;
  int num_rows;
  bool deals_rows;
  int64_t row_bytes, first_byte;
  uint32_t row_pieces;
  uint8_t* rows[kMaxRanks] = {};
};
struct RowsPlan {
  SharePlan share;
  RowRange own;  // rows
  ShareRowsParams::Rows buffers[ShareRowsParams::kMaxBuffers] = {};
};

/// Gives all other ranks the sign of this rank's block, in the table that `table` finds in a state;
/// then waits for theirs, or later ones. All threads of the block call it.
template <typename Table>
__device__ __forceinline__ void meet(const SharePlan& plan, uint64_t value, const Table& table) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x);
  if (other < plan.num_ranks && other != plan.rank) {
    cuda::give_sign(&table(*plan.states[other])[plan.rank][blockIdx.x], value);
    const uint64_t* sign = &table(*plan.own.state)[other][blockIdx.x];
    const bool is_counted = blockIdx.x == 0 && other == (plan.rank == 0 ? 1 : 0);
    cuda::wait_until(plan.own, is_counted, [&] { return cuda::load_sign(sign) >= value; });
  }
  __syncthreads();
}

/// The block has sent all it does: ends when the others' like has, too.
__device__ __forceinline__ void end_sharing(const SharePlan& plan, uint64_t value) {
  meet(plan, value, [](ExchangeState& state) -> auto& { return state.has_sent; });
  // By then all blocks have read the number.
  if (threadIdx.x != 0) return;
  ExchangeState& own = *plan.own.state;
  const auto num_done =
      atomicAdd(reinterpret_cast<unsigned long long*>(&own.num_blocks_done), 1ull);
  if (num_done + 1 < gridDim.x) return;
  own.num_blocks_done = 0;
  own.num_shared = value;
}

/// The same blocks on every rank, all of which are resident: each copies a part of the pieces, and
/// waits for its like on the others. All blocks wait for all parts together.
__global__ void __launch_bounds__(kThreads)
    share_columns_kernel(const __grid_constant__ ColumnsPlan plan) {
  constexpr int kAtOnce = 4;
  constexpr uint32_t kStride = kThreads * kShareBlocks;
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const SharePlan& share = plan.share;
  const int num_ranks = share.num_ranks, rank = share.rank;
  const uint64_t value = share.own.state->num_shared + 1;
  meet(share, value, [](ExchangeState& state) -> auto& { return state.is_ready; });

  // Of dealt rows it begins with those of the next rank, so that not all send to the same.
  const RowRange own = plan.deals_rows ? dealt_rows(num_ranks, rank, plan.num_rows) : RowRange{};
  const auto num_sent = static_cast<uint32_t>(plan.num_rows - own.count);
  const uint32_t num_pieces = num_sent * plan.row_pieces;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < num_pieces;
       first += kAtOnce * kStride) {
    uint4 piece[kAtOnce];
    int64_t at[kAtOnce];
    int row[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kStride;
      row[k] = own.first + own.count + static_cast<int>(i / plan.row_pieces);
      row[k] -= row[k] >= plan.num_rows ? plan.num_rows : 0;
      at[k] =
          row[k] * plan.row_bytes + plan.first_byte + int64_t{i % plan.row_pieces} * kPieceBytes;
      piece[k] = uint4();
      if (i < num_pieces) piece[k] = *reinterpret_cast<const uint4*>(plan.rows[rank] + at[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * kStride >= num_pieces) break;
      const auto send_to = [&](int other) {
        *reinterpret_cast<uint4*>(plan.rows[other] + at[k]) = piece[k];
      };
      if (plan.deals_rows) {
        send_to(rank_of_dealt(num_ranks, row[k], plan.num_rows));
      } else {
        for (int step = 1; step < num_ranks; ++step) send_to((rank + step) % num_ranks);
      }
    }
  }
  end_sharing(share, value);
}

/// As above, by few blocks: each copies a part of a buffer. Other ranks are ready, as they have
/// dealt rows.
constexpr int kRowBlocks = 4 * ShareRowsParams::kMaxBuffers;
static_assert(kRowBlocks <= kShareBlocks);
__global__ void __launch_bounds__(kThreads)
    share_rows_kernel(const __grid_constant__ RowsPlan plan) {
  constexpr int kBlocks = kRowBlocks / ShareRowsParams::kMaxBuffers;
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const SharePlan& share = plan.share;
  const uint64_t value = share.own.state->num_shared + 1;
  const ShareRowsParams::Rows& buffer = plan.buffers[blockIdx.x / kBlocks];
  const int end = (plan.own.first + plan.own.count) * buffer.row_words;
  for (int i = plan.own.first * buffer.row_words +
               static_cast<int>(blockIdx.x % kBlocks * kThreads + threadIdx.x);
       i < end; i += kBlocks * kThreads) {
    const auto words = [&](int rank) { return static_cast<uint32_t*>(buffer.words[rank]); };
    const uint32_t word = words(share.rank)[i];
    for (int step = 1; step < share.num_ranks; ++step) {
      words((share.rank + step) % share.num_ranks)[i] = word;
    }
  }
  end_sharing(share, value);
}

SharePlan share_plan(const Exchange& exchange) {
  SharePlan plan = {cuda::own_inbox(exchange), exchange.num_ranks, exchange.rank};
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    plan.states[rank] = state_of(exchange, rank);
  }
  return plan;
}

bool is_legal(const Exchange* exchange) {
  return exchange != nullptr && is_legal_round(*exchange, 0, 0, 0);
}

struct MeetPlan {
  cuda::Inbox own;
  int num_ranks, rank;
  bool lets_next_begin;
  ExchangeState* states[kMaxRanks] = {};
};

/// A thread for each of the others.
__global__ void __launch_bounds__(kMaxRanks) meet_kernel(const __grid_constant__ MeetPlan plan) {
  if (plan.lets_next_begin) cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  ExchangeState& own = *plan.own.state;
  const uint64_t value = own.num_met + 1;
  const int other = static_cast<int>(threadIdx.x);
  if (other < plan.num_ranks && other != plan.rank) {
    cuda::give_sign(&plan.states[other]->has_come[plan.rank], value);
    // The other one may have gone on, and come to the next meeting.
    cuda::wait_until(plan.own, other == (plan.rank == 0 ? 1 : 0),
                     [&] { return cuda::load_sign(&own.has_come[other]) >= value; });
  }
  __syncthreads();
  if (threadIdx.x == 0) own.num_met = value;
}

}  // namespace

int meet_cuda(const Exchange& exchange, bool lets_next_begin, void* stream) {
  if (!is_legal_round(exchange, 0, 0, 0)) return cudaErrorInvalidValue;
  MeetPlan plan = {cuda::own_inbox(exchange), exchange.num_ranks, exchange.rank, lets_next_begin};
  for (int i = 0; i < exchange.num_ranks; ++i) plan.states[i] = state_of(exchange, i);
  return cuda::launch(meet_kernel, 1, kMaxRanks, 0, stream, plan);
}

int clear_exchange_cuda(const Exchange& exchange, void* stream) {
  if (!is_legal_round(exchange, 0, 0, 0)) return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  const size_t bytes = exchange_bytes(exchange.floats) - sizeof(ExchangeState);
  const int error = cudaMemsetAsync(exchange.memory[exchange.rank], 0xff, bytes, on);
  if (error != cudaSuccess) return error;
  return cudaMemsetAsync(state_of(exchange, exchange.rank), 0, sizeof(ExchangeState), on);
}

int share_columns_cuda(const ShareColumnsParams& params, void* stream) {
  constexpr int64_t kMostPieces = int64_t{1} << 31;
  if (!is_legal(params.exchange) || params.first_byte < 0 || params.num_bytes < 0 ||
      params.first_byte + params.num_bytes > params.row_bytes ||
      params.first_byte % kPieceBytes != 0 || params.num_bytes % kPieceBytes != 0 ||
      params.row_bytes % kPieceBytes != 0 ||
      params.num_rows * params.num_bytes >= kMostPieces * kPieceBytes) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  ColumnsPlan plan = {share_plan(*params.exchange),
                      params.num_rows,
                      params.deals_rows,
                      params.row_bytes,
                      params.first_byte,
                      static_cast<uint32_t>(params.num_bytes / kPieceBytes)};
  for (int rank = 0; rank < params.exchange->num_ranks; ++rank) {
    plan.rows[rank] = static_cast<uint8_t*>(params.rows[rank]);
  }
  return cuda::launch(share_columns_kernel, kShareBlocks, kThreads, 0, stream, plan);
}

int share_rows_cuda(const ShareRowsParams& params, void* stream) {
  if (!is_legal(params.exchange)) return cudaErrorInvalidValue;
  if (params.num_rows == 0) return cudaSuccess;
  const Exchange& exchange = *params.exchange;
  RowsPlan plan = {share_plan(exchange),
                   dealt_rows(exchange.num_ranks, exchange.rank, params.num_rows)};
  std::copy(std::begin(params.buffers), std::end(params.buffers), plan.buffers);
  return cuda::launch(share_rows_kernel, kRowBlocks, kThreads, 0, stream, plan);
}

}  // namespace openspec
