#pragma once

/// How the warpgroups of linear_wgmma multiply what arrives in the ring of stages.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/wgmma.cuh"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/wgmma_tiles.cuh"

#ifdef OPENSPEC_HAS_WGMMA
namespace openspec::cuda {

/// Which stage of the ring is read next.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
};

/// A warpgroup's place in the ring.
template <int kCluster>
class StageReader {
 public:
  __device__ __forceinline__ StageReader(const Ring& ring, int lane, const RingPlace& place = {})
      : ring_(ring), lane_(lane), stage_(place.stage), parity_(place.parity) {}

  /// Between two tiles.
  __device__ __forceinline__ RingPlace place() const { return {stage_, parity_}; }

  /// After the last chain of a tile: what is left of the stage is of no use.
  __device__ __forceinline__ void finish_tile() {
    if (step_ > 0) give_back_stage();
  }

  /// Past stages of a tile that has nothing for this group.
  __device__ __forceinline__ void skip(int num_steps) {
#pragma unroll 1
    for (; num_steps > 0; num_steps -= kStageSteps) {
      wait_for_stage();
      give_back_stage();
    }
  }

 protected:
  static constexpr int kRowStep = 2 * kLinearStep / 16;  // from step to step, in a descriptor

  __device__ __forceinline__ void wait_for_stage() const {
    wgmma::wait(ring_.full + stage_ * 8, parity_);
  }

  /// Returns the stage to release when all products but those of this one are done: 0 for none. A
  /// stage is read once the products that were started on it are done, one stage later or at the
  /// end of the chain.
  __device__ __forceinline__ uint32_t leave_stage() {
    const uint32_t before = left_;
    left_ = ring_.empty + stage_ * 8;
    step_ = 0;
    const bool wraps = stage_ + 1 == ring_.num_stages;
    parity_ ^= wraps ? 1 : 0;
    stage_ = wraps ? 0 : stage_ + 1;
    return before;
  }

  __device__ __forceinline__ void release(uint32_t left) const {
    if (left == 0) return;
    if constexpr (kCluster == 1) {
      if (lane_ == 0) wgmma::arrive(left);
    } else {
      if (lane_ < kCluster) wgmma::arrive_at(left, lane_);
    }
  }

  /// Of a stage on which no product is under way.
  __device__ __forceinline__ void give_back_stage() {
    leave_stage();
    release(left_);
    left_ = 0;
  }

  const Ring& ring_;
  int lane_;
  int stage_;
  uint32_t parity_;
  int step_ = 0;       // of the stage
  uint32_t left_ = 0;  // barrier of the stage that is left but not released
};

/// Multiplies weights that wgmma reads from shared memory. With one warp on each scheduler of the
/// SM, every instruction between two products shows: whole stages of a chain have a loop of their
/// own.
template <int kRows, int kCluster>
class ChainReader : public StageReader<kCluster> {
 public:
  __device__ __forceinline__ ChainReader(const Ring& ring, int group, int lane,
                                         uint32_t max_weight_bytes, const RingPlace& place = {})
      : StageReader<kCluster>(ring, lane, place),
        group_(group),
        max_weight_bytes_(max_weight_bytes) {}

  /// Of a tile with weights of `box_units` units and so many steps.
  __device__ __forceinline__ void begin_tile(int box_units, int) {
    weight_form_ = wgmma::describe_place(0, box_units * kOctetUnitBytes);
    weight_step_ = box_units * (2 * kOctetUnitBytes / 16);
  }

  /// sums = the chain of the next `num_steps` steps.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], int num_steps) {
    int keep = 0;
    Operands operands = find_operands();
#pragma unroll 1
    while (num_steps > 0) {
      if (step_ == 0) {
#pragma unroll 1
        for (; num_steps >= kStageSteps; num_steps -= kStageSteps) {
          wait_for_stage();
          multiply_steps<kStageSteps>(sums, keep, operands);
          keep = 1;
          const uint32_t before = leave_stage();
          operands = find_operands();
          wgmma::wait_products<1>();
          release(before);
        }
        if (num_steps == 0) break;
        wait_for_stage();
      }
      const int count = min(num_steps, kStageSteps - step_);
      multiply_part(sums, keep, count, operands);
      keep = 1;
      num_steps -= count;
      step_ += count;
      if (step_ == kStageSteps) {
        const uint32_t before = leave_stage();
        operands = find_operands();
        wgmma::wait_products<1>();
        release(before);
      }
    }
    wgmma::wait_products<0>();
    wgmma::pin(sums);
    release(left_);
    left_ = 0;
  }

 private:
  using Place = StageReader<kCluster>;
  using Place::kRowStep, Place::left_, Place::ring_, Place::stage_, Place::step_;
  using Place::leave_stage, Place::release, Place::wait_for_stage;
  static constexpr int kCoreBytes = 128;  // of 8 outputs x 8 k

  /// Of the next step: the lower halves of its descriptors, and from there to the next weights.
  struct Operands {
    uint32_t weights;
    uint32_t rows;
    int weight_step;
  };

  /// While products are under way, since this takes as long as one of few rows. Descriptors lie in
  /// uniform registers: what the compiler knows to be the same in all lanes is worked out there,
  /// anything else moved there piece by piece between one product and the next.
  __device__ __forceinline__ Operands find_operands() const {
    const auto uniform = [](auto value) { return __shfl_sync(0xffffffffu, value, 0); };
    const uint32_t at = ring_.stages + stage_ * ring_.stage_bytes;
    const uint32_t weights =
        wgmma::describe_place(at + group_ * (kGroupUnits * kOctetUnitBytes), 0) | weight_form_;
    const uint32_t rows = wgmma::describe_place(at + max_weight_bytes_, 16);
    return {uniform(weights + step_ * weight_step_), uniform(rows + step_ * kRowStep),
            uniform(weight_step_)};
  }

  /// Less than a stage.
  __device__ __forceinline__ void multiply_part(float (&sums)[kRows / 2], int keep, int count,
                                                const Operands& operands) {
    if (count == 1) {
      multiply_steps<1>(sums, keep, operands);
    } else if (count == 2) {
      multiply_steps<2>(sums, keep, operands);
    } else {
      multiply_steps<3>(sums, keep, operands);
    }
  }

  /// The next kCount steps of the stage, as one group: straight-line code from fence to commit, as
  /// ptxas needs it to leave products in flight.
  template <int kCount>
  __device__ __forceinline__ void multiply_steps(float (&sums)[kRows / 2], int keep,
                                                 const Operands& operands) {
    static_assert(kCount <= kStageSteps);
    constexpr uint64_t kWeightForm = wgmma::describe_form(kCoreBytes, false);
    constexpr uint64_t kRowForm = wgmma::describe_form(8 * kRowBytes, true);
    wgmma::pin(sums);
    wgmma::begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma::multiply<kRows>(sums, kWeightForm | (operands.weights + i * operands.weight_step),
                             kRowForm | (operands.rows + i * kRowStep), i == 0 ? keep : 1);
    }
    wgmma::end_products();
  }

  int group_;
  uint32_t max_weight_bytes_;
  uint32_t weight_form_ = 0;  // of the descriptors' lower halves
  int weight_step_ = 0;
};

}  // namespace openspec::cuda
#endif  // OPENSPEC_HAS_WGMMA
