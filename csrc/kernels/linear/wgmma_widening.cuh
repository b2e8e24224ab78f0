#pragma once

/// How the warpgroups of linear_wgmma multiply weights of e4m3, which they widen on the way.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/linear/wgmma_reader.cuh"

#ifdef OPENSPEC_HAS_WGMMA
namespace openspec::cuda {

/// As ChainReader, with weights in registers: each lane reads the codes of its outputs, 8 bytes a
/// step, and widens them to the first operand. A *piece* is what lies between two ends of stages or
/// chains, 1 to 4 steps. While the products of a piece are under way, the codes of the next are
/// read and widened, into the other of two sets of registers; the first of a chain, or of a part of
/// one, is in set 0.
template <int kRows, int kCluster>
class WideningReader : public StageReader<kCluster> {
 public:
  __device__ __forceinline__ WideningReader(const Ring& ring, int group, int lane,
                                            uint32_t max_weight_bytes)
      : StageReader<kCluster>(ring, lane),
        max_weight_bytes_(max_weight_bytes),
        own_weights_((group * kGroupThreads + threadIdx.x % kGroupThreads) / 32 * kUnitBytes +
                     lane * 8) {}

  __device__ __forceinline__ void begin_tile(int, int num_steps) {
    steps_left_ = num_steps;
    read_codes();
    widen_codes<0>();
  }

  /// sums = the chain of the next `num_steps` steps, or a part of one.
  __device__ __forceinline__ void multiply(float (&sums)[kRows / 2], int num_steps) {
    int keep = 0;
    bool is_odd = false;
#pragma unroll 1
    do {
      is_odd = !multiply_piece<0>(sums, num_steps, keep);
    } while (!is_odd && multiply_piece<1>(sums, num_steps, keep));
    wgmma::wait_products<0>();
    wgmma::pin(sums);
    pin_weights<0>();
    pin_weights<1>();
    release(left_);
    left_ = 0;
    if (!is_odd) return;
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) weights_[0][i][j] = weights_[1][i][j];
    }
  }

 private:
  using Place = StageReader<kCluster>;
  using Place::kRowStep, Place::left_, Place::ring_, Place::stage_, Place::step_;
  using Place::leave_stage, Place::release, Place::wait_for_stage;
  static constexpr int kUnitBytes = unit_bytes(WeightForm::kOutputScales);
  static constexpr int kStepBytes = kUnitBytes / kStageSteps;

  /// Of the next piece. Where it has less than 4 steps what follows is read too, and not used.
  __device__ __forceinline__ void read_codes() {
    if (step_ == 0) wait_for_stage();
    const uint32_t at = ring_.stages + stage_ * ring_.stage_bytes;
    const uint32_t codes = at + own_weights_ + step_ * kStepBytes;
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) codes_[i] = load_codes(codes + i * kStepBytes);
    const uint32_t rows = wgmma::describe_place(at + max_weight_bytes_, 16) + step_ * kRowStep;
    rows_ = __shfl_sync(0xffffffffu, rows, 0);  // in a uniform register
  }

  template <int kSet>
  __device__ __forceinline__ void widen_codes() {
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) widen(codes_[i], weights_[kSet][i]);
  }

  /// The next piece, which is in set kSet; whether more of the chain is left. The one after it
  /// comes into the other set.
  template <int kSet>
  __device__ __forceinline__ bool multiply_piece(float (&sums)[kRows / 2], int& num_steps,
                                                 int& keep) {
    const int count = min(num_steps, kStageSteps - step_);
    if (count == kStageSteps) {
      start<kSet, kStageSteps>(sums, keep);
    } else if (count == 3) {
      start<kSet, 3>(sums, keep);
    } else if (count == 2) {
      start<kSet, 2>(sums, keep);
    } else {
      start<kSet, 1>(sums, keep);
    }
    keep = 1;
    num_steps -= count;
    steps_left_ -= count;
    step_ += count;
    const uint32_t before = left_;
    left_ = 0;
    if (step_ == kStageSteps) leave_stage();
    if (steps_left_ > 0) read_codes();
    wgmma::wait_products<1>();
    pin_weights<1 - kSet>();
    release(before);
    widen_codes<1 - kSet>();
    return num_steps > 0;
  }

  /// The first kCount steps of the piece, as one group: straight-line code, as ptxas needs it.
  template <int kSet, int kCount>
  __device__ __forceinline__ void start(float (&sums)[kRows / 2], int keep) {
    constexpr uint64_t kRowForm = wgmma::describe_form(8 * kRowBytes, true);
    wgmma::pin(sums);
    pin_weights<kSet>();
    wgmma::begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma::multiply<kRows>(sums, weights_[kSet][i], kRowForm | (rows_ + i * kRowStep),
                             i == 0 ? keep : 1);
    }
    wgmma::end_products();
  }

  /// Registers that products read must not be taken for something else while these are under way:
  /// the compiler knows the instructions as reading them at once.
  template <int kSet>
  __device__ __forceinline__ void pin_weights() {
#pragma unroll
    for (int i = 0; i < kStageSteps; ++i) wgmma::pin(weights_[kSet][i]);
  }

  uint32_t max_weight_bytes_;
  uint32_t own_weights_;  // bytes in a stage before those of the warp's unit and lane
  int steps_left_ = 0;    // of the tile, whose codes are not read yet
  uint2 codes_[kStageSteps];
  uint32_t rows_ = 0;  // lower half of the descriptor of the piece's rows
  uint32_t weights_[2][kStageSteps][4];
};

template <WeightForm kForm, int kRows, int kCluster>
using TileReader = std::conditional_t<is_e4m3(kForm), WideningReader<kRows, kCluster>,
                                      ChainReader<kRows, kCluster>>;

}  // namespace openspec::cuda
#endif  // OPENSPEC_HAS_WGMMA
