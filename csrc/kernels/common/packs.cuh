#pragma once

/// Consecutive elements of a row as one thread loads and stores them: up to 16 bytes at once.

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace openspec::cuda {

/// Whether all pointers are multiples of 16 bytes, as 16-byte accesses need; null is.
template <typename... T>
bool are_aligned(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <int kCount>
struct alignas(16) FloatPack {
  static_assert(kCount % 4 == 0);
  float x[kCount];
};

template <int kCount>
struct alignas(kCount == 4 ? 8 : 16) Bf16Pack {
  static_assert(kCount == 4 || kCount % 8 == 0);
  uint32_t pairs[kCount / 2];
};

template <typename Pack>
__device__ __forceinline__ Pack load_pack(const void* from) {
  return *static_cast<const Pack*>(from);
}
template <typename Pack>
__device__ __forceinline__ void store_pack(void* to, const Pack& pack) {
  *static_cast<Pack*>(to) = pack;
}

/// Has the line at an address brought to L2, of which nothing is read here.
__device__ __forceinline__ void fetch_to_cache(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

template <int kCount>
__device__ __forceinline__ FloatPack<kCount> to_floats(const Bf16Pack<kCount>& pack) {
  FloatPack<kCount> out;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    out.x[2 * i] = __uint_as_float(pack.pairs[i] << 16);
    out.x[2 * i + 1] = __uint_as_float(pack.pairs[i] & 0xffff0000u);
  }
  return out;
}

/// Rounds to nearest, ties to even.
template <int kCount>
__device__ __forceinline__ Bf16Pack<kCount> to_bf16(const FloatPack<kCount>& pack) {
  Bf16Pack<kCount> out;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(pack.x[2 * i], pack.x[2 * i + 1]);
    memcpy(&out.pairs[i], &pair, sizeof pair);
  }
  return out;
}

template <int kCount>
__device__ __forceinline__ FloatPack<kCount> round_to_bf16(const FloatPack<kCount>& pack) {
  return to_floats(to_bf16(pack));
}

}  // namespace openspec::cuda
