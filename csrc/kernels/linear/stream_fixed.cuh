#pragma once

/// linear_stream's kernel for chains whose length is known when compiling, one split to a block:
/// the activations stay in registers, and a slot's place in the ring is an immediate. Whatever a
/// warp does between two chains keeps weights from being under way, so it does as little as
/// possible.

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "kernels/linear/stream.cuh"

namespace openspec::cuda {

/// The fewest even parts of at most 12.5 KB.
constexpr int even_parts(WeightForm form, int num_steps) {
  int num_parts = ceil_div(num_steps * step_bytes(form), 25 << 9);
  while (num_steps % num_parts != 0) ++num_parts;
  return num_parts;
}

/// Steps of a slot: whole slots where that is possible, of about 2 KB.
constexpr int slot_steps(WeightForm form, int part_steps) {
  if (is_e4m3(form)) return part_steps % 8 == 0 ? 8 : 10;
  return part_steps % 5 == 0 ? 5 : part_steps % 4 == 0 ? 4 : part_steps % 3 == 0 ? 3 : 5;
}

/// Records of a warp's ring, each of a whole chain or, of a long one, an even part.
template <WeightForm kForm, int kSteps>
struct ChainRecord {
  static constexpr int kStepBytes = step_bytes(kForm);
  static constexpr int kParts = even_parts(kForm, kSteps);  // of a chain
  static constexpr int kPartSteps = kSteps / kParts;
  static constexpr int kSlotSteps = slot_steps(kForm, kPartSteps);
  static constexpr int kSlots = (kPartSteps + kSlotSteps - 1) / kSlotSteps;
  /// Slots that are multiplied at once: with the ends of segments between them, 20 steps take less
  /// time than twice 10.
  static constexpr int kGroup = has_blocks(kForm) && kSlotSteps == 10 ? 2 : 1;
  static constexpr int kPartBytes = kPartSteps * kStepBytes;
  /// Weights, then the barriers of their slots. A copy between addresses that lie differently
  /// within lines of 128 bytes takes up to a quarter longer.
  static constexpr int kRecordBytes = (kPartBytes + kSlots * kSlotBarrierBytes + 127) / 128 * 128;
  static constexpr int kBlockBytes = kRecordBytes * kStreamWarps;

