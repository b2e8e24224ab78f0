#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/common/per_device.h"
#include "kernels/experts/experts.h"
#include "kernels/experts/stream_experts.cuh"
#include "kernels/experts/tile_experts.h"
#include "kernels/linear/stream_launch.cuh"

namespace openspec {
namespace {

using namespace cuda;

constexpr int kColumns = 8;  // of a thread
constexpr int kGatherWarps = 8;
constexpr int kMinSlots = 2;           // of a ring
constexpr int kStreamTileRows = 8;     // of a stream's tile
constexpr int kMaxRowsOfOneTile = 64;  // of a step; with codes

/// A warp for each place: the row of x that belongs there. A fence, so that what comes after it may
/// read how pairs are sorted before its wait.
__global__ void __launch_bounds__(32 * kGatherWarps)
    gather_kernel(const __nv_bfloat16* x, SortedPairs pairs, __nv_bfloat16* to, int num_pairs,
                  int width, int top_k) {
  constexpr int kAtOnce = 8;  // packs of a lane that are under way together
  constexpr int kStride = 32 * kColumns;
  const int lane = threadIdx.x % 32;
  const int64_t place = blockIdx.x * kGatherWarps + threadIdx.x / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  // A place that is not taken has what lay there.
  const int pair = place < num_pairs ? __ldcg(pairs.pair + place) : 0;
  if (place >= __ldcg(pairs.num_places)) return;
  const __nv_bfloat16* const from = x + int64_t{pair / top_k} * width;
  for (int first = lane * kColumns; first < width; first += kAtOnce * kStride) {
    Bf16Pack<kColumns> packs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + i * kStride;
      if (column < width) packs[i] = load_pack<Bf16Pack<kColumns>>(from + column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + i * kStride;
      if (column < width) store_pack(to + place * width + column, packs[i]);
    }
  }
}

/// Where things lie in the workspace, in bytes. Those of fewer rows lie within those of more.
struct Places {
  size_t counts = 0;  // of SortedPairs
  size_t segment, pair, place;
  size_t inner;   // [places] what comes between the two products
  size_t hidden;  // [places] rows of x, then those of down, or of down [num_pairs] alone
  size_t total;

