#pragma once

/// The kernel of tile_experts.h. Blocks stay for many tiles: 8 units of an expert's outputs by up
/// to tile_rows of its rows. The two blocks of a cluster have the same rows and neighbouring
/// units; each copies its weights and half of the rows for both. Multiplying is linear_wgmma's, and
/// so are ring, order of sums and writing.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/experts/tile_experts.h"
#include "kernels/linear/wgmma_kernel.cuh"

namespace openspec::cuda {

inline constexpr int kExpertCluster = 2;
inline constexpr int kExpertGroups = 2;  // warpgroups that multiply
inline constexpr int kExpertUnits = kExpertGroups * kGroupUnits;
inline constexpr int kExpertThreads = (kExpertGroups + 1) * kGroupThreads;
inline constexpr int kExpertFillers = 2;  // threads that copy: the weights, the rows
inline constexpr int kBoxRows = 32;       // that are copied at once

/// What the kernel is told.
struct ExpertTilesJob {
  PackedLinear weight;  // of the first expert
  int num_scales;       // of an expert
  SortedPairs pairs;
  void* out;
  int num_units;  // of an expert
  int num_steps;
  int num_stages;
  int tile_rows;  // at most
};

template <WeightForm kForm, int kMost>
constexpr int expert_stage_bytes() {
  return kExpertUnits * unit_bytes(kForm) + kMost * kRowBytes;
}
/// Whether the sums of the chains so far are in shared memory.
template <WeightForm kForm, int kMost>
inline constexpr bool kStoresExpertChains = has_blocks(kForm) && kMost > kBlockTileRows;
/// Of a warpgroup, for these and the output.
template <WeightForm kForm, int kMost, bool kIsGateUp>
constexpr int expert_buffer_bytes() {
  return group_buffer_bytes(kMost, /*adds_splits=*/false, kStoresExpertChains<kForm, kMost>,
                            /*is_f32=*/false, kIsGateUp, /*is_sent=*/false);
}

#ifdef OPENSPEC_HAS_WGMMA

/// A block's tiles, one after the other. The segments of an expert have about as many rows each.
class ExpertTileCursor {
 public:
  __device__ __forceinline__ ExpertTileCursor(const ExpertTilesJob& job, int rank)
      : job_(job),
        rank_(rank),
        num_pairs_((job.num_units + kPairUnits - 1) / kPairUnits),
        num_tiles_(__ldcg(job.pairs.num_segments) * num_pairs_),
        id_(blockIdx.x / kExpertCluster),
        ahead_(range_words(id_)) {
    find();
  }
  __device__ __forceinline__ bool at_end() const { return id_ >= num_tiles_; }
  __device__ __forceinline__ void advance() {
    id_ += stride();
    find();
  }
  __device__ __forceinline__ int num_boxes() const { return (num_rows + kBoxRows - 1) / kBoxRows; }

  int expert, first_place, num_rows, first_unit;
  bool is_read_once;  // its weights

 private:
  static constexpr int kPairUnits = kExpertCluster * kExpertUnits;

  __device__ static __forceinline__ int stride() {
    return static_cast<int>(gridDim.x) / kExpertCluster;
  }
  /// Of the range of a tile's segment.
  __device__ __forceinline__ int4 range_words(int id) const {
    if (id >= num_tiles_) return {};
    return __ldcg(reinterpret_cast<const int4*>(job_.pairs.segment + id / num_pairs_));
  }

  __device__ __forceinline__ void find() {
    if (at_end()) return;
    const int4 words = ahead_;
    ahead_ = range_words(id_ + stride());  // comes while this tile is worked on
    const ExpertRange range = {words.x, words.y, words.z, words.w};
    const int all_rows = range.last_pair - range.first_pair;
    const int num_segments = (all_rows + job_.tile_rows - 1) / job_.tile_rows;
    const int width = (all_rows + num_segments - 1) / num_segments;
    const int local = id_ - range.first_segment * num_pairs_;
    is_read_once = num_segments == 1;
    expert = range.expert;
    first_place = range.first_pair + local % num_segments * width;
    num_rows = min(width, range.last_pair - first_place);
    first_unit = (local / num_segments * kExpertCluster + rank_) * kExpertUnits;
  }

