#pragma once

#include <cstdint>

#include "kernels/common/exec.h"

namespace openspec {

/// What a linear does with its product before writing it.
enum class LinearEpilogue : uint8_t {
  kNone,    // out = x W^T
  kSwiGlu,  // W holds gate and up; out[:, j] = silu(gate_j) * up_j, out has num_outputs / 2 columns
};

/// The order of the weights within a panel of 32 output columns.
enum class LinearLayout : uint8_t {
  kLines,  // [num_inputs][32]; a line interleaves columns i and i + 16, so that a shift and a
           // mask of 32-bit lanes unpack it
  kPairs,  // [num_inputs / 32][2 halves][16 pairs of k][16 columns][2]: what a matrix unit takes
  kTiles,  // CUDA: units of 16 outputs, [num_outputs / 16][num_inputs / 8][16 outputs][8 k]; see
           // linear_cuda
};

/// The layout that is fastest on this CPU for a matrix of so many inputs.
LinearLayout linear_layout_cpu(int num_inputs);

/// A bf16 weight matrix repacked for streaming. On the CPU: panels of `kLinearPanel` output
/// columns, zero-padded to whole panels; a SwiGLU matrix alternates gate and up panels. Made once
/// at load by linear_pack_cpu. `data` should be aligned to 64 bytes: a line is then one cache line.
struct PackedLinear {
  const void* data = nullptr;
  int num_outputs = 0;  // N, gate and up together for SwiGLU
  int num_inputs = 0;   // K
  LinearLayout layout = LinearLayout::kLines;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  int num_splits = 1;  // kTiles: parts of the inputs with sums of their own, 1, 4 or 8
};

inline constexpr int kLinearPanel = 32;       // output columns
inline constexpr int kLinearInPlaceRows = 6;  // fp32 rows read where they are; more are copied

/// Bytes of the packed form of a [num_outputs, num_inputs] matrix.
size_t linear_packed_bytes_cpu(int num_outputs, int num_inputs, LinearEpilogue epilogue);

/// Packs rows [first_output, first_output + num_rows) of the (fused) matrix from `rows`
/// ([num_rows, num_inputs] row-major, bf16) into `packed`, so that fused matrices (q|k|v, gate|up)
/// are packed piece by piece without a copy of the whole.
void linear_pack_cpu(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed);

/// out[r, n] = sum_k x[r, k] * W[n, k], fp32 accumulation.
///
/// Row-invariant, whatever the number of rows, the row's place among them and the number of
/// threads: in kLines every output element is one chain of fused multiply-adds over k = 0 .. K-1;
/// in kPairs an activation is cut into three bf16 parts that add up to it exactly, each part has a
/// chain of its own in the matrix unit, and the three sums are added in the order of the parts. For
/// kTiles see linear_cuda.
struct LinearParams {
  PackedLinear weight;
  const void* x = nullptr;  // [num_rows, num_inputs] dtype
  void* out = nullptr;      // [num_rows, num_outputs (/ 2 for SwiGLU)] out_dtype
  int num_rows = 0;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  // CPU: linear_workspace_bytes_cpu(...) bytes, may be null if 0; 64-byte aligned. CUDA:
  // kLinearWorkspaceBytesCuda, zero before the first launch and not shared by launches that may
  // overlap; null: blocks share the work evenly, whatever else their multiprocessors do.
  float* workspace = nullptr;
  // CUDA, without epilogue: where given, sums of parts of the inputs are written here instead of
  // `out`, for the next op to add as a tree: [linear_num_partials_cuda(..), num_rows, num_outputs].
  float* partials = nullptr;
};

size_t linear_workspace_bytes_cpu(int max_num_rows, int num_inputs, DType dtype,
                                  LinearLayout layout = LinearLayout::kLines);
void linear_cpu(const ExecContext& exec, const LinearParams& params);

inline constexpr int kLinearUnit = 16;   // CUDA: outputs of a packed unit
inline constexpr int kLinearStep = 16;   // inputs of a step: the k of one matrix instruction
inline constexpr int kLinearChains = 8;  // chains of a split
inline constexpr int kLinearLeaves = 8;  // leaves of a matrix with splits

/// Parts that a matrix of this shape is split into where its sums may stay apart (o, down, fc): 4
/// or 8, or 1 where inputs are few. A function of the shape alone, since it decides the order of
/// summation.
constexpr int linear_num_splits_cuda(int num_outputs, int num_inputs) {
  constexpr int kItems = 600;                    // units times splits that fill the device evenly
  constexpr int kMinSteps = 4 * kLinearChains;   // of a split: a chain should outlast its latencies
  constexpr int kMaxSteps = 40 * kLinearChains;  // activations of longer chains need more registers
  const int num_steps = num_inputs / kLinearStep;
  if (num_inputs < 2048) return 1;
  const bool is_worth_more = num_outputs / kLinearUnit * 4 < kItems || num_steps > 4 * kMaxSteps;
  return is_worth_more && num_steps / 8 >= kMinSteps ? 8 : 4;
}

/// Leaves of a split: two of four splits; one of eight, or where there is one split.
constexpr int linear_split_leaves(int num_splits) {
  return num_splits == 4 ? kLinearLeaves / 4 : 1;
}

constexpr int linear_num_leaves(int num_splits) {
  return num_splits * linear_split_leaves(num_splits);
}

/// Who owns which inputs: leaf `leaf` begins with this step of inputs and ends where the next leaf
/// begins; the one after the last begins at num_steps. Of the 8 leaves of a matrix with splits,
/// rank r of n = 2, 4 or 8 owns [8 r / n, 8 (r + 1) / n), a whole subtree: the ranks' sums, added
/// as a tree, have the bits of one device. The shares are equal if 8 divides num_steps.
constexpr int linear_leaf_begin(int num_steps, int num_splits, int leaf) {
  return num_steps * leaf / linear_num_leaves(num_splits);
}

#ifdef OPENSPEC_CUDA
inline constexpr size_t kLinearWorkspaceBytesCuda = 256;

/// Partials of a product of so many rows: a sum for each split, or for each leaf where the kernel
/// for many rows works on one leaf at a time. As a tree both add up to the same bits.
int linear_num_partials_cuda(const PackedLinear& weight, int num_rows);

/// Bytes of the kTiles form of a matrix. num_outputs and num_inputs are multiples of 16. A
/// SwiGLU unit holds 8 gate rows, then the 8 up rows of the same outputs.
size_t linear_packed_bytes_cuda(int num_outputs, int num_inputs);

/// As linear_pack_cpu, from `rows` in device memory. Enqueues a kernel.
int linear_pack_cuda(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed, void* stream);

/// bf16 activations, kTiles weights; out bf16 or fp32. x and out are 16-byte aligned.
///
/// One arithmetic for every number of rows, from a decode step to a prefill chunk. With S =
/// num_inputs / 16 steps of 16 k, leaf i of n covers steps [S i / n, S (i + 1) / n)
/// (linear_leaf_begin). Of its s steps chain c of m covers [s c / m, s (c + 1) / m): 8 chains a
/// split, which its leaves share. A chain is one fp32 accumulator, from zero, through m16n8k16
/// matrix instructions in order of k, weights as the M operand (wgmma and mma.sync give the same
/// bits). A leaf's sum is ((c0 + c1) + c2) + ... in fp32. The 8 leaves of a matrix with splits are
/// added as a balanced binary tree, ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7)); without
/// splits there is one leaf. Then the product is rounded to the output type. SwiGLU takes
/// silu(gate) * up of the two fp32 products rounded to bf16 first, silu in fp32 and rounded to
/// bf16, as the Hugging Face reference does.
///
/// Returns a cudaError_t.
int linear_cuda(const LinearParams& params, void* stream);
#endif

}  // namespace openspec
