#include <algorithm>

#include "kernels/common/hopper.h"
#include "kernels/common/per_device.h"
#include "kernels/experts/tile_experts.cuh"
#include "kernels/linear/wgmma_launch.cuh"

namespace openspec::cuda {
namespace {

/// Rows of x in boxes of kBoxRows, as the one plane of three dimensions.
bool map_places(const TileProduct& product, CUtensorMap* map) {
  const auto num_inputs = static_cast<cuuint64_t>(product.weights.first.num_inputs);
  const auto num_rows = static_cast<cuuint64_t>(product.max_places);
  const cuuint64_t sizes[] = {num_inputs, num_rows, 1};
  const cuuint64_t strides[] = {num_inputs * 2, num_rows * num_inputs * 2};
  const cuuint32_t box[] = {kStageInputs, kBoxRows, 1};
  const cuuint32_t every[] = {1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(product.x),
                        sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <WeightForm kForm, int kMost, bool kIsGateUp>
int launch_tiles(const TileProduct& product, void* stream) {
  constexpr auto kKernel = expert_tiles_kernel<kForm, kMost, kIsGateUp>;
  const int prepared = per_device([] { return prepare_shared(kKernel, kSharedKib * 1024); });
  if (prepared != cudaSuccess) return prepared;
  const LinearStack& stack = product.weights;
  PackedLinear all = stack.first;
  all.num_outputs *= stack.count;
  CUtensorMap weights, rows;
  if (!map_weights(all, kExpertUnits, /*cluster=*/1, &weights) || !map_places(product, &rows)) {
    return cudaErrorInvalidValue;
  }
  constexpr int kBytes = kSharedKib * 1024 - kAlignment -
                         kExpertGroups * expert_buffer_bytes<kForm, kMost, kIsGateUp>();
  constexpr int kStages = std::min(kMaxStages, kBytes / expert_stage_bytes<kForm, kMost>());
  static_assert(kStages > min_stages(kForm));
  const ExpertTilesJob job = {.weight = stack.first,
                              .num_scales = stack.first.num_scales(),
                              .pairs = product.pairs,
                              .out = product.out,
                              .num_units = stack.first.num_outputs / kLinearUnit,
                              .num_steps = stack.first.num_inputs / kLinearStep,
                              .num_stages = kStages,
                              .tile_rows = product.tile_rows};
  const int num_clusters = num_sms() / kExpertCluster;
  return launch_clusters(kExpertCluster, kKernel, dim3(num_clusters * kExpertCluster),
                         dim3(kExpertThreads), kSharedKib * 1024, stream, weights, rows, job);
}

template <WeightForm kForm, int kMost>
int launch_tiles(const TileProduct& product, void* stream) {
  return product.weights.first.epilogue == LinearEpilogue::kSwiGlu
             ? launch_tiles<kForm, kMost, true>(product, stream)
             : launch_tiles<kForm, kMost, false>(product, stream);
}

}  // namespace

bool takes_tiles(const LinearStack& gate_up, const LinearStack& down, int num_pairs) {
  // Of an expert on average. With fewer, streaming is faster unless few experts have most rows.
  const int min_rows = is_e4m3(form_of(down.first)) ? 8 : 5;
  const auto fits = [](const PackedLinear& weight) {
    return weight.num_inputs / kLinearStep >= kLinearChains;
  };
  static const bool has_kernel =
      has_hopper_kernel(expert_tiles_kernel<WeightForm::kPlain, kTileRows, true>);
  return has_kernel && num_pairs / down.count >= min_rows && fits(gate_up.first) &&
         fits(down.first);
}

int multiply_tiles(const TileProduct& product, void* stream) {
  return with_form(product.weights.first, [&](auto form) {
    constexpr WeightForm kForm = decltype(form)::value;
    constexpr int kShort = has_blocks(kForm) ? kBlockTileRows : kTileRows;
    return product.tile_rows == kShort ? launch_tiles<kForm, kShort>(product, stream)
                                       : launch_tiles<kForm, kTileRows>(product, stream);
  });
}

}  // namespace openspec::cuda