  Places(int num_rows, int top_k, int hidden_size, int intermediate_size, int num_experts) {
    const auto area = [](size_t count, size_t bytes) { return (count * bytes + 255) / 256 * 256; };
    const auto num_pairs = static_cast<size_t>(num_rows) * static_cast<size_t>(top_k);
    const size_t max_segments = static_cast<size_t>(num_experts) + num_pairs / 8;
    const size_t few_places = FewRowsTable::kSegments * kFewRows;
    segment = counts + area(2, sizeof(int32_t));
    pair = segment + area(max_segments, sizeof(ExpertRange));
    place = pair + area(num_pairs, sizeof(int32_t));
    inner = place + area(num_pairs, sizeof(int32_t));
    hidden = inner + area(std::max(num_pairs, few_places) * static_cast<size_t>(intermediate_size),
                          sizeof(__nv_bfloat16));
    total = hidden + area(num_pairs * static_cast<size_t>(hidden_size), sizeof(__nv_bfloat16));
  }
};

/// Of shared memory, for each of two blocks on a multiprocessor.
int half_limit() { return device_limits().shared_per_sm / 2 - kReservedBytes; }

/// In steps.
int longest_chain(const PackedLinear& weight) {
  return std::max(1, ceil_div(longest_split(weight), kLinearChains));
}

template <WeightForm kForm, int kTiles, bool kIsGateUp>
int launch_products(ExpertsJob job, void* stream) {
  constexpr auto kKernel = experts_kernel<kForm, kTiles, kIsGateUp>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  if (error != cudaSuccess) return error;
  job.chain_steps = longest_chain(job.weights.first);
  if (unit_lanes<kForm>(job.chain_steps) > 32) return cudaErrorInvalidValue;
  constexpr int kUnits = units_at_once(kForm, kTiles);
  constexpr int kSlotBytes = ExpertRing<kForm, kUnits>::kSlotBytes;
  const auto bytes = [&] {
    return ExpertsShared(kSlotBytes, ExpertSums<kTiles>::kBytes, job).total;
  };
  job.num_slots = kMinSlots;
  job.num_places = kStreamTileRows * kTiles;
  const bool is_pair = bytes() <= half_limit();
  const int limit = is_pair ? half_limit() : shared_limit();
  job.num_slots = 4 / kUnits;  // longer rings hold up the activations
  while (bytes() > limit && job.num_slots > 1) --job.num_slots;
  if (bytes() > limit) return cudaErrorInvalidValue;
  // Those of few rows are the same for all experts, in the first product.
  const bool is_fixed = kIsGateUp && job.num_rows <= kFewRows;
  const int more = (limit - bytes()) / (kStreamWarps * activation_pitch(job.chain_steps));
  job.num_places +=
      is_fixed ? 0 : std::min(job.num_places, more / kStreamTileRows * kStreamTileRows);
  return launch(kKernel, dim3(num_sms() * (is_pair ? 2 : 1)), dim3(kStreamThreads), bytes(), stream,
                job);
}

template <bool kIsGateUp>
int launch_products(const ExpertsJob& job, int num_tiles, void* stream) {
  return with_form(job.weights.first, [&](auto form) {
    constexpr WeightForm kForm = decltype(form)::value;
    return num_tiles == 1 ? launch_products<kForm, 1, kIsGateUp>(job, stream)
                          : launch_products<kForm, 2, kIsGateUp>(job, stream);
  });
}

/// Whether a block holds a segment of two tiles, beside the shortest ring.
bool fits_two(const PackedLinear& weight) {
  ExpertsJob job{};
  job.num_slots = kMinSlots;
  job.num_places = 2 * kStreamTileRows;
  job.chain_steps = longest_chain(weight);
  return with_form(weight, [&](auto form) {
    constexpr int kSlotBytes = ExpertRing<decltype(form)::value, 1>::kSlotBytes;
    return ExpertsShared(kSlotBytes, ExpertSums<2>::kBytes, job).total <= shared_limit();
  });
}

/// Tiles of a segment, 1 or 2. It decides speed alone: an expert's weights are read again for every
/// segment, but codes of two units are multiplied at once where a segment has one tile.
int tiles_for(const ExpertsParams& params) {
  const PackedLinear& weight = params.down.first;
  const int most = weight.format == MatrixFormat::kE4M3 ? kMaxRowsOfOneTile : kFewRows;
  return params.num_rows > most && fits_two(params.gate_up.first) && fits_two(weight) ? 2 : 1;
}

bool is_legal(const ExpertsParams& params) {
  const PackedLinear &gate_up = params.gate_up.first, &down = params.down.first;
  const auto fits = [](const PackedLinear& weight) {
    return weight.layout == LinearLayout::kTiles && weight.num_splits == 1 &&
           weight.num_outputs % kLinearUnit == 0 && weight.num_inputs % kLinearStep == 0 &&
           weight.bias == nullptr && has_legal_scales(weight);
  };
  return params.dtype == DType::kBF16 && fits(gate_up) && fits(down) &&
         gate_up.epilogue == LinearEpilogue::kSwiGlu && down.epilogue == LinearEpilogue::kNone &&
         gate_up.num_outputs == 2 * down.num_inputs && gate_up.num_inputs == down.num_outputs &&
         params.gate_up.count == params.down.count && params.down.count <= kMaxExperts &&
         params.top_k >= 1 && params.top_k <= std::min(kMaxTopExperts, params.down.count) &&
         params.terms != nullptr && are_aligned(params.x, params.expert, params.workspace);
}

/// The kernels of a layer's experts, one after the other.
class ExpertsLaunch {
 public:
  ExpertsLaunch(const ExpertsParams& params, void* stream)
      : params_(params),
        stream_(stream),
        num_pairs_(params.num_rows * params.top_k),
        width_(params.down.first.num_outputs) {
    const Places places(params.num_rows, params.top_k, width_, params.down.first.num_inputs,
                        params.down.count);
    auto* const base = static_cast<uint8_t*>(params.workspace);
    auto* const counts = reinterpret_cast<int32_t*>(base + places.counts);
    pairs_ = {counts,
              counts + 1,
              reinterpret_cast<ExpertRange*>(base + places.segment),
              reinterpret_cast<int32_t*>(base + places.pair),
              reinterpret_cast<int32_t*>(base + places.place),
              params.counts};
    inner_ = reinterpret_cast<__nv_bfloat16*>(base + places.inner);
    hidden_ = reinterpret_cast<__nv_bfloat16*>(base + places.hidden);
  }