  static constexpr int slot_begin(int slot) { return slot * kSlotSteps; }
  static constexpr int slot_end(int slot) {
    return slot + 1 < kSlots ? (slot + 1) * kSlotSteps : kPartSteps;
  }
  static constexpr int barrier(int slot) { return kPartBytes + slot * kSlotBarrierBytes; }
};

/// Of an SM's shared memory, what the blocks of two matrices have for themselves at least if their
/// rings are to be wide.
inline constexpr int kWideSharedBytes = 226 << 10;

/// How many of them a ring has. `is_wide`: where a block takes more than half of an SM's shared
/// memory anyway (see linear_stream), up to three, as long as one of the next matrix fits beside
/// it: more of the weights are there when the input comes. Of e4m3 the usual ring has as much.
template <WeightForm kForm, int kTiles, int kSteps>
constexpr int num_records(bool is_wide) {
  constexpr int kRingBytes = 84 << 10;
  constexpr int kRoom = kWideSharedBytes - kRingBytes - 2 * SumLayout<kTiles, 2>::kBytes;
  using Record = ChainRecord<kForm, kSteps>;
  if (Record::kParts > 1) return 1;
  const int usual = std::max(1, kRingBytes / Record::kBlockBytes);
  return is_wide && !is_e4m3(kForm) ? std::max(usual, std::min(3, kRoom / Record::kBlockBytes))
                                    : usual;
}

inline constexpr int kClaimBytes = 16;

/// Of so few steps the weights of a unit come sooner than the answer to a claim.
inline constexpr int kShortSteps = 8;

template <WeightForm kForm, int kTiles, int kSteps, int kRecords>
constexpr int fixed_shared_bytes() {
  return SumLayout<kTiles, 2>::kBytes + kRecords * ChainRecord<kForm, kSteps>::kBlockBytes +
         kClaimBytes;
}

/// Segments of a chain of so many steps end at multiples of this, if the chain begins at one.
constexpr int chain_grain(int num_steps) { return std::gcd(num_steps, kBlockSteps); }

// The fewer registers, the better: the blocks of the next linear, and of the small kernel between
// them, are to start beside these. Twice 80 leave room for any small kernel; so do 120 and 72, of
// neighbours in a model at 16 rows, for ten warps of 40. But what is spilled waits for the same
// memory as the weights. With e4m3, what is widened needs some too; two blocks of 128 just fit.
constexpr int fixed_registers(WeightForm form, int num_tiles, int num_steps) {
  const int held = 2 * num_tiles * num_steps + 4 * num_tiles;  // activations and accumulators
  if (is_e4m3(form)) {
    const int more = (has_blocks(form) ? 4 * num_tiles + 4 : 0) + (num_steps % 4 == 0 ? 0 : 8);
    const int all = held + more + (num_tiles > 1 ? 56 : 48);
    return held <= 88 && all > 128 ? 128 : std::min(240, all / 8 * 8);
  }
  if (held <= 40 && num_tiles > 1) return 72;
  return held <= 46 ? 80 : held <= 72 ? 112 : held <= 88 ? 120 : held <= 136 ? 168 : 240;
}

/// Sets up a warp's ring. Lane 0 does, all call it.
template <typename Ring, int kRecords>
__device__ __forceinline__ void init_ring(uint32_t ring, int lane) {
  if (lane == 0) {
#pragma unroll
    for (int record = 0; record < kRecords; ++record) {
#pragma unroll
      for (int slot = 0; slot < Ring::kSlots; ++slot) {
        init_slot_barrier(ring + record * Ring::kRecordBytes + Ring::barrier(slot));
      }
    }
    publish_slot_barriers();
  }
  __syncwarp();
}

/// Starts to fill a slot of a record; `from`: what the whole record is filled with.
template <typename Ring>
__device__ __forceinline__ void fill_record_slot(uint32_t record, int slot, const uint8_t* from,
                                                 int lane) {
  const int begin = Ring::slot_begin(slot);
  fill_slot<Ring::kSlotSteps * Ring::kStepBytes>(
      record + begin * Ring::kStepBytes, record + Ring::barrier(slot),
      from + begin * Ring::kStepBytes, (Ring::slot_end(slot) - begin) * Ring::kStepBytes, lane,
      /*is_read_once=*/true);
}

/// Starts to fill a ring with the first units. Of e4m3 slot after slot, each when the one before is
/// there. That is as fast, for a slot of every warp occupies the memory, and it lets pass what the
/// kernels before still read and write: all of a ring at once would hold them up until it is full.
template <typename Ring, WeightForm kForm, int kRecords>
__device__ __forceinline__ void fill_ring(uint32_t ring, const int (&units)[kRecords + 1],
                                          int num_units, const uint8_t* first_weights,
                                          int64_t unit_bytes, int lane) {
  uint32_t on_its_way = 0;  // the barrier of that slot
#pragma unroll
  for (int i = 0; i < kRecords; ++i) {
    if (units[i] >= num_units) return;
    const uint32_t record = ring + i * Ring::kRecordBytes;
#pragma unroll
    for (int slot = 0; slot < Ring::kSlots; ++slot) {
      if (is_e4m3(kForm) && i + slot > 0) wait_for_slot(on_its_way, 0);
      fill_record_slot<Ring>(record, slot, first_weights + units[i] * unit_bytes, lane);
      on_its_way = record + Ring::barrier(slot);
    }
  }
  if (!is_e4m3(kForm) || units[kRecords] >= num_units) return;
  // That is sooner than the kernel before is done: half of a chain more, to the cache.
  wait_for_slot(on_its_way, 0);
  prefetch_weights<false>(first_weights + units[kRecords] * unit_bytes, Ring::kPartBytes / 2, lane);
}

/// On to the ring's next record, whose slots wait for phases of `parity`.
template <typename Ring, int kRecords>
__device__ __forceinline__ void next_record(uint32_t ring, uint32_t& record, uint32_t& parity) {
  if constexpr (kRecords == 1) {
    parity ^= 1;
  } else {
    record += Ring::kRecordBytes;
    if (record == ring + kRecords * Ring::kRecordBytes) {
      record = ring;
      parity ^= 1;
    }
  }
}

/// Has all scales of a matrix brought near, by all blocks together. The memory answers the later,
/// the more weights are under way: a unit would wait for its scales for longer than it takes.
template <WeightForm kForm>
__device__ __forceinline__ void fetch_scales(const PackedLinear& weight) {
  if constexpr (is_e4m3(kForm)) {
    constexpr int kLineScales = 128 / sizeof(float);
    const int num_scales = weight.num_scales();
    const int stride = static_cast<int>(gridDim.x) * kStreamThreads * kLineScales;
    int at = static_cast<int>(threadIdx.x * gridDim.x + blockIdx.x) * kLineScales;
    for (; at < num_scales; at += stride) fetch_to_cache(weight.scales + at);
  }
}

/// A thread's part of the scales of a unit, which it begins to load while the unit before is
/// multiplied. Of blocks, a lane has one of those of the warp's chain; of outputs, that of its
/// output.
template <WeightForm kForm, int kSteps>
class UnitScales {
 public:
  /// The chain begins with `first_step` of those that are here.
  __device__ __forceinline__ UnitScales(const PackedLinear& weight, int first_step, int unit,
                                        int lane)
      : weight_(weight) {
    if constexpr (has_blocks(kForm)) {
      const int before = scale_phase(weight) + first_step;
      phase_ = before % kBlockSteps;
      const int block = before / kBlockSteps + lane / 2;
      const int num_blocks = weight.num_scale_blocks();
      at_ = lane % 2 * num_blocks + min(block, num_blocks - 1);
      unit_scales_ = 2 * num_blocks;
    } else if constexpr (has_output_scales(kForm)) {
      at_ = threadIdx.x % kLinearUnit;
      unit_scales_ = kLinearUnit;
    }
    load(unit);
  }

