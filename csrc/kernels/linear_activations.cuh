#pragma once

/// A warp's activations: those of one chain, as the second operand of the matrix instructions.
///
/// A warp reads only its own chain's inputs, so nothing here concerns the other warps. An earlier
/// kernel of the stream wrote them, maybe while this one was running already: loads bypass the
/// first-level cache.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/linear_ring.cuh"

namespace openspec::cuda {

/// Steps [first_step, first_step + num_steps) of a unit.
struct Chain {
  int first_step;
  int num_steps;
};

/// The rows of x that a block works on, one tile of 8 after another. Rows from num_rows on are
/// zeros and never read.
struct ActivationRows {
  const __nv_bfloat16* x;
  int num_inputs;
  int first_row;
  int num_rows;  // of all x

  /// Inputs [16 step + 8 octet, + 8) of row first_row + row.
  __device__ __forceinline__ uint4 load(int row, int step, int octet) const {
    if (first_row + row >= num_rows) return make_uint4(0, 0, 0, 0);
    const int64_t at = static_cast<int64_t>(first_row + row) * num_inputs + step * kLinearStep;
    return __ldcg(reinterpret_cast<const uint4*>(x + at) + octet);
  }
};

/// In registers, for a block whose every chain has exactly kChainSteps steps and whose inputs are
/// always the same.
template <int kNumTiles, int kChainSteps>
class RegisterActivations {
 public:
  static constexpr int kTiles = kNumTiles;
  static constexpr int kSteps = kChainSteps;
  // Whole slots where that is possible, of about 2 KB.
  static constexpr int kSlotSteps = kSteps % 5 == 0   ? 5
                                    : kSteps % 4 == 0 ? 4
                                    : kSteps % 3 == 0 ? 3
                                                      : 5;
  static constexpr bool kNeedsFewRegisters = kTiles * kSteps <= 20;

  /// Loads the chain. `scratch`: 1 KB of the warp's own, free again afterwards.
  __device__ __forceinline__ void begin_block(const ActivationRows& rows, const Chain& chain,
                                              uint32_t scratch, int lane) {
    const int octet = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        pairs_[tile][pair] = make_uint4(0, 0, 0, 0);
        if (4 * pair + octet < 2 * kSteps) {
          pairs_[tile][pair] = rows.load(tile * 8 + lane / 4, chain.first_step + 2 * pair, octet);
        }
      }
    }
    // A lane has 8 inputs of one row and wants 2 of each octet: through shared memory, in blocks of
    // two steps whose 16-byte pieces are permuted so that neither side has bank conflicts. Blocks
    // take turns: when a lane writes a block again, every lane has passed the barrier after reading
    // it.
    const uint32_t to = scratch + piece(lane / 4, octet);
    const uint32_t from = scratch + piece(lane % 8, lane / 8);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int turn = (tile * kPairs + pair) % 2 * kBlockBytes;
        store_shared(to + turn, pairs_[tile][pair]);
        __syncwarp();
        uint32_t words[4];
        load_matrices(from + turn, words);
        pairs_[tile][pair] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void begin_slot(int /*split*/, const Chain& /*chain*/,
                                             int /*first_step*/) {}

  /// Of a step of the chain, in a loop that is unrolled.
  __device__ __forceinline__ void load(int step, uint32_t (&x)[kTiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4& pair = pairs_[tile][step / 2];
      x[tile][0] = step % 2 == 0 ? pair.x : pair.z;
      x[tile][1] = step % 2 == 0 ? pair.y : pair.w;
    }
  }

 private:
  static constexpr int kPairs = (kSteps + 1) / 2;
  static constexpr int kBlockBytes = 8 * 64;

  __device__ static __forceinline__ uint32_t piece(int row, int octet) {
    return row * 64 + (octet ^ (row / 2)) * 16;
  }

  uint4 pairs_[kTiles][kPairs];  // two steps: of each, inputs 0-7 and 8-15
};

/// Bytes from row to row of SharedActivations; 16 more than needed, so that ldmatrix has no bank
/// conflicts.
__host__ __device__ constexpr int activation_pitch(int phase_steps) {
  return phase_steps * (2 * kLinearStep) + 16;
}
/// Shared memory of a warp's SharedActivations.
__host__ __device__ constexpr int activation_bytes(int num_tiles, int phase_steps) {
  return num_tiles * 8 * activation_pitch(phase_steps);
}

/// In shared memory, for chains of any length. What does not fit at once is read again in phases of
/// phase_steps steps, a multiple of kSlotSteps.
template <int kNumTiles>
class SharedActivations {
 public:
  static constexpr int kTiles = kNumTiles;
  static constexpr int kSteps = 0;  // any number
  static constexpr int kSlotSteps = 4;
  static constexpr bool kNeedsFewRegisters = false;

  __device__ __forceinline__ void begin_block(const ActivationRows& rows, uint32_t shared,
                                              int phase_steps, int lane) {
    rows_ = rows;
    shared_ = shared;
    phase_steps_ = phase_steps;
    lane_ = lane;
  }

  /// Makes sure that the steps of the slot from `first_step` of the chain on are there.
  __device__ __forceinline__ void begin_slot(int split, const Chain& chain, int first_step) {
    if (split == split_ && first_step >= phase_begin_ && first_step < phase_begin_ + phase_steps_) {
      return;
    }
    split_ = split;
    phase_begin_ = first_step;
    const int num_octets = 2 * min(phase_steps_, chain.num_steps - first_step);
    const int step = chain.first_step + first_step;
    __syncwarp();  // every lane is done with the phase before
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = tile * 8 + lane_ / 4;
      const uint32_t to = shared_ + row * activation_pitch(phase_steps_);
      for (int octet = lane_ % 4; octet < num_octets; octet += 4 * kLoadsInFlight) {
        uint4 value[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          if (octet + 4 * i < num_octets) value[i] = rows_.load(row, step, octet + 4 * i);
        }
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          if (octet + 4 * i < num_octets) store_shared(to + (octet + 4 * i) * 16, value[i]);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load(int step, uint32_t (&x)[kTiles][2]) const {
    // Lanes 0-7 address the rows of a tile at inputs 0-7, lanes 8-15 at inputs 8-15; the other
    // lanes do the same for the next tile.
    const uint32_t from = shared_ + (lane_ / 16 * 8 + lane_ % 8) * activation_pitch(phase_steps_) +
                          (step - phase_begin_) * (2 * kLinearStep) + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int tile = 0; tile + 1 < kTiles; tile += 2) {
      uint32_t words[4];
      load_matrices(from + tile * 8 * activation_pitch(phase_steps_), words);
      x[tile][0] = words[0];
      x[tile][1] = words[1];
      x[tile + 1][0] = words[2];
      x[tile + 1][1] = words[3];
    }
    if constexpr (kTiles % 2 == 1) {
      load_matrices(from + (kTiles - 1) * 8 * activation_pitch(phase_steps_), x[kTiles - 1]);
    }
  }

 private:
  static constexpr int kLoadsInFlight = 8;

  ActivationRows rows_;
  uint32_t shared_;
  int phase_steps_;
  int lane_;
  int split_ = -1;
  int phase_begin_ = 0;
};

}  // namespace openspec::cuda
