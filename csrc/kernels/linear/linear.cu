#include <cuda_runtime.h>

#include "kernels/exchange/exchange.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/weight_form.cuh"

namespace openspec {
namespace cuda {

bool linear_stream_has_registers(const LinearParams& params) {
  return with_form(params.weight, [&](auto form) { return stream_has_registers<form()>(params); });
}

int linear_stream(const LinearParams& params, void* stream, const StreamPlan& plan) {
  return with_form(params.weight,
                   [&](auto form) { return stream_as<form()>(params, stream, plan); });
}

}  // namespace cuda

namespace {

/// Whether sums that are sent are those of whole rows, and a round of them fits.
bool has_legal_exchange(const LinearParams& params) {
  if (params.exchange == nullptr) return true;
  const PackedLinear& weight = params.weight;
  const Exchange& exchange = *params.exchange;
  if (params.partials != nullptr || !weight.has_all_outputs() ||
      !is_legal_round(exchange, weight.num_splits, params.num_rows, weight.num_outputs)) {
    return false;
  }
  // The first rank has those that are added before others'.
  const SplitRange own = weight.own_splits();
  const int first_sum =
      round_form(exchange.num_ranks, weight.num_splits, params.num_rows, weight.num_outputs)
          .first_sum;
  return first_sum == 0 ||
         (exchange.rank == 0 ? own.begin == 0 && own.end == first_sum + 1 : own.begin > first_sum);
}

int launch_linear(const LinearParams& params, void* stream) {
  // Rows up to which nothing is faster than streaming with the activations in registers. For a
  // tile more there are registers too, but then no other block fits beside these.
  constexpr int kStreamRows = 24;
  const bool streams = params.num_rows <= kStreamRows && cuda::linear_stream_has_registers(params);
  if (!streams && cuda::linear_wgmma_takes(params.weight, params.num_rows)) {
    return cuda::linear_wgmma(params, stream);
  }
  return cuda::linear_stream(params, stream);
}

}  // namespace

int linear_cuda(const LinearParams& given, void* stream) {
  if (!has_legal_exchange(given)) return cudaErrorInvalidValue;
  LinearParams params = given;
  if (given.exchange != nullptr) params.partials = cuda::own_inbox(*given.exchange).words;
  const PackedLinear& weight = params.weight;
  const bool is_swiglu = weight.epilogue == LinearEpilogue::kSwiGlu;
  const auto row_bytes = linear_row_stride(params) * int64_t(dtype_bytes(params.out_dtype));
  if (weight.layout != LinearLayout::kTiles || params.dtype != DType::kBF16 ||
      weight.num_outputs % kLinearUnit != 0 || weight.num_inputs % cuda::kLinearStep != 0 ||
      !has_legal_scales(weight) || !has_legal_bias(params) || !has_legal_shard(weight) ||
      !has_legal_output(params) || row_bytes % 16 != 0 ||
      (is_swiglu && params.out_dtype != DType::kBF16)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0 || weight.num_outputs == 0) return cudaSuccess;
  return launch_linear(params, stream);
}

}  // namespace openspec
