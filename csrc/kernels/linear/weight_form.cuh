#pragma once

/// How the weights of a kernel lie, how they become operands and where their scales act. A kernel
/// is made for one form; what forms have in common it does in the same order.

#include <cstdint>
#include <type_traits>

#include "kernels/linear/tiles.cuh"

namespace openspec::cuda {

/// bf16 without scales, or e4m3 with scales of a kind.
enum class WeightForm : uint8_t { kPlain, kOutputScales, kBlockScales };

OPENSPEC_HD constexpr bool is_e4m3(WeightForm form) { return form != WeightForm::kPlain; }
OPENSPEC_HD constexpr bool has_output_scales(WeightForm form) {
  return form == WeightForm::kOutputScales;
}
OPENSPEC_HD constexpr bool has_blocks(WeightForm form) { return form == WeightForm::kBlockScales; }
constexpr WeightForm form_of(const PackedLinear& weight) {
  if (weight.format == MatrixFormat::kBF16) return WeightForm::kPlain;
  return weight.scale_kind == ScaleKind::kBlock ? WeightForm::kBlockScales
                                                : WeightForm::kOutputScales;
}
/// Bytes of a unit's step, contiguous.
OPENSPEC_HD constexpr int step_bytes(WeightForm form) {
  return kLinearUnit * kLinearStep * (is_e4m3(form) ? 1 : 2);
}

/// Calls `call` with the form of a matrix, as a constant.
template <typename Call>
auto with_form(const PackedLinear& weight, const Call& call) {
  switch (form_of(weight)) {
    case WeightForm::kPlain:
      return call(std::integral_constant<WeightForm, WeightForm::kPlain>{});
    case WeightForm::kOutputScales:
      return call(std::integral_constant<WeightForm, WeightForm::kOutputScales>{});
    default:
      return call(std::integral_constant<WeightForm, WeightForm::kBlockScales>{});
  }
}

/// Of linear_stream: the instances of a form, in stream_bf16.cu and its neighbours.
template <WeightForm kForm>
int stream_as(const LinearParams& params, void* stream, const StreamPlan& plan);
template <WeightForm kForm>
bool stream_has_registers(const LinearParams& params);

// Packed e4m3 is [unit][step][lane][8 bytes]: lane 4 g + t has what the matrix instructions want of
// it, rows g and g + 8 of k 2t and 2t + 1 in its first word, of k 2t + 8 and 2t + 9 in its second.
// In each half of a word the bits of row g lie as in bf16 of 2^-120 times the value (sign 15, the
// rest 10 to 4), those of row g + 8 between them (sign 11, the upper exponent 14 to 12, the rest
// 3 to 0).
inline constexpr uint32_t kUpperRowBits = 0x87f087f0u;  // of row g

OPENSPEC_HD constexpr uint32_t e4m3_upper_bits(uint32_t code) {
  return (code & 0x80) << 8 | (code & 0x7f) << 4;
}
OPENSPEC_HD constexpr uint32_t e4m3_lower_bits(uint32_t code) {
  return (code & 0x80) << 4 | (code & 0x70) << 8 | (code & 0x0f);
}

inline constexpr int kBlockSteps = kScaleInputs / kLinearStep;  // of a block of scales

/// Steps of the first block of scales before those that are here.
OPENSPEC_HD constexpr int scale_phase(const PackedLinear& weight) {
  return weight.shard.first_input % kScaleInputs / kLinearStep;
}

#ifdef __CUDACC__

/// Two bf16 times 2^120: exact, for a product that is not subnormal. Those of subnormal factors are
/// not flushed. Minus zero added leaves every product as it is.
__device__ __forceinline__ uint32_t times_2_120(uint32_t pair) {
  constexpr uint32_t kFactors = 0x7b807b80u, kMinusZeros = 0x80008000u;
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(kFactors), "r"(kMinusZeros));
  return product;
}

/// The weights of a lane in a step, as bf16: the first operand of mma and wgmma.
__device__ __forceinline__ void widen(const uint2& codes, uint32_t (&weights)[4]) {
  constexpr uint32_t kSignAndLow = 0x80f080f0u, kHigh = 0x07000700u;
  weights[0] = times_2_120(codes.x & kUpperRowBits);
  weights[1] = times_2_120((codes.x << 4 & kSignAndLow) | (codes.x >> 4 & kHigh));
  weights[2] = times_2_120(codes.y & kUpperRowBits);
  weights[3] = times_2_120((codes.y << 4 & kSignAndLow) | (codes.y >> 4 & kHigh));
}

__device__ __forceinline__ uint2 load_codes(uint32_t address) {
  uint2 codes;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(codes.x), "=r"(codes.y)
               : "r"(address)
               : "memory");
  return codes;
}

/// A unit's scales of blocks, for steps that are here.
struct BlockScales {
  const float* first;  // of its first 8 outputs
  int num_blocks;      // from there to those of the other 8
  unsigned phase;

  __device__ __forceinline__ BlockScales(const PackedLinear& weight, int unit)
      : first(weight.scales + static_cast<int64_t>(unit) * 2 * weight.num_scale_blocks()),
        num_blocks(weight.num_scale_blocks()),
        phase(scale_phase(weight)) {}

  /// The step after `step` that begins another segment of a chain which ends before step `end`.
  __device__ __forceinline__ int segment_end(int step, int end) const {
    return min(end,
               static_cast<int>((phase + step) / kBlockSteps * kBlockSteps + kBlockSteps - phase));
  }
  /// Of the segment with `step`: of outputs lane / 4 and 8 further.
  __device__ __forceinline__ void get(int step, float (&scales)[2]) const {
    const float* at = first + (phase + step) / kBlockSteps;
    scales[0] = __ldg(at);
    scales[1] = __ldg(at + num_blocks);
  }
};

/// The sums of a warp's chain in tiles of 8 rows. `products` are those since the last segment; a
/// chain without segments has no other.
template <WeightForm kForm, int kTiles>
struct ChainSums {
  float products[kTiles][4] = {};
  float segments[kTiles][4] = {};

  /// scales: of outputs lane / 4 and 8 further.
  __device__ __forceinline__ void end_segment(const float (&scales)[2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        segments[tile][i] = __fmaf_rn(products[tile][i], scales[i / 2], segments[tile][i]);
        products[tile][i] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ const float (&whole() const)[kTiles][4] {
    if constexpr (has_blocks(kForm)) {
      return segments;
    } else {
      return products;
    }
  }
};

#endif

}  // namespace openspec::cuda
