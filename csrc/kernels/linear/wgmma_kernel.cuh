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
#include "kernels/linear/wgmma_tiles.cuh"
#include "kernels/linear/wgmma_widening.cuh"

namespace openspec::cuda {

// Blocks stay for many tiles. Two threads of a block copy what the tiles need into a ring of stages
// in shared memory; up to three warpgroups multiply, each 64 outputs of the tile with all its rows.
// A warpgroup that adds up a chain or writes a tile leaves the matrix units to the others.

#ifdef OPENSPEC_HAS_WGMMA

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

/// No kernel writes weights: they do not wait for the kernel before. In a cluster each block copies
/// a part for both, of e4m3 half of the units; of an odd number the one in the middle comes twice.
template <WeightForm kForm, int kRows, int kCluster>
__device__ __forceinline__ void copy_weights(const WeightMaps& maps, const Job& job,
                                             const Ring& ring, int rank) {
  using Cursor = StageCursor<kRows, kCluster>;
  constexpr int kUnitBytes = unit_bytes(kForm);
  const bool is_read_once = job.num_row_tiles == 1;
  fill_ring<kRows, kCluster>(job, ring, rank, [&](const Cursor& at, int stage) {
    uint32_t to = ring.stages + stage * ring.stage_bytes;
    const uint32_t barrier = ring.full + stage * 8;
    const int units = at.tile().box_units;
    const CUtensorMap* map = &maps.whole;
    if (units != job.tile_units) map = units == job.last_units ? &maps.last : &maps.shorter;
    int bytes = units * kUnitBytes;
    int unit = at.tile().first_unit, octet = at.step * 2, word = 0;
    if constexpr (is_e4m3(kForm)) {
      const int box_units = (units + kCluster - 1) / kCluster;
      const int skipped = rank * (units - box_units);
      bytes = kCluster * box_units * kUnitBytes;
      to += skipped * kUnitBytes;
      unit += skipped;
      word = at.step * (step_bytes(kForm) / 4);
      octet = 0;
    } else {
      to += rank * (bytes / kCluster);
      octet += rank * (kStageOctets / kCluster);
    }
    // The rows' bytes too; they may have come before this.
    wgmma::expect_bytes(barrier, bytes + kRows * kRowBytes);
    if constexpr (kCluster == 1) {
      wgmma::copy_box(to, *map, word, unit, octet, barrier, is_read_once);
    } else {
      wgmma::copy_box_to_all(to, *map, word, unit, octet, barrier, (1 << kCluster) - 1,
                             is_read_once);
    }
  });
}

template <WeightForm kForm, int kRows, int kCluster>
__device__ __forceinline__ void copy_rows(const CUtensorMap& rows, const Job& job, const Ring& ring,
                                          int rank) {
  using Cursor = StageCursor<kRows, kCluster>;
  const uint32_t first = ring.stages + job.tile_units * unit_bytes(kForm);
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

/// chain_sums = those of steps [begin, end) of what is here: of segments with scales of their own
/// where the form has blocks.
template <WeightForm kForm, int kRows, typename Reader>
__device__ __forceinline__ void multiply_chain(Reader& reader, const BlockScales& scales, int begin,
                                               int end, float (&chain_sums)[kRows / 2]) {
  if constexpr (!has_blocks(kForm)) {
    reader.multiply(chain_sums, end - begin);
  } else {
    float products[kRows / 2] = {};  // as own_sums below
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) chain_sums[i] = 0.0f;
#pragma unroll 1
    while (begin < end) {
      const int next = scales.segment_end(begin, end);
      float of_segment[2];
      scales.get(begin, of_segment);
      reader.multiply(products, next - begin);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        chain_sums[i] = __fmaf_rn(products[i], of_segment[i / 2 % 2], chain_sums[i]);
      }
      begin = next;
    }
  }
}

/// sums = a split's, scaled. `stored`: shared memory for the sums of the chains so far, where they
/// have no registers: kStores.
template <WeightForm kForm, int kRows, bool kStores = stores_chains(kForm, kRows), typename Reader>
__device__ __forceinline__ void add_split(const PackedLinear& weight, Reader& reader,
                                          const StepRange& steps, int unit, uint32_t stored,
                                          float (&sums)[kRows / 2]) {
  // The first product of a chain overwrites them; as far as the compiler knows it may read them,
  // and without a value here they would take registers from one tile to the next.
  float own_sums[kRows / 2] = {};
  float (&chain_sums)[kRows / 2] = kStores ? sums : own_sums;
  const BlockScales scales(weight, unit);
  if constexpr (!kStores) {
    // A chain may be minus zero: with blocks, for a sum below zero that a scale has brought to
    // zero, which then stays as it is in every kernel; otherwise in wgmma alone, and is made zero.
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = has_blocks(kForm) ? -0.0f : 0.0f;
  }
#pragma unroll 1
  for (int chain = 0; chain < kLinearChains; ++chain) {
    multiply_chain<kForm, kRows>(reader, scales, chain_begin(steps.begin, steps.end, chain),
                                 chain_begin(steps.begin, steps.end, chain + 1), chain_sums);
    if constexpr (kStores) {
      if (chain > 0) add_stored(sums, stored);
      if (chain + 1 < kLinearChains) store(sums, stored);
    } else {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] = __fadd_rn(sums[i], chain_sums[i]);
    }
  }
  if constexpr (has_output_scales(kForm)) {
    const float* at = weight.scales + unit * kLinearUnit + threadIdx.x % 32 / 4;
    const float scales[2] = {__ldg(at), __ldg(at + kLinearUnit / 2)};
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = __fmul_rn(sums[i], scales[i / 2 % 2]);
  }
}

