// Kernels as torch ops, `torch.ops.openspec`: checks at the boundary, no logic. For tests,
// benchmarks and research code; the engine calls the kernels directly.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>

#include "core/thread_pool.h"
#include "kernels/common/exec.h"
#include "kernels/drafts/copy_lookup.h"

#ifdef OPENSPEC_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace openspec {
namespace {

using at::Tensor;

void check_int32(const Tensor& tensor, const char* name, int64_t num_dims) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, " must be int32, is ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == num_dims, name, " must have ", num_dims, " dimensions, has ",
                    tensor.dim());
}

void check_range(int64_t value, const char* name, int64_t low, int64_t high) {
  TORCH_CHECK_VALUE(value >= low && value <= high, name, " must be in [", low, ", ", high, "], is ",
                    value);
}

using NgramLookupResult = std::tuple<Tensor, Tensor, Tensor>;

/// What holds of tensors with and without data.
void check_ngram_lookup(const Tensor& tokens, const Tensor& num_tokens, const Tensor& seq,
                        const Tensor& num_wanted, int64_t max_drafts, int64_t ngram_min,
                        int64_t ngram_max, int64_t max_lookback) {
  check_int32(tokens, "tokens", 2);
  check_int32(num_tokens, "num_tokens", 1);
  check_int32(seq, "seq", 1);
  check_int32(num_wanted, "num_wanted", 1);
  for (const Tensor* other : {&num_tokens, &seq, &num_wanted}) {
    TORCH_CHECK_VALUE(other->device() == tokens.device(), "all tensors must be on ",
                      tokens.device(), ", one is on ", other->device());
  }
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  check_range(max_drafts, "max_drafts", 0, kMaxInt);
  check_range(ngram_min, "ngram_min", 1, kMaxInt);
  check_range(ngram_max, "ngram_max", ngram_min, kMaxInt);
  check_range(max_lookback, "max_lookback", 1, kMaxInt);
}

/// What holds of tensors with data.
void check_ngram_lookup_layout(const Tensor& tokens, const Tensor& num_tokens, const Tensor& seq,
                               const Tensor& num_wanted) {
  TORCH_CHECK_VALUE(tokens.size(1) <= 1 || tokens.stride(1) == 1,
                    "tokens must be contiguous along its last dimension");
  for (const Tensor* list : {&num_tokens, &seq, &num_wanted}) {
    TORCH_CHECK_VALUE(list->is_contiguous(), "num_tokens, seq and num_wanted must be contiguous");
  }
  TORCH_CHECK_VALUE(num_tokens.size(0) == tokens.size(0),
                    "num_tokens must have one entry for each of ", tokens.size(0),
                    " rows of tokens, has ", num_tokens.size(0));
  TORCH_CHECK_VALUE(num_wanted.size(0) == seq.size(0),
                    "num_wanted must have one entry for each of ", seq.size(0),
                    " entries of seq, has ", num_wanted.size(0));
}

void run_on_cpu(CopyLookupParams params, const Tensor& tokens, const Tensor& seq) {
  // Values can be checked here; on a device reading them would stall the stream.
  for (int64_t i = 0; i < tokens.size(0); ++i) {
    check_range(params.num_tokens[i], "num_tokens", 0, tokens.size(1));
  }
  for (int i = 0; i < params.num_seqs; ++i) {
    check_range(params.seq[i], "seq", 0, tokens.size(0) - 1);
    check_range(params.num_wanted[i], "num_wanted", 0, params.max_drafts);
  }
  // No window is longer than a history: the workspace need not be either.
  params.max_lookback = static_cast<int>(
      std::min<int64_t>(params.max_lookback, std::max<int64_t>(tokens.size(1), 1)));
  const auto workspace_bytes =
      static_cast<int64_t>(copy_lookup_workspace_bytes(params.num_seqs, params.max_lookback));
  const Tensor workspace = at::empty({(workspace_bytes + 3) / 4}, seq.options());
  params.workspace = workspace.mutable_data_ptr<int32_t>();
  ThreadPool pool(1);
  ExecContext exec;
  exec.pool = &pool;
  copy_lookup_cpu(exec, params);
}

#ifdef OPENSPEC_CUDA
void run_on_cuda(const CopyLookupParams& params, const Tensor& tokens) {
  const c10::DeviceGuard guard(tokens.device());
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      copy_lookup_cuda(params, c10::cuda::getCurrentCUDAStream().stream())));
}
#endif

/// The op as the dispatcher calls it for one kind of tensors.
template <c10::DeviceType kDevice>
NgramLookupResult ngram_lookup(const Tensor& tokens, const Tensor& num_tokens, const Tensor& seq,
                               const Tensor& num_wanted, int64_t max_drafts, int64_t ngram_min,
                               int64_t ngram_max, int64_t max_lookback, bool earliest) {
  check_ngram_lookup(tokens, num_tokens, seq, num_wanted, max_drafts, ngram_min, ngram_max,
                     max_lookback);
  const c10::SymInt num_seqs = seq.sym_size(0);
  const Tensor drafts = at::empty_symint({num_seqs, max_drafts}, seq.options());
  const Tensor num_drafts = at::empty_symint({num_seqs}, seq.options());
  const Tensor match_len = at::empty_symint({num_seqs}, seq.options());
  if constexpr (kDevice != c10::DeviceType::Meta) {
    check_ngram_lookup_layout(tokens, num_tokens, seq, num_wanted);
    CopyLookupParams params;
    params.tokens = tokens.const_data_ptr<int32_t>();
    params.tokens_stride = tokens.stride(0);
    params.num_tokens = num_tokens.const_data_ptr<int32_t>();
    params.seq = seq.const_data_ptr<int32_t>();
    params.num_wanted = num_wanted.const_data_ptr<int32_t>();
    params.num_seqs = static_cast<int>(seq.size(0));
    params.max_drafts = static_cast<int>(max_drafts);
    params.min_match_len = static_cast<int>(ngram_min);
    params.max_match_len = static_cast<int>(ngram_max);
    params.max_lookback = static_cast<int>(max_lookback);
    params.earliest = earliest;
    params.drafts = drafts.mutable_data_ptr<int32_t>();
    params.num_drafts = num_drafts.mutable_data_ptr<int32_t>();
    params.match_len = match_len.mutable_data_ptr<int32_t>();
#ifdef OPENSPEC_CUDA
    if constexpr (kDevice == c10::DeviceType::CUDA) run_on_cuda(params, tokens);
#endif
    if constexpr (kDevice == c10::DeviceType::CPU) run_on_cpu(params, tokens, seq);
  }
  return {drafts, num_drafts, match_len};
}

}  // namespace
}  // namespace openspec

TORCH_LIBRARY(openspec, m) {
  m.def(
      "ngram_lookup(Tensor tokens, Tensor num_tokens, Tensor seq, Tensor num_wanted, "
      "int max_drafts, int ngram_min, int ngram_max, int max_lookback, bool earliest) "
      "-> (Tensor drafts, Tensor num_drafts, Tensor match_len)");
}

#define OPENSPEC_IMPLEMENT(Device)                                           \
  TORCH_LIBRARY_IMPL(openspec, Device, m) {                                  \
    m.impl("ngram_lookup", openspec::ngram_lookup<c10::DeviceType::Device>); \
  }

OPENSPEC_IMPLEMENT(Meta)
OPENSPEC_IMPLEMENT(CPU)
#ifdef OPENSPEC_CUDA
OPENSPEC_IMPLEMENT(CUDA)
#endif