  __device__ __forceinline__ void begin_unit(int next_unit) {
    scale_ = next_scale_;
    segment_ = 0;
    load(next_unit);
  }

  /// After step `step` of the chain, in a loop that is unrolled.
  template <int kTiles>
  __device__ __forceinline__ void end_step(ChainSums<kForm, kTiles>& sums, int step) {
    if constexpr (has_blocks(kForm)) {
      const bool is_last = step + 1 == kSteps;
      if (!is_last && (step + 1) % kGrain != 0) return;  // no segment ends here, whatever the phase
      if (!is_last && (phase_ + step + 1) % kBlockSteps != 0) return;
      float scales[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[half] = __shfl_sync(kAllLanes, scale_, segment_ * 2 + half);
      }
      sums.end_segment(scales);
      ++segment_;
    }
  }

  __device__ __forceinline__ float of_output(float sum) const {
    return has_output_scales(kForm) ? __fmul_rn(sum, scale_) : sum;
  }

 private:
  static constexpr int kGrain = chain_grain(kSteps);
  static_assert((kSteps + 2 * kBlockSteps - 2) / kBlockSteps <= 16, "a lane for each scale");

  __device__ __forceinline__ void load(int unit) {
    if constexpr (is_e4m3(kForm)) {
      const int there = min(unit, weight_.num_outputs / kLinearUnit - 1);
      next_scale_ = __ldg(weight_.scales + static_cast<int64_t>(there) * unit_scales_ + at_);
    }
  }

  const PackedLinear& weight_;
  int phase_;             // steps of the first block before the chain
  int at_, unit_scales_;  // the thread's place in a unit's table, of so many
  int segment_;
  float scale_, next_scale_;
};

/// Waits for slots [first, last] of a record, whose steps come `part_step` steps into the chain,
/// multiplies them, and is done with them.
template <typename Ring, WeightForm kForm, int kTiles, int kSteps>
__device__ __forceinline__ void multiply_slots(
    ChainSums<kForm, kTiles>& sums, const RegisterActivations<kTiles, kSteps>& activations,
    UnitScales<kForm, kSteps>& scales, uint32_t record, uint32_t parity, int first, int last,
    int part_step, int lane) {
#pragma unroll
  for (int slot = first; slot <= last; ++slot) {
    wait_for_slot(record + Ring::barrier(slot), parity);
  }
#pragma unroll
  for (int i = 0; i < Ring::kGroup * Ring::kSlotSteps; ++i) {
    const int step = Ring::slot_begin(first) + i;
    if (step >= Ring::slot_end(last)) break;
    uint32_t weights[4], x[kTiles][2];
    load_weights<kForm>(weights, record, step, lane);
    activations.get(part_step + step, x);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      multiply_add(sums.products[tile], weights, x[tile][0], x[tile][1]);
    }
    scales.end_step(sums, part_step + step);
  }
  __syncwarp();
}

/// A unit on its way from the chains' sums to memory. A thread stores some of its chain's sums,
/// then adds up and writes one output, of row thread / 16 (and 16 rows on). `buffer`: bytes to
/// those sums that are the unit's.
template <typename Sums, bool kHasBias>
class UnitSums {
 public:
  /// `sums`: shared address of all, `own_sums`: of the warp's chain's.
  __device__ __forceinline__ UnitSums(const LinearParams& params, int64_t row_stride, int split,
                                      uint32_t sums, uint32_t own_sums, int lane)
      : row_(threadIdx.x / kLinearUnit),
        output_(threadIdx.x % kLinearUnit),
        from_(sums + (row_ * Sums::kPitch + output_) * 4),
        to_(own_sums + (lane % 4 * 2 * Sums::kPitch + lane / 4) * 4),
        layout_(params, row_stride),
        out_(layout_.data + layout_.at(static_cast<int64_t>(split) * params.num_rows, 0, 0)),
        first_at_(static_cast<uint32_t>(layout_.at(row_, 0, output_))),
        row_bytes_(static_cast<uint32_t>(row_stride) * layout_.element_bytes),
        unit_at_(layout_.unit_columns * layout_.element_bytes) {}

