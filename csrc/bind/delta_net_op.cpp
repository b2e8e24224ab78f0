// Gated DeltaNet over one sequence as a torch op, `torch.ops.openspec.delta_net`, on the CPU.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "bind/check_shape.h"
#include "core/thread_pool.h"
#include "kernels/delta_net/delta_net.h"

namespace openspec {
namespace {

using at::Tensor;

Tensor delta_net(const Tensor& qkv, const Tensor& z, const Tensor& b, const Tensor& a,
                 const Tensor& conv_weight, const Tensor& a_log, const Tensor& dt_bias,
                 const Tensor& norm_weight, int64_t num_k_heads, double eps, int64_t chunk) {
  TORCH_CHECK_VALUE(qkv.dim() == 2 && b.dim() == 2, "qkv and b must have 2 dimensions");
  TORCH_CHECK_VALUE(chunk >= 1 && num_k_heads >= 1, "chunk and num_k_heads must be positive");
  const int64_t num_tokens = qkv.size(0), num_v_heads = b.size(1);
  const at::ScalarType type = qkv.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16, "qkv is ", type);
  const DeltaShape shape = {static_cast<int>(num_k_heads), static_cast<int>(num_v_heads)};
  check_shape(qkv, "qkv", type, {num_tokens, shape.conv_width()});
  check_shape(z, "z", type, {num_tokens, shape.v_width()});
  check_shape(b, "b", type, {num_tokens, num_v_heads});
  check_shape(a, "a", type, {num_tokens, num_v_heads});
  check_shape(conv_weight, "conv_weight", at::kFloat, {kDeltaTaps, shape.conv_width()});
  check_shape(a_log, "a_log", at::kFloat, {num_v_heads});
  check_shape(dt_bias, "dt_bias", at::kFloat, {num_v_heads});
  check_shape(norm_weight, "norm_weight", at::kFloat, {kDeltaHeadDim});

  const Tensor out = at::empty_like(z);
  DeltaNetParams params;
  params.shape = shape;
  params.dtype = type == at::kFloat ? DType::kF32 : DType::kBF16;
  params.qkv_stride = shape.conv_width();
  params.z_stride = shape.v_width();
  params.b_stride = params.a_stride = num_v_heads;
  params.conv_weight = conv_weight.const_data_ptr<float>();
  params.a_log = a_log.const_data_ptr<float>();
  params.dt_bias = dt_bias.const_data_ptr<float>();
  params.norm_weight = norm_weight.const_data_ptr<float>();
  params.eps = static_cast<float>(eps);
  constexpr int kRing = 4 * kDeltaBlock;
  std::vector<std::byte> records(kRing * shape.record_bytes(params.dtype));
  std::vector<std::byte> conv_rows(kRing * shape.conv_row_bytes(params.dtype));
  std::vector<float> state(static_cast<size_t>(shape.num_tiles()) * DeltaStates::kTileBytes / 4);
  params.records = {records.data(), kRing, shape.record_bytes(params.dtype)};
  params.conv_rows = {conv_rows.data(), kRing, shape.conv_row_bytes(params.dtype)};
  const int32_t zero = 0;
  params.states.data = reinterpret_cast<std::byte*>(state.data());
  params.states.tiles_per_slice = shape.num_tiles();
  params.states.pages_per_state = 1;
  params.states.read_pages = params.states.write_pages = &zero;

  ThreadPool pool(1);
  std::vector<std::byte> workspace(
      delta_net_workspace_bytes_cpu(shape, static_cast<int>(std::min(chunk, num_tokens)), 1));
  params.workspace = workspace.data();
  for (int64_t begin = 0; begin < num_tokens; begin += chunk) {
    const auto num_rows = static_cast<int>(std::min(chunk, num_tokens - begin));
    const auto first = static_cast<int32_t>(begin);
    const std::array<int32_t, 2> span_begin = {0, num_rows};
    const std::vector<int32_t> row_span(static_cast<size_t>(num_rows), 0);
    const int32_t read = folded_blocks(first);
    const int32_t written = folded_blocks(first + num_rows);
    params.rows.num_rows = num_rows;
    params.rows.num_spans = 1;
    params.rows.row_span = row_span.data();
    params.rows.span_begin = span_begin.data();
    params.rows.span_kv_len = &first;
    params.rows.span_seq = &zero;
    params.folded_read = &read;
    params.folded_write = &written;
    const auto at = [&](const Tensor& rows) {
      return static_cast<std::byte*>(rows.data_ptr()) +
             begin * rows.stride(0) * static_cast<int64_t>(rows.element_size());
    };
    params.qkv = at(qkv);
    params.z = at(z);
    params.b = at(b);
    params.a = at(a);
    params.out = at(out);
    delta_net_cpu({.pool = &pool}, params);
  }
  return out;
}

}  // namespace
}  // namespace openspec

TORCH_LIBRARY_FRAGMENT(openspec, m) {
  m.def(
      "delta_net(Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor conv_weight, Tensor a_log, "
      "Tensor dt_bias, Tensor norm_weight, int num_k_heads, float eps, int chunk) -> Tensor");
}

TORCH_LIBRARY_IMPL(openspec, CPU, m) { m.impl("delta_net", openspec::delta_net); }
