#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/linear_tiles.cuh"
#include "kernels/linear_wgmma.h"
#include "kernels/linear_wgmma_output.cuh"
#include "kernels/wgmma.cuh"

namespace openspec::cuda {
namespace {

// Blocks stay for many tiles. One thread of a block copies what the tiles need into a ring of
// stages in shared memory; up to three warpgroups multiply, each 64 outputs of the tile with all
// its rows. A warpgroup that adds up a chain or writes a tile leaves the matrix units to the
// others.
//
// A stage is 64 k wide: weights [8 octets of k][unit][16 outputs][8 k], which without swizzle are
// the core matrices of wgmma in order, then activations [row][64 k] in the swizzle of 128 bytes.

constexpr int kMaxGroups = 3;
constexpr int kMaxUnits = kMaxGroups * 4;
constexpr int kMaxStages = 8;
constexpr int kStageSteps = 4;
constexpr int kStageInputs = kStageSteps * kLinearStep;
constexpr int kUnitBytes = kLinearUnit * kStageInputs * 2;  // of a stage
constexpr int kRowBytes = kStageInputs * 2;                 // of a stage
constexpr int kOctetUnitBytes = kLinearUnit * 8 * 2;        // a unit's weights of 8 k
constexpr int kAlignment = 1024;                            // of the swizzle
constexpr int kBandRows = 2048;
constexpr int kMinStages = 4;
constexpr int kMinRows = 25;  // below, streaming through mma.sync is as fast as the memory

constexpr int kSharedBytes = 227 * 1024 - 256;  // of a block, but for the barriers
// Where two warpgroups' worth of registers are left on the SM, leave shared memory as well: the
// small kernels between the linears can then start early.
constexpr int kSharedBytesOfFew = 176 * 1024;

/// Tiles of many rows take accumulators for which the registers of the copying warp's whole group
/// are needed.
template <int kRows>
struct Threads {
  static constexpr bool kMovesRegisters = kRows > 64;
  static constexpr int kCopying = kMovesRegisters ? 128 : 32;
  static constexpr int kMax = kMaxGroups * 128 + kCopying;
};
constexpr int kCopyingRegisters = 32;
constexpr int kMultiplyingRegisters = 160;

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

/// Shared memory of a warpgroup beside the ring: its output on the way to memory, before that the
/// sums of the splits so far.
__host__ __device__ constexpr int group_buffer_bytes(int tile_rows, bool adds_splits) {
  const int sum_bytes = tile_rows / 2 * kGroupThreads * 4;
  return adds_splits && sum_bytes > 2 * kTurnBytes ? sum_bytes : 2 * kTurnBytes;
}

struct StreamTile {
  int first_unit;
  int first_row;
  int first_split;
  int last_split;  // one past
};

#ifdef OPENSPEC_HAS_WGMMA

template <int kRows, int kCluster>
__device__ __forceinline__ StreamTile find_tile(const Job& job, int index, int rank) {
  const int num_splits = job.is_split ? job.num_splits : 1;
  const int band_tiles = job.band * job.num_unit_tiles * num_splits;
  const int first_of_band = index / band_tiles * job.band;
  const int in_band = index % band_tiles;
  const int width = min(job.band, job.num_row_tiles - first_of_band);
  const int row_tile = first_of_band + in_band % width;
  const int unit_tile = in_band / width % job.num_unit_tiles;
  const int split = in_band / width / job.num_unit_tiles;
  StreamTile tile;
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
    const StreamTile tile = find_tile<kRows, kCluster>(job_, index_, rank_);
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
                             at.step * 2 + rank * kStageSteps, barrier, 3);
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
}

/// A warpgroup's way through the ring.
template <int kRows, int kCluster>
class ChainReader {
 public:
  __device__ ChainReader(const Ring& ring, int tile_units, int group, int lane)
      : ring_(ring), lane_(lane) {
    constexpr int kCoreBytes = 128;
    weights_ = wgmma::describe(ring.stages + group * (4 * kOctetUnitBytes),
                               tile_units * kOctetUnitBytes, kCoreBytes, false);
    weight_step_ = tile_units * (2 * kOctetUnitBytes / 16);
    rows_ = wgmma::describe(ring.stages + tile_units * kUnitBytes, 16, 8 * kRowBytes, true);
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
  static constexpr int kRowStep = 2 * kLinearStep / 16;  // in a descriptor

  /// The next kCount steps of the stage, as one group: straight-line code from fence to commit, as
  /// ptxas needs it to leave products in flight.
  template <int kCount>
  __device__ __forceinline__ void multiply_steps(float (&sums)[kRows / 2], int keep) {
    static_assert(kCount <= kStageSteps);
    const int stage = stage_ * (ring_.stage_bytes / 16);
    const uint64_t weights = weights_ + stage + step_ * weight_step_;
    const uint64_t rows = rows_ + stage + step_ * kRowStep;
    wgmma::pin(sums);
    wgmma::begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma::multiply<kRows>(sums, weights + i * weight_step_, rows + i * kRowStep,
                             i == 0 ? keep : 1);
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
  uint64_t weights_;
  uint64_t rows_;
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
  const int barrier = 1 + group;
  const uint32_t stored_sums = shared + thread * 16;
  ChainReader<kRows, kCluster> reader(ring, job.tile_units, group, thread % 32);
  for (int index = blockIdx.x / kCluster; index < job.num_tiles; index += gridDim.x / kCluster) {
    const StreamTile tile = find_tile<kRows, kCluster>(job, index, rank);
    float sums[kRows / 2];
    for (int split = tile.first_split; split < tile.last_split; ++split) {
      const int begin = split_begin(job.num_steps, job.num_splits, split);
      const int end = split_begin(job.num_steps, job.num_splits, split + 1);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
      for (int chain = 0; chain < kLinearChains; ++chain) {
        float chain_sums[kRows / 2];
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
    to.is_swiglu = job.is_swiglu;
    to.thread = thread;
    to.shared = shared;
    to.barrier = barrier;
    to.out = job.out;
    if (job.is_split) {
      to.out = static_cast<float*>(job.out) +
               partial_index(job.num_rows, num_outputs, tile.first_split, 0, 0);
    }
    // One buffer serves all this: nobody writes it for one purpose while another thread still reads
    // it for the one before.
    wgmma::sync_threads(barrier, kGroupThreads);
    if (job.is_f32) {
      write_f32<kRows>(to, sums);
    } else if (job.is_swiglu) {
      write_bf16<kRows, true>(to, sums);
    } else {
      write_bf16<kRows, false>(to, sums);
    }
    wgmma::sync_threads(barrier, kGroupThreads);
  }
}

#endif  // OPENSPEC_HAS_WGMMA

template <int kRows, int kCluster>
__global__ void __launch_bounds__(Threads<kRows>::kMax, 1)
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
    __syncwarp();
  } else {
    if constexpr (Threads<kRows>::kMovesRegisters) wgmma::take_registers<kMultiplyingRegisters>();
    wait_for_previous_kernel();
    const int buffer_bytes = group_buffer_bytes(kRows, job.num_splits > 1 && !job.is_split);
    multiply_tiles<kRows, kCluster>(
        job, ring, rank,
        ring.stages + ring.num_stages * ring.stage_bytes + warp / 4 * buffer_bytes);
  }
  // The other block may still announce to this one's barriers.
  if constexpr (kCluster > 1) wgmma::sync_cluster();
#endif
}

// --- Host
// -----------------------------------------------------------------------------------------

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// From the driver, without linking to it; null where it has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

/// [units][octets of k][16 outputs][8 k], seen as octets of units of 128 elements.
bool map_weights(const PackedLinear& weight, const WgmmaPlan& plan, CUtensorMap* map) {
  const cuuint64_t num_octets = weight.num_inputs / 8;
  const cuuint64_t sizes[] = {
      kLinearUnit * 8, static_cast<cuuint64_t>(weight.num_outputs / kLinearUnit), num_octets};
  const cuuint64_t strides[] = {num_octets * kOctetUnitBytes, kOctetUnitBytes};
  const cuuint32_t box[] = {kLinearUnit * 8, static_cast<cuuint32_t>(plan.tile_units),
                            static_cast<cuuint32_t>(2 * kStageSteps / plan.cluster)};
  const cuuint32_t every[] = {1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(weight.data),
                        sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// x; rows that are not there read as zeros.
bool map_rows(const LinearParams& params, const WgmmaPlan& plan, CUtensorMap* map) {
  const cuuint64_t num_inputs = params.weight.num_inputs;
  const cuuint64_t sizes[] = {num_inputs, static_cast<cuuint64_t>(params.num_rows)};
  const cuuint64_t strides[] = {num_inputs * 2};
  const cuuint32_t box[] = {kStageInputs, static_cast<cuuint32_t>(plan.tile_rows)};
  const cuuint32_t every[] = {1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(params.x),
                        sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int num_sms() {
  static const int count = [] {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value;
  }();
  return count;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int num_groups(const WgmmaPlan& plan) { return ceil_div(plan.tile_units, kGroupUnits); }

int stage_bytes(const WgmmaPlan& plan) {
  return plan.tile_units * kUnitBytes + plan.tile_rows * kRowBytes;
}

int buffer_bytes(const WgmmaPlan& plan, bool adds_splits) {
  return num_groups(plan) * group_buffer_bytes(plan.tile_rows, adds_splits);
}

int num_stages(const WgmmaPlan& plan, bool adds_splits) {
  const int bytes = (plan.tile_rows > 64 ? kSharedBytes : kSharedBytesOfFew) - kAlignment;
  return std::min(kMaxStages, (bytes - buffer_bytes(plan, adds_splits)) / stage_bytes(plan));
}

bool adds_splits(const LinearParams& params) {
  return params.weight.num_splits > 1 && params.partials == nullptr;
}

template <int kRows, int kCluster>
int launch_tiles(const WgmmaPlan& plan, const LinearParams& params, void* stream) {
  const auto kernel = linear_wgmma_kernel<kRows, kCluster>;
  static const int allowed = allow_shared_bytes(kernel, kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  CUtensorMap weights, rows;
  if (!map_weights(params.weight, plan, &weights) || !map_rows(params, plan, &rows)) {
    return cudaErrorInvalidValue;
  }

  Job job = {};
  job.is_split = params.partials != nullptr;
  job.out = job.is_split ? params.partials : params.out;
  job.num_rows = params.num_rows;
  job.num_units = params.weight.num_outputs / kLinearUnit;
  job.num_steps = params.weight.num_inputs / kLinearStep;
  job.num_splits = params.weight.num_splits;
  job.is_swiglu = params.weight.epilogue == LinearEpilogue::kSwiGlu;
  job.is_f32 = job.is_split || params.out_dtype == DType::kF32;
  job.tile_units = plan.tile_units;
  job.num_unit_tiles = ceil_div(job.num_units, plan.tile_units);
  job.num_row_tiles = ceil_div(params.num_rows, kRows * kCluster);
  job.band = std::max(1, kBandRows / (kRows * kCluster));
  job.num_tiles = job.num_unit_tiles * job.num_row_tiles * (job.is_split ? job.num_splits : 1);
  job.num_stages = num_stages(plan, adds_splits(params));

  const int num_clusters = std::min(job.num_tiles, num_sms() / kCluster);
  const int threads = num_groups(plan) * kGroupThreads + Threads<kRows>::kCopying;
  cudaLaunchConfig_t config = {};
  config.gridDim = num_clusters * kCluster;
  config.blockDim = threads;
  config.dynamicSmemBytes =
      kAlignment + job.num_stages * stage_bytes(plan) + buffer_bytes(plan, adds_splits(params));
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kCluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = kCluster == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, weights, rows, job);
}

/// Whether the code of sm_90a is there and the current device runs it. A build for other
/// architectures, sm_90 among them, has kernels without a body, hence without barriers.
bool has_wgmma() {
  static const bool has = [] {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major != 9 || minor != 0) return false;
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, linear_wgmma_kernel<64, 1>) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return attributes.sharedSizeBytes > 0 && encode_tiled() != nullptr;
  }();
  return has;
}

/// Nanoseconds that a plan takes, roughly: what a block computes and takes in, what all blocks take
/// in. Memory is left out, for it is the same for all plans.
double estimate(const WgmmaPlan& plan, const LinearParams& params) {
  constexpr double kNsPerCycle = 1 / 1.6;
  constexpr double kProductsPerCycle = 2048 * 0.85;  // multiplications and additions of an SM
  constexpr double kBytesPerNs = 65;                 // into an SM
  constexpr double kAllBytesPerNs = 6000;            // out of the second-level cache
  constexpr double kTileNs = 700;                    // to write a tile
  const PackedLinear& weight = params.weight;
  const int num_splits = params.partials != nullptr ? weight.num_splits : 1;
  const int num_row_tiles = ceil_div(params.num_rows, plan.tile_rows * plan.cluster);
  const double num_clusters = static_cast<double>(num_row_tiles) * num_splits *
                              ceil_div(weight.num_outputs / kLinearUnit, plan.tile_units);
  const double num_rounds = std::ceil(num_clusters / (num_sms() / plan.cluster));
  const double num_inputs = static_cast<double>(weight.num_inputs) / num_splits;
  const double weight_bytes = 2.0 * num_inputs * plan.tile_units * kLinearUnit;
  const double row_bytes = 2.0 * num_inputs * plan.tile_rows;
  const double compute =
      num_inputs * num_groups(plan) * 64.0 * plan.tile_rows / kProductsPerCycle * kNsPerCycle;
  const double intake = (weight_bytes + row_bytes) / kBytesPerNs;
  const double cache = num_clusters * (weight_bytes + row_bytes * plan.cluster) / kAllBytesPerNs;
  return std::max(num_rounds * std::max(compute, intake), cache) + num_rounds * kTileNs;
}

}  // namespace

WgmmaPlan linear_wgmma_plan(const LinearParams& params) {
  WgmmaPlan best;
  double best_time = 0;
  for (const int tile_rows : {32, 64, 96, 128}) {
    // More than one tile of few rows is never best; nor is a tile with whole spare columns.
    if (tile_rows < 96 && params.num_rows > tile_rows) continue;
    for (const int cluster : {1, 2}) {
      if (cluster == 2 && params.num_rows <= tile_rows) continue;
      for (int tile_units = 1; tile_units <= kMaxUnits; ++tile_units) {
        const WgmmaPlan plan = {tile_rows, tile_units, cluster};
        if (num_stages(plan, adds_splits(params)) < kMinStages) continue;
        const double time = estimate(plan, params);
        if (best.tile_rows == 0 || time < best_time) {
          best = plan;
          best_time = time;
        }
      }
    }
  }
  return best;
}

int linear_wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream) {
  if (plan.cluster == 2) {
    if (plan.tile_rows == 96) return launch_tiles<96, 2>(plan, params, stream);
    if (plan.tile_rows == 128) return launch_tiles<128, 2>(plan, params, stream);
  } else {
    if (plan.tile_rows == 32) return launch_tiles<32, 1>(plan, params, stream);
    if (plan.tile_rows == 64) return launch_tiles<64, 1>(plan, params, stream);
    if (plan.tile_rows == 96) return launch_tiles<96, 1>(plan, params, stream);
    if (plan.tile_rows == 128) return launch_tiles<128, 1>(plan, params, stream);
  }
  return cudaErrorInvalidValue;
}

int linear_wgmma(const LinearParams& params, void* stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return linear_wgmma_as(linear_wgmma_plan(params), params, stream);
}

bool linear_wgmma_takes(const PackedLinear& shape, int num_rows) {
  // Chains without a step have no product to wait for; the kernel has no case for them.
  const int num_steps = shape.num_inputs / kLinearStep;
  return num_rows >= kMinRows && num_steps >= shape.num_splits * kLinearChains &&
         shape.layout == LinearLayout::kTiles && shape.dtype == DType::kBF16 &&
         shape.num_inputs % kLinearStep == 0 && shape.num_outputs % kLinearUnit == 0 && has_wgmma();
}

}  // namespace openspec::cuda
