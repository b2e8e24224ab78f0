#pragma once

/// Scales of experts' weights on their way to a warp.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/experts/segments.cuh"
#include "kernels/linear/stream.cuh"

namespace openspec::cuda {

/// Steps of a slot of experts' weights. Copies of less than 2 KB take longer, and with as many
/// steps as a block of scales has, a block ends at the same step of every slot.
template <WeightForm kForm>
inline constexpr int kExpertSlotSteps = is_e4m3(kForm) ? kBlockSteps : kSlotSteps;

/// Units that a warp multiplies at once, for one waits for itself, and codes come faster. With two
/// tiles of rows there is no room for more.
OPENSPEC_HD constexpr int units_at_once(WeightForm form, int num_tiles) {
  return is_e4m3(form) && num_tiles == 1 ? 2 : 1;
}

/// Lanes that have a unit's scales, a power of two: those of all blocks that a chain of so many
/// steps can touch, for each half of the outputs, or those of outputs.
template <WeightForm kForm>
OPENSPEC_HD constexpr int unit_lanes(int chain_steps) {
  if (!has_blocks(kForm)) return kLinearUnit;
  int lanes = 2;
  while (lanes / 2 * kBlockSteps < chain_steps + kBlockSteps - 1) lanes *= 2;
  return lanes;
}

/// The scales of a warp's chain. They come some units ahead, for the memory answers the later, the
/// more weights are under way: each lane has those of one of as many turns as there are lanes for,
/// a turn being kUnits units.
template <WeightForm kForm, int kUnits>
class ExpertScales {
 public:
  /// `chain_steps`: of the longest chain.
  __device__ __forceinline__ ExpertScales(const PackedLinear& shape, const Chain& chain,
                                          int chain_steps, int lane)
      : scales_(shape.scales), unit_lanes_(unit_lanes<kForm>(chain_steps)) {
    if constexpr (is_e4m3(kForm)) {
      own_unit_ = lane / unit_lanes_ * kUnits;
      at_ = lane % unit_lanes_;
      if constexpr (has_blocks(kForm)) {
        const int num_blocks = shape.num_scale_blocks(), half_lanes = unit_lanes_ / 2;
        const int before = scale_phase(shape) + chain.first_step;
        block_end_ = kBlockSteps - 1 - before % kBlockSteps;
        unit_scales_ = 2 * num_blocks;
        at_ = at_ / half_lanes * num_blocks +
              min(before / kBlockSteps + at_ % half_lanes, num_blocks - 1);
      }
      num_scales_ = shape.num_outputs / kLinearUnit * unit_scales_;
    }
  }

  /// Starts to load those of an item's first units, before any other.
  __device__ __forceinline__ void begin(const ExpertItem& item) {
    if constexpr (is_e4m3(kForm)) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) next_scale_[i] = __ldg(find(item, item.first_unit + i));
    }
  }

  /// Before the units from `unit` of an item on are multiplied. `next`: the item after it.
  __device__ __forceinline__ void begin_units(const ExpertItem& item, int unit,
                                              const ExpertItem& next) {
    if constexpr (is_e4m3(kForm)) {
      from_ = (unit - item.first_unit) / kUnits * unit_lanes_ % 32;
      const float* from[kUnits] = {};
      if (from_ == 0) {
        const int ahead = unit + 32 / unit_lanes_ * kUnits;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          scale_[i] = next_scale_[i];
          from[i] =
              ahead < item.last_unit ? find(item, ahead + i) : find(next, next.first_unit + i);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        // In the branch the compiler would wait for what comes, to move it to its register.
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.eq.s32 p, %2, 0;\n"
            "@p ld.global.nc.f32 %0, [%1];\n"
            "}"
            : "+f"(next_scale_[i])
            : "l"(from[i]), "r"(from_));
      }
    }
  }

  /// Whether blocks end where slots do.
  __device__ __forceinline__ bool end_with_slots() const {
    return !has_blocks(kForm) || block_end_ == kBlockSteps - 1;
  }
  /// Which steps of a slot end a segment, a bit each; the chain's last is step `last`.
  __device__ __forceinline__ unsigned ends(int last) const {
    return 1u << block_end_ | (last < kBlockSteps ? 1u << last : 0);
  }
  /// Of a unit of the turn, of the current segment or one behind it: of outputs lane / 4 and 8
  /// further.
  __device__ __forceinline__ void get(int unit, int ahead, float (&scales)[2]) const {
    scales[0] = __shfl_sync(kAllLanes, scale_[unit], from_ + ahead);
    scales[1] = __shfl_sync(kAllLanes, scale_[unit], from_ + ahead + unit_lanes_ / 2);
  }
  __device__ __forceinline__ void end_segment() { ++from_; }
  /// All lanes of the warp call it, each for output lane % 16 of one unit of the turn.
  __device__ __forceinline__ float of_output(float sum, int unit, int output) const {
    if constexpr (!has_output_scales(kForm)) return sum;
    const float scale = unit == 0 ? scale_[0] : scale_[kUnits - 1];
    return __fmul_rn(sum, __shfl_sync(kAllLanes, scale, from_ + output));
  }

 private:
  /// The lane's own, of the units from `unit` of an item on.
  __device__ __forceinline__ const float* find(const ExpertItem& item, int unit) const {
    const int own_unit = min(unit + own_unit_, item.last_unit - 1);
    return scales_ + int64_t{item.expert} * num_scales_ + own_unit * unit_scales_ + at_;
  }

  const float* scales_;
  int unit_lanes_, num_scales_;  // num_scales_: of an expert
  int own_unit_, at_;            // of the lane: which first unit it is, and the place in a table
  int unit_scales_ = kLinearUnit;
  int block_end_ = 0;  // step of a slot
  int from_ = 0;       // lane with the first scale of the current segment or turn
  float scale_[kUnits], next_scale_[kUnits];
};

}  // namespace openspec::cuda
