#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/exchange/exchange.cuh"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceBytes = 16;

struct SharePlan {
  cuda::Inbox own;
  int num_ranks, rank;
  int num_rows;
  int64_t row_bytes, first_byte, num_bytes;
  ExchangeState* states[kMaxRanks] = {};
  uint8_t* rows[kMaxRanks] = {};
};

/// Gives all other ranks the sign of this rank's block, in the table that `table` finds in a state;
/// then waits for theirs. All threads of the block call it.
template <typename Table>
__device__ __forceinline__ void meet(const SharePlan& plan, uint64_t value, const Table& table) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x);
  if (other < plan.num_ranks && other != plan.rank) {
    cuda::give_sign(&table(*plan.states[other])[plan.rank][blockIdx.x], value);
    const uint64_t* sign = &table(*plan.own.state)[other][blockIdx.x];
    const bool is_counted = blockIdx.x == 0 && other == (plan.rank == 0 ? 1 : 0);
    cuda::wait_until(plan.own, is_counted, [&] { return cuda::load_sign(sign) == value; });
  }
  __syncthreads();
}

/// The same blocks on every rank, all of which are resident: each copies a part of the pieces, and
/// waits for its like on the others. All blocks wait for all parts together.
__global__ void __launch_bounds__(kThreads)
    share_columns_kernel(const __grid_constant__ SharePlan plan) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  ExchangeState& own = *plan.own.state;
  const uint64_t value = own.num_shared + 1;
  meet(plan, value, [](ExchangeState& state) -> auto& { return state.is_ready; });

  const int64_t row_pieces = plan.num_bytes / kPieceBytes;
  const int64_t num_pieces = row_pieces * plan.num_rows;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < num_pieces;
       i += kThreads * kShareBlocks) {
    const int64_t at =
        i / row_pieces * plan.row_bytes + plan.first_byte + i % row_pieces * kPieceBytes;
    const uint4 piece = *reinterpret_cast<const uint4*>(plan.rows[plan.rank] + at);
    for (int step = 1; step < plan.num_ranks; ++step) {
      const int other = (plan.rank + step) % plan.num_ranks;
      *reinterpret_cast<uint4*>(plan.rows[other] + at) = piece;
    }
  }
  meet(plan, value, [](ExchangeState& state) -> auto& { return state.has_sent; });

  // By then all blocks have read the number.
  if (threadIdx.x != 0) return;
  const auto num_done =
      atomicAdd(reinterpret_cast<unsigned long long*>(&own.num_blocks_done), 1ull);
  if (num_done + 1 < kShareBlocks) return;
  own.num_blocks_done = 0;
  own.num_shared = value;
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
  if (params.exchange == nullptr || !is_legal_round(*params.exchange, 0, 0, 0) ||
      params.first_byte < 0 || params.num_bytes < 0 ||
      params.first_byte + params.num_bytes > params.row_bytes ||
      params.first_byte % kPieceBytes != 0 || params.num_bytes % kPieceBytes != 0 ||
      params.row_bytes % kPieceBytes != 0) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  const Exchange& exchange = *params.exchange;
  SharePlan plan = {cuda::own_inbox(exchange), exchange.num_ranks, exchange.rank,   params.num_rows,
                    params.row_bytes,          params.first_byte,  params.num_bytes};
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    plan.states[rank] = state_of(exchange, rank);
    plan.rows[rank] = static_cast<uint8_t*>(params.rows[rank]);
  }
  return cuda::launch(share_columns_kernel, kShareBlocks, kThreads, 0, stream, plan);
}

}  // namespace openspec
