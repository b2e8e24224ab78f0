#pragma once

/// The kernel of linear_wgmma.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/linear_tiles.cuh"
#include "kernels/linear_wgmma_output.cuh"
#include "kernels/wgmma.cuh"

namespace openspec::cuda {

// Blocks stay for many tiles. One thread of a block copies what the tiles need into a ring of
// stages in shared memory; up to three warpgroups multiply, each 64 outputs of the tile with all
// its rows. A warpgroup that adds up a chain or writes a tile leaves the matrix units to the
// others.
//
// A stage is 64 k wide: weights [8 octets of k][unit][16 outputs][8 k], which without swizzle are
// the core matrices of wgmma in order, then activations [row][64 k] in the swizzle of 128 bytes.

inline constexpr int kMaxGroups = 3;
inline constexpr int kMaxStages = 8;
inline constexpr int kStageSteps = 4;
inline constexpr int kStageInputs = kStageSteps * kLinearStep;
inline constexpr int kStageOctets = kStageInputs / 8;
inline constexpr int kUnitBytes = kLinearUnit * kStageInputs * 2;  // of a stage
inline constexpr int kRowBytes = kStageInputs * 2;                 // of a stage
inline constexpr int kOctetUnitBytes = kLinearUnit * 8 * 2;        // a unit's weights of 8 k
inline constexpr int kAlignment = 1024;                            // of the swizzle

/// Tiles of many rows need more registers than an even share: the copying warp gets a group of its
/// own, which hands over its registers.
template <int kRows>
struct Threads {
  static constexpr bool kMovesRegisters = kRows > 64;
  static constexpr int kCopying = kMovesRegisters ? 128 : 32;
  // What the compiler is told. Blocks with small tiles have at most 416 threads; a bound of 608
  // limits them to 96 registers, which leaves some for the small kernels that follow a linear.
  static constexpr int kBound = kMovesRegisters ? kMaxGroups * kGroupThreads + kCopying : 608;
};

/// What the kernel is told. `num_row_tiles` and the bands count tiles of all blocks of a cluster.
struct Job {
  void* out;
  int num_rows;
  int num_units;
  int num_steps;
  int num_splits;
  bool is_swiglu;
  bool is_f32;
  bool is_split;  // out is [num_splits, num_rows, num_outputs]
  int tile_units;
  int num_unit_tiles;
  int num_row_tiles;
  int band;  // row tiles that run together, so that they find each other's weights in the cache
  int num_tiles;
  int num_stages;
};

/// Shared memory of a warpgroup beside the ring: the sums of the splits so far where it adds them
/// up, then its output on the way to memory where that is bf16.
__host__ __device__ constexpr int group_buffer_bytes(int tile_rows, bool adds_splits, bool is_f32) {
  const int sum_bytes = adds_splits ? tile_rows / 2 * kGroupThreads * 4 : 0;
  const int turn_bytes = is_f32 ? 0 : 2 * kTurnBytes;
  return sum_bytes > turn_bytes ? sum_bytes : turn_bytes;
}

/// Units of 16 outputs, rows of x and splits that a block works on together.
struct ProductTile {
  int first_unit;
  int first_row;
  int first_split;
  int last_split;  // one past
};

#ifdef OPENSPEC_HAS_WGMMA

// Where registers move; every thread begins with 128.
inline constexpr int kCopyingRegisters = 32;
inline constexpr int kMultiplyingRegisters = 160;

template <int kRows, int kCluster>
__device__ __forceinline__ ProductTile find_tile(const Job& job, int index, int rank) {
  const int num_splits = job.is_split ? job.num_splits : 1;
  const int band_tiles = job.band * job.num_unit_tiles * num_splits;
  const int first_of_band = index / band_tiles * job.band;
  const int in_band = index % band_tiles;
  const int width = min(job.band, job.num_row_tiles - first_of_band);
  const int row_tile = first_of_band + in_band % width;
  const int unit_tile = in_band / width % job.num_unit_tiles;
  const int split = in_band / width / job.num_unit_tiles;
  ProductTile tile;
  tile.first_unit = unit_tile * job.tile_units;
  tile.first_row = (row_tile * kCluster + rank) * kRows;
  tile.first_split = split;
  tile.last_split = job.is_split ? split + 1 : job.num_splits;
  return tile;
}

/// Shared addresses of the ring. A full barrier's phase ends when the stage has arrived, an empty
/// one's when all readers, in a cluster those of both blocks, are done with it.
struct Ring {
  uint32_t stages;
  uint32_t full;
  uint32_t empty;
  int num_stages;
  int stage_bytes;
};

/// The stages that a block's tiles need, in order.
template <int kRows, int kCluster>
class StageCursor {
 public:
  __device__ StageCursor(const Job& job, int rank)
      : job_(job), rank_(rank), index_(blockIdx.x / kCluster) {
    enter_tile();
  }
  __device__ bool at_end() const { return index_ >= job_.num_tiles; }
  __device__ void advance() {
    step += kStageSteps;
    if (step < last_step_) return;
    index_ += gridDim.x / kCluster;
    enter_tile();
  }

