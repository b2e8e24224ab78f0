#pragma once

/// The kernel of linear_wgmma.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/wgmma_output.cuh"
#include "kernels/linear/wgmma_reader.cuh"
#include "kernels/linear/wgmma_tiles.cuh"

namespace openspec::cuda {

// Blocks stay for many tiles. Two threads of a block copy what the tiles need into a ring of stages
// in shared memory; up to three warpgroups multiply, each 64 outputs of the tile with all its rows.
// A warpgroup that adds up a chain or writes a tile leaves the matrix units to the others.

#ifdef OPENSPEC_HAS_WGMMA

// Where registers move; every thread begins with 128.
inline constexpr int kCopyingRegisters = 32;
inline constexpr int kMultiplyingRegisters = 160;

/// Calls copy(cursor, stage) for every stage that the block's tiles need, each once its place in
/// the ring is free. Two threads of a block do this, so that neither holds up the other: one for
/// the weights, one for the rows.
template <int kRows, int kCluster, typename Copy>
__device__ __forceinline__ void fill_ring(const Job& job, const Ring& ring, int rank,
                                          const Copy& copy) {
  int stage = 0;
  uint32_t parity = 1;  // as if there had been a phase before the first
  const auto wait_for_stage = [&] { wgmma::wait(ring.empty + stage * 8, parity); };
  const auto leave_stage = [&] {
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  };
#pragma unroll 1
  for (StageCursor<kRows, kCluster> at(job, rank); !at.at_end(); at.advance()) {
    wait_for_stage();
    copy(at, stage);
    leave_stage();
  }
  // Until all that the other block announces to this one's barriers is there, this one stays.
  if constexpr (kCluster > 1) {
#pragma unroll 1
    for (int i = 0; i < ring.num_stages; ++i) {
      wait_for_stage();
      leave_stage();
    }
  }
}

/// No kernel writes weights: they do not wait for the kernel before.
template <int kRows, int kCluster>
__device__ __forceinline__ void copy_weights(const WeightMaps& maps, const Job& job,
                                             const Ring& ring, int rank) {
  using Cursor = StageCursor<kRows, kCluster>;
  const uint64_t policy = wgmma::cache_policy(job.num_row_tiles == 1);
  fill_ring<kRows, kCluster>(job, ring, rank, [&](const Cursor& at, int stage) {
    const uint32_t to = ring.stages + stage * ring.stage_bytes;
    const uint32_t barrier = ring.full + stage * 8;
    const int units = at.tile().box_units;
    const CUtensorMap* map = &maps.whole;
    if (units != job.tile_units) map = units == job.last_units ? &maps.last : &maps.shorter;
    // The rows' bytes too; they may have come before this.
    wgmma::expect_bytes(barrier, units * kUnitBytes + kRows * kRowBytes);
    if constexpr (kCluster == 1) {
      wgmma::copy_box(to, *map, 0, at.tile().first_unit, at.step * 2, barrier, policy);
    } else {
      wgmma::copy_box_to_all(to + rank * (units * kUnitBytes / kCluster), *map, 0,
                             at.tile().first_unit, at.step * 2 + rank * (kStageOctets / kCluster),
                             barrier, (1 << kCluster) - 1, policy);
    }
  });
}

template <int kRows, int kCluster>
__device__ __forceinline__ void copy_rows(const CUtensorMap& rows, const Job& job, const Ring& ring,
                                          int rank) {
  using Cursor = StageCursor<kRows, kCluster>;
  const uint32_t first = ring.stages + job.tile_units * kUnitBytes;
  wait_for_previous_kernel();
  fill_ring<kRows, kCluster>(job, ring, rank, [&](const Cursor& at, int stage) {
    wgmma::copy_box(first + stage * ring.stage_bytes, rows, at.step * kLinearStep,
                    at.tile().first_row, ring.full + stage * 8);
  });
}

/// The sums of a group's splits so far, in shared memory, each thread's by itself.
template <int kCount>
__device__ __forceinline__ void add_stored(float (&sums)[kCount], uint32_t at) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const uint4 stored = wgmma::load_16_bytes(at + i * (kGroupThreads * 4));
    sums[i] = __fadd_rn(__uint_as_float(stored.x), sums[i]);
    sums[i + 1] = __fadd_rn(__uint_as_float(stored.y), sums[i + 1]);
    sums[i + 2] = __fadd_rn(__uint_as_float(stored.z), sums[i + 2]);
    sums[i + 3] = __fadd_rn(__uint_as_float(stored.w), sums[i + 3]);
  }
}
template <int kCount>
__device__ __forceinline__ void store(const float (&sums)[kCount], uint32_t at) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) wgmma::store_floats(at + i * (kGroupThreads * 4), &sums[i]);
}