  template <int kTiles>
  __device__ __forceinline__ void store(const float (&accumulators)[kTiles][4],
                                        uint32_t buffer) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared(to_ + buffer + ((tile * 8 + i % 2) * Sums::kPitch + i / 2 * 8) * 4,
                     accumulators[tile][i]);
      }
    }
  }

  /// `slot`: of the round that is sent, where it is.
  template <typename Scales, typename Geometry>
  __device__ __forceinline__ void write(const LinearParams& params, int unit, uint32_t buffer,
                                        const Scales& scales, const Geometry& geometry,
                                        [[maybe_unused]] int64_t slot) const {
    constexpr int kElements = Sums::kRows * kLinearUnit;
    constexpr int kPasses = (kElements + kStreamThreads - 1) / kStreamThreads;
    constexpr int kPassRows = kStreamThreads / kLinearUnit;
    const uint32_t at = first_at_ + unit * unit_at_;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass * kStreamThreads + static_cast<int>(threadIdx.x) >= kElements) break;  // whole warps
      const uint32_t from = from_ + buffer + pass * kPassRows * Sums::kPitch * 4;
      float sum = load_shared(from);
#pragma unroll
      for (int c = 1; c < kLinearChains; ++c) {
        sum += load_shared(from + c * Sums::kChainFloats * 4);
      }
      sum = scales.of_output(sum);
      const bool is_written = row_ + pass * kPassRows < params.num_rows && layout_.has(output_);
      const uint32_t pass_at = pass * kPassRows * row_bytes_;
      if constexpr (kSends<Geometry>) {
        float* own = reinterpret_cast<float*>(out_ + at + pass_at) + slot;
        if (is_written) send_to_all(geometry.to, own, word_of(sum));  // few rows
      } else {
        write_output(layout_.is_swiglu, layout_.is_f32, out_ + at + pass_at, is_written,
                     kHasBias ? with_bias(sum, params.weight, unit, output_) : sum);
      }
    }
  }

 private:
  int row_, output_;
  uint32_t from_, to_;
  OutputLayout layout_;
  uint8_t* out_;
  uint32_t first_at_, row_bytes_, unit_at_;  // few rows: below 4 GB
};

