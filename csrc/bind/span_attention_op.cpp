// Attention as torch ops, for tests, benchmarks and research code: span_attention_workspace_bytes,
// span_attention_plan and span_attention.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>

#include "bind/checks.h"
#include "core/thread_pool.h"
#include "kernels/attention/span_attention.h"
#include "kernels/common/exec.h"

#ifdef OPENSPEC_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace openspec {
namespace {

using at::Tensor;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

/// What the ops take, in the order of their schema.
struct Arguments {
  const Tensor &q, &kv;
  const Tensor &row_span, &row_parent, &row_position;
  const Tensor &span_begin, &span_kv_len, &span_seq;
  const Tensor &page_table, &workspace;
  int64_t expected_kv_len;
  bool may_have_trees;
};

/// What holds of tensors whose sizes are symbols, too.
void check_types(const Arguments& a) {
  TORCH_CHECK_TYPE(a.q.scalar_type() == at::kFloat || a.q.scalar_type() == at::kBFloat16,
                   "q must be float32 or bfloat16, is ", a.q.scalar_type());
  TORCH_CHECK_TYPE(a.kv.scalar_type() == a.q.scalar_type(), "kv must be ", a.q.scalar_type(),
                   ", as q, is ", a.kv.scalar_type());
  TORCH_CHECK_VALUE(a.q.dim() == 3, "q must have 3 dimensions, has ", a.q.dim());
  TORCH_CHECK_VALUE(a.kv.dim() == 5, "kv must have 5 dimensions, has ", a.kv.dim());
  check_int32(a.row_span, "row_span", 1);
  check_int32(a.row_parent, "row_parent", 1);
  check_int32(a.row_position, "row_position", 1);
  check_int32(a.span_begin, "span_begin", 1);
  check_int32(a.span_kv_len, "span_kv_len", 1);
  check_int32(a.span_seq, "span_seq", 1);
  check_int32(a.page_table, "page_table", 2);
  check_range(a.expected_kv_len, "expected_kv_len", 0, kMaxInt);
}

void check_sizes(const Arguments& a) {
  TORCH_CHECK_VALUE(a.kv.size(1) == 2, "kv must hold K and V in its second dimension, has ",
                    a.kv.size(1), " there");
  TORCH_CHECK_VALUE(a.kv.size(4) == a.q.size(2), "kv must have the head_dim of q, ", a.q.size(2),
                    ", has ", a.kv.size(4));
  TORCH_CHECK_VALUE(a.kv.size(2) > 0 && a.q.size(1) % a.kv.size(2) == 0,
                    "q must have a multiple of the ", a.kv.size(2), " KV heads, has ", a.q.size(1));
  const int64_t num_rows = a.q.size(0), num_spans = a.span_kv_len.size(0);
  const auto check_size = [](const Tensor& list, const char* name, int64_t size) {
    TORCH_CHECK_VALUE(list.size(0) == size, name, " must have ", size, " entries, has ",
                      list.size(0));
  };
  check_size(a.row_span, "row_span", num_rows);
  check_size(a.row_parent, "row_parent", num_rows);
  check_size(a.row_position, "row_position", num_rows);
  check_size(a.span_begin, "span_begin", num_spans + 1);
  check_size(a.span_seq, "span_seq", num_spans);
}

int64_t max_tokens_of(const Arguments& a) { return a.page_table.size(1) * a.kv.size(3); }

SpanAttentionParams params_of(const Arguments& a) {
  check_types(a);
  check_sizes(a);
  for (const Tensor* tensor :
       {&a.q, &a.kv, &a.row_span, &a.row_parent, &a.row_position, &a.span_begin, &a.span_kv_len,
        &a.span_seq, &a.page_table, &a.workspace}) {
    TORCH_CHECK_VALUE(tensor->device() == a.q.device(), "all tensors must be on ", a.q.device(),
                      ", one is on ", tensor->device());
    TORCH_CHECK_VALUE(tensor->is_contiguous(), "all tensors must be contiguous");
  }
  check_range(max_tokens_of(a), "page_table.shape[1] * page_size", 1, kMaxInt);
  SpanAttentionParams params;
  params.rows.num_rows = static_cast<int>(a.q.size(0));
  params.rows.num_spans = static_cast<int>(a.span_kv_len.size(0));
  params.rows.row_span = a.row_span.const_data_ptr<int32_t>();
  params.rows.row_parent = a.row_parent.const_data_ptr<int32_t>();
  params.rows.row_position = a.row_position.const_data_ptr<int32_t>();
  params.rows.span_begin = a.span_begin.const_data_ptr<int32_t>();
  params.rows.span_kv_len = a.span_kv_len.const_data_ptr<int32_t>();
  params.rows.span_seq = a.span_seq.const_data_ptr<int32_t>();
  params.rows.may_have_trees = a.may_have_trees;
  params.rows.expected_kv_len = static_cast<int>(a.expected_kv_len);
  params.q = a.q.const_data_ptr();
  params.kv = {const_cast<void*>(a.kv.const_data_ptr()), static_cast<int>(a.kv.size(2)),
               static_cast<int>(a.kv.size(4)), static_cast<int>(a.kv.size(3))};
  params.page_table = {a.page_table.const_data_ptr<int32_t>(),
                       static_cast<int>(a.page_table.size(1))};
  params.num_q_heads = static_cast<int>(a.q.size(1));
  params.dtype = a.q.scalar_type() == at::kFloat ? DType::kF32 : DType::kBF16;
  params.workspace = static_cast<float*>(a.workspace.data_ptr());
  params.max_tokens = static_cast<int>(max_tokens_of(a));
  return params;
}

void check_workspace(const Arguments& a, size_t num_bytes) {
  TORCH_CHECK_VALUE(a.workspace.nbytes() >= num_bytes, "workspace must have ", num_bytes,
                    " bytes (span_attention_workspace_bytes), has ", a.workspace.nbytes());
}

// ---- CPU ----------------------------------------------------------------------------------------

/// Values can be checked here; on a device reading them would stall the stream.
void check_values(const Arguments& a, const SpanAttentionParams& params) {
  const RowBatch& rows = params.rows;
  check_range(rows.span_begin[0], "span_begin[0]", 0, 0);
  check_range(rows.span_begin[rows.num_spans], "span_begin[-1]", rows.num_rows, rows.num_rows);
  for (int span = 0; span < rows.num_spans; ++span) {
    const int begin = rows.span_begin[span], end = rows.span_begin[span + 1];
    check_range(end, "span_begin", begin, rows.num_rows);
    check_range(rows.span_seq[span], "span_seq", 0, a.page_table.size(0) - 1);
    check_range(rows.span_kv_len[span], "span_kv_len", 0, params.max_tokens - (end - begin));
    const int32_t* pages = params.page_table.pages +
                           int64_t{rows.span_seq[span]} * params.page_table.max_pages_per_seq;
    for (int token = 0; token < rows.span_kv_len[span] + end - begin;
         token += params.kv.page_size) {
      check_range(pages[token / params.kv.page_size], "page_table", 0, a.kv.size(0) - 1);
    }
    for (int row = begin; row < end; ++row) {
      check_range(rows.row_span[row], "row_span", span, span);
      const int parent = rows.row_parent[row];
      if (parent != -1) check_range(parent, "row_parent", begin, row - 1);
      const int position = parent == -1 ? rows.span_kv_len[span] : rows.row_position[parent] + 1;
      check_range(rows.row_position[row], "row_position", position, position);
    }
  }
}

void plan_on_cpu(const Arguments& a) { params_of(a); }

Tensor attend_on_cpu(const Arguments& a, double scale) {
  SpanAttentionParams params = params_of(a);
  TORCH_CHECK_VALUE(params.kv.head_dim % 32 == 0 && params.kv.head_dim <= 256,
                    "head_dim must be a multiple of 32 up to 256 on the CPU, is ",
                    params.kv.head_dim);
  check_workspace(a, span_attention_workspace_bytes_cpu(1, params.num_q_heads, params.max_tokens));
  check_values(a, params);
  const Tensor out = at::empty_like(a.q);
  params.out = out.mutable_data_ptr();
  params.scale = static_cast<float>(scale);
  ThreadPool pool(1);
  ExecContext exec;
  exec.pool = &pool;
  span_attention_cpu(exec, params);
  return out;
}

// ---- CUDA ---------------------------------------------------------------------------------------

#ifdef OPENSPEC_CUDA
SpanAttentionParams cuda_params_of(const Arguments& a) {
  const SpanAttentionParams params = params_of(a);
  TORCH_CHECK_VALUE(params.dtype == DType::kBF16 && params.kv.head_dim == 128 &&
                        params.num_q_heads / params.kv.num_kv_heads <= 8 &&
                        params.kv.page_size % 8 == 0,
                    "on CUDA attention is for bfloat16, head_dim 128, up to 8 q heads per KV head "
                    "and a page_size divisible by 8");
  check_workspace(a, span_attention_workspace_bytes_cuda(params.rows.num_rows,
                                                         params.rows.num_spans, params.num_q_heads,
                                                         params.kv.head_dim, params.max_tokens));
  return params;
}

void plan_on_cuda(const Arguments& a) {
  const c10::DeviceGuard guard(a.q.device());
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      span_attention_plan_cuda(cuda_params_of(a), c10::cuda::getCurrentCUDAStream().stream())));
}

