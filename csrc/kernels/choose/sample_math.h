#pragma once

/// The arithmetic of choosing: noise, exp, log and fixed-point mass. Only integer operations and
/// IEEE additions, multiplications and fused multiply-adds of fp32, each spelled out, so that every
/// CPU and GPU computes the same bits. Compile with contraction off (-ffp-contract=off; nvcc:
/// -fmad=false).
///
/// The *position* of a choice is the index that the chosen token takes in the sequence: a row's own
/// position plus one. A drafter that draws with the same noise uses the same position.
///
/// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10).

#include <cstdint>
#include <cstring>

#include "kernels/common/exec.h"

namespace openspec::sample_math {

OPENSPEC_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
OPENSPEC_HD float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct Philox {
  uint32_t word[4];
};

OPENSPEC_HD Philox philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                 uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Token ids share a Philox call by fours: ids [64 b, 64 b + 64) use counters 16 b .. 16 b + 15,
/// the id's offset giving word offset / 16 of counter offset % 16. So neighbouring lanes of a
/// vector (or threads of a warp) hold neighbouring ids.
OPENSPEC_HD Philox noise_of_counter(uint64_t seed, int32_t position, uint32_t counter) {
  return philox4x32_10(counter, static_cast<uint32_t>(position), 0, 0, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32));
}
OPENSPEC_HD uint32_t noise_bits(uint64_t seed, int32_t position, int32_t id) {
  const uint32_t offset = static_cast<uint32_t>(id) % 64;
  const uint32_t counter = static_cast<uint32_t>(id) / 64 * 16 + offset % 16;
  const Philox philox = noise_of_counter(seed, position, counter);
  // Selects instead of an index keep this in registers (and vectorisable).
  const uint32_t low = offset < 16 ? philox.word[0] : philox.word[1];
  const uint32_t high = offset < 48 ? philox.word[2] : philox.word[3];
  return offset < 32 ? low : high;
}

/// Other noise of the same sequence comes of its seed xor one of these: that of drafts which the
/// choice must not know of, and that by which rejection sampling accepts.
inline constexpr uint64_t kDraftNoise = 0x9E3779B97F4A7C15u;
inline constexpr uint64_t kAcceptanceNoise = 0xD1B54A32D192ED03u;

/// In (0, 1): 2^-24 .. 1 - 2^-24.
OPENSPEC_HD float uniform(uint32_t bits) {
  return (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 1.1920928955078125e-7f;
}

/// log(1 + f) + exponent * log(2) for f in [sqrt(1/2) - 1, sqrt(2) - 1].
OPENSPEC_HD float log_of_parts(float f, float exponent) {
  float p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, f, -1.1514610310e-1f);
  p = __builtin_fmaf(p, f, 1.1676998740e-1f);
  p = __builtin_fmaf(p, f, -1.2420140846e-1f);
  p = __builtin_fmaf(p, f, 1.4249322787e-1f);
  p = __builtin_fmaf(p, f, -1.6668057665e-1f);
  p = __builtin_fmaf(p, f, 2.0000714765e-1f);
  p = __builtin_fmaf(p, f, -2.4999993993e-1f);
  p = __builtin_fmaf(p, f, 3.3333331174e-1f);
  const float f2 = f * f;
  float y = f2 * f * p;
  y = __builtin_fmaf(exponent, -2.12194440e-4f, y);
  y = __builtin_fmaf(f2, -0.5f, y);
  return __builtin_fmaf(exponent, 0.693359375f, f + y);
}

/// Natural logarithm of a positive normal number.
OPENSPEC_HD float log_f32(float x) {
  const uint32_t bits = bits_of(x);
  const int32_t exponent =
      static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // mantissa from sqrt(1/2)
  const float mantissa = float_of(bits - (static_cast<uint32_t>(exponent) << 23));
  return log_of_parts(mantissa - 1.0f, static_cast<float>(exponent));
}

/// e^x for x <= 0 (NaN and x below -87: 0).
OPENSPEC_HD float exp_f32(float x) {
  const float t = __builtin_fmaf(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float n = t - 12582912.0f;
  float r = __builtin_fmaf(n, -0.693359375f, x);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  const float scale = float_of((bits_of(t) << 23) + 0x3f800000u);
  return x > -87.0f ? p * scale : 0.0f;
}

/// Standard exponential variate -log(u) with u = (bits + 1/2) / 2^32. Where u is near 1, 1 - u is
/// taken from the complemented bits, so that the smallest variates, which decide a race, keep their
/// full precision. Range 1.2e-10 .. 22.9.
OPENSPEC_HD float exponential_variate(uint32_t bits) {
  const bool is_upper = (bits >> 31) != 0;
  const uint32_t z = is_upper ? ~bits : bits;  // distance from the nearer end of (0, 1)
  const float high = static_cast<float>(static_cast<int32_t>(z >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(z & 0xffffu)) + 0.5f;
  const float distance = __builtin_fmaf(high, 65536.0f, low) * 2.3283064365386963e-10f;
  const float u = is_upper ? 1.0f - distance : distance;
  const uint32_t u_bits = bits_of(u);
  const int32_t exponent = static_cast<int32_t>(u_bits - 0x3f3504f3u) >> 23;
  const float mantissa = float_of(u_bits - (static_cast<uint32_t>(exponent) << 23));
  const float f = is_upper && exponent == 0 ? -distance : mantissa - 1.0f;
  return -log_of_parts(f, static_cast<float>(exponent));
}

/// Standard Gumbel variate, -3.2 .. 22.9.
OPENSPEC_HD float gumbel_of_bits(uint32_t bits) { return -log_f32(exponential_variate(bits)); }
OPENSPEC_HD float gumbel(uint64_t seed, int32_t position, int32_t id) {
  return gumbel_of_bits(noise_bits(seed, position, id));
}

/// A weight in [0, 1] as an integer multiple of 2^-40, rounded down: sums of these are exact, so
/// they do not depend on the order of summation.
OPENSPEC_HD uint64_t fixed_mass(float weight) {
  const uint32_t bits = bits_of(weight);
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 127u - (bits >> 23);
  return (mantissa << 17) >> (shift < 63u ? shift : 63u);
}
OPENSPEC_HD float mass_to_float(uint64_t mass) {
  return static_cast<float>(static_cast<double>(mass) * 9.094947017729282379150390625e-13);
}

/// The mass that top_p asks for, out of `total`.
OPENSPEC_HD uint64_t top_p_mass(float top_p, uint64_t total) {
  return static_cast<uint64_t>(static_cast<double>(top_p) * static_cast<double>(total));
}

/// Logits as the sampler sees them: NaN counts as -inf, +inf as the largest number.
OPENSPEC_HD float sanitize(float logit) {
  const float bounded = logit < 3.4028234663852886e38f ? logit : 3.4028234663852886e38f;
  return logit == logit ? bounded : float_of(0xff800000u);
}

}  // namespace openspec::sample_math
