#pragma once

/// Launches of linear_wgmma. Included where the kernels of a form are made.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/hopper.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/per_device.h"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/wgmma_kernel.cuh"
#include "kernels/linear/wgmma_plan.cuh"

namespace openspec::cuda {

inline constexpr int kBandRows = 2048;

/// bf16: [units][octets of k][16 outputs][8 k], seen as octets of units of 128 elements.
inline bool map_octets(const PackedLinear& weight, int box_units, int cluster, CUtensorMap* map) {
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

/// e4m3: [units][steps][lanes][8 bytes], seen as words of units.
inline bool map_codes(const PackedLinear& weight, int box_units, int cluster, CUtensorMap* map) {
  constexpr cuuint32_t kStageWords = unit_bytes(WeightForm::kOutputScales) / 4;
  const cuuint64_t num_units = weight.num_outputs / kLinearUnit;
  const cuuint64_t unit_bytes = format_bytes(weight.format, kLinearUnit, weight.num_inputs);
  const cuuint64_t sizes[] = {unit_bytes / 4, num_units, 1};
  const cuuint64_t strides[] = {unit_bytes, num_units * unit_bytes};
  const cuuint32_t box[] = {kStageWords, static_cast<cuuint32_t>(ceil_div(box_units, cluster)), 1};
  const cuuint32_t every[] = {1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 3, const_cast<void*>(weight.data),
                        sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline bool map_weights(const PackedLinear& weight, int box_units, int cluster, CUtensorMap* map) {
  return weight.format == MatrixFormat::kE4M3 ? map_codes(weight, box_units, cluster, map)
                                              : map_octets(weight, box_units, cluster, map);
}

/// x; rows that are not there read as zeros.
inline bool map_rows(const LinearParams& params, const WgmmaPlan& plan, CUtensorMap* map) {
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

/// `job`: what it holds besides the fields of Job.
template <WeightForm kForm, int kRows, int kCluster, typename JobType>
int launch_tiles(const WgmmaPlan& plan, const LinearParams& params, JobType job, void* stream) {
  constexpr auto kernel = wgmma_kernel<kForm, kRows, kCluster, JobType>();
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
  if (job.num_stages < min_stages(kForm) || plan.tile_units > kMaxUnits) {
    return cudaErrorInvalidValue;
  }

  const int num_splits = num_splits_apart(params);
  job.num_row_tiles = ceil_div(params.num_rows, kRows * kCluster);
  int num_clusters = num_sms() / kCluster;
  int shorter_units = plan.tile_units;
  if (plan.num_runs > 0) {
    job.num_runs = std::min(plan.num_runs, job.num_units);
    job.last_units = last_units(ceil_div(job.num_units, job.num_runs), plan.tile_units);
    shorter_units = last_units(job.num_units / job.num_runs, plan.tile_units);
    job.run_splits = plan.run_splits;
    if (num_splits % plan.run_splits != 0) return cudaErrorInvalidValue;
    num_clusters = job.num_runs * job.num_row_tiles * (num_splits / plan.run_splits);
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

template <WeightForm kForm, typename JobType>
int launch_plan(const WgmmaPlan& plan, const LinearParams& params, const JobType& job,
                void* stream) {
  if (plan.cluster == 2) {
    if (plan.tile_rows == 96) return launch_tiles<kForm, 96, 2>(plan, params, job, stream);
    if (plan.tile_rows == 128) return launch_tiles<kForm, 128, 2>(plan, params, job, stream);
  } else {
    if (plan.tile_rows == 32) return launch_tiles<kForm, 32, 1>(plan, params, job, stream);
    if (plan.tile_rows == 64) return launch_tiles<kForm, 64, 1>(plan, params, job, stream);
    if (plan.tile_rows == 96) return launch_tiles<kForm, 96, 1>(plan, params, job, stream);
    if (plan.tile_rows == 128) return launch_tiles<kForm, 128, 1>(plan, params, job, stream);
  }
  return cudaErrorInvalidValue;
}

template <WeightForm kForm>
int wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream) {
  if (params.exchange == nullptr) return launch_plan<kForm>(plan, params, Job{}, stream);
  return launch_plan<kForm>(plan, params, ExchangeJob{{}, outbox_of(params)}, stream);
}

template <WeightForm kForm>
bool has_wgmma_kernels() {
  static const bool has = has_hopper_kernel(wgmma_kernel<kForm, 64, 1, Job>());
  return has;
}

}  // namespace openspec::cuda
