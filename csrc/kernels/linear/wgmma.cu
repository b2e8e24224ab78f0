#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "kernels/common/hopper.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/per_device.h"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/wgmma.h"
#include "kernels/linear/wgmma_kernel.cuh"

namespace openspec::cuda {
namespace {

constexpr int kMaxUnits = kMaxGroups * kGroupUnits;
constexpr int kMinStages = 3;    // of tiles of many rows
constexpr int kSharedKib = 226;  // of a block, barriers aside
constexpr int kBandRows = 2048;
constexpr int kMinRows = 9;  // below, streaming through mma.sync is as fast

/// [units][octets of k][16 outputs][8 k], seen as octets of units of 128 elements.
bool map_weights(const PackedLinear& weight, int box_units, int cluster, CUtensorMap* map) {
  const cuuint64_t num_octets = weight.num_inputs / 8;
  const cuuint64_t sizes[] = {
      kLinearUnit * 8, static_cast<cuuint64_t>(weight.num_outputs / kLinearUnit), num_octets};
  const cuuint64_t strides[] = {num_octets * kOctetUnitBytes, kOctetUnitBytes};
  const cuuint32_t box[] = {kLinearUnit * 8, static_cast<cuuint32_t>(box_units),
                            static_cast<cuuint32_t>(kStageOctets / cluster)};
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

int num_groups(const WgmmaPlan& plan) { return ceil_div(plan.tile_units, kGroupUnits); }

int stage_bytes(const WgmmaPlan& plan) {
  return plan.tile_units * kUnitBytes + plan.tile_rows * kRowBytes;
}

Outbox outbox_of(const LinearParams& params) {
  const PackedLinear& weight = params.weight;
  return cuda::outbox_of(*params.exchange, weight.num_splits, params.num_rows, weight.num_outputs);
}

/// Whether the sums of splits stay apart.
bool are_apart(const LinearParams& params) {
  if (params.exchange == nullptr) return params.partials != nullptr;
  return !outbox_of(params).adds_splits();
}

/// Splits whose sums stay apart, or one for all of them.
int num_splits_apart(const LinearParams& params) {
  return are_apart(params) ? params.weight.own_splits().size() : 1;
}

bool writes_f32(const LinearParams& params) {
  return params.partials != nullptr || params.out_dtype == DType::kF32;
}

int buffer_bytes(const WgmmaPlan& plan, const LinearParams& params) {
  const bool adds_splits = params.weight.num_splits > 1 && !are_apart(params);
  return num_groups(plan) * group_buffer_bytes(plan.tile_rows, adds_splits, writes_f32(params),
                                               params.weight.epilogue == LinearEpilogue::kSwiGlu,
                                               params.exchange != nullptr);
}

int num_stages(const WgmmaPlan& plan, const LinearParams& params) {
  const int bytes = plan.shared_kib * 1024 - kAlignment - buffer_bytes(plan, params);
  return std::min(kMaxStages, bytes / stage_bytes(plan));
}

/// Units of the last tile of a run.
int last_units(int run_units, int tile_units) { return (run_units - 1) % tile_units + 1; }

/// `job`: what it holds besides the fields of Job.
template <int kRows, int kCluster, typename JobType>
int launch_tiles(const WgmmaPlan& plan, const LinearParams& params, JobType job, void* stream) {
  constexpr auto kernel = wgmma_kernel<kRows, kCluster, JobType>();
  const int prepared = per_device([&] { return prepare_shared(kernel, kSharedKib * 1024); });
  if (prepared != cudaSuccess) return prepared;
  job.is_split = are_apart(params);
  job.out = params.partials != nullptr ? params.partials : params.out;
  job.weight = params.weight;
  job.splits = params.weight.own_splits();
  job.row_stride = linear_row_stride(params);
  job.num_rows = params.num_rows;
  job.num_units = params.weight.num_outputs / kLinearUnit;
  job.is_swiglu = params.weight.epilogue == LinearEpilogue::kSwiGlu;
  job.is_f32 = writes_f32(params);
  job.tile_units = plan.tile_units;
  job.num_stages = num_stages(plan, params);
  // A stage is given back while the next one is read.
  if (job.num_stages < 2) return cudaErrorInvalidValue;

  const int num_splits = num_splits_apart(params);
  job.num_row_tiles = ceil_div(params.num_rows, kRows * kCluster);
  int num_clusters = num_sms() / kCluster;
  int shorter_units = plan.tile_units;
  if (plan.num_runs > 0) {
    job.num_runs = std::min(plan.num_runs, job.num_units);
    job.last_units = last_units(ceil_div(job.num_units, job.num_runs), plan.tile_units);
    shorter_units = last_units(job.num_units / job.num_runs, plan.tile_units);
    num_clusters = job.num_runs * job.num_row_tiles * num_splits;
  } else {
    job.last_units = plan.tile_units;
    job.num_unit_tiles = ceil_div(job.num_units, plan.tile_units);
    job.band = std::max(1, kBandRows / (kRows * kCluster));
    job.num_tiles = job.num_unit_tiles * job.num_row_tiles * num_splits;
    num_clusters = std::min(num_clusters, job.num_tiles);
  }
  WeightMaps weights;
  CUtensorMap rows;
  if (!map_weights(params.weight, plan.tile_units, kCluster, &weights.whole) ||
      !map_weights(params.weight, job.last_units, kCluster, &weights.last) ||
      !map_weights(params.weight, shorter_units, kCluster, &weights.shorter) ||
      !map_rows(params, plan, &rows)) {
    return cudaErrorInvalidValue;
  }

  const int num_threads = num_groups(plan) * kGroupThreads + Threads<kRows>::kCopying;
  return launch_clusters(kCluster, kernel, num_clusters * kCluster, num_threads,
                         plan.shared_kib * 1024, stream, weights, rows, job);
}

template <typename JobType>
int launch_plan(const WgmmaPlan& plan, const LinearParams& params, const JobType& job,
                void* stream) {
  if (plan.cluster == 2) {
    if (plan.tile_rows == 96) return launch_tiles<96, 2>(plan, params, job, stream);
    if (plan.tile_rows == 128) return launch_tiles<128, 2>(plan, params, job, stream);
  } else {
    if (plan.tile_rows == 32) return launch_tiles<32, 1>(plan, params, job, stream);
    if (plan.tile_rows == 64) return launch_tiles<64, 1>(plan, params, job, stream);
    if (plan.tile_rows == 96) return launch_tiles<96, 1>(plan, params, job, stream);
    if (plan.tile_rows == 128) return launch_tiles<128, 1>(plan, params, job, stream);
  }
  return cudaErrorInvalidValue;
}

bool has_wgmma() {
  static const bool has = has_hopper_kernel(wgmma_kernel<64, 1, Job>());
  return has;
}

/// Nanoseconds that a plan takes, roughly: what the busiest block computes and takes in, what all
/// blocks take in. Memory is left out, for it is the same for all plans.
double estimate(const WgmmaPlan& plan, const LinearParams& params) {
  constexpr double kNsPerCycle = 1 / 1.6;
  constexpr double kProductsPerCycle = 2048 * 0.75;  // multiplications and additions of an SM
  constexpr double kBytesPerNs = 65;                 // into an SM
  constexpr double kAllBytesPerNs = 6000;            // out of the second-level cache
  constexpr double kTileNs = 700;                    // to write a tile
  const PackedLinear& weight = params.weight;
  const int num_units = weight.num_outputs / kLinearUnit;
  const int num_splits = num_splits_apart(params);
  const int num_row_tiles = ceil_div(params.num_rows, plan.tile_rows * plan.cluster);
  const double num_inputs = static_cast<double>(weight.num_inputs) / num_splits;
  const double row_bytes = 2.0 * num_inputs * plan.tile_rows;
  const double unit_bytes = 2.0 * num_inputs * kLinearUnit;
  const auto tile_ns = [&](int units) {
    const double products = num_inputs * ceil_div(units, kGroupUnits) * 64.0 * plan.tile_rows;
    const double intake = (units * unit_bytes + row_bytes) / kBytesPerNs;
    return std::max(products / kProductsPerCycle * kNsPerCycle, intake) + kTileNs;
  };

  double block_ns = 0;
  double num_tiles = static_cast<double>(num_row_tiles) * num_splits;  // of clusters
  if (plan.num_runs > 0) {
    const int run_units = ceil_div(num_units, plan.num_runs);
    const int last = last_units(run_units, plan.tile_units);
    block_ns = (run_units - last) / plan.tile_units * tile_ns(plan.tile_units) + tile_ns(last);
    num_tiles *= plan.num_runs * ceil_div(run_units, plan.tile_units);
  } else {
    num_tiles *= ceil_div(num_units, plan.tile_units);
    block_ns = std::ceil(num_tiles / (num_sms() / plan.cluster)) * tile_ns(plan.tile_units);
  }
  const double all_bytes = num_tiles * plan.cluster * row_bytes +
                           static_cast<double>(num_row_tiles) * num_splits * num_units * unit_bytes;
  return std::max(block_ns, all_bytes / kAllBytesPerNs);
}

/// How a cluster's tiles have all rows, for as few as that takes.
constexpr struct RunForm {
  int tile_rows, cluster;
} kRunForms[] = {{32, 1}, {64, 1}, {96, 1}, {128, 1}, {96, 2}, {128, 2}};

/// Shared memory of a block with a run. Of few rows, so much that no two blocks share an SM: stages
/// under way are worth more than an early start, and where two of a kind might meet, another SM
/// would have none.
int run_shared_kib(const WgmmaPlan& plan) {
  if (plan.tile_rows > 64) return kSharedKib;
  return plan.tile_units <= 2 * kGroupUnits ? 128 : 168;
}

/// For many rows: the fastest by the model above, of bands and of a run for every cluster.
WgmmaPlan many_rows_plan(const LinearParams& params) {
  const int num_units = params.weight.num_outputs / kLinearUnit;
  const int num_splits = num_splits_apart(params);
  WgmmaPlan best;
  double best_time = 0;
  for (const int tile_rows : {96, 128}) {
    for (const int cluster : {1, 2}) {
      const int num_row_tiles = ceil_div(params.num_rows, tile_rows * cluster);
      const int num_runs = std::min(num_units, num_sms() / cluster / (num_row_tiles * num_splits));
      for (int tile_units = 1; tile_units <= kMaxUnits; ++tile_units) {
        for (const int runs : {0, num_runs}) {
          const WgmmaPlan plan = {tile_rows, tile_units, cluster, runs};
          if (num_stages(plan, params) < kMinStages) continue;
          const double time = estimate(plan, params);
          if (best.tile_rows == 0 || time < best_time) {
            best = plan;
            best_time = time;
          }
        }
      }
    }
  }
  return best;
}

}  // namespace

WgmmaPlan linear_wgmma_plan(const LinearParams& params) {
  const RunForm* form = kRunForms;
  while (form != std::end(kRunForms) && form->tile_rows * form->cluster < params.num_rows) ++form;
  if (form == std::end(kRunForms)) return many_rows_plan(params);

  // One run for every multiprocessor. With many rows it has at least what a warpgroup multiplies
  // anyway: otherwise reading the rows, which every block does, is what takes the time.
  WgmmaPlan plan;
  plan.tile_rows = form->tile_rows;
  plan.cluster = form->cluster;
  const int num_units = params.weight.num_outputs / kLinearUnit;
  const int num_splits = num_splits_apart(params);
  const int min_units = plan.tile_rows > 32 ? kGroupUnits : 1;
  plan.num_runs = std::clamp(num_sms() / plan.cluster / num_splits, 1,
                             std::max(1, ceil_div(num_units, min_units)));
  const int run_units = ceil_div(num_units, plan.num_runs);
  const int num_tiles = ceil_div(run_units, kMaxUnits);
  plan.tile_units = ceil_div(run_units, num_tiles);
  if (plan.tile_rows > 64 && num_tiles > 1) {  // multiplying takes the time: whole warpgroups
    plan.tile_units = ceil_div(plan.tile_units, kGroupUnits) * kGroupUnits;
  }
  plan.shared_kib = run_shared_kib(plan);
  return plan;
}

int linear_wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream) {
  if (params.exchange == nullptr) return launch_plan(plan, params, Job{}, stream);
  return launch_plan(plan, params, ExchangeJob{{}, outbox_of(params)}, stream);
}

int linear_wgmma(const LinearParams& params, void* stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return linear_wgmma_as(linear_wgmma_plan(params), params, stream);
}

bool linear_wgmma_takes(const PackedLinear& shape, int num_rows) {
  // Chains without a step have no product to wait for; the kernel has no case for them.
  const SplitRange splits = shape.own_splits();
  for (int split = splits.begin; split < splits.end; ++split) {
    if (split_steps(shape, split).size() < kLinearChains) return false;
  }
  return num_rows >= kMinRows && shape.layout == LinearLayout::kTiles &&
         shape.num_inputs % kLinearStep == 0 && shape.num_outputs % kLinearUnit == 0 && has_wgmma();
}

}  // namespace openspec::cuda