  int run() {
    return takes_tiles(params_.gate_up, params_.down, num_pairs_) ? multiply_in_tiles()
                                                                  : stream_weights();
  }

 private:
  int sort(int segment_rows) {
    return launch(sort_pairs_kernel, dim3(params_.down.count), dim3(kSortThreads), 0, stream_,
                  params_.expert, num_pairs_, segment_rows, pairs_);
  }

  int stream_weights() {
    const int num_tiles = tiles_for(params_);
    if (params_.num_rows > kFewRows) {
      const int error = sort(kStreamTileRows * num_tiles);
      if (error != cudaSuccess) return error;
    }
    ExpertsJob job = {.weights = params_.gate_up,
                      .x = static_cast<const __nv_bfloat16*>(params_.x),
                      .out = inner_,
                      .expert = params_.expert,
                      .pairs = pairs_,
                      .num_rows = params_.num_rows,
                      .top_k = params_.top_k};
    int error = launch_products<true>(job, num_tiles, stream_);
    if (error != cudaSuccess) return error;
    job.weights = params_.down;
    job.x = inner_;
    job.out = hidden_;
    leave_terms(nullptr);
    return launch_products<false>(job, num_tiles, stream_);
  }

  int multiply_in_tiles() {
    const int rows = tile_rows(params_.down, num_pairs_);
    int error = sort(rows);
    if (error != cudaSuccess) return error;
    error = launch(gather_kernel, dim3(ceil_div(num_pairs_, kGatherWarps)), dim3(32 * kGatherWarps),
                   0, stream_, static_cast<const __nv_bfloat16*>(params_.x), pairs_, hidden_,
                   num_pairs_, width_, params_.top_k);
    if (error != cudaSuccess) return error;
    error = multiply_tiles({params_.gate_up, hidden_, inner_, pairs_, num_pairs_, rows}, stream_);
    if (error != cudaSuccess) return error;
    leave_terms(pairs_.place);
    return multiply_tiles({params_.down, inner_, hidden_, pairs_, num_pairs_, rows}, stream_);
  }

  void leave_terms(const int32_t* place) const {
    *params_.terms = {hidden_, place, params_.expert, params_.weight, params_.top_k};
  }

  const ExpertsParams& params_;
  void* stream_;
  int num_pairs_, width_;
  SortedPairs pairs_;
  __nv_bfloat16 *inner_, *hidden_;
};

}  // namespace

size_t experts_workspace_bytes_cuda(int max_num_rows, int hidden_size, int intermediate_size,
                                    int num_experts, int top_k) {
  return Places(max_num_rows, top_k, hidden_size, intermediate_size, num_experts).total;
}

int experts_cuda(const ExpertsParams& params, void* stream) {
  if (!is_legal(params)) return cudaErrorInvalidValue;
  return params.num_rows == 0 ? cudaSuccess : ExpertsLaunch(params, stream).run();
}

}  // namespace openspec