Tensor attend_on_cuda(const Arguments& a, double scale) {
  const c10::DeviceGuard guard(a.q.device());
  SpanAttentionParams params = cuda_params_of(a);
  const Tensor out = at::empty_like(a.q);
  params.out = out.mutable_data_ptr();
  params.scale = static_cast<float>(scale);
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      span_attention_cuda(params, c10::cuda::getCurrentCUDAStream().stream())));
  return out;
}
#endif

// ---- Schemas ------------------------------------------------------------------------------------

int64_t workspace_bytes(at::Device device, int64_t num_rows, int64_t num_spans, int64_t num_q_heads,
                        int64_t head_dim, int64_t max_tokens) {
  for (int64_t size : {num_rows, num_spans, num_q_heads, head_dim, max_tokens}) {
    check_range(size, "every size", 0, kMaxInt);
  }
#ifdef OPENSPEC_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    return static_cast<int64_t>(span_attention_workspace_bytes_cuda(
        static_cast<int>(num_rows), static_cast<int>(num_spans), static_cast<int>(num_q_heads),
        static_cast<int>(head_dim), static_cast<int>(max_tokens)));
  }
#endif
  TORCH_CHECK_VALUE(device.is_cpu(), "no attention was built for ", device);
  return static_cast<int64_t>(span_attention_workspace_bytes_cpu(1, static_cast<int>(num_q_heads),
                                                                 static_cast<int>(max_tokens)));
}

