#pragma once

/// The router for few rows, in one kernel: a cluster of blocks for each eight rows. A block has
/// some of the router's units, whose weights it reads before its wait. The logits go to the block
/// that has their row, of which a warp chooses its experts.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/experts/chain_rows.cuh"
#include "kernels/experts/choice.cuh"
#include "kernels/linear/stream.cuh"

namespace openspec::cuda {

inline constexpr int kRouteRows = 8;  // of a cluster, and its blocks

/// Places of a block's shared memory, in bytes.
struct RouteShared {
  using Sums = SumLayout<1, 1>;

  int units;        // of a block, at most
  int chain_bytes;  // weights of the longest chain
  int sums, barriers, logits, rows, total;

  OPENSPEC_HD RouteShared(int num_experts, int chain_steps)
      : units(ceil_div(num_experts / kLinearUnit, kRouteRows)),
        chain_bytes(chain_steps * step_bytes(WeightForm::kPlain)),
        sums(units * kStreamWarps * chain_bytes),
        barriers(sums + Sums::kBytes),
        logits(barriers + kStreamWarps * kSlotBarrierBytes),
        rows(logits + (num_experts * 2 + 15) / 16 * 16),
        total(rows + kStreamWarps * activation_bytes(1, chain_steps)) {}
};

/// Multiplies one unit by the tile of rows; its logits go to the blocks of their rows.
__device__ __forceinline__ void send_unit_logits(const ChainRows<1>& rows, const Chain& chain,
                                                 uint32_t weights, float* sums, uint32_t logits,
                                                 int unit, int warp, int lane) {
  using Sums = RouteShared::Sums;
  ChainSums<WeightForm::kPlain, 1> chain_sums;
#pragma unroll 4
  for (int step = 0; step < chain.num_steps; ++step) {
    uint32_t a[4], x[1][2];
    load_weights<WeightForm::kPlain>(a, weights, step, lane);
    rows.load(step, x);
    multiply_add(chain_sums.products[0], a, x[0][0], x[0][1]);
  }
  __syncthreads();  // the sums of the unit before are read
  store_sums<Sums>(sums + warp * Sums::kChainFloats, chain_sums.whole(), lane);
  __syncthreads();
  const int row = threadIdx.x / kLinearUnit, output = threadIdx.x % kLinearUnit;
  if (row >= kRouteRows) return;
  const float* from = sums + row * Sums::kPitch + output;
  float sum = from[0];
#pragma unroll
  for (int c = 1; c < kLinearChains; ++c) sum += from[c * Sums::kChainFloats];
#if __CUDA_ARCH__ >= 900
  const uint32_t to = address_in(logits + (unit * kLinearUnit + output) * 2, row);
  const uint16_t bits = __bfloat16_as_ushort(__float2bfloat16_rn(sum));
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
#endif
}

/// In clusters of kRouteRows blocks; devices without clusters have no body.
template <int kPerLane>
__global__ void __launch_bounds__(kStreamThreads)
    route_kernel([[maybe_unused]] RouteParams params, [[maybe_unused]] int chain_steps) {
#if __CUDA_ARCH__ >= 900
  allow_next_kernel();
  arrive_in_cluster();  // this block has begun, and can be sent to
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kRouteRows, first_row = blockIdx.x / kRouteRows * kRouteRows;
  const PackedLinear& weight = params.router;
  const int num_units = weight.num_outputs / kLinearUnit;
  const RouteShared at(weight.num_outputs, chain_steps);
  const Chain chain = find_chain(weight, 0, warp);
  const uint32_t base = shared_address(shared);
  const uint32_t weights = base + warp * at.chain_bytes;
  const uint32_t barrier = base + at.barriers + warp * kSlotBarrierBytes;
  const int chain_bytes = chain.num_steps * step_bytes(WeightForm::kPlain);
  if (lane == 0 && chain_bytes > 0) {
    init_barrier(barrier, 1);
    publish_slot_barriers();
    expect_bytes(barrier, chain_bytes * ((num_units - rank + kRouteRows - 1) / kRouteRows));
    for (int i = 0; i * kRouteRows + rank < num_units; ++i) {
      const int64_t step =
          int64_t{i * kRouteRows + rank} * (weight.num_inputs / kLinearStep) + chain.first_step;
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(weights + i * kStreamWarps * at.chain_bytes),
          "l"(static_cast<const uint8_t*>(weight.data) + step * step_bytes(WeightForm::kPlain)),
          "r"(chain_bytes), "r"(barrier)
          : "memory");
    }
  }
  __syncwarp();
  wait_for_previous_kernel();
  const ChainRows<1> rows(base + at.rows + warp * activation_bytes(1, chain_steps), chain_steps,
                          lane);
  rows.fetch(static_cast<const __nv_bfloat16*>(params.x), weight.num_inputs, chain,
             min(kRouteRows, params.num_rows - first_row),
             [&](int row) -> int64_t { return first_row + row; });
  const int row = first_row + rank;
  const bool is_there = row < params.num_rows;
  const bool goes_nowhere = is_there && is_padding(params, row);
  wait_for_rows(/*but_last=*/false);
  if (chain_bytes > 0 && rank < num_units) wait_for_slot(barrier, 0);
  wait_for_cluster();
  for (int i = 0; i * kRouteRows + rank < num_units; ++i) {
    send_unit_logits(rows, chain, weights + i * kStreamWarps * at.chain_bytes,
                     reinterpret_cast<float*>(shared + at.sums), base + at.logits,
                     i * kRouteRows + rank, warp, lane);
  }
  meet_in_cluster();
  if (warp > 0 || !is_there) return;
  uint32_t bits[kPerLane];
  const auto* const logits = reinterpret_cast<const uint16_t*>(shared + at.logits);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    bits[i] = index < params.num_experts ? logits[index] : kMinusInfinity;
  }
  choose_row(bits, params, row, goes_nowhere, lane);
#endif
}

}  // namespace openspec::cuda
