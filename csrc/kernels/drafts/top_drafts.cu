#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/choose/filter.cuh"
#include "kernels/choose/row.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/drafts/draft_tree.h"

// Compile with -fmad=false (sample_math.h): the CPU's bits are promised.

namespace openspec {
namespace {

using namespace choosing;  // NOLINT

static_assert(kMaxTopDrafts <= kMaxBest && kMaxTopDrafts <= kGroups / 2);

struct Args {
  ChooseParams choose;  // what the rows of drafts and their choice have in common
  int top_k;
  int32_t* tokens;
  float* scores;
};

/// One pass over the logits, a warp per group of a row: adds the noise where nothing is filtered,
/// and finds the groups' largest values, of the logits where something is.
__global__ void __launch_bounds__(kScanThreads)
    top_drafts_scan_kernel(const __grid_constant__ Args args) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const ChooseParams& params = args.choose;
  const int sample = static_cast<int>(blockIdx.y);
  const int group = static_cast<int>(blockIdx.x) * kScanWarps + warp_index();
  const int lane = lane_index();
  const RowWorkspace workspace = row_workspace<false>(params, sample);
  const int row = params.sample_row[sample];
  if (row < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.plan = {};
    return;
  }
  const View raw{row_logits(params, sample), params.vocab_size, 1.0f};
  Batch batch;
  batch.load(raw.values, raw.size, group, lane);
  const RowPlan plan = plan_row<true>(params, sample, row);
  const SamplingParams& sampling = params.sampling[plan.slot];
  GroupWalk walk{raw, nullptr, plan.position + 1, nullptr, false, params.token_of};
  const bool is_filtered = plan.has(RowPlan::kIsFiltered);
  if (plan.has(RowPlan::kIsDrawn) && !is_filtered) {
    walk.view.scale = 1.0f / sampling.temperature;
    walk.noise = &sampling;
    walk.drawn = workspace.edited;
  }
  const GroupBest result = walk.run(batch, group, lane);
  if (lane == 0) {
    workspace.largest[group] =
        is_filtered ? result.largest : static_cast<uint32_t>(result.best >> 32);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.plan = plan;
}

/// The best of what the first kernel has left of a row, by the CTAs of a cluster.
class RowDrafter {
 public:
  __device__ RowDrafter(const Args& args, int sample, const RowPlan& plan,
                        const RowWorkspace& workspace, Shared& shared)
      : args_(args),
        params_(args.choose),
        sample_(sample),
        plan_(plan),
        workspace_(workspace),
        sampling_(params_.sampling[plan.slot]),
        shared_(shared),
        filter_(sampling_, workspace, shared) {}

  __device__ void run() {
    View view{row_logits(params_, sample_), params_.vocab_size, 1.0f};
    filter_.load_largest();
    if (plan_.has(RowPlan::kIsFiltered)) {
      view.scale = 1.0f / sampling_.temperature;
      filter_.narrow(view, [&](auto& source, const Filters& filters) { draw(source, filters); });
      return;
    }
    if (plan_.has(RowPlan::kIsDrawn)) view.values = workspace_.edited;
    take_best(view);
  }

 private:
  /// Of a whole row, whose groups' largest values are known.
  __device__ void take_best(const View& view) {
    RowSource row = filter_.source_of(view);
    const float maximum = filter_.maximum_of(view);
    const float bound = bound_of_kth_largest(shared_, args_.top_k);
    uint64_t total = 0;
    int num_listed = list_from(bound, row, view, [&](float value) {
      total += sm::fixed_mass(sm::exp_f32(value - maximum));
    });
    total = row.sum(total);
    if (num_listed <= kListCapacity) {
      write_listed(num_listed, maximum, total);
    } else {  // a few groups have all that counts
      take_kth(row, view, maximum, total);
    }
  }

  /// Writes what reaches the top_k-th largest value itself, which only equal values pass in
  /// numbers.
  __device__ void take_kth(RowSource& row, const View& view, float maximum, uint64_t total) {
    const float bound = value_of_order(
        select_kth(row, shared_, args_.top_k, [&](float stored) { return view.at(stored); }));
    const int num_listed = list_from(bound, row, view, [](float) {});
    if (num_listed <= kListCapacity) {
      write_listed(num_listed, maximum, total);
      return;
    }
    const auto key_of = [&](int32_t column, float stored) {
      const float value = view.at(stored);
      return value >= bound ? candidate_key(value, column) : 0;
    };
    write(best_of(row, shared_, args_.top_k, key_of), maximum, total);
  }

  /// Lists what reaches the bound, and shows every value to `visit`. Returns how many it does.
  template <typename Visit>
  __device__ int list_from(float bound, RowSource& row, const View& view, const Visit& visit) {
    clear_list(shared_);
    row.for_each([&](int32_t column, float stored) {
      const float value = view.at(stored);
      visit(value);
      if (value >= bound && value > minus_infinity()) add_to_list(shared_, column, value);
    });
    return gather_list(shared_, filter_.cluster());
  }

  __device__ void write_listed(int num_listed, float maximum, uint64_t total) const {
    if (cluster_rank() != 0) return;
    const auto as_stored = [](int32_t, float stored) { return stored; };
    write(best_of_list(shared_, num_listed, args_.top_k, as_stored), maximum, total);
  }

