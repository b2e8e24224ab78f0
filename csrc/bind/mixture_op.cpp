// A mixture of experts as a torch op, `torch.ops.openspec.mixture`, on the CPU.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "bind/check_shape.h"
#include "core/thread_pool.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"

namespace openspec {
namespace {

using at::Tensor;

/// Matrices [count, outputs, inputs] as linears read them, which lie in `packed`.
LinearStack pack(const Tensor& matrices, LinearEpilogue epilogue, std::vector<uint8_t>& packed) {
  LinearStack stack;
  PackedLinear& first = stack.first;
  stack.count = static_cast<int>(matrices.size(0));
  first.num_outputs = static_cast<int>(matrices.size(1));
  first.num_inputs = static_cast<int>(matrices.size(2));
  first.epilogue = epilogue;
  first.layout = linear_layout_cpu(first.num_inputs);
  stack.bytes = linear_packed_bytes_cpu(first);
  packed.resize(stack.bytes * static_cast<size_t>(stack.count));
  first.data = packed.data();
  for (int i = 0; i < stack.count; ++i) {
    linear_pack_cpu(first, matrices[i].const_data_ptr(), 0, first.num_outputs,
                    packed.data() + stack.bytes * static_cast<size_t>(i));
  }
  return stack;
}

std::tuple<Tensor, Tensor, Tensor> mixture(const Tensor& x, const Tensor& router,
                                           const Tensor& gate_up, const Tensor& down, int64_t top_k,
                                           bool norm_top_k) {
  const at::ScalarType type = x.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16, "x is ", type);
  TORCH_CHECK_VALUE(x.dim() == 2 && router.dim() == 2 && down.dim() == 3,
                    "x and router must have 2 dimensions, down 3");
  const int64_t num_rows = x.size(0), hidden = x.size(1);
  const int64_t num_experts = router.size(0), inner = down.size(2);
  check_shape(x, "x", type, {num_rows, hidden});
  check_shape(router, "router", at::kBFloat16, {num_experts, hidden});
  check_shape(gate_up, "gate_up", at::kBFloat16, {num_experts, 2 * inner, hidden});
  check_shape(down, "down", at::kBFloat16, {num_experts, hidden, inner});
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= kMaxExperts && hidden >= 1 && inner >= 1,
                    "experts must be 1 to ", kMaxExperts, " and not empty");
  TORCH_CHECK_VALUE(top_k >= 1 && top_k <= std::min<int64_t>(kMaxTopExperts, num_experts),
                    "top_k must be in [1, ", std::min<int64_t>(kMaxTopExperts, num_experts),
                    "], is ", top_k);
  const Tensor out = at::empty_like(x);
  const Tensor expert = at::empty({num_rows, top_k}, x.options().dtype(at::kInt));
  const Tensor weight = at::empty({num_rows, top_k}, x.options().dtype(at::kFloat));
  const auto rows = static_cast<int>(num_rows), width = static_cast<int>(hidden);
  const auto count = static_cast<int>(num_experts), k = static_cast<int>(top_k);
  const DType dtype = type == at::kFloat ? DType::kF32 : DType::kBF16;
  std::vector<uint8_t> packed[3];
  std::vector<std::byte> workspace(
      std::max(route_experts_workspace_bytes_cpu(rows, width, count),
               experts_workspace_bytes_cpu(rows, width, static_cast<int>(inner), count, k, dtype)));
  ThreadPool pool(1);
  const ExecContext exec = {.pool = &pool};
  route_experts_cpu(exec,
                    {.router = pack(router.unsqueeze(0), LinearEpilogue::kNone, packed[0]).first,
                     .x = x.const_data_ptr(),
                     .expert = expert.mutable_data_ptr<int32_t>(),
                     .weight = weight.mutable_data_ptr<float>(),
                     .num_rows = rows,
                     .top_k = k,
                     .norm_top_k = norm_top_k,
                     .dtype = dtype,
                     .workspace = workspace.data()});
  experts_cpu(exec, {.gate_up = pack(gate_up, LinearEpilogue::kSwiGlu, packed[1]),
                     .down = pack(down, LinearEpilogue::kNone, packed[2]),
                     .x = x.const_data_ptr(),
                     .expert = expert.const_data_ptr<int32_t>(),
                     .weight = weight.const_data_ptr<float>(),
                     .out = out.mutable_data_ptr(),
                     .num_rows = rows,
                     .top_k = k,
                     .dtype = dtype,
                     .workspace = workspace.data()});
  return {out, expert, weight};
}

}  // namespace
}  // namespace openspec

TORCH_LIBRARY_FRAGMENT(openspec, m) {
  m.def(
      "mixture(Tensor x, Tensor router, Tensor gate_up, Tensor down, int top_k, bool norm_top_k) "
      "-> (Tensor out, Tensor expert, Tensor weight)");
}

TORCH_LIBRARY_IMPL(openspec, CPU, m) { m.impl("mixture", openspec::mixture); }
