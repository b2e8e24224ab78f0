#pragma once

/// A warp's activations: those of one chain, as the second operand of the matrix instructions.
///
/// A warp reads only its own chain's inputs, so nothing here concerns the other warps. An earlier
/// kernel of the stream wrote them, maybe while this one was running already: loads bypass the
/// first-level cache.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/linear/ring.cuh"

namespace openspec::cuda {

/// Steps [first_step, first_step + num_steps) of a unit.
struct Chain {
  int first_step;
  int num_steps;
};

/// The rows of x that a block works on, one tile of 8 after another. Rows from num_rows on are
/// never read, and what is computed for them is never written.
struct ActivationRows {
  const __nv_bfloat16* x;
  int num_inputs;
  int first_row;
  int num_rows;  // of all x

  /// Inputs [16 step + 8 octet, + 8) of row first_row + row, zeros where there is none.
  __device__ __forceinline__ uint4 load(int row, int step, int octet) const {
    if (first_row + row >= num_rows) return make_uint4(0, 0, 0, 0);
    const int64_t at = static_cast<int64_t>(first_row + row) * num_inputs + step * kLinearStep;
    return __ldcg(reinterpret_cast<const uint4*>(x + at) + octet);
  }
};

/// In registers, for chains of exactly kSteps steps. Loaded in whole lines of four steps: all
/// blocks read the same few lines at the same time, so that requests to the second-level cache
/// count.
template <int kTiles, int kSteps>
class RegisterActivations {
 public:
  /// Starts to load a chain's. A row that is not there is read as the last one: its products are
  /// never written, and no other row's depend on it.
  __device__ __forceinline__ void load(const ActivationRows& rows, int first_step, int lane) {
    // A chain that begins within a line shares its first line and its last with its neighbours. The
    // lanes that have nothing of the first load what is there of the one after the others.
    const int skipped = kIsAligned ? 0 : first_step % 4 * 2;  // octets of the first line
    is_late_ = lane % 8 < skipped;
    const int octet = lane % 8 - skipped;
    octet_ = octet & 7;
    const uint4* from[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(rows.first_row + tile * 8 + half * 4 + lane / 8, rows.num_rows - 1);
        from[tile][half] =
            reinterpret_cast<const uint4*>(rows.x + static_cast<int64_t>(row) * rows.num_inputs +
                                           first_step * kLinearStep) +
            octet;
      }
    }
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const int at = line == 0 && is_late_ ? 8 * kLines : 8 * line;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool is_there = kIsAligned || at + octet < 2 * kSteps;
          pieces_[tile][line][half] = make_uint4(0, 0, 0, 0);
          if (is_there) pieces_[tile][line][half] = __ldcg(from[tile][half] + at);
        }
      }
    }
  }

  /// Makes operands of what was loaded for steps [begin, end): once, in order, for all steps.
  /// `scratch`: 1 KB of the warp's own.
  ///
  /// A lane has 8 inputs of one row and wants 2 of each octet: through shared memory, 8 rows of a
  /// line at a time, whose 16-byte pieces are permuted so that neither side has bank conflicts.
  __device__ __forceinline__ void turn(int begin, int end, uint32_t scratch, int lane) {
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      if (4 * line < begin || 4 * line >= end) continue;  // bounds that let every loop be unrolled
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4(&pieces)[2] = pieces_[tile][line];
        if constexpr (!kIsAligned) {
          if (line + 1 < kLines && is_late_) {  // what came with the first line moves to the last
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint4 first = pieces[half];
              pieces[half] = pieces_[tile][line + 1][half];
              pieces_[tile][line + 1][half] = first;
            }
          }
        }
        __syncwarp();  // every lane has read what was there
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_shared(scratch + piece(half * 4 + lane / 8, octet_), pieces[half]);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
          load_matrices(words, scratch + piece(lane % 8, half * 4 + lane / 8));
          pieces[half] = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  /// The operands of a step, in a loop that is unrolled.
  __device__ __forceinline__ void get(int step, uint32_t (&x)[kTiles][2]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4& pair = pieces_[tile][step / 4][step / 2 % 2];
      x[tile][0] = step % 2 == 0 ? pair.x : pair.z;
      x[tile][1] = step % 2 == 0 ? pair.y : pair.w;
    }
  }

 private:
  static constexpr int kLines = (kSteps + 3) / 4;
  static constexpr bool kIsAligned = kSteps % 4 == 0;  // then so is every chain

  __device__ static __forceinline__ uint32_t piece(int row, int octet) {
    return row * 128 + (octet ^ row) * 16;
  }

  // Of four steps: of each half as loaded, 8 inputs of row lane / 8 (+ 4); turned, the operands of
  // two steps, inputs 0-7 and 8-15 of each.
  uint4 pieces_[kTiles][kLines][2];
  int octet_;     // of four steps of the chain, that the lane loads
  bool is_late_;  // it has each of them one line later, the last one's with the first line
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
template <int kTiles>
class SharedActivations {
 public:
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
      load_matrices(words, from + tile * 8 * activation_pitch(phase_steps_));
      x[tile][0] = words[0];
      x[tile][1] = words[1];
      x[tile + 1][0] = words[2];
      x[tile + 1][1] = words[3];
    }
    if constexpr (kTiles % 2 == 1) {
      load_matrices(x[kTiles - 1], from + (kTiles - 1) * 8 * activation_pitch(phase_steps_));
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