  const ExpertTilesJob& job_;
  int rank_, num_pairs_, num_tiles_, id_;
  int4 ahead_;  // of the next tile
};

/// Calls copy(tile, step, stage) for every stage that the block's tiles need, each once its place
/// in both blocks' rings is free. copy() arrives at the stage's full barrier, so that nobody reads
/// a stage before each of the block's kExpertFillers threads has been here: a parity does not tell
/// a stage that is not free yet from one that has been read once more since.
template <typename Copy>
__device__ __forceinline__ void fill_expert_ring(const ExpertTilesJob& job, const Ring& ring,
                                                 int rank, const Copy& copy) {
  int stage = 0;
  uint32_t parity = 1;  // as if there had been a phase before the first
  const auto leave_stage = [&] {
    if (++stage < ring.num_stages) return;
    stage = 0;
    parity ^= 1;
  };
#pragma unroll 1
  for (ExpertTileCursor tile(job, rank); !tile.at_end(); tile.advance()) {
#pragma unroll 1
    for (int step = 0; step < job.num_steps; step += kStageSteps) {
      wgmma::wait(ring.empty + stage * 8, parity);
      copy(tile, step, stage);
      leave_stage();
    }
  }
  // Until all that the other block announces to this one's barriers is there, this one stays.
#pragma unroll 1
  for (int i = 0; i < ring.num_stages; ++i) {
    wgmma::wait(ring.empty + stage * 8, parity);
    leave_stage();
  }
}

template <WeightForm kForm>
__device__ __forceinline__ void copy_expert_weights(const CUtensorMap& weights,
                                                    const ExpertTilesJob& job, const Ring& ring,
                                                    int rank) {
  constexpr int kBytes = kExpertUnits * unit_bytes(kForm);
  fill_expert_ring(job, ring, rank, [&](const ExpertTileCursor& tile, int step, int stage) {
    const uint32_t barrier = ring.full + stage * 8;
    wgmma::expect_bytes(barrier, kBytes);
    const int word = is_e4m3(kForm) ? step * (step_bytes(kForm) / 4) : 0;
    const int octet = is_e4m3(kForm) ? 0 : step * 2;
    wgmma::copy_box(ring.stages + stage * ring.stage_bytes, weights, word,
                    tile.expert * job.num_units + tile.first_unit, octet, barrier,
                    tile.is_read_once);
  });
}

template <WeightForm kForm>
__device__ __forceinline__ void copy_expert_rows(const CUtensorMap& rows, const ExpertTilesJob& job,
                                                 const Ring& ring, int rank) {
  constexpr int kFirst = kExpertUnits * unit_bytes(kForm);
  wait_for_previous_kernel();
  fill_expert_ring(job, ring, rank, [&](const ExpertTileCursor& tile, int step, int stage) {
    const uint32_t barrier = ring.full + stage * 8;
    const uint32_t to = ring.stages + stage * ring.stage_bytes + kFirst;
    // Those of the other block too, which may have come before this; there may be no others.
    wgmma::expect_bytes(barrier, tile.num_boxes() * (kBoxRows * kRowBytes));
    for (int box = rank; box < tile.num_boxes(); box += kExpertCluster) {
      wgmma::copy_box_to_all(to + box * (kBoxRows * kRowBytes), rows, step * kLinearStep,
                             tile.first_place + box * kBoxRows, 0, barrier,
                             (1 << kExpertCluster) - 1, /*is_read_once=*/false);
    }
  });
}

/// Multiplies and writes a tile of up to kRows rows, of kMost; returns the warpgroup's place behind
/// it. `shared`: its own buffer.
template <WeightForm kForm, int kRows, int kMost, bool kIsGateUp>
__device__ __forceinline__ RingPlace multiply_expert_tile(const ExpertTilesJob& job,
                                                          const Ring& ring,
                                                          const ExpertTileCursor& tile, int group,
                                                          uint32_t shared, RingPlace place) {
  const int thread = threadIdx.x % kGroupThreads;
  TileReader<kForm, kRows, kExpertCluster> reader(ring, group, thread % 32,
                                                  kExpertUnits * unit_bytes(kForm), place);
  PackedLinear weight = job.weight;
  if constexpr (is_e4m3(kForm)) weight.scales += int64_t{tile.expert} * job.num_scales;
  // A warp without a unit has the scales of the last one, for sums that nobody writes.
  const int unit = min(tile.first_unit + group * kGroupUnits + thread / 32, job.num_units - 1);
  float sums[kRows / 2];
  reader.begin_tile(kExpertUnits, job.num_steps);
  add_split<kForm, kRows, kStoresExpertChains<kForm, kMost>>(weight, reader, {0, job.num_steps},
                                                             unit, shared + thread * 16, sums);
  reader.finish_tile();
  GroupOutput to;
  to.out = job.out;
  to.row_stride = int64_t{job.num_units} * (kIsGateUp ? kLinearGateRows : kLinearUnit);
  to.first_row = tile.first_place;
  to.num_rows = tile.first_place + tile.num_rows;
  to.first_unit = tile.first_unit + group * kGroupUnits;
  to.num_units = job.num_units - to.first_unit;
  to.group = group;
  to.thread = thread;
  to.shared = shared;
  wgmma::sync_group(group);  // one buffer serves all this
  write_bf16<kRows, kIsGateUp>(to, sums);
  wgmma::sync_group(group);
  return reader.place();
}

/// Calls run(n) with the rows of so many boxes, from kRows to kMost.
template <int kRows, int kMost, typename Run>
__device__ __forceinline__ void with_rows(int num_boxes, const Run& run) {
  if constexpr (kRows < kMost) {
    if (num_boxes * kBoxRows > kRows) return with_rows<kRows + kBoxRows, kMost>(num_boxes, run);
  }
  run(std::integral_constant<int, kRows>{});
}

/// A warpgroup's part: of each tile as many rows as it has, up to a multiple of 32.
template <WeightForm kForm, int kMost, bool kIsGateUp>
__device__ __forceinline__ void multiply_expert_tiles(const ExpertTilesJob& job, const Ring& ring,
                                                      int group, int rank, uint32_t shared) {
  RingPlace place;
#pragma unroll 1
  for (ExpertTileCursor tile(job, rank); !tile.at_end(); tile.advance()) {
    const auto multiply = [&](auto rows) {
      place = multiply_expert_tile<kForm, decltype(rows)::value, kMost, kIsGateUp>(
          job, ring, tile, group, shared, place);
    };
    with_rows<kBoxRows, kMost>(tile.num_boxes(), multiply);
  }
}

#endif  // OPENSPEC_HAS_WGMMA

/// kMost: rows of a tile.
template <WeightForm kForm, int kMost, bool kIsGateUp>
__global__ void __launch_bounds__(kExpertThreads, 1)
    expert_tiles_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap weights,
                        [[maybe_unused]] const __grid_constant__ CUtensorMap rows,
                        [[maybe_unused]] const __grid_constant__ ExpertTilesJob job) {
#ifdef OPENSPEC_HAS_WGMMA
  allow_next_kernel();
  // Their place in static shared memory also tells the host that the kernel has a body.
  __shared__ uint64_t barriers[2 * kMaxStages];
  extern __shared__ uint8_t dynamic_shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // in a uniform register
  const int rank = wgmma::cluster_rank();
  Ring ring;
  ring.stages = (wgmma::shared_address(dynamic_shared) + kAlignment - 1) / kAlignment * kAlignment;
  ring.full = wgmma::shared_address(barriers);
  ring.empty = ring.full + kMaxStages * 8;
  ring.num_stages = job.num_stages;
  ring.stage_bytes = expert_stage_bytes<kForm, kMost>();
  if (threadIdx.x == kExpertGroups * kGroupThreads) {
#pragma unroll 1
    for (int stage = 0; stage < ring.num_stages; ++stage) {
      wgmma::init_barrier(ring.full + stage * 8, kExpertFillers);
      wgmma::init_barrier(ring.empty + stage * 8, kExpertGroups * 4 * kExpertCluster);
    }
    wgmma::publish_barriers();
  }
  wgmma::sync_cluster();
  if (warp >= kExpertGroups * 4) {
    wgmma::give_registers<24>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == kExpertGroups * 4) {
      copy_expert_weights<kForm>(weights, job, ring, rank);
    } else if (warp == kExpertGroups * 4 + 1) {
      copy_expert_rows<kForm>(rows, job, ring, rank);
    }
  } else {
    wgmma::take_registers<240>();
    wait_for_previous_kernel();
    multiply_expert_tiles<kForm, kMost, kIsGateUp>(
        job, ring, warp / 4, rank,
        ring.stages + ring.num_stages * ring.stage_bytes +
            warp / 4 * expert_buffer_bytes<kForm, kMost, kIsGateUp>());
  }
#endif
}

}  // namespace openspec::cuda
