#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/rope/rope.h"

namespace openspec {
namespace {

using cuda::Bf16Pack;
using cuda::FloatPack;

constexpr unsigned kAllLanes = 0xffffffffu;

// Multiplications and additions that the compiler may not fuse, as in rope_cpu.cpp.
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }

/// The arithmetic of rope_cpu.cpp's cos_sin_of, for the same bits.
__device__ __forceinline__ void cos_sin_of(float angle, float& cosine, float& sine) {
  const double a = angle;
  const double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = add(mul(a, 0.63661977236758134308), shifter);
  const double n = sub(shifted, shifter);
  const int64_t quadrant = __double_as_longlong(shifted);
  const double r = sub(sub(a, mul(n, 1.57079632673412561417)), mul(n, 6.07710050650619224932e-11));
  const double r2 = mul(r, r);
  double s = -1.0 / 39916800;
  s = add(1.0 / 362880, mul(r2, s));
  s = add(-1.0 / 5040, mul(r2, s));
  s = add(1.0 / 120, mul(r2, s));
  s = add(-1.0 / 6, mul(r2, s));
  s = add(r, mul(mul(r, r2), s));
  double c = 1.0 / 479001600;
  c = add(-1.0 / 3628800, mul(r2, c));
  c = add(1.0 / 40320, mul(r2, c));
  c = add(-1.0 / 720, mul(r2, c));
  c = add(1.0 / 24, mul(r2, c));
  c = add(-0.5, mul(r2, c));
  c = add(1.0, mul(r2, c));
  const bool is_swapped = (quadrant & 1) != 0;
  const double unsigned_cos = is_swapped ? s : c;
  const double unsigned_sin = is_swapped ? c : s;
  cosine = static_cast<float>(((quadrant + 1) & 2) != 0 ? -unsigned_cos : unsigned_cos);
  sine = static_cast<float>((quadrant & 2) != 0 ? -unsigned_sin : unsigned_sin);
}

/// One row per block, one angle per thread.
__global__ void rope_angles_kernel(RopeAnglesParams params) {
  if (!params.is_fence) cuda::allow_next_kernel();
  const int half = params.head_dim / 2;
  const int j = threadIdx.x;
  const float inv_freq = j < half ? params.inv_freq[j] : 0.0f;
  cuda::wait_for_previous_kernel();
  if (params.is_fence) cuda::allow_next_kernel();
  if (j >= half) return;
  const int64_t row = blockIdx.x;
  float cosine, sine;
  cos_sin_of(static_cast<float>(params.position[row]) * inv_freq, cosine, sine);
  float* out = params.cos_sin + row * params.head_dim;
  out[j] = cosine * params.scale;
  out[half + j] = sine * params.scale;
}

constexpr int kAppendThreads = 128;
constexpr int kAppendBlocks = 12;  // per SM: 40 registers, to fit beside linears as rms_norm does
constexpr int kPairsPerLane = 4;   // a lane holds columns j .. j + 3 and half + j .. half + j + 3

/// Columns that turn with those of another lane, `apart` from it: the second of two `is_partner`.
/// All lanes of a warp take part.
template <int kLanes, typename Floats>
__device__ __forceinline__ void turn_among_lanes(Floats& x, const Floats& cosine,
                                                 const Floats& sine, int apart, bool turns,
                                                 bool is_partner) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int other = is_partner ? lane - apart : lane + apart;
#pragma unroll
  for (int i = 0; i < kPairsPerLane; ++i) {
    const float crossed = __fmul_rn(__shfl_sync(kAllLanes, x.x[i], other, kLanes), sine.x[i]);
    const float turned = __fadd_rn(__fmul_rn(x.x[i], cosine.x[i]), is_partner ? crossed : -crossed);
    if (turns) x.x[i] = turned;
  }
}

