#pragma once

/// Vectors of the instruction set being compiled, written with the vector extensions of GCC and
/// Clang; intrinsics only where those have no word for it (fused multiply-add).

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define OPENSPEC_INLINE inline __attribute__((always_inline))
#define OPENSPEC_INLINE_LAMBDA __attribute__((always_inline))

namespace openspec::OPENSPEC_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
inline constexpr int kNumRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
inline constexpr int kNumRegisters = 16;
#elif defined(__ARM_NEON)
inline constexpr int kLanes = 4;
inline constexpr int kNumRegisters = 32;
#else
inline constexpr int kLanes = 4;
inline constexpr int kNumRegisters = 16;
#endif

using Vf = float __attribute__((vector_size(kLanes * 4)));
using Vi = int32_t __attribute__((vector_size(kLanes * 4)));
using Vu = uint32_t __attribute__((vector_size(kLanes * 4)));

OPENSPEC_INLINE Vf load(const float* p) {
  Vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OPENSPEC_INLINE Vu load_bits(const void* p) {
  Vu v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OPENSPEC_INLINE void store(float* p, Vf v) { std::memcpy(p, &v, sizeof v); }

OPENSPEC_INLINE Vf splat(float x) { return x - Vf{}; }  // x - 0 is x: only a broadcast is left

OPENSPEC_INLINE Vf as_float(Vu v) { return reinterpret_cast<Vf>(v); }
OPENSPEC_INLINE Vu as_bits(Vf v) { return reinterpret_cast<Vu>(v); }

/// a * b + c: fused where the instruction set has it, separate in the baseline of x86; never left
/// to the compiler, so that every loop of one instruction set agrees.
OPENSPEC_INLINE Vf fma(Vf a, Vf b, Vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

/// a * b + c of single numbers, fused as that of vectors is.
OPENSPEC_INLINE float fma(float a, float b, float c) {
#if defined(__AVX2__) || defined(__ARM_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/// a where a > b, else b (b where a is NaN).
OPENSPEC_INLINE Vf max(Vf a, Vf b) { return a > b ? a : b; }

/// Whether any lane of a comparison's result is set.
OPENSPEC_INLINE bool any(Vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#elif defined(__ARM_NEON)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

/// v with its lanes moved down by `kBy`, cyclically.
template <int kBy, int... kLane>
OPENSPEC_INLINE Vf rotate_lanes(Vf v, std::integer_sequence<int, kLane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, ((kLane + kBy) % kLanes)...);
#else
  return __builtin_shuffle(v, Vi{((kLane + kBy) % kLanes)...});
#endif
}

/// Combines the lanes by halves until one is left.
template <int kHalf = kLanes / 2, typename Combine>
OPENSPEC_INLINE float fold_lanes(Vf v, const Combine& combine) {
  v = combine(v, rotate_lanes<kHalf>(v, std::make_integer_sequence<int, kLanes>()));
  if constexpr (kHalf > 1) {
    return fold_lanes<kHalf / 2>(v, combine);
  } else {
    return v[0];
  }
}
OPENSPEC_INLINE float sum_lanes(Vf v) {
  return fold_lanes(v, [](Vf a, Vf b) OPENSPEC_INLINE_LAMBDA { return a + b; });
}
OPENSPEC_INLINE float max_lanes(Vf v) {
  return fold_lanes(v, [](Vf a, Vf b) OPENSPEC_INLINE_LAMBDA { return a > b ? a : b; });
}

/// Interleaves the low (high) halves of a and b.
OPENSPEC_INLINE Vf zip_low(Vf a, Vf b) {
#if defined(__AVX512F__)
  const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, index, b);
#elif defined(__AVX2__)
  const Vf low = _mm256_unpacklo_ps(a, b);
  const Vf high = _mm256_unpackhi_ps(a, b);
  return _mm256_permute2f128_ps(low, high, 0x20);
#else
  return Vf{a[0], b[0], a[1], b[1]};
#endif
}
OPENSPEC_INLINE Vf zip_high(Vf a, Vf b) {
#if defined(__AVX512F__)
  const __m512i index =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, index, b);
#elif defined(__AVX2__)
  const Vf low = _mm256_unpacklo_ps(a, b);
  const Vf high = _mm256_unpackhi_ps(a, b);
  return _mm256_permute2f128_ps(low, high, 0x31);
#else
  return Vf{a[2], b[2], a[3], b[3]};
#endif
}

/// Transposes a square of kLanes vectors: log2(kLanes) rounds of a perfect shuffle.
OPENSPEC_INLINE void transpose(Vf (&rows)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Vf next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

/// e^x for x <= 0 with relative error below 2^-22; below -87 the result is 0.
OPENSPEC_INLINE Vf exp_nonpositive(Vf x) {
  const Vf shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vf t = fma(x, splat(1.44269504f), shifter);
  const Vf n = t - shifter;
  Vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const Vu scale = (as_bits(t) << 23) + 0x3f800000u;
  const Vf y = p * as_float(scale);
  return x > -87.0f ? y : Vf{};  // also NaN gives 0
}

OPENSPEC_INLINE Vf sigmoid(Vf x) {
  const Vf e = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

/// x * sigmoid(x).
OPENSPEC_INLINE Vf silu(Vf x) { return x * sigmoid(x); }

/// Finite e4m3 codes as fp32, exactly: their values times 2^-120, for that is what their bits mean
/// there. Subnormal codes are fp32's subnormals, with which a product is exact where it is not one.
/// So what they are multiplied by comes times kCodeFactor, which keeps sums of any use far from
/// both ends of fp32's range; a sum is then the codes' over kCodeUnit.
inline constexpr float kCodeFactor = 0x1p60f, kCodeUnit = 0x1p120f / kCodeFactor;

/// 2 kLanes codes, of which those at odd places go to `high`.
OPENSPEC_INLINE void load_e4m3(const char* p, Vf& low, Vf& high) {
  using Codes = int8_t __attribute__((vector_size(2 * kLanes)));
  Codes codes;
  std::memcpy(&codes, p, sizeof codes);
#if defined(__AVX512F__)  // g++ would widen in two halves
  const Vu pairs = reinterpret_cast<Vu>(_mm512_cvtepi8_epi16(reinterpret_cast<__m256i>(codes)));
#elif defined(__AVX2__)
  const Vu pairs = reinterpret_cast<Vu>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(codes)));
#else
  using Words = int16_t __attribute__((vector_size(4 * kLanes)));
  const Vu pairs = reinterpret_cast<Vu>(__builtin_convertvector(codes, Words));
#endif
  low = as_float(pairs << 20 & 0x87f00000u);  // the sign is there many times over
  high = as_float(pairs << 4 & 0x87f00000u);
}

// bf16 <-> fp32. Rounding to nearest, ties to even; NaN stays NaN.

OPENSPEC_INLINE float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}
OPENSPEC_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
OPENSPEC_INLINE float round_to_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
OPENSPEC_INLINE Vf round_to_bf16(Vf x) {
  const Vu bits = as_bits(x);
  const Vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return as_float((x == x ? rounded : bits | 0x400000u) & 0xffff0000u);
}

// Loops over arrays that the compiler vectorises by itself.
OPENSPEC_INLINE void bf16_to_float(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(from[i]);
}
OPENSPEC_INLINE void float_to_bf16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
}

OPENSPEC_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <typename T>
OPENSPEC_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
OPENSPEC_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace openspec::OPENSPEC_ISA
