#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/row_terms.h"

namespace openspec {

struct Exchange;

/// Where rows have owners (have_owners) each rank norms those that it owns, and sends them to all.
/// Of other ranks' rows its residual is then what it was, unless residuals are sent, too. All
/// buffers are [num_rows, width] at the strides of the own ones; those of the rank itself are its
/// own residual and out. Neither is read by the product whose sums are exchanged, or after it.
struct OwnedRows {
  void* out[kMaxRanks] = {};
  void* residual[kMaxRanks] = {};  // null: residuals are not sent
};

/// residual += delta (where delta is given), or = delta; out = residual * rsqrt(mean(residual^2) +
/// eps) * weight.
///
/// Statistics in fp32; the normalised value is rounded to `dtype` before the multiplication with
/// the weight, as in the Hugging Face reference, unless it `rounds_once`. One row's sum is always
/// taken in the same order.
/// `delta` may come as partial sums of a split linear: their sum in order, rounded to `dtype`.
struct RmsNormParams {
  void* residual = nullptr;  // [num_rows, width] dtype, updated in place when delta is given
  // Elements from row to row of residual, as of out; other than the width only without delta.
  int64_t residual_stride = 0;
  const void* delta = nullptr;            // [num_rows, width] dtype, or null
  const float* delta_partials = nullptr;  // [num_partials, num_rows, width], instead of delta
  int num_partials = 0;
  // CUDA, instead of delta: its rows' terms. All but `rows` is read before the kernel's wait.
  RowTerms terms = {};
  // CUDA, instead of delta_partials: the sums come through the rank's inbox, whose current round is
  // taken. An even number of them; the residual is not started so.
  const Exchange* exchange = nullptr;
  const OwnedRows* owned = nullptr;  // of an exchange whose rows have owners
  bool starts_residual = false;      // residual = delta: what it was is not read
  const float* weight = nullptr;     // [width]
  // [num_rows, width] dtype. It may be delta, or where no delta is given residual itself at the
  // same stride; it may not alias residual else.
  void* out = nullptr;
  // Elements from row to row of out, at least width (CUDA: a multiple of 8, as rows begin at
  // multiples of 16 bytes); 0: width. Two norms write the halves of one [num_rows, 2 * width]
  // buffer so; nothing between the rows is touched.
  int64_t out_stride = 0;
  int num_rows = 0;
  int width = 0;
  float eps = 1e-6f;
  // Only the product with the weight is rounded, as the reference of Gemma and Qwen3.5 has it.
  bool rounds_once = false;
  DType dtype = DType::kF32;
};

void rms_norm_cpu(const ExecContext& exec, const RmsNormParams& params);
/// Returns a cudaError_t, as every op below its CPU form does.
int rms_norm_cuda(const RmsNormParams& params, void* stream);

}  // namespace openspec
