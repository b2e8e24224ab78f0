#pragma once

/// A warp's ring of weights in shared memory, filled asynchronously and read by the same warp.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/mma.cuh"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/weight_form.cuh"

namespace openspec::cuda {

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// The barrier of a slot of weights, whose phase ends when the slot has arrived: one bulk copy, or
// each lane's own copies.
inline constexpr int kSlotBarrierBytes = 8;

__device__ __forceinline__ void init_slot_barrier(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  constexpr int kArrivals = 1;
#else
  constexpr int kArrivals = 32;
#endif
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(kArrivals) : "memory");
}

/// After the barriers are set up, by the lane that did so and before the first fill.
__device__ __forceinline__ void publish_slot_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
/// One bulk copy to a slot whose barrier expects its bytes.
__device__ __forceinline__ void copy_to_slot(uint32_t to, uint32_t barrier, const uint8_t* from,
                                             int bytes, bool is_read_once) {
  if (is_read_once) {
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], policy;\n"
        "}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
}
#endif

/// Starts copying `bytes`, whole steps of weights, to a slot that every lane is done with. All
/// lanes call it. `is_read_once`: no other block reads them, and the second-level cache is to keep
/// the activations and whatever else is read again instead. Of up to kPieces pieces each has
/// kMaxBytes of the slot; they come from `stride` bytes apart.
template <int kMaxBytes, int kPieces = 1>
__device__ __forceinline__ void fill_slot(uint32_t slot, uint32_t barrier, const uint8_t* from,
                                          int bytes, int lane, [[maybe_unused]] bool is_read_once,
                                          int num_pieces = 1, int64_t stride = 0) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_pieces * bytes)
                 : "memory");
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece < num_pieces) {
        copy_to_slot(slot + piece * kMaxBytes, barrier, from + piece * stride, bytes, is_read_once);
      }
    }
  }
#else
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int begin = 0; begin < kMaxBytes; begin += 32 * 16) {
      const int at = begin + lane * 16;
      if (at < bytes && piece < num_pieces) {
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot + piece * kMaxBytes + at),
            "l"(from + piece * stride + at)
            : "memory");
      }
    }
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

/// Starts to fetch weights into the second-level cache: line by line, or by one copy (where the
/// device has an instruction for that), for which the slots' copies wait.
template <bool kByLines>
__device__ __forceinline__ void prefetch_weights([[maybe_unused]] const uint8_t* from,
                                                 [[maybe_unused]] int bytes,
                                                 [[maybe_unused]] int lane) {
  if constexpr (kByLines) {
    constexpr int kLineBytes = 128;
    for (int at = lane * kLineBytes; at < bytes; at += 32 * kLineBytes) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
  } else {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
    }
#endif
  }
}

/// Waits until the slot's phase of this parity has ended.
__device__ __forceinline__ void wait_for_slot(uint32_t barrier, uint32_t parity) {
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
        : "r"(barrier), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}"
        : "=r"(has_arrived)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
  } while (has_arrived == 0);
}

/// A lane's part of step `step` of a slot, as the first operand of the matrix instruction.
template <WeightForm kForm>
__device__ __forceinline__ void load_weights(uint32_t (&weights)[4], uint32_t slot, int step,
                                             int lane) {
  const uint32_t from = slot + step * step_bytes(kForm) + lane * (step_bytes(kForm) / 32);
  if constexpr (is_e4m3(kForm)) {
    widen(load_codes(from), weights);
  } else {
    load_matrices(weights, from);
  }
}

inline constexpr int kSlotSteps = 4;  // of a WeightRing

/// Slots of up to kSteps steps of each of kUnits units, in turn. All lanes of the warp call every
/// function together.
template <WeightForm kForm, int kSteps = kSlotSteps, int kUnits = 1>
class WeightRing {
 public:
  static constexpr int kUnitBytes = kSteps * step_bytes(kForm);
  static constexpr int kSlotBytes = kUnits * kUnitBytes;

  __device__ WeightRing(uint32_t slots, uint32_t barriers, int num_slots, int lane)
      : slots_(slots), barriers_(barriers), num_slots_(num_slots), lane_(lane) {
    if (lane == 0) {
#pragma unroll 1
      for (int slot = 0; slot < num_slots; ++slot) init_slot_barrier(barrier(slot));
      publish_slot_barriers();
    }
    __syncwarp();
  }

  /// Starts copying `num_steps` steps of each unit, `stride` bytes apart, into a slot that every
  /// lane is done with.
  __device__ __forceinline__ void fill(int slot, const uint8_t* from, int num_steps,
                                       bool is_read_once, int num_units = 1, int64_t stride = 0) {
    fill_slot<kUnitBytes, kUnits>(slots_ + slot * kSlotBytes, barrier(slot), from,
                                  num_steps * step_bytes(kForm), lane_, is_read_once, num_units,
                                  stride);
  }

  /// Waits for the current slot to arrive; returns its shared address.
  __device__ __forceinline__ uint32_t wait() const {
    wait_for_slot(barrier(slot_), parity_);
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
  __device__ __forceinline__ uint32_t barrier(int slot) const {
    return barriers_ + slot * kSlotBarrierBytes;
  }

  uint32_t slots_;
  uint32_t barriers_;
  int num_slots_;
  int lane_;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace openspec::cuda
