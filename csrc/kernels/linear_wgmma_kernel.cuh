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

// Blocks stay for many tiles. Two threads of a block copy what the tiles need into a ring of stages
// in shared memory; up to three warpgroups multiply, each 64 outputs of the tile with all its rows.
// A warpgroup that adds up a chain or writes a tile leaves the matrix units to the others.
//
// A stage is 64 k wide: weights [8 octets of k][unit][16 outputs][8 k], which without swizzle are
// the core matrices of wgmma in order, then activations [row][64 k] in the swizzle of 128 bytes.

inline constexpr int kMaxGroups = 3;
inline constexpr int kMaxStages = 12;
inline constexpr int kStageSteps = 4;
inline constexpr int kStageInputs = kStageSteps * kLinearStep;
inline constexpr int kStageOctets = kStageInputs / 8;
inline constexpr int kUnitBytes = kLinearUnit * kStageInputs * 2;  // of a stage
inline constexpr int kRowBytes = kStageInputs * 2;                 // of a stage
inline constexpr int kOctetUnitBytes = kLinearUnit * 8 * 2;        // a unit's weights of 8 k
inline constexpr int kAlignment = 1024;                            // of the swizzle

/// Tiles of many rows need more registers than an even share: the copying warps get a group of
/// their own, which hands over its registers.
template <int kRows>
struct Threads {
  static constexpr bool kMovesRegisters = kRows > 64;
  static constexpr int kCopying = kMovesRegisters ? 128 : 64;
};

/// The weights as boxes of as many units as a block's tiles have.
struct WeightMaps {
  CUtensorMap whole;    // Job::tile_units
  CUtensorMap last;     // Job::last_units
  CUtensorMap shorter;  // one less, where some runs are shorter
};

/// What the kernel is told. Either every cluster works on one tile of rows and a run of units, all
/// runs as long or one unit shorter, in tiles of `tile_units` and a last one of what is left; or
/// clusters take one tile after the other, in bands.
struct Job {
  void* out;
  int num_rows;
  int num_units;
  int num_steps;
  int num_splits;
  bool is_swiglu;
  bool is_f32;
  bool is_split;  // out is [num_splits, num_rows, num_outputs]
  int num_stages;
  int tile_units;
  int num_runs;    // of a split and tile of rows; 0: bands of tiles
  int last_units;  // of the last tile of a longest run
  // Tiles of all blocks of a cluster.
  int num_unit_tiles;
  int num_row_tiles;
  int band;  // row tiles that run together, so that they find each other's weights in the cache
  int num_tiles;
};

/// Shared memory of a warpgroup beside the ring: the sums of the splits so far where it adds them
/// up, then its output on the way to memory where that is bf16.
__host__ __device__ constexpr int group_buffer_bytes(int tile_rows, bool adds_splits, bool is_f32,
                                                     bool is_swiglu) {
  const int sum_bytes = adds_splits ? tile_rows / 2 * kGroupThreads * 4 : 0;
  const int out_bytes = is_f32 ? 0 : turn_bytes(is_swiglu);
  return sum_bytes > out_bytes ? sum_bytes : out_bytes;
}

/// Units of 16 outputs, rows of x and splits that a block works on together.
struct ProductTile {
  int first_unit;
  int num_units;
  int box_units;  // that are loaded: in a band always as many
  int first_row;
  int first_split;
  int last_split;  // one past
};

#ifdef OPENSPEC_HAS_WGMMA

// Where registers move; every thread begins with 128.
inline constexpr int kCopyingRegisters = 32;
inline constexpr int kMultiplyingRegisters = 160;