/// One row per blockIdx.x, as many heads per block as fit; a head never leaves its warp, and its
/// sum is taken in an order that depends on head_dim alone. `kTurnsPartly`: the first
/// `params.rotary_dim` columns turn, whose partners are other lanes'.
template <int kHeadDim, bool kTurnsPartly = false>
__device__ __forceinline__ void append_row(const RopeAppendParams& params) {
  constexpr int kHalf = kHeadDim / 2;
  constexpr int kLanes = kHalf / kPairsPerLane;
  constexpr int kHeadsPerBlock = kAppendThreads / kLanes;
  static_assert(kLanes <= 32);
  using Bits = Bf16Pack<kPairsPerLane>;
  using Floats = FloatPack<kPairsPerLane>;

  const int num_q_heads = params.num_q_heads;
  const int num_kv_heads = params.kv.num_kv_heads;
  const int num_heads = num_q_heads + 2 * num_kv_heads;
  const int wanted = blockIdx.y * kHeadsPerBlock + threadIdx.x / kLanes;
  const int head = min(wanted, num_heads - 1);  // all lanes take part in the shuffles
  const int column = threadIdx.x % kLanes * kPairsPerLane;
  const bool is_q = head < num_q_heads;
  const bool is_v = head >= num_q_heads + num_kv_heads;
  const float* norm = is_q ? params.q_norm : is_v ? nullptr : params.k_norm;
  Floats low_weight = {}, high_weight = {};
  if (norm != nullptr) {
    low_weight = cuda::load_pack<Floats>(norm + column);
    high_weight = cuda::load_pack<Floats>(norm + kHalf + column);
  }
  cuda::wait_for_previous_kernel();

  const int64_t row = blockIdx.x;
  const int num_gates = params.has_gates ? num_q_heads : 0;
  const int row_heads = params.row_heads > 0 ? params.row_heads : num_heads + num_gates;
  const int head_in = head + min(head, num_gates);  // q is followed by its gate, k by k
  const uint16_t* in =
      static_cast<const uint16_t*>(params.qkv) + (row * row_heads + head_in) * kHeadDim + column;
  Bits low_bits = cuda::load_pack<Bits>(in);
  Bits high_bits = cuda::load_pack<Bits>(in + kHalf);
  const int turning_half = kTurnsPartly ? params.rotary_dim / 2 : kHalf;
  const bool turns = !kTurnsPartly || column < 2 * turning_half;
  const bool is_partner = kTurnsPartly && turns && column >= turning_half;
  const float* cos_sin = params.cos_sin + row * 2 * turning_half +
                         (!turns       ? 0
                          : is_partner ? column - turning_half
                                       : column);
  const Floats cosine = cuda::load_pack<Floats>(cos_sin);
  const Floats sine = cuda::load_pack<Floats>(cos_sin + turning_half);
  const int64_t slot = params.rows.row_kv_slot[row];

  // A page is [K heads, V heads][page_size] lines. No pool holds 2^32 tokens.
  const int64_t page_size = params.kv.page_size;
  const int64_t in_page = static_cast<uint32_t>(slot) % static_cast<uint32_t>(page_size);
  const int64_t kv_line =
      (slot - in_page) * 2 * num_kv_heads + (head - num_q_heads) * page_size + in_page;
  const int64_t line = is_q ? row * num_q_heads + head : kv_line;
  uint16_t* out = static_cast<uint16_t*>(is_q ? params.q : params.kv.data) + line * kHeadDim;

  Floats low = cuda::to_floats(low_bits);
  Floats high = cuda::to_floats(high_bits);
  float square_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairsPerLane; ++i) square_sum = fmaf(low.x[i], low.x[i], square_sum);
#pragma unroll
  for (int i = 0; i < kPairsPerLane; ++i) square_sum = fmaf(high.x[i], high.x[i], square_sum);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    square_sum += __shfl_xor_sync(kAllLanes, square_sum, offset);
  }
  if (norm != nullptr) {
    const float scale = rsqrtf(fmaf(square_sum, 1.0f / kHeadDim, params.eps));
#pragma unroll
    for (int i = 0; i < kPairsPerLane; ++i) {
      low.x[i] *= scale;
      high.x[i] *= scale;
    }
    if (!params.rounds_once) {
      low = cuda::round_to_bf16(low);
      high = cuda::round_to_bf16(high);
    }
#pragma unroll
    for (int i = 0; i < kPairsPerLane; ++i) {
      low.x[i] *= low_weight.x[i];
      high.x[i] *= high_weight.x[i];
    }
    low = cuda::round_to_bf16(low);
    high = cuda::round_to_bf16(high);
  }
  if constexpr (kTurnsPartly) {
    turn_among_lanes<kLanes>(low, cosine, sine, turning_half / kPairsPerLane, turns, is_partner);
  } else {
#pragma unroll
    for (int i = 0; i < kPairsPerLane; ++i) {
      const float x = low.x[i], y = high.x[i];
      low.x[i] = __fsub_rn(__fmul_rn(x, cosine.x[i]), __fmul_rn(y, sine.x[i]));
      high.x[i] = __fadd_rn(__fmul_rn(y, cosine.x[i]), __fmul_rn(x, sine.x[i]));
    }
  }
  if (!is_v) {
    low_bits = cuda::to_bf16(low);
    high_bits = cuda::to_bf16(high);
  }

  if (wanted >= num_heads || (!is_q && slot < 0)) return;
  cuda::store_pack(out + column, low_bits);
  cuda::store_pack(out + kHalf + column, high_bits);
}

template <int kHeadDim, bool kTurnsPartly>
__global__ void __launch_bounds__(kAppendThreads, kAppendBlocks)
    rope_append_kernel(const __grid_constant__ RopeAppendParams params) {
  cuda::allow_next_kernel();
  append_row<kHeadDim, kTurnsPartly>(params);
}

