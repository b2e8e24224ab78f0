#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/linear/packed_linear.h"
#include "kernels/linear/panels_cpu.h"

namespace openspec {

struct Exchange;

/// The layout that is fastest on this CPU for a matrix of so many inputs. It decides bits: shards
/// have the whole's.
LinearLayout linear_layout_cpu(int whole_inputs);

/// Bytes of the packed form of a matrix, without its scales.
size_t linear_packed_bytes_cpu(const PackedLinear& shape);

/// Packs rows [first_output, first_output + num_rows) of the (fused) matrix from `rows`
/// ([num_rows, num_inputs] row-major, of the shape's format) into `packed`, so that fused matrices
/// (q|k|v, gate|up) are packed piece by piece without a copy of the whole.
void linear_pack_cpu(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed);

/// Outputs of one packed matrix as those of another, of the same inputs and layout: output i of
/// `to` becomes output[i] of `from`. Both are bf16 and have no epilogue.
struct LinearSelectParams {
  PackedLinear from;
  const int32_t* output = nullptr;  // [to.num_outputs], each below from.num_outputs
  PackedLinear to;
  void* packed = nullptr;  // to.data, to be written; not from.data
};

/// Whether both are matrices that linear_select takes.
constexpr bool are_legal_to_select(const LinearSelectParams& params) {
  const auto is_plain = [](const PackedLinear& matrix) {
    return matrix.format == MatrixFormat::kBF16 && matrix.epilogue == LinearEpilogue::kNone;
  };
  return is_plain(params.from) && is_plain(params.to) && params.from.layout == params.to.layout &&
         params.from.num_inputs == params.to.num_inputs;
}

void linear_select_cpu(const ExecContext& exec, const LinearSelectParams& params);

/// out[r, n] = sum_k x[r, k] * W[n, k] (+ bias[n]), fp32 accumulation.
///
/// Row-invariant, whatever the number of rows, the row's place among them and the number of
/// threads: each split (splits.h) has a sum of its own, from zero, and the product is ((s0 + s1) +
/// s2) + ... in fp32. In kLines a split's sum is one chain of fused multiply-adds over its k; in
/// kPairs an activation is cut into three bf16 parts that add up to it exactly, each part has a
/// chain of its own in the matrix unit, and the three sums are added in the order of the parts. For
/// kTiles see linear_cuda.
///
/// Weights of kE4M3 enter products as their values, without their scales. A scale of ScaleKind
/// kOutput multiplies a split's whole sum, once, before it is stored or added to others. With
/// kBlock a chain is cut at the blocks of inputs: each segment, the part of a chain in one block,
/// is a fp32 sum from zero, and the chain takes fmaf(segment, scale, chain), from zero too. So a
/// chain that lies in one block is its segment times the scale.
///
/// Shard-invariant: an output has the same bits from a shard of the matrix's outputs as from the
/// whole. Shards of its inputs put their splits' sums at the whole's places in `partials`, the same
/// bits there too.
struct LinearParams {
  PackedLinear weight;
  const void* x = nullptr;  // [num_rows, num_inputs] dtype, of a shard its own inputs
  void* out = nullptr;      // [num_rows, num_outputs (/ 2 for SwiGLU)] out_dtype
  // Elements from row to row of out, at least its width (CUDA: rows begin at multiples of 16
  // bytes); 0: the width. Shards of the outputs write their columns of one wider row so.
  int64_t out_stride = 0;
  int num_rows = 0;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  // CPU: linear_workspace_bytes_cpu(...) bytes, 64-byte aligned. CUDA:
  // kLinearWorkspaceBytesCuda, zero before the first launch and not shared by launches that may
  // overlap; null: blocks share the work evenly, whatever else their multiprocessors do.
  float* workspace = nullptr;
  // Without epilogue: where given, the sums of the splits are written here instead of `out`, for
  // the next op to add in order: [weight.num_splits, num_rows, num_outputs]. A shard of the inputs
  // needs it and writes its own splits' alone.
  float* partials = nullptr;
  // CUDA, instead of partials: the sums are sent to every rank's inbox, as its current round.
  const Exchange* exchange = nullptr;
};

size_t linear_workspace_bytes_cpu(int max_num_rows, int num_inputs,
                                  LinearLayout layout = LinearLayout::kLines);
void linear_cpu(const ExecContext& exec, const LinearParams& params);

inline constexpr int kLinearUnit = 16;   // outputs of a packed unit
inline constexpr int kLinearChains = 8;  // chains of a split
inline constexpr size_t kLinearWorkspaceBytesCuda = 256;

/// Columns of the output.
OPENSPEC_HD constexpr int64_t linear_width(const PackedLinear& weight) {
  return weight.epilogue == LinearEpilogue::kSwiGlu ? weight.num_outputs / 2 : weight.num_outputs;
}

/// Elements from row to row of what is written: of `out`, or of a split's sums.
OPENSPEC_HD constexpr int64_t linear_row_stride(const LinearParams& params) {
  const bool is_dense = params.partials != nullptr || params.out_stride == 0;
  return is_dense ? linear_width(params.weight) : params.out_stride;
}

/// Whether the output's rows do not overlap, and sums that stay apart are of a matrix without
/// epilogue, as a shard of the inputs' must.
constexpr bool has_legal_output(const LinearParams& params) {
  const bool is_apart = params.partials != nullptr;
  return (params.out_stride == 0 || params.out_stride >= linear_width(params.weight)) &&
         (!is_apart || params.weight.epilogue == LinearEpilogue::kNone) &&
         (is_apart || params.weight.has_all_inputs());
}

/// Whether a matrix has no bias, or one that linear can add.
constexpr bool has_legal_bias(const LinearParams& params) {
  return params.weight.bias == nullptr ||
         (params.weight.epilogue == LinearEpilogue::kNone && params.weight.num_splits == 1 &&
          params.partials == nullptr);
}

/// Whether a matrix has scales as its format wants them.
constexpr bool has_legal_scales(const PackedLinear& weight) {
  const bool is_scaled = weight.scale_kind != ScaleKind::kNone && weight.scales != nullptr;
  return is_scaled == (weight.format == MatrixFormat::kE4M3);
}

/// Whether a matrix is the whole, or a part of it along one side, of inputs in whole splits.
constexpr bool has_legal_shard(const PackedLinear& weight) {
  const LinearShard& shard = weight.shard;
  return (weight.has_all_outputs() || weight.has_all_inputs()) && shard.first_output >= 0 &&
         shard.first_output + weight.num_outputs <= weight.whole_outputs() &&
         weight.num_splits >= 1 && weight.num_splits <= kMaxSplits &&
         weight.own_splits().size() > 0;
}

/// Bytes of the kTiles form of a bf16 matrix. num_outputs and num_inputs are multiples of 16. A
/// SwiGLU unit holds 8 gate rows, then the 8 up rows of the same outputs.
size_t linear_packed_bytes_cuda(int num_outputs, int num_inputs);

/// As linear_pack_cpu, from `rows` in device memory. Enqueues a kernel.
int linear_pack_cuda(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed, void* stream);

/// Of kTiles; to.num_outputs is a multiple of 16. Returns a cudaError_t.
int linear_select_cuda(const LinearSelectParams& params, void* stream);

/// bf16 activations, kTiles weights; out bf16 or fp32. x and out are 16-byte aligned.
///
/// One arithmetic for every number of rows, from a decode step to a prefill chunk. Inside a split
/// of s steps of 16 k chain c of 8 covers its steps [s c / 8, s (c + 1) / 8), integer division. A
/// chain is one fp32 accumulator, from zero, through m16n8k16 matrix instructions in order of k,
/// weights as the M operand (wgmma and mma.sync give the same bits). A split's sum is ((c0 + c1) +
/// c2) + ... in fp32, the product ((s0 + s1) + s2) + ..., plus the bias, then rounded to the output
/// type. Of e4m3 the instructions multiply the codes' values, as bf16; where scales have blocks, an
/// accumulator is a segment's, and scales act as linear_cpu says. SwiGLU takes silu(gate) * up of
/// the two fp32 products rounded to bf16 first, silu in fp32 and rounded to bf16, as the Hugging
/// Face reference does.
///
/// Returns a cudaError_t.
int linear_cuda(const LinearParams& params, void* stream);

}  // namespace openspec
