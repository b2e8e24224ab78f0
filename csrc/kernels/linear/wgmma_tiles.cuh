#pragma once

/// What the blocks of linear_wgmma work on: tiles of the output, and the stages of inputs that a
/// tile needs.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/wgmma.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/weight_form.cuh"
#include "kernels/linear/wgmma_output.cuh"

namespace openspec::cuda {

// A stage is 64 k wide: weights, then activations [row][64 k] in the swizzle of 128 bytes. Weights
// of bf16 lie as [8 octets of k][unit][16 outputs][8 k], which without swizzle are the core
// matrices of wgmma in order, those of e4m3 as [unit][4 steps][lane][8 bytes].

inline constexpr int kMaxGroups = 3;  // warpgroups of a block that multiply
inline constexpr int kMaxUnits = kMaxGroups * kGroupUnits;
inline constexpr int kMaxStages = 12;
inline constexpr int kStageSteps = 4;
inline constexpr int kStageInputs = kStageSteps * kLinearStep;
inline constexpr int kStageOctets = kStageInputs / 8;
inline constexpr int kRowBytes = kStageInputs * 2;           // of a stage
inline constexpr int kOctetUnitBytes = kLinearUnit * 8 * 2;  // a unit's weights of 8 k
inline constexpr int kAlignment = 1024;                      // of the swizzle

/// Of a unit in a stage.
__host__ __device__ constexpr int unit_bytes(WeightForm form) {
  return kStageSteps * step_bytes(form);
}

/// Of a ring: a stage is given back while the next one is read. Of e4m3 codes of another are read
/// then, which should be there already.
__host__ __device__ constexpr int min_stages(WeightForm form) { return is_e4m3(form) ? 3 : 2; }
/// Whether the chains' sums so far are in shared memory, for want of registers.
__host__ __device__ constexpr bool stores_chains(WeightForm form, int tile_rows) {
  return has_blocks(form) && tile_rows >= 64;
}

/// Tiles of many rows need more registers than an even share: the copying warps get a group of
/// their own, which hands over its registers.
template <int kRows>
struct Threads {
  static constexpr bool kMovesRegisters = kRows > 64;
  static constexpr int kCopying = kMovesRegisters ? 128 : 64;
  static constexpr int kMost = kMaxGroups * kGroupThreads + kCopying;
  // Where registers move; every thread begins with an even share.
  static constexpr int kCopyingRegisters = 32;
  static constexpr int kMultiplyingRegisters = 160;
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
  PackedLinear weight;
  SplitRange splits;  // that are here
  void* out;
  int64_t row_stride;  // elements
  int num_rows;
  int num_units;
  bool is_swiglu;
  bool is_f32;
  bool is_split;  // out is [num_splits, num_rows, num_outputs]
  int num_stages;
  int tile_units;
  int num_runs;    // of some splits and a tile of rows; 0: bands of tiles
  int run_splits;  // neighbours, one after the other
  int last_units;  // of the last tile of a longest run
  // Tiles of all blocks of a cluster.
  int num_unit_tiles;
  int num_row_tiles;
  int band;  // row tiles that run together, so that they find each other's weights in the cache
  int num_tiles;
};

/// A job whose sums go to the inboxes of ranks. `out` is then slot 0 of the own inbox.
struct ExchangeJob : Job {
  Outbox to;
};
template <typename JobType>
inline constexpr bool kIsSent = std::is_same_v<JobType, ExchangeJob>;

/// A warpgroup's sums of a tile.
__host__ __device__ constexpr int group_sum_bytes(int tile_rows) {
  return tile_rows / 2 * kGroupThreads * 4;
}

/// Shared memory of a warpgroup beside the ring: the sums of the splits so far where it adds them
/// up, behind them those of the chains so far, then its output on the way to memory where that is
/// bf16 or sent.
__host__ __device__ constexpr int group_buffer_bytes(int tile_rows, bool adds_splits,
                                                     bool adds_chains, bool is_f32, bool is_swiglu,
                                                     bool is_sent) {
  const int sum_bytes = (adds_splits + adds_chains) * group_sum_bytes(tile_rows);
  const int out_bytes = is_sent ? kSendTurnBytes : is_f32 ? 0 : turn_bytes(is_swiglu);
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

/// A block's tiles, one after the other.
template <int kRows, int kCluster>
class TileCursor {
 public:
  __device__ __forceinline__ TileCursor(const Job& job, int rank)
      : job_(job), rank_(rank), index_(blockIdx.x / kCluster) {
    if (job.num_runs > 0) {
      const int row_tile = index_ % job.num_row_tiles;
      const int run = index_ / job.num_row_tiles % job.num_runs;
      const int splits = index_ / (job.num_row_tiles * job.num_runs);
      first_unit_ = job.num_units * run / job.num_runs;
      tile.first_unit = first_unit_;
      last_unit_ = job.num_units * (run + 1) / job.num_runs;
      tile.first_row = (row_tile * kCluster + rank) * kRows;
      find_splits(splits * job.run_splits);
      last_split_ = tile.first_split + job.run_splits;
      tile.num_units = tile.box_units = min(job.tile_units, last_unit_ - tile.first_unit);
    } else {
      find_tile();
    }
  }
  __device__ __forceinline__ bool at_end() const { return tile.num_units <= 0; }
  __device__ __forceinline__ void advance() {
    if (job_.num_runs > 0) {
      tile.first_unit += tile.num_units;
      if (tile.first_unit == last_unit_ && tile.first_split + 1 < last_split_) {
        tile.first_unit = first_unit_;
        ++tile.first_split;
        ++tile.last_split;
      }
      tile.num_units = tile.box_units = min(job_.tile_units, last_unit_ - tile.first_unit);
    } else {
      index_ += gridDim.x / kCluster;
      find_tile();
    }
  }

  ProductTile tile;

 private:
  __device__ __forceinline__ void find_splits(int split) {
    tile.first_split = job_.splits.begin + split;
    tile.last_split = job_.is_split ? tile.first_split + 1 : job_.splits.end;
  }
  __device__ __forceinline__ void find_tile() {
    tile.num_units = 0;
    if (index_ >= job_.num_tiles) return;
    const int num_splits = job_.is_split ? job_.splits.size() : 1;
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
  // Of the run, the last ones one past:
  int first_unit_ = 0, last_unit_ = 0;
  int last_split_ = 0;
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
    step = split_steps(job_.weight, tile().first_split).begin;
    last_step_ = split_steps(job_.weight, tile().last_split - 1).end;
  }

  const Job& job_;
  TileCursor<kRows, kCluster> tiles_;
  int last_step_ = 0;
};

#endif  // OPENSPEC_HAS_WGMMA

}  // namespace openspec::cuda