/// Sends a tile's sums to the slot that begins at `slot`. They are turned round in shared memory 32
/// rows at a time: half a warp sends the 256 bytes that a row has of the group's outputs, for a
/// link carries whole lines best.
template <int kRows>
__device__ __forceinline__ void send_lines(const GroupOutput& to, const Outbox& outbox,
                                           int64_t slot, const float (&sums)[kRows / 2]) {
  constexpr int kRowPieces = kGroupUnits * kLinearUnit / 4;  // of 16 bytes
  constexpr int kPassRows = kGroupThreads / kRowPieces;
  const int warp = to.thread / 32;
  const int lane = to.thread % 32;
  const uint32_t mine = to.shared + (lane % 4 * 2 * kSendPitch + warp * kLinearUnit + lane / 4) * 4;
  const int piece = to.thread % kRowPieces;
  const bool is_there = piece < to.num_units * (kLinearUnit / 4);
  float* out = static_cast<float*>(to.out) + slot + to.first_unit * kLinearUnit + piece * 4;
#pragma unroll
  for (int turn = 0; turn < kRows / kTurnRows; ++turn) {
    if (to.first_row + turn * kTurnRows >= to.num_rows) break;
    const float* turn_sums = &sums[turn * kTurnRows / 2];
    if (turn > 0) wgmma::sync_group(to.group);
#pragma unroll
    for (int i = 0; i < kTurnRows / 2; ++i) {
      const int row = i / 4 * 8 + i % 2, output = i / 2 % 2 * (kLinearUnit / 2);
      wgmma::store_4_bytes(mine + (row * kSendPitch + output) * 4, word_of(turn_sums[i]));
    }
    wgmma::sync_group(to.group);
#pragma unroll
    for (int pass = 0; pass < kTurnRows / kPassRows; ++pass) {
      const int turn_row = to.thread / kRowPieces + pass * kPassRows;
      const int row = to.first_row + turn * kTurnRows + turn_row;
      if (row >= to.num_rows || !is_there) continue;
      const uint4 words = wgmma::load_16_bytes(to.shared + turn_row * kSendPitch * 4 + piece * 16);
      send(outbox, row, out + outbox.inbox_row(row) * to.row_stride, words);
    }
  }
}

/// A warpgroup's part. `shared`: its own buffer, for split sums and then for the output.
template <int kRows, int kCluster, typename JobType>
__device__ __forceinline__ void multiply_tiles(const JobType& job, const Ring& ring, int group,
                                               int rank, uint32_t shared) {
  [[maybe_unused]] int64_t slot = 0;
  if constexpr (kIsSent<JobType>) slot = begin_sending(job.to);
  const int thread = threadIdx.x % kGroupThreads;
  const uint32_t stored_sums = shared + thread * 16;
  ChainReader<kRows, kCluster> reader(ring, group, thread % 32, job.tile_units * kUnitBytes);
  for (TileCursor<kRows, kCluster> tiles(job, rank); !tiles.at_end(); tiles.advance()) {
    const ProductTile& tile = tiles.tile;
    if (group * kGroupUnits >= tile.num_units) {
      reader.skip(split_steps(job.weight, tile.last_split - 1).end -
                  split_steps(job.weight, tile.first_split).begin);
      continue;
    }
    float sums[kRows / 2];
    // The first product of a chain overwrites them; as far as the compiler knows it may read them,
    // and without a value here they would take registers from one tile to the next.
    float chain_sums[kRows / 2] = {};
    reader.begin_tile(tile.box_units);
    for (int split = tile.first_split; split < tile.last_split; ++split) {
      const StepRange steps = split_steps(job.weight, split);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
      for (int chain = 0; chain < kLinearChains; ++chain) {
        reader.multiply(chain_sums, chain_begin(steps.begin, steps.end, chain + 1) -
                                        chain_begin(steps.begin, steps.end, chain));
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sums[i] = __fadd_rn(sums[i], chain_sums[i]);
      }
      if (split > tile.first_split) add_stored(sums, stored_sums);
      if (split + 1 < tile.last_split) store(sums, stored_sums);
    }
    reader.finish_tile();

    GroupOutput to;
    to.row_stride = job.row_stride;
    to.first_row = tile.first_row;
    to.num_rows = job.num_rows;
    to.first_unit = tile.first_unit + group * kGroupUnits;
    to.num_units = tile.num_units - group * kGroupUnits;
    to.thread = thread;
    to.shared = shared;
    to.group = group;
    to.out = job.out;
    if constexpr (kIsSent<JobType>) {
      const RoundForm& form = job.to.form;
      to.out =
          static_cast<float*>(job.out) + partial_index(form.inbox_rows, job.weight.num_outputs,
                                                       tile.last_split - 1 - form.first_sum, 0, 0);
    } else if (job.is_split) {
      to.out = static_cast<float*>(job.out) +
               partial_index(job.num_rows, job.weight.num_outputs, tile.first_split, 0, 0);
    }
    if (job.weight.bias != nullptr) add_bias<kRows>(to, job.weight.bias, sums);
    // One buffer serves all this: nobody writes it for one purpose while another thread still reads
    // it for the one before.
    wgmma::sync_group(group);
    if constexpr (kIsSent<JobType>) {
      send_lines<kRows>(to, job.to, slot, sums);
    } else if (job.is_f32) {
      write_f32<kRows>(to, sums);
    } else if (job.is_swiglu) {
      write_bf16<kRows, true>(to, sums);
    } else {
      write_bf16<kRows, false>(to, sums);
    }
    wgmma::sync_group(group);
  }
}