  int step = 0;
  int unit = 0;
  int row = 0;

 private:
  __device__ void enter_tile() {
    if (at_end()) return;
    const ProductTile tile = find_tile<kRows, kCluster>(job_, index_, rank_);
    unit = tile.first_unit;
    row = tile.first_row;
    step = split_begin(job_.num_steps, job_.num_splits, tile.first_split);
    last_step_ = split_begin(job_.num_steps, job_.num_splits, tile.last_split);
  }

  const Job& job_;
  int rank_;
  int index_;
  int last_step_ = 0;
};

/// One thread's part: fills the ring. Weights, which no kernel writes, before the wait for the
/// kernel before.
template <int kRows, int kCluster>
__device__ __forceinline__ void copy_tiles(const CUtensorMap& weights, const CUtensorMap& rows,
                                           const Job& job, const Ring& ring, int rank) {
  using Cursor = StageCursor<kRows, kCluster>;
  const int weight_bytes = job.tile_units * kUnitBytes;
  const auto copy_weights = [&](const Cursor& at, int stage) {
    const uint32_t to = ring.stages + stage * ring.stage_bytes;
    const uint32_t barrier = ring.full + stage * 8;
    wgmma::expect_bytes(barrier, ring.stage_bytes);
    if constexpr (kCluster == 1) {
      wgmma::copy_box(to, weights, 0, at.unit, at.step * 2, barrier);
    } else {
      wgmma::copy_box_to_all(to + rank * (weight_bytes / 2), weights, 0, at.unit,
                             at.step * 2 + rank * (kStageOctets / kCluster), barrier, 3);
    }
  };
  const auto copy_rows = [&](const Cursor& at, int stage) {
    wgmma::copy_box(ring.stages + stage * ring.stage_bytes + weight_bytes, rows,
                    at.step * kLinearStep, at.row, ring.full + stage * 8);
  };

  Cursor at(job, rank);
  int num_early = 0;
  for (; num_early < ring.num_stages && !at.at_end(); ++num_early, at.advance()) {
    copy_weights(at, num_early);
  }
  wait_for_previous_kernel();
  Cursor rows_at(job, rank);
  for (int stage = 0; stage < num_early; ++stage, rows_at.advance()) copy_rows(rows_at, stage);

  int stage = 0;
  uint32_t parity = 0;
  for (; !at.at_end(); at.advance()) {
    wgmma::wait(ring.empty + stage * 8, parity);
    copy_weights(at, stage);
    copy_rows(at, stage);
    if (++stage == ring.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Until all that the other block announces to this one's barriers is there, this one stays.
  if constexpr (kCluster > 1) {
    for (int i = 0; i < num_early; ++i) {
      wgmma::wait(ring.empty + stage * 8, parity);
      if (++stage == ring.num_stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

/// A warpgroup's way through the ring.
template <int kRows, int kCluster>
class ChainReader {
 public:
  __device__ ChainReader(const Ring& ring, int tile_units, int group, int lane)
      : ring_(ring), lane_(lane) {
    weights_ = wgmma::describe_place(ring.stages + group * (kGroupUnits * kOctetUnitBytes),
                                     tile_units * kOctetUnitBytes);
    weight_step_ = tile_units * (2 * kOctetUnitBytes / 16);
    rows_ = wgmma::describe_place(ring.stages + tile_units * kUnitBytes, 16);
  }

  /// sums = the chain of the next `num_steps` steps.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], int num_steps) {
    int keep = 0;
    while (num_steps > 0) {
      if (step_ == 0) wgmma::wait(ring_.full + stage_ * 8, parity_);
      const int count = min(num_steps, kStageSteps - step_);
      if (count == 4) {
        multiply_steps<4>(sums, keep);
      } else if (count == 3) {
        multiply_steps<3>(sums, keep);
      } else if (count == 2) {
        multiply_steps<2>(sums, keep);
      } else {
        multiply_steps<1>(sums, keep);
      }
      keep = 1;
      num_steps -= count;
      step_ += count;
      if (step_ == kStageSteps) {
        wgmma::wait_products<1>();
        release();
        leave_stage();
      }
    }
    wgmma::wait_products<0>();
    wgmma::pin(sums);
    release();
  }

  /// After the last chain of a tile: what is left of the stage is of no use.
  __device__ __forceinline__ void finish_tile() {
    if (step_ == 0) return;
    leave_stage();
    release();
  }

 private:
  static constexpr int kCoreBytes = 128;                 // of 8 outputs x 8 k
  static constexpr int kRowStep = 2 * kLinearStep / 16;  // in a descriptor

  /// The next kCount steps of the stage, as one group: straight-line code from fence to commit, as
  /// ptxas needs it to leave products in flight.
  template <int kCount>
  __device__ __forceinline__ void multiply_steps(float (&sums)[kRows / 2], int keep) {
    static_assert(kCount <= kStageSteps);
    constexpr uint64_t kWeightForm = wgmma::describe_form(kCoreBytes, false);
    constexpr uint64_t kRowForm = wgmma::describe_form(8 * kRowBytes, true);
    const int stage = stage_ * (ring_.stage_bytes / 16);
    const uint32_t weights = weights_ + stage + step_ * weight_step_;
    const uint32_t rows = rows_ + stage + step_ * kRowStep;
    wgmma::pin(sums);
    wgmma::begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma::multiply<kRows>(sums, kWeightForm | (weights + i * weight_step_),
                             kRowForm | (rows + i * kRowStep), i == 0 ? keep : 1);
    }
    wgmma::end_products();
  }

  /// The stage is read once the products that were started on it are done: one stage later, or at
  /// the end of the chain.
  __device__ __forceinline__ void leave_stage() {
    left_ = stage_;
    step_ = 0;
    if (++stage_ == ring_.num_stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ __forceinline__ void release() {
    if (left_ >= 0) {
      const uint32_t barrier = ring_.empty + left_ * 8;
      if constexpr (kCluster == 1) {
        if (lane_ == 0) wgmma::arrive(barrier);
      } else {
        if (lane_ < kCluster) wgmma::arrive_at(barrier, lane_);
      }
      left_ = -1;
    }
  }

  const Ring& ring_;
  int lane_;
  uint32_t weights_;  // descriptors' lower halves, at the beginning of the ring
  uint32_t rows_;
  int weight_step_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  int step_ = 0;   // of the stage
  int left_ = -1;  // stage that is left but not released
};

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

/// A warpgroup's part. `shared`: its own buffer, for split sums and then for the output.
template <int kRows, int kCluster>
__device__ __forceinline__ void multiply_tiles(const Job& job, const Ring& ring, int rank,
                                               uint32_t shared) {
  const int group = threadIdx.x / kGroupThreads;
  const int thread = threadIdx.x % kGroupThreads;
  const uint32_t stored_sums = shared + thread * 16;
  ChainReader<kRows, kCluster> reader(ring, job.tile_units, group, thread % 32);
  for (int index = blockIdx.x / kCluster; index < job.num_tiles; index += gridDim.x / kCluster) {
    const ProductTile tile = find_tile<kRows, kCluster>(job, index, rank);
    float sums[kRows / 2];
    // The first product of a chain overwrites them; as far as the compiler knows it may read them,
    // and without a value here they would take registers from one tile to the next.
    float chain_sums[kRows / 2] = {};
    for (int split = tile.first_split; split < tile.last_split; ++split) {
      const int begin = split_begin(job.num_steps, job.num_splits, split);
      const int end = split_begin(job.num_steps, job.num_splits, split + 1);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
      for (int chain = 0; chain < kLinearChains; ++chain) {
        reader.multiply(chain_sums,
                        chain_begin(begin, end, chain + 1) - chain_begin(begin, end, chain));
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sums[i] = __fadd_rn(sums[i], chain_sums[i]);
      }
      if (split > tile.first_split) add_stored(sums, stored_sums);
      if (split + 1 < tile.last_split) store(sums, stored_sums);
    }
    reader.finish_tile();

    GroupOutput to;
    const int num_outputs = job.num_units * kLinearUnit / (job.is_swiglu ? 2 : 1);
    to.row_stride = num_outputs;
    to.first_row = tile.first_row;
    to.num_rows = job.num_rows;
    to.first_unit = tile.first_unit + group * kGroupUnits;
    to.num_units = min(tile.first_unit + job.tile_units, job.num_units) - to.first_unit;
    to.thread = thread;
    to.shared = shared;
    to.group = group;
    to.out = job.out;
    if (job.is_split) {
      to.out = static_cast<float*>(job.out) +
               partial_index(job.num_rows, num_outputs, tile.first_split, 0, 0);
    }
    // One buffer serves all this: nobody writes it for one purpose while another thread still reads
    // it for the one before.
    wgmma::sync_group(group);
    if (job.is_f32) {
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

template <int kRows, int kCluster>
__global__ void __launch_bounds__(Threads<kRows>::kBound, 1)
    linear_wgmma_kernel(const __grid_constant__ CUtensorMap weights,
                        const __grid_constant__ CUtensorMap rows, const __grid_constant__ Job job) {
#ifdef OPENSPEC_HAS_WGMMA
  allow_next_kernel();
  // Their place in static shared memory also tells the host that the kernel has a body.
  __shared__ uint64_t barriers[2 * kMaxStages];
  extern __shared__ uint8_t dynamic_shared[];
  const int num_groups = (blockDim.x - Threads<kRows>::kCopying) / kGroupThreads;
  const int warp = threadIdx.x / 32;
  const int rank = kCluster == 1 ? 0 : wgmma::cluster_rank();
  Ring ring;
  ring.stages = (wgmma::shared_address(dynamic_shared) + kAlignment - 1) / kAlignment * kAlignment;
  ring.full = wgmma::shared_address(barriers);
  ring.empty = ring.full + kMaxStages * 8;
  ring.num_stages = job.num_stages;
  ring.stage_bytes = job.tile_units * kUnitBytes + kRows * kRowBytes;

  if (threadIdx.x == 0) {
    wgmma::prefetch_map(weights);
    wgmma::prefetch_map(rows);
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
    if (warp == num_groups * 4 && threadIdx.x % 32 == 0) {
      copy_tiles<kRows, kCluster>(weights, rows, job, ring, rank);
    }
  } else {
    if constexpr (Threads<kRows>::kMovesRegisters) wgmma::take_registers<kMultiplyingRegisters>();
    wait_for_previous_kernel();
    const int buffer_bytes =
        group_buffer_bytes(kRows, job.num_splits > 1 && !job.is_split, job.is_f32);
    multiply_tiles<kRows, kCluster>(
        job, ring, rank,
        ring.stages + ring.num_stages * ring.stage_bytes + warp / 4 * buffer_bytes);
  }
#endif
}

}  // namespace openspec::cuda