using Attend = Tensor (*)(const Arguments&, double);
using Plan = void (*)(const Arguments&);

template <Plan kPlan>
void plan_op(const Tensor& q, const Tensor& kv, const Tensor& row_span, const Tensor& row_parent,
             const Tensor& row_position, const Tensor& span_begin, const Tensor& span_kv_len,
             const Tensor& span_seq, const Tensor& page_table, const Tensor& workspace,
             int64_t expected_kv_len, bool may_have_trees) {
  kPlan({q, kv, row_span, row_parent, row_position, span_begin, span_kv_len, span_seq, page_table,
         workspace, expected_kv_len, may_have_trees});
}

template <Attend kAttend>
Tensor attend_op(const Tensor& q, const Tensor& kv, const Tensor& row_span,
                 const Tensor& row_parent, const Tensor& row_position, const Tensor& span_begin,
                 const Tensor& span_kv_len, const Tensor& span_seq, const Tensor& page_table,
                 const Tensor& workspace, int64_t expected_kv_len, bool may_have_trees,
                 double scale) {
  return kAttend({q, kv, row_span, row_parent, row_position, span_begin, span_kv_len, span_seq,
                  page_table, workspace, expected_kv_len, may_have_trees},
                 scale);
}

Tensor attend_on_meta(const Arguments& a, double /*scale*/) {
  check_types(a);
  return at::empty_like(a.q);
}

}  // namespace
}  // namespace openspec

#define OPENSPEC_SPANS                                                             \
  "Tensor q, Tensor kv, Tensor row_span, Tensor row_parent, Tensor row_position, " \
  "Tensor span_begin, Tensor span_kv_len, Tensor span_seq, Tensor page_table, "    \
  "Tensor(a!) workspace, int expected_kv_len, bool may_have_trees"

TORCH_LIBRARY_FRAGMENT(openspec, m) {
  m.def(
      "span_attention_workspace_bytes(Device device, int num_rows, int num_spans, "
      "int num_q_heads, int head_dim, int max_tokens) -> int",
      openspec::workspace_bytes);
  m.def("span_attention_plan(" OPENSPEC_SPANS ") -> ()");
  m.def("span_attention(" OPENSPEC_SPANS ", float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(openspec, Meta, m) {
  m.impl("span_attention_plan", openspec::plan_op<openspec::check_types>);
  m.impl("span_attention", openspec::attend_op<openspec::attend_on_meta>);
}

TORCH_LIBRARY_IMPL(openspec, CPU, m) {
  m.impl("span_attention_plan", openspec::plan_op<openspec::plan_on_cpu>);
  m.impl("span_attention", openspec::attend_op<openspec::attend_on_cpu>);
}

#ifdef OPENSPEC_CUDA
TORCH_LIBRARY_IMPL(openspec, CUDA, m) {
  m.impl("span_attention_plan", openspec::plan_op<openspec::plan_on_cuda>);
  m.impl("span_attention", openspec::attend_op<openspec::attend_on_cuda>);
}
#endif
