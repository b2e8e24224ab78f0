#pragma once

/// A warp's ring of weights in shared memory, filled asynchronously and read by the same warp, and
/// the matrix instructions that it feeds.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/linear_tiles.cuh"

namespace openspec::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Four 8 x 8 matrices of bf16; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

/// Two of them; lanes 16 to 31 give no address.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&to)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// sums[16 outputs, 8 rows] += weights[16, 16 k] * x[16 k, 8], one step of a chain. Volatile, so
/// that it stays ahead of refilling the slot that its weights came from.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&weights)[4],
                                             const uint32_t (&x)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(x[0]), "r"(x[1]));
}

/// Slots of up to kSlotSteps steps, each with a barrier whose phase ends when the slot has arrived.
/// All lanes of the warp call every function together.
template <int kSlotSteps>
class WeightRing {
 public:
  static constexpr int kSlotBytes = kSlotSteps * kLinearStepBytes;
  static constexpr int kBarrierBytes = 8;

  __device__ WeightRing(uint32_t slots, uint32_t barriers, int num_slots, int lane)
      : slots_(slots), barriers_(barriers), num_slots_(num_slots), lane_(lane) {
    if (lane == 0) {
#pragma unroll 1
      for (int slot = 0; slot < num_slots; ++slot) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier(slot)), "r"(kArrivals)
                     : "memory");
      }
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    __syncwarp();
  }

  /// Starts copying `num_steps` steps into a slot that every lane is done with.
  __device__ __forceinline__ void fill(int slot, const uint8_t* from, int num_steps) {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) {
      const int bytes = num_steps * kLinearStepBytes;
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(slot)),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(slots_ + slot * kSlotBytes),
          "l"(from), "r"(bytes), "r"(barrier(slot))
          : "memory");
    }
#else
    const uint32_t to = slots_ + slot * kSlotBytes + lane_ * 16;
#pragma unroll
    for (int i = 0; i < kSlotSteps; ++i) {
      if (i < num_steps) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * kLinearStepBytes),
                     "l"(from + i * kLinearStepBytes + lane_ * 16)
                     : "memory");
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier(slot)) : "memory");
#endif
  }

  /// Waits for the current slot to arrive; returns its shared address.
  __device__ __forceinline__ uint32_t wait() const {
    uint32_t has_arrived;
    do {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.b32 %0, 1, 0, p;\n"
          "}"
          : "=r"(has_arrived)
          : "r"(barrier(slot_)), "r"(parity_)
          : "memory");
#else
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
          "selp.b32 %0, 1, 0, p;\n"
          "}"
          : "=r"(has_arrived)
          : "r"(barrier(slot_)), "r"(parity_)
          : "memory");
#endif
    } while (has_arrived == 0);
    return slots_ + slot_ * kSlotBytes;
  }

  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ void advance() {
    if (++slot_ == num_slots_) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // One bulk copy, or each lane's own copies.
#if __CUDA_ARCH__ >= 900
  static constexpr int kArrivals = 1;
#else
  static constexpr int kArrivals = 32;
#endif

  __device__ __forceinline__ uint32_t barrier(int slot) const {
    return barriers_ + slot * kBarrierBytes;
  }

  uint32_t slots_;
  uint32_t barriers_;
  int num_slots_;
  int lane_;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace openspec::cuda