/// A warpgroup's part. `shared`: its own buffer, for split sums and then for the output.
template <WeightForm kForm, int kRows, int kCluster, typename JobType>
__device__ __forceinline__ void multiply_tiles(const JobType& job, const Ring& ring, int group,
                                               int rank, uint32_t shared) {
  [[maybe_unused]] int64_t slot = 0;
  if constexpr (kIsSent<JobType>) slot = begin_sending(job.to);
  const int thread = threadIdx.x % kGroupThreads;
  const uint32_t stored_sums = shared + thread * 16;
  const bool adds_splits = job.splits.size() > 1 && !job.is_split;
  const uint32_t stored_chains = stored_sums + (adds_splits ? group_sum_bytes(kRows) : 0);
  TileReader<kForm, kRows, kCluster> reader(ring, group, thread % 32,
                                            job.tile_units * unit_bytes(kForm));
  for (TileCursor<kRows, kCluster> tiles(job, rank); !tiles.at_end(); tiles.advance()) {
    const ProductTile& tile = tiles.tile;
    const int num_steps = split_steps(job.weight, tile.last_split - 1).end -
                          split_steps(job.weight, tile.first_split).begin;
    if (group * kGroupUnits >= tile.num_units) {
      reader.skip(num_steps);
      continue;
    }
    float sums[kRows / 2];
    reader.begin_tile(tile.box_units, num_steps);
    // A warp without a unit has the scales of the last one, for sums that nobody writes.
    const int unit = min(tile.first_unit + group * kGroupUnits + thread / 32, job.num_units - 1);
    for (int split = tile.first_split; split < tile.last_split; ++split) {
      add_split<kForm, kRows>(job.weight, reader, split_steps(job.weight, split), unit,
                              stored_chains, sums);
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

template <WeightForm kForm, int kRows, int kCluster, typename JobType>
__device__ __forceinline__ void run_block(const WeightMaps& weights, const CUtensorMap& rows,
                                          const JobType& job) {
#ifdef OPENSPEC_HAS_WGMMA
  using Block = Threads<kRows>;
  allow_next_kernel();
  // Their place in static shared memory also tells the host that the kernel has a body.
  __shared__ uint64_t barriers[2 * kMaxStages];
  extern __shared__ uint8_t dynamic_shared[];
  const int num_groups = (blockDim.x - Block::kCopying) / kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // in a uniform register
  const int rank = kCluster == 1 ? 0 : wgmma::cluster_rank();
  Ring ring;
  ring.stages = (wgmma::shared_address(dynamic_shared) + kAlignment - 1) / kAlignment * kAlignment;
  ring.full = wgmma::shared_address(barriers);
  ring.empty = ring.full + kMaxStages * 8;
  ring.num_stages = job.num_stages;
  ring.stage_bytes = job.tile_units * unit_bytes(kForm) + kRows * kRowBytes;

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
    if constexpr (Block::kMovesRegisters) wgmma::give_registers<Block::kCopyingRegisters>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == num_groups * 4) {
      copy_weights<kForm, kRows, kCluster>(weights, job, ring, rank);
    } else if (warp == num_groups * 4 + 1) {
      copy_rows<kForm, kRows, kCluster>(rows, job, ring, rank);
    }
  } else {
    if constexpr (Block::kMovesRegisters) wgmma::take_registers<Block::kMultiplyingRegisters>();
    wait_for_previous_kernel();
    const int buffer_bytes = group_buffer_bytes(kRows, job.splits.size() > 1 && !job.is_split,
                                                stores_chains(kForm, kRows), job.is_f32,
                                                job.is_swiglu, kIsSent<JobType>);
    multiply_tiles<kForm, kRows, kCluster>(
        job, ring, warp / 4, rank,
        ring.stages + ring.num_stages * ring.stage_bytes + warp / 4 * buffer_bytes);
  }
#endif
}

// The fewer registers, the better: blocks of the small kernels between two linears are to start
// beside these. But not fewer than the loop over chains needs: beside this much shared
// memory the first-level cache is too small for what hundreds of threads spill.
constexpr int few_rows_registers(WeightForm form, int num_rows) {
  // Of a block's 14 warps a scheduler has four, whose 16,384 registers are 128 for each thread.
  if (is_e4m3(form)) return 128;
  return num_rows <= 32 ? 72 : 96;
}

/// JobType: Job or ExchangeJob.
template <WeightForm kForm, int kRows, int kCluster, typename JobType>
__global__ void __maxnreg__(few_rows_registers(kForm, kRows))
    wgmma_kernel_beside(const __grid_constant__ WeightMaps weights,
                        const __grid_constant__ CUtensorMap rows,
                        const __grid_constant__ JobType job) {
  run_block<kForm, kRows, kCluster>(weights, rows, job);
}
template <WeightForm kForm, int kRows, int kCluster, typename JobType>
__global__ void __launch_bounds__(Threads<kRows>::kMost, 1)
    wgmma_kernel_alone(const __grid_constant__ WeightMaps weights,
                       const __grid_constant__ CUtensorMap rows,
                       const __grid_constant__ JobType job) {
  run_block<kForm, kRows, kCluster>(weights, rows, job);
}

template <WeightForm kForm, int kRows, int kCluster, typename JobType>
constexpr auto wgmma_kernel() {
  if constexpr (kRows <= 64) {
    return wgmma_kernel_beside<kForm, kRows, kCluster, JobType>;
  } else {
    return wgmma_kernel_alone<kForm, kRows, kCluster, JobType>;
  }
}

}  // namespace openspec::cuda