/// A layer per blockIdx.z.
template <int kHeadDim>
__global__ void __launch_bounds__(kAppendThreads, kAppendBlocks)
    append_context_kernel(const __grid_constant__ AppendContextParams params) {
  cuda::allow_next_kernel();
  const AppendContextParams::Layer& layer = params.layers[blockIdx.z];
  const int num_heads = 2 * layer.kv.num_kv_heads;
  append_row<kHeadDim>({.rows = params.rows,
                        .qkv = static_cast<const uint16_t*>(params.kv) +
                               static_cast<int>(blockIdx.z) * num_heads * kHeadDim,
                        .row_heads = params.num_layers * num_heads,
                        .cos_sin = params.cos_sin,
                        .k_norm = layer.k_norm,
                        .kv = layer.kv,
                        .eps = params.eps,
                        .dtype = params.dtype});
}

/// Rows, and blocks for their heads.
dim3 append_grid(int num_rows, int num_heads, int head_dim) {
  const int heads_per_block = kAppendThreads / (head_dim / 2 / kPairsPerLane);
  return {static_cast<unsigned>(num_rows),
          static_cast<unsigned>((num_heads + heads_per_block - 1) / heads_per_block)};
}

template <int kHeadDim>
int launch_append(const RopeAppendParams& params, void* stream) {
  const dim3 grid =
      append_grid(params.rows.num_rows, params.num_q_heads + 2 * params.kv.num_kv_heads, kHeadDim);
  auto* kernel = params.rotary_dim > 0 ? rope_append_kernel<kHeadDim, true>
                                       : rope_append_kernel<kHeadDim, false>;
  return cuda::launch(kernel, grid, kAppendThreads, 0, stream, params);
}

template <int kHeadDim>
int launch_append(const AppendContextParams& params, void* stream) {
  dim3 grid = append_grid(params.rows.num_rows, 2 * params.layers[0].kv.num_kv_heads, kHeadDim);
  grid.z = static_cast<unsigned>(params.num_layers);
  return cuda::launch(append_context_kernel<kHeadDim>, grid, kAppendThreads, 0, stream, params);
}

template <typename Params>
int launch_append(const Params& params, int head_dim, void* stream) {
  switch (head_dim) {
    case 64:
      return launch_append<64>(params, stream);
    case 128:
      return launch_append<128>(params, stream);
    case 256:
      return launch_append<256>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

int rope_angles_cuda(const RopeAnglesParams& params, void* stream) {
  constexpr int kMaxHalf = 1024;
  const int half = params.head_dim / 2;
  if (half <= 0 || half > kMaxHalf || params.head_dim % 2 != 0) return cudaErrorInvalidValue;
  if (params.num_rows == 0) return cudaSuccess;
  const int num_threads = (half + 31) / 32 * 32;
  return cuda::launch(rope_angles_kernel, params.num_rows, num_threads, 0, stream, params);
}

int rope_append_cuda(const RopeAppendParams& params, void* stream) {
  if (params.dtype != DType::kBF16 || params.num_q_heads < 0 || params.kv.num_kv_heads < 1 ||
      params.kv.page_size < 1 || params.rotary_dim < 0 || params.rotary_dim % 8 != 0 ||
      params.rotary_dim > params.kv.head_dim / 2 ||
      !cuda::are_aligned(params.qkv, params.cos_sin, params.q_norm, params.k_norm, params.q,
                         params.kv.data)) {
    return cudaErrorInvalidValue;
  }
  if (params.rows.num_rows == 0) return cudaSuccess;
  return launch_append(params, params.kv.head_dim, stream);
}

int append_context_cuda(const AppendContextParams& params, void* stream) {
  if (params.dtype != DType::kBF16 || params.num_layers < 0 ||
      params.num_layers > kMaxContextLayers || !cuda::are_aligned(params.kv, params.cos_sin)) {
    return cudaErrorInvalidValue;
  }
  const KvLayerView& shape = params.layers[0].kv;
  for (int i = 0; i < params.num_layers; ++i) {
    const AppendContextParams::Layer& layer = params.layers[i];
    if (layer.kv.num_kv_heads != shape.num_kv_heads || layer.kv.head_dim != shape.head_dim ||
        layer.kv.num_kv_heads < 1 || layer.kv.page_size < 1 ||
        !cuda::are_aligned(layer.k_norm, layer.kv.data)) {
      return cudaErrorInvalidValue;
    }
  }
  if (params.rows.num_rows == 0 || params.num_layers == 0) return cudaSuccess;
  return launch_append(params, shape.head_dim, stream);
}

}  // namespace openspec