  /// Of what passes the filters: with noise.
  template <typename Source>
  __device__ void draw(Source& source, const Filters& filters) {
    const uint64_t seed = sampling_.seed;
    const int32_t position = plan_.position + 1;
    const auto key_of = [&](int32_t column, float value) -> uint64_t {
      if (!filters.keeps(value)) return 0;
      const int32_t token = token_of_column(params_.token_of, column);
      return candidate_key(filters.view.at(value) + sm::gumbel(seed, position, token), column);
    };
    const auto drawn = [&](int32_t column, float value) {
      const uint64_t key = key_of(column, value);
      return key == 0 ? minus_infinity() : value_of(key);
    };
    uint64_t best = 0;
    source.for_each([&](int32_t column, float value) {
      const uint64_t key = key_of(column, value);
      best = max_key(best, key);
      // A whole row's noise is drawn once; each thread reads what it wrote.
      if (!Source::kIsList) workspace_.edited[column] = key == 0 ? minus_infinity() : value_of(key);
    });
    const float maximum = value_of(source.max(best));
    uint64_t total = 0;
    const auto add = [&](float value) {
      if (value > minus_infinity()) total += sm::fixed_mass(sm::exp_f32(value - maximum));
    };
    if constexpr (Source::kIsList) {
      source.for_each([&](int32_t column, float value) { add(drawn(column, value)); });
      total = source.sum(total);
      write(best_of_list(shared_, source.size(), args_.top_k, drawn), maximum, total);
    } else {
      const View view{workspace_.edited, params_.vocab_size, 1.0f};
      RowSource row = filter_.source_of(view);
      row.for_each([&](int32_t, float value) { add(value); });
      take_kth(row, view, maximum, row.sum(total));
    }
  }

  /// By one warp; after the `num_found` in shared memory the first columns that are not there.
  __device__ void write(int num_found, float maximum, uint64_t total) const {
    if (cluster_rank() != 0 || warp_index() != 0) return;
    const int lane = lane_index();
    int32_t* tokens = args_.tokens + static_cast<int64_t>(sample_) * args_.top_k;
    float* scores = args_.scores + static_cast<int64_t>(sample_) * args_.top_k;
    const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));
    for (int i = lane; i < num_found; i += kWarp) {
      const uint64_t key = shared_.best[i];
      tokens[i] = token_of_column(params_.token_of, id_of(key));
      scores[i] = fminf(0.0f, (value_of(key) - maximum) - log_total);
    }
    int num_written = num_found;
    for (int first = 0; num_written < args_.top_k; first += kWarp) {
      const int column = first + lane;
      bool is_missing = column < params_.vocab_size;
      for (int i = 0; i < num_found; ++i) {
        is_missing = is_missing && id_of(shared_.best[i]) != column;
      }
      const unsigned missing = __ballot_sync(kAllLanes, is_missing);
      const int at = num_written + __popc(missing & ((1u << lane) - 1));
      if (is_missing && at < args_.top_k) {
        tokens[at] = token_of_column(params_.token_of, column);
        scores[at] = minus_infinity();
      }
      num_written += __popc(missing);
    }
  }

  const Args& args_;
  const ChooseParams& params_;
  const int sample_;
  const RowPlan& plan_;
  const RowWorkspace& workspace_;
  const SamplingParams& sampling_;
  Shared& shared_;
  RowFilter filter_;
};

/// A cluster per row. Two CTAs fit an SM, so that one computes while the other waits.
__global__ void __launch_bounds__(kThreads, 2)
    top_drafts_finish_kernel(const __grid_constant__ Args args) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ Shared shared;
  const int sample = static_cast<int>(blockIdx.x) / cluster_size();
  const RowWorkspace workspace = row_workspace<false>(args.choose, sample);
  const RowPlan plan = *workspace.plan;
  if (plan.has(RowPlan::kIsReal)) RowDrafter(args, sample, plan, workspace, shared).run();
}

}  // namespace

size_t top_drafts_workspace_bytes_cuda(int max_num_samples, int vocab_size) {
  return static_cast<size_t>(max_num_samples) * row_workspace_bytes(vocab_size, false);
}

int top_drafts_cuda(const TopDraftsParams& params, void* stream) {
  if (params.top_k < 1 || params.top_k > kMaxTopDrafts || params.top_k > params.vocab_size) {
    return cudaErrorInvalidValue;
  }
  if (params.num_samples == 0) return cudaSuccess;
  const Args args = {.choose = {.rows = params.rows,
                                .sample_row = params.sample_row,
                                .num_samples = params.num_samples,
                                .logits = params.logits,
                                .vocab_size = params.vocab_size,
                                .is_draft = true,
                                // Here no more than that nothing is filtered (plan_row).
                                .has_own_noise = params.ignores_filters,
                                .token_of = params.token_of,
                                .sampling = params.sampling,
                                .workspace = static_cast<float*>(params.workspace)},
                     .top_k = params.top_k,
                     .tokens = params.tokens,
                     .scores = params.scores};
  const dim3 grid(kGroups / kScanWarps, static_cast<unsigned>(params.num_samples));
  const int error = cuda::launch(top_drafts_scan_kernel, grid, dim3(kScanThreads), 0, stream, args);
  return error != cudaSuccess
             ? error
             : launch_clusters(top_drafts_finish_kernel, params.num_samples, args, stream);
}

}  // namespace openspec
