#pragma once

/// Activations of experts as the second operand of the matrix instructions: rows that lie anywhere.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/linear/activations.cuh"

namespace openspec::cuda {

/// A warp's activations in shared memory: its chain's inputs of up to 8 kTiles rows. In place of
/// rows that are not there is whatever lay there; no other row's products depend on them.
template <int kTiles>
class ChainRows {
 public:
  /// `shared`: of the first row; rows up to a multiple of eight are read, whatever lies there.
  /// chain_steps: those of the longest chain.
  __device__ __forceinline__ ChainRows(uint32_t shared, int chain_steps, int lane)
      : shared_(shared), pitch_(activation_pitch(chain_steps)), lane_(lane) {}

  /// Starts to copy rows of x. `row_of` says which is the i-th; -1: it is not there.
  template <typename RowOf>
  __device__ __forceinline__ void fetch(const __nv_bfloat16* x, int num_inputs, const Chain& chain,
                                        int num_rows, const RowOf& row_of) const {
    __syncwarp();  // every lane is done with what was there
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = tile * 8 + lane_ / 4;
      const int64_t of = row < num_rows ? row_of(row) : -1;
      if (of < 0) continue;
      const __nv_bfloat16* from = x + of * num_inputs + chain.first_step * kLinearStep;
      const uint32_t to = shared_ + row * pitch_;
      for (int octet = lane_ % 4; octet < 2 * chain.num_steps; octet += 4) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + octet * 16),
                     "l"(from + octet * 8)
                     : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  /// The operands of a step of the chain.
  __device__ __forceinline__ void load(int step, uint32_t (&x)[kTiles][2]) const {
    const uint32_t from = shared_ + (lane_ / 16 * 8 + lane_ % 8) * pitch_ + lane_ / 8 % 2 * 16 +
                          step * (2 * kLinearStep);
#pragma unroll
    for (int tile = 0; tile + 1 < kTiles; tile += 2) {
      uint32_t words[4];
      load_matrices(words, from + tile * 8 * pitch_);
      x[tile][0] = words[0];
      x[tile][1] = words[1];
      x[tile + 1][0] = words[2];
      x[tile + 1][1] = words[3];
    }
    if constexpr (kTiles % 2 == 1) load_matrices(x[kTiles - 1], from + (kTiles - 1) * 8 * pitch_);
  }

 private:
  uint32_t shared_;
  int pitch_, lane_;
};

/// All rows are there that the warp has started to copy, but for those of the last call if
/// `but_last`.
__device__ __forceinline__ void wait_for_rows(bool but_last) {
  if (but_last) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __syncwarp();
}

}  // namespace openspec::cuda