#endif  // OPENSPEC_HAS_WGMMA

template <int kRows, int kCluster, typename JobType>
__device__ __forceinline__ void run_block(const WeightMaps& weights, const CUtensorMap& rows,
                                          const JobType& job) {
#ifdef OPENSPEC_HAS_WGMMA
  allow_next_kernel();
  // Their place in static shared memory also tells the host that the kernel has a body.
  __shared__ uint64_t barriers[2 * kMaxStages];
  extern __shared__ uint8_t dynamic_shared[];
  const int num_groups = (blockDim.x - Threads<kRows>::kCopying) / kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // in a uniform register
  const int rank = kCluster == 1 ? 0 : wgmma::cluster_rank();
  Ring ring;
  ring.stages = (wgmma::shared_address(dynamic_shared) + kAlignment - 1) / kAlignment * kAlignment;
  ring.full = wgmma::shared_address(barriers);
  ring.empty = ring.full + kMaxStages * 8;
  ring.num_stages = job.num_stages;
  ring.stage_bytes = job.tile_units * kUnitBytes + kRows * kRowBytes;

  if (threadIdx.x == num_groups * kGroupThreads) {
    wgmma::prefetch_map(weights.whole);
    wgmma::prefetch_map(rows);
#pragma unroll 1
    for (int stage = 0; stage < ring.num_stages; ++stage) {
      wgmma::init_barrier(ring.full + stage * 8, 1);
      wgmma::init_barrier(ring.empty + stage * 8, num_groups * 4 * kCluster);
    }
    wgmma::publish_barriers();
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    wgmma::sync_cluster();
  }

  if (warp >= num_groups * 4) {
    if constexpr (Threads<kRows>::kMovesRegisters) wgmma::give_registers<kCopyingRegisters>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == num_groups * 4) {
      copy_weights<kRows, kCluster>(weights, job, ring, rank);
    } else if (warp == num_groups * 4 + 1) {
      copy_rows<kRows, kCluster>(rows, job, ring, rank);
    }
  } else {
    if constexpr (Threads<kRows>::kMovesRegisters) wgmma::take_registers<kMultiplyingRegisters>();
    wait_for_previous_kernel();
    const int buffer_bytes = group_buffer_bytes(kRows, job.splits.size() > 1 && !job.is_split,
                                                job.is_f32, job.is_swiglu, kIsSent<JobType>);
    multiply_tiles<kRows, kCluster>(
        job, ring, warp / 4, rank,
        ring.stages + ring.num_stages * ring.stage_bytes + warp / 4 * buffer_bytes);
  }
#endif
}

// The fewer registers, the better: blocks of the small kernels between two linears are to start
// beside these. But not fewer than the loop over chains needs: beside this much shared
// memory the first-level cache is too small for what hundreds of threads spill.
constexpr int few_rows_registers(int num_rows) { return num_rows <= 32 ? 72 : 96; }

/// JobType: Job or ExchangeJob.
template <int kRows, int kCluster, typename JobType>
__global__ void __maxnreg__(few_rows_registers(kRows))
    wgmma_kernel_beside(const __grid_constant__ WeightMaps weights,
                        const __grid_constant__ CUtensorMap rows,
                        const __grid_constant__ JobType job) {
  run_block<kRows, kCluster>(weights, rows, job);
}
template <int kRows, int kCluster, typename JobType>
__global__ void __launch_bounds__(kMaxGroups* kGroupThreads + Threads<kRows>::kCopying, 1)
    wgmma_kernel_alone(const __grid_constant__ WeightMaps weights,
                       const __grid_constant__ CUtensorMap rows,
                       const __grid_constant__ JobType job) {
  run_block<kRows, kCluster>(weights, rows, job);
}

template <int kRows, int kCluster, typename JobType>
constexpr auto wgmma_kernel() {
  if constexpr (kRows <= 64) {
    return wgmma_kernel_beside<kRows, kCluster, JobType>;
  } else {
    return wgmma_kernel_alone<kRows, kCluster, JobType>;
  }
}

}  // namespace openspec::cuda
