#pragma once

/// What a plan of linear_wgmma means for a product, on the host.

#include <algorithm>

#include "kernels/linear/weight_form.cuh"
#include "kernels/linear/wgmma.h"
#include "kernels/linear/wgmma_tiles.cuh"

namespace openspec::cuda {

inline constexpr int kSharedKib = 226;  // of a block, barriers aside

inline int num_groups(const WgmmaPlan& plan) { return ceil_div(plan.tile_units, kGroupUnits); }

inline int stage_bytes(const WgmmaPlan& plan, WeightForm form) {
  return plan.tile_units * unit_bytes(form) + plan.tile_rows * kRowBytes;
}

inline Outbox outbox_of(const LinearParams& params) {
  const PackedLinear& weight = params.weight;
  return outbox_of(*params.exchange, weight.num_splits, params.num_rows, weight.num_outputs);
}

/// Whether the sums of splits stay apart.
inline bool are_apart(const LinearParams& params) {
  if (params.exchange == nullptr) return params.partials != nullptr;
  return !outbox_of(params).adds_splits();
}

/// Splits whose sums stay apart, or one for all of them.
inline int num_splits_apart(const LinearParams& params) {
  return are_apart(params) ? params.weight.own_splits().size() : 1;
}

inline bool writes_f32(const LinearParams& params) {
  return params.partials != nullptr || params.out_dtype == DType::kF32;
}

inline int buffer_bytes(const WgmmaPlan& plan, const LinearParams& params) {
  const bool adds_splits = params.weight.num_splits > 1 && !are_apart(params);
  const bool adds_chains = stores_chains(form_of(params.weight), plan.tile_rows);
  const bool is_swiglu = params.weight.epilogue == LinearEpilogue::kSwiGlu;
  return num_groups(plan) * group_buffer_bytes(plan.tile_rows, adds_splits, adds_chains,
                                               writes_f32(params), is_swiglu,
                                               params.exchange != nullptr);
}

inline int num_stages(const WgmmaPlan& plan, const LinearParams& params) {
  const int bytes = plan.shared_kib * 1024 - kAlignment - buffer_bytes(plan, params);
  return std::min(kMaxStages, bytes / stage_bytes(plan, form_of(params.weight)));
}

/// Whether a ring has a stage more than it needs.
inline bool has_stages(const WgmmaPlan& plan, const LinearParams& params) {
  return num_stages(plan, params) > min_stages(form_of(params.weight));
}

/// Of a tile, at most: whole warpgroups, whose sums leave room for the ring.
inline int max_units(const LinearParams& params, int tile_rows) {
  WgmmaPlan plan = {tile_rows, kMaxUnits};
  while (plan.tile_units > kGroupUnits && !has_stages(plan, params)) plan.tile_units -= kGroupUnits;
  return plan.tile_units;
}

/// Units of the last tile of a run.
inline int last_units(int run_units, int tile_units) { return (run_units - 1) % tile_units + 1; }

/// The kernels of a form, in wgmma_bf16.cu and wgmma_e4m3.cu: by a plan, and whether the current
/// device has them.
template <WeightForm kForm>
int wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream);
template <WeightForm kForm>
bool has_wgmma_kernels();

}  // namespace openspec::cuda