/// A block's tiles, one after the other.
template <int kRows, int kCluster>
class TileCursor {
 public:
  __device__ __forceinline__ TileCursor(const Job& job, int rank)
      : job_(job), rank_(rank), index_(blockIdx.x / kCluster) {
    if (job.num_runs > 0) {
      const int row_tile = index_ % job.num_row_tiles;
      const int run = index_ / job.num_row_tiles % job.num_runs;
      const int split = index_ / (job.num_row_tiles * job.num_runs);
      tile.first_unit = job.num_units * run / job.num_runs;
      last_unit_ = job.num_units * (run + 1) / job.num_runs;
      tile.first_row = (row_tile * kCluster + rank) * kRows;
      find_splits(split);
      tile.num_units = tile.box_units = min(job.tile_units, last_unit_ - tile.first_unit);
    } else {
      find_tile();
    }
  }
  __device__ __forceinline__ bool at_end() const { return tile.num_units <= 0; }
  __device__ __forceinline__ void advance() {
    if (job_.num_runs > 0) {
      tile.first_unit += tile.num_units;
      tile.num_units = tile.box_units = min(job_.tile_units, last_unit_ - tile.first_unit);
    } else {
      index_ += gridDim.x / kCluster;
      find_tile();
    }
  }

  ProductTile tile;

 private:
  __device__ __forceinline__ void find_splits(int split) {
    tile.first_split = split;
    tile.last_split = job_.is_split ? split + 1 : job_.num_splits;
  }
  __device__ __forceinline__ void find_tile() {
    tile.num_units = 0;
    if (index_ >= job_.num_tiles) return;
    const int num_splits = job_.is_split ? job_.num_splits : 1;
    const int band_tiles = job_.band * job_.num_unit_tiles * num_splits;
    const int first_of_band = index_ / band_tiles * job_.band;
    const int in_band = index_ % band_tiles;
    const int width = min(job_.band, job_.num_row_tiles - first_of_band);
    const int row_tile = first_of_band + in_band % width;
    const int unit_tile = in_band / width % job_.num_unit_tiles;
    tile.first_unit = unit_tile * job_.tile_units;
    tile.num_units = min(job_.tile_units, job_.num_units - tile.first_unit);
    tile.box_units = job_.tile_units;
    tile.first_row = (row_tile * kCluster + rank_) * kRows;
    find_splits(in_band / width / job_.num_unit_tiles);
  }

  const Job& job_;
  int rank_;
  int index_;
  int last_unit_ = 0;  // of the run, one past
};

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
  __device__ __forceinline__ StageCursor(const Job& job, int rank) : job_(job), tiles_(job, rank) {
    enter_tile();
  }
  __device__ __forceinline__ bool at_end() const { return tiles_.at_end(); }
  __device__ __forceinline__ void advance() {
    step += kStageSteps;
    if (step < last_step_) return;
    tiles_.advance();
    enter_tile();
  }
  __device__ __forceinline__ const ProductTile& tile() const { return tiles_.tile; }

  int step = 0;

 private:
  __device__ __forceinline__ void enter_tile() {
    if (at_end()) return;
    step = split_begin(job_.num_steps, job_.num_splits, tile().first_split);
    last_step_ = split_begin(job_.num_steps, job_.num_splits, tile().last_split);
  }

  const Job& job_;
  TileCursor<kRows, kCluster> tiles_;
  int last_step_ = 0;
};

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

/// A warpgroup's way through the ring. With one warp on each scheduler of the SM, every instruction
/// between two products shows: whole stages of a chain have a loop of their own.
template <int kRows, int kCluster>
class ChainReader {
 public:
  __device__ __forceinline__ ChainReader(const Ring& ring, int group, int lane,
                                         uint32_t max_weight_bytes)
      : ring_(ring), group_(group), lane_(lane), max_weight_bytes_(max_weight_bytes) {}

  __device__ __forceinline__ void begin_tile(int box_units) {
    weight_form_ = wgmma::describe_place(0, box_units * kOctetUnitBytes);
    weight_step_ = box_units * (2 * kOctetUnitBytes / 16);
  }

