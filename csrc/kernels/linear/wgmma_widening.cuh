#pragma once

/// How the warpgroups of linear_wgmma multiply weights of e4m3, which they widen on the way.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/linear/wgmma_reader.cuh"

#ifdef OPENSPEC_HAS_WGMMA
namespace openspec::cuda {

/// As ChainReader, with weights in registers: each lane reads the codes of its outputs, 8 bytes a
/// step, and widens them to the first operand. Every step is a product of its own, and while it
/// runs the next one's weights are widened, into the other of two sets of registers: a warp that
/// starts several products at once waits for all but the last of them before it goes on.
template <int kRows, int kCluster>
class WideningReader : public StageReader<kCluster> {
 public:
  __device__ __forceinline__ WideningReader(const Ring& ring, int group, int lane,
                                            uint32_t max_weight_bytes, const RingPlace& place = {})
      : StageReader<kCluster>(ring, lane, place),
        max_weight_bytes_(max_weight_bytes),
        own_weights_((group * kGroupThreads + threadIdx.x % kGroupThreads) / 32 * kUnitBytes +
                     lane * 8) {}

  __device__ __forceinline__ void begin_tile(int, int num_steps) {
    stages_left_ = (num_steps - 1) / kStageSteps;
    read_stage();
    rows_ = next_rows_;
    widen(codes_[0], weights_[0]);
  }

  __device__ __forceinline__ void finish_tile() {
    release(left_);
    left_ = 0;
    if (0 < step_ && step_ <= kReadingStep) this->give_back_stage();
    step_ = 0;
  }

  /// sums = the chain of the next `num_steps` steps, or a part of one. Whole stages are
  /// straight-line code.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], int num_steps) {
    int keep = 0;
    wgmma::pin(sums);
#pragma unroll 1
    while (num_steps > 0) {
      if (step_ == 0 && num_steps >= kStageSteps) {
        multiply_step<0>(sums, keep);
        multiply_step<1>(sums, 1);
        multiply_step<2>(sums, 1);
        multiply_step<3>(sums, 1);
        num_steps -= kStageSteps;
      } else {
        if (step_ == 0) {
          multiply_step<0>(sums, keep);
        } else if (step_ == 1) {
          multiply_step<1>(sums, keep);
        } else if (step_ == 2) {
          multiply_step<2>(sums, keep);
        } else {
          multiply_step<3>(sums, keep);
        }
        --num_steps;
      }
      keep = 1;
    }
    wgmma::wait_products<0>();
    wgmma::pin(sums);
    wgmma::pin(weights_[0]);
    wgmma::pin(weights_[1]);
  }

 private:
  using Place = StageReader<kCluster>;
  using Place::kRowStep, Place::left_, Place::ring_, Place::stage_, Place::step_;
  using Place::leave_stage, Place::release, Place::wait_for_stage;
  static constexpr int kUnitBytes = unit_bytes(WeightForm::kOutputScales);
  static constexpr int kStepBytes = kUnitBytes / kStageSteps;
  static constexpr int kReadingStep = 1;  // of a stage, behind which the next one's codes are read

  /// Waits for the next stage and starts to read its codes.
  __device__ __forceinline__ void read_stage() {
    wait_for_stage();
    const uint32_t at = ring_.stages + stage_ * ring_.stage_bytes;
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i)
      codes_[i] = load_codes(at + own_weights_ + i * kStepBytes);
    const uint32_t rows = wgmma::describe_place(at + max_weight_bytes_, 16);
    next_rows_ = __shfl_sync(0xffffffffu, rows, 0);  // in a uniform register
  }

  /// Starts the product of step kStep of the stage and widens the weights of the next.
  template <int kStep>
  __device__ __forceinline__ void multiply_step(float (&sums)[kRows / 2], int keep) {
    constexpr uint64_t kRowForm = wgmma::describe_form(8 * kRowBytes, true);
    constexpr int kNext = (kStep + 1) % kStageSteps;
    wgmma::pin(weights_[kStep % 2]);
    wgmma::begin_products();
    wgmma::multiply<kRows>(sums, weights_[kStep % 2], kRowForm | (rows_ + kStep * kRowStep), keep);
    wgmma::end_products();
    // Registers that products read must not be taken for something else while these are under
    // way: the compiler knows the instructions as reading them at once.
    wgmma::wait_products<1>();
    wgmma::pin(weights_[kNext % 2]);
    widen(kNext == kStageSteps - 1 ? last_codes_ : codes_[kNext], weights_[kNext % 2]);
    if constexpr (kStep == kReadingStep) {
      release(leave_stage());  // the products of the one before are done
      last_codes_ = codes_[kStageSteps - 1];
      if (stages_left_ > 0) read_stage();
      --stages_left_;
    }
    if constexpr (kStep == kStageSteps - 1) rows_ = next_rows_;
    step_ = (kStep + 1) % kStageSteps;
  }

  uint32_t max_weight_bytes_;
  uint32_t own_weights_;  // bytes in a stage before those of the warp's unit and lane
  int stages_left_ = 0;   // of the tile, behind the one that was read last
  uint2 codes_[kStageSteps];
  uint2 last_codes_;   // of the stage's last step, while codes_ has the next stage's
  uint32_t rows_ = 0;  // lower half of the descriptor of the stage's rows
  uint32_t next_rows_ = 0;
  uint32_t weights_[2][4];
};

template <WeightForm kForm, int kRows, int kCluster>
using TileReader = std::conditional_t<is_e4m3(kForm), WideningReader<kRows, kCluster>,
                                      ChainReader<kRows, kCluster>>;

}  // namespace openspec::cuda
#endif  // OPENSPEC_HAS_WGMMA