/// kHasBias: of a matrix with a bias. Apart from the others, which have no register to spare.
/// Geometry: StreamGeometry or ExchangeGeometry.
template <WeightForm kForm, int kTiles, int kSteps, int kRecords, bool kHasBias, typename Geometry>
__global__ void __maxnreg__(fixed_registers(kForm, kTiles, kSteps))
    fixed_kernel(LinearParams params, Geometry geometry) {
  allow_next_kernel();
  using Ring = ChainRecord<kForm, kSteps>;
  constexpr int kRingBytes = kRecords * Ring::kRecordBytes;  // of a warp
  using Sums = SumLayout<kTiles, 2>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;

  const PackedLinear& weight = params.weight;
  const int num_splits = geometry.splits.size();  // 1 without partials
  const int split = blockIdx.x % num_splits;      // of those that are here
  const int first_unit = blockIdx.x / num_splits;
  const int unit_stride = geometry.streams_of(split, num_splits);
  const int num_units = weight.num_outputs / kLinearUnit;
  const int first_step = (split * kLinearChains + warp) * kSteps;
  // The unit being multiplied, those in the ring after it, and the one that goes there next. The
  // first ones are this block's by its number, for their weights are to be under way before the
  // kernel before this one is done; which block multiplies the others is decided by who comes
  // first. So a block that shares its SM with another one, or starts late, takes fewer. Units of
  // short chains are all dealt by number.
  constexpr int kAhead = kRecords;
  int units[kAhead + 1];
#pragma unroll
  for (int i = 0; i <= kAhead; ++i) units[i] = first_unit + i * unit_stride;
  const bool claims_units = kSteps > kShortSteps && params.workspace != nullptr;
  auto* const claims = reinterpret_cast<uint32_t*>(params.workspace) + split;

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t sums = shared_address(shared);
  // The next claim, in two places by turns: one is read while the other is written.
  auto* const claim = reinterpret_cast<int*>(shared + Sums::kBytes + kStreamWarps * kRingBytes);
  const uint32_t own_sums = sums + warp * Sums::kChainFloats * 4;
  const uint32_t ring = sums + Sums::kBytes + warp * kRingBytes;
  init_ring<Ring, kRecords>(ring, lane);
  fetch_scales<kForm>(weight);
  UnitScales<kForm, kSteps> scales(weight, first_step, first_unit, lane);

  const int64_t unit_bytes = int64_t{weight.num_inputs / kLinearStep} * Ring::kStepBytes;
  const uint8_t* const first_weights =
      static_cast<const uint8_t*>(weight.data) + int64_t{first_step} * Ring::kStepBytes;
  fill_ring<Ring, kForm, kRecords>(ring, units, num_units, first_weights, unit_bytes, lane);

  const UnitSums<Sums, kHasBias> unit_sums(params, geometry.row_stride,
                                           geometry.splits.begin + split, sums, own_sums, lane);

  wait_for_previous_kernel();
  [[maybe_unused]] int64_t slot = 0;
  if constexpr (kSends<Geometry>) slot = begin_sending(geometry.to);
  RegisterActivations<kTiles, kSteps> activations;
  activations.load(
      {static_cast<const __nv_bfloat16*>(params.x), weight.num_inputs, 0, params.num_rows},
      first_step, lane);
  // The ring is full and the memory would idle until the activations are there, the longer the more
  // rows they have; more than this would hold up the first refills.
  constexpr bool kIsLonger = kTiles > 1;
  constexpr int kPrefetched =
      Ring::slot_end(kIsLonger && Ring::kSlots > 1 ? 1 : 0) * Ring::kStepBytes;
  if (Ring::kParts > 1) {
    prefetch_weights<kIsLonger>(first_weights + units[0] * unit_bytes + Ring::kPartBytes,
                                kPrefetched, lane);
  } else if (!is_e4m3(kForm) && units[kAhead] < num_units) {
    prefetch_weights<kIsLonger>(first_weights + units[kAhead] * unit_bytes, kPrefetched, lane);
  }

  uint32_t record = ring;
  uint32_t parity = 0;
  uint32_t buffer = 0;
  // The first unit apart: it begins as soon as the first activations are there.
  const auto add_unit = [&](auto is_first) {
    ChainSums<kForm, kTiles> chain_sums;
    scales.begin_unit(units[1]);
    if constexpr (kHasBias) fetch_bias(weight, units[0]);
    const bool has_next = units[kAhead] < num_units;
    // Asked for now, needed when this unit is done.
    int claimed = units[kAhead] + unit_stride;
    if (claims_units && has_next && threadIdx.x == 0) {
      claimed =
          (kAhead + 1) * unit_stride + atomicInc(claims, num_units - kAhead * unit_stride - 1);
    }
#pragma unroll
    for (int part = 0; part < Ring::kParts; ++part) {
      const bool refills = part + 1 < Ring::kParts || has_next;
      // The next part comes while this one is multiplied; after the last, the next unit.
      const uint8_t* const next =
          part + 1 < Ring::kParts
              ? first_weights + units[0] * unit_bytes + (part + 1) * Ring::kPartBytes
              : first_weights + units[kAhead] * unit_bytes;
#pragma unroll
      for (int first = 0; first < Ring::kSlots; first += Ring::kGroup) {
        const int part_step = part * Ring::kPartSteps;
        const int last = min(first + Ring::kGroup, +Ring::kSlots) - 1;
        if constexpr (decltype(is_first)::value) {
          activations.turn(part_step + Ring::slot_begin(first), part_step + Ring::slot_end(last),
                           own_sums, lane);
        }
        multiply_slots<Ring>(chain_sums, activations, scales, record, parity, first, last,
                             part_step, lane);
#pragma unroll
        for (int slot = first; slot <= last; ++slot) {
          if (refills) fill_record_slot<Ring>(record, slot, next, lane);
        }
      }
      next_record<Ring, kRecords>(ring, record, parity);
    }

    unit_sums.store(chain_sums.whole(), buffer);
    if (claims_units && threadIdx.x == 0) claim[buffer != 0] = has_next ? claimed : num_units;
    __syncthreads();
    const int unit = units[0];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) units[i] = units[i + 1];
    units[kAhead] = claims_units ? claim[buffer != 0] : claimed;
    unit_sums.write(params, unit, buffer, scales, geometry, slot);
    buffer ^= Sums::kBufferFloats * 4;
  };
  add_unit(std::true_type{});
#pragma unroll 1
  while (units[0] < num_units) add_unit(std::false_type{});
}

}  // namespace openspec::cuda
