#include <algorithm>
#include <cmath>
#include <iterator>

#include "kernels/common/launch.cuh"
#include "kernels/linear/wgmma.h"
#include "kernels/linear/wgmma_plan.cuh"

namespace openspec::cuda {
namespace {

constexpr int kMinRows = 9;  // below, streaming through mma.sync is as fast

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
  const double unit_bytes =
      num_inputs * static_cast<double>(format_bytes(weight.format, kLinearUnit, 1));
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
      for (int tile_units = 1; tile_units <= max_units(params, tile_rows); ++tile_units) {
        for (const int runs : {0, num_runs}) {
          const WgmmaPlan plan = {tile_rows, tile_units, cluster, runs};
          if (!has_stages(plan, params)) continue;
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
  const int max_runs = std::max(1, ceil_div(num_units, min_units));
  // Of few rows a run has neighbouring splits where more multiprocessors get one so.
  const int most_splits = plan.tile_rows > 64 ? 1 : num_splits;
  for (int splits = 1; splits <= most_splits && num_splits % splits == 0; splits *= 2) {
    const int num_parts = num_splits / splits, num_before = num_splits / plan.run_splits;
    const int runs = std::clamp(num_sms() / plan.cluster / num_parts, 1, max_runs);
    if (runs * num_parts <= plan.num_runs * num_before) continue;
    plan.num_runs = runs;
    plan.run_splits = splits;
  }
  const int run_units = ceil_div(num_units, plan.num_runs);
  const int num_tiles = ceil_div(run_units, max_units(params, plan.tile_rows));
  plan.tile_units = ceil_div(run_units, num_tiles);
  if (plan.tile_rows > 64 && num_tiles > 1) {  // multiplying takes the time: whole warpgroups
    plan.tile_units = ceil_div(plan.tile_units, kGroupUnits) * kGroupUnits;
  }
  plan.shared_kib = run_shared_kib(plan);
  return plan;
}

int linear_wgmma_as(const WgmmaPlan& plan, const LinearParams& params, void* stream) {
  return with_form(params.weight,
                   [&](auto form) { return wgmma_as<form()>(plan, params, stream); });
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
         shape.num_inputs % kLinearStep == 0 && shape.num_outputs % kLinearUnit == 0 &&
         with_form(shape, [](auto form) { return has_wgmma_kernels<form()>(); });
}

}  // namespace openspec::cuda
