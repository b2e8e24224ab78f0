#pragma once

/// The arithmetic of attention, and the instructions it is made of.
///
/// Every output element is a chain of the same m16n8k16 products and the same fp32 operations for
/// every shape of tile, so a pair's bits depend on its own q and visible keys only:
///
///   s = q . k            8 products over head_dim, in order, from zero
///   m = max of s         over the visible keys of the block
///   p = 2^(s c - m c)    c = scale * log2(e), one multiply-add; 0 for other keys; rounded to bf16
///   l = p . 1            4 products over the block's keys, in order, from zero
///   o = p . v            as l
///
/// and (m, l, o) are merged in order. A block of which a row sees nothing changes nothing but the
/// sign of a zero, which finish() clears: so tiles may visit it or not.
///
/// One limit: within a tile a key that a row does not see still meets it with p = 0, so V must be
/// finite there. After the last token that any row of the tile sees nothing is read.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/common/mma.cuh"

namespace openspec::span_attention {

using cuda::load_matrices;
using cuda::load_matrices_transposed;
using cuda::multiply_add;
using cuda::shared_address;

/// The thread's index, as a value that nothing can be derived from ahead of time: else addresses of
/// every kind of tile are computed before the loop over items, and spilled.
__device__ __forceinline__ int opaque_thread() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

/// Counts one up in global memory, after this thread's writes and before its reads.
__device__ __forceinline__ int add_and_order(int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// Reads a counter in global memory, before this thread's later reads.
__device__ __forceinline__ int load_and_order(const int32_t* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

/// Reads a counter in shared memory, by which a warp tells others of its CTA what they can see.
__device__ __forceinline__ int load_from_cta(const int* value) {
  int x;
  asm volatile("ld.acquire.cta.s32 %0, [%1];" : "=r"(x) : "l"(value) : "memory");
  return x;
}
__device__ __forceinline__ void store_for_cta(int* to, int value) {
  asm volatile("st.release.cta.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// Copies 16 bytes, or writes 16 zero bytes.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool is_wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Returns when all but the latest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Of 8 x 8 elements that a warp has, a row to 4 lanes.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct MergeWeights {
  float earlier, later;
};

/// Weights of two partial results, and the maximum of both in `maximum`. Of two that are both empty
/// both weights are 0; an empty later one leaves the earlier with weight 1.
__device__ __forceinline__ MergeWeights merge_weights(float& maximum, float later, float scale) {
  const float earlier = maximum;
  maximum = fmaxf(earlier, later);
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  return {exp2_of(__fmul_rn(__fsub_rn(earlier, base), scale)),
          exp2_of(__fmul_rn(__fsub_rn(later, base), scale))};
}
__device__ __forceinline__ float merged(float earlier, float later, MergeWeights weights) {
  return __fmaf_rn(later, weights.later, __fmul_rn(earlier, weights.earlier));
}
/// The output: never -0, whichever empty blocks were merged.
__device__ __forceinline__ float finish(float sum, float reciprocal) {
  return __fmaf_rn(sum, reciprocal, 0.0f);
}

}  // namespace openspec::span_attention