  /// sums = the chain of the next `num_steps` steps.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], int num_steps) {
    int keep = 0;
    Operands operands = find_operands();
#pragma unroll 1
    while (num_steps > 0) {
      if (step_ == 0) {
#pragma unroll 1
        for (; num_steps >= kStageSteps; num_steps -= kStageSteps) {
          wait_for_stage();
          multiply_steps<kStageSteps>(sums, keep, operands);
          keep = 1;
          const uint32_t before = leave_stage();
          operands = find_operands();
          wgmma::wait_products<1>();
          release(before);
        }
        if (num_steps == 0) break;
        wait_for_stage();
      }
      const int count = min(num_steps, kStageSteps - step_);
      multiply_part(sums, keep, count, operands);
      keep = 1;
      num_steps -= count;
      step_ += count;
      if (step_ == kStageSteps) {
        const uint32_t before = leave_stage();
        operands = find_operands();
        wgmma::wait_products<1>();
        release(before);
      }
    }
    wgmma::wait_products<0>();
    wgmma::pin(sums);
    release(left_);
    left_ = 0;
  }

  /// After the last chain of a tile: what is left of the stage is of no use.
  __device__ __forceinline__ void finish_tile() {
    if (step_ > 0) give_back_stage();
  }

  /// Past stages of a tile that has nothing for this group.
  __device__ __forceinline__ void skip(int num_steps) {
#pragma unroll 1
    for (; num_steps > 0; num_steps -= kStageSteps) {
      wait_for_stage();
      give_back_stage();
    }
  }

 private:
  static constexpr int kCoreBytes = 128;                 // of 8 outputs x 8 k
  static constexpr int kRowStep = 2 * kLinearStep / 16;  // in a descriptor

  /// Of the next step: the lower halves of its descriptors, and from there to the next weights.
  struct Operands {
    uint32_t weights;
    uint32_t rows;
    int weight_step;
  };

  /// While products are under way, since this takes as long as one of few rows. Descriptors lie in
  /// uniform registers: what the compiler knows to be the same in all lanes is worked out there,
  /// anything else moved there piece by piece between one product and the next.
  __device__ __forceinline__ Operands find_operands() const {
    const auto uniform = [](auto value) { return __shfl_sync(0xffffffffu, value, 0); };
    const uint32_t at = ring_.stages + stage_ * ring_.stage_bytes;
    const uint32_t weights =
        wgmma::describe_place(at + group_ * (kGroupUnits * kOctetUnitBytes), 0) | weight_form_;
    const uint32_t rows = wgmma::describe_place(at + max_weight_bytes_, 16);
    return {uniform(weights + step_ * weight_step_), uniform(rows + step_ * kRowStep),
            uniform(weight_step_)};
  }

  /// Less than a stage.
  __device__ __forceinline__ void multiply_part(float (&sums)[kRows / 2], int keep, int count,
                                                const Operands& operands) {
    if (count == 1) {
      multiply_steps<1>(sums, keep, operands);
    } else if (count == 2) {
      multiply_steps<2>(sums, keep, operands);
    } else {
      multiply_steps<3>(sums, keep, operands);
    }
  }

  /// The next kCount steps of the stage, as one group: straight-line code from fence to commit, as
  /// ptxas needs it to leave products in flight.
  template <int kCount>
  __device__ __forceinline__ void multiply_steps(float (&sums)[kRows / 2], int keep,
                                                 const Operands& operands) {
    static_assert(kCount <= kStageSteps);
    constexpr uint64_t kWeightForm = wgmma::describe_form(kCoreBytes, false);
    constexpr uint64_t kRowForm = wgmma::describe_form(8 * kRowBytes, true);
    wgmma::pin(sums);
    wgmma::begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma::multiply<kRows>(sums, kWeightForm | (operands.weights + i * operands.weight_step),
                             kRowForm | (operands.rows + i * kRowStep), i == 0 ? keep : 1);
    }
    wgmma::end_products();
  }

  __device__ __forceinline__ void wait_for_stage() const {
    wgmma::wait(ring_.full + stage_ * 8, parity_);
  }

  /// Returns the stage to release when all products but those of this one are done: 0 for none. A
  /// stage is read once the products that were started on it are done, one stage later or at the
  /// end of the chain.
  __device__ __forceinline__ uint32_t leave_stage() {
    const uint32_t before = left_;
    left_ = ring_.empty + stage_ * 8;
    step_ = 0;
    const bool wraps = stage_ + 1 == ring_.num_stages;
    parity_ ^= wraps ? 1 : 0;
    stage_ = wraps ? 0 : stage_ + 1;
    return before;
  }

  __device__ __forceinline__ void release(uint32_t left) const {
    if (left == 0) return;
    if constexpr (kCluster == 1) {
      if (lane_ == 0) wgmma::arrive(left);
    } else {
      if (lane_ < kCluster) wgmma::arrive_at(left, lane_);
    }
  }

  /// Of a stage on which no product is under way.
  __device__ __forceinline__ void give_back_stage() {
    leave_stage();
    release(left_);
    left_ = 0;
  }

  const Ring& ring_;
  int group_;
  int lane_;
  uint32_t max_weight_bytes_;
  uint32_t weight_form_ = 0;  // of the descriptors' lower halves
  int weight_step_ = 0;
  int stage_ = 0;
  uint32_t parity_ = 0;
  int step_ = 0;       // of the stage
  uint32_t left_ = 0;  // barrier of the stage that is left but not released
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
__device__ __forceinline__ void multiply_tiles(const Job& job, const Ring& ring, int group,
                                               int rank, uint32_t shared) {
  const int thread = threadIdx.x % kGroupThreads;
  const uint32_t stored_sums = shared + thread * 16;
  ChainReader<kRows, kCluster> reader(ring, group, thread % 32, job.tile_units * kUnitBytes);
  for (TileCursor<kRows, kCluster> tiles(job, rank); !tiles.at_end(); tiles.advance()) {
    const ProductTile& tile = tiles.tile;
    if (group * kGroupUnits >= tile.num_units) {
      reader.skip(split_begin(job.num_steps, job.num_splits, tile.last_split) -
                  split_begin(job.num_steps, job.num_splits, tile.first_split));
      continue;
    }
    float sums[kRows / 2];
    // The first product of a chain overwrites them; as far as the compiler knows it may read them,
    // and without a value here they would take registers from one tile to the next.
    float chain_sums[kRows / 2] = {};
    reader.begin_tile(tile.box_units);
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
    to.num_units = tile.num_units - group * kGroupUnits;
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
__device__ __forceinline__ void run_block(const WeightMaps& weights, const CUtensorMap& rows,
                                          const Job& job) {
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
    const int buffer_bytes =
        group_buffer_bytes(kRows, job.num_splits > 1 && !job.is_split, job.is_f32, job.is_swiglu);
    multiply_tiles<kRows, kCluster>(
        job, ring, warp / 4, rank,
        ring.stages + ring.num_stages * ring.stage_bytes + warp / 4 * buffer_bytes);
  }
#endif
}

// The fewer registers, the better: blocks of the next linear, and of the small kernel between them,
// are to start beside these. But not fewer than the loop over chains needs: beside this much shared
// memory the first-level cache is too small for what hundreds of threads spill. (__maxnreg__ takes
// no template's constant.)
template <int kRows, int kCluster>
__global__ void __maxnreg__(72)
    wgmma_kernel_72(const __grid_constant__ WeightMaps weights,
                    const __grid_constant__ CUtensorMap rows, const __grid_constant__ Job job) {
  run_block<kRows, kCluster>(weights, rows, job);
}
template <int kRows, int kCluster>
__global__ void __maxnreg__(96)
    wgmma_kernel_96(const __grid_constant__ WeightMaps weights,
                    const __grid_constant__ CUtensorMap rows, const __grid_constant__ Job job) {
  run_block<kRows, kCluster>(weights, rows, job);
}
template <int kRows, int kCluster>
__global__ void __launch_bounds__(kMaxGroups* kGroupThreads + Threads<kRows>::kCopying, 1)
    wgmma_kernel_alone(const __grid_constant__ WeightMaps weights,
                       const __grid_constant__ CUtensorMap rows, const __grid_constant__ Job job) {
  run_block<kRows, kCluster>(weights, rows, job);
}

template <int kRows, int kCluster>
constexpr auto wgmma_kernel() {
  if constexpr (kRows <= 32) {
    return wgmma_kernel_72<kRows, kCluster>;
  } else if constexpr (kRows <= 64) {
    return wgmma_kernel_96<kRows, kCluster>;
  } else {
    return wgmma_kernel_alone<kRows, kCluster>;
  }
}

}  // namespace openspec::cuda
