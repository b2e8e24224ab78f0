#include "kernels/rope/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "cuda/cuda_testing.h"
#include "cuda/norm_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Bits = std::vector<uint16_t>;
constexpr float kEps = 1e-6f;

std::vector<float> inverse_frequencies(int head_dim) {  // of what turns
  std::vector<float> inv_freq;
  for (int j = 0; j < head_dim / 2; ++j) {
    inv_freq.push_back(static_cast<float>(std::pow(1e6, -2.0 * j / head_dim)));
  }
  return inv_freq;
}

struct Input {
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int page_size = 0;
  int num_pages = 0;
  Bits qkv;                    // [num_rows, num_heads, head_dim]
  std::vector<float> cos_sin;  // [num_rows, head_dim]
  std::vector<int64_t> slots;  // [num_rows]
  std::vector<float> q_norm;   // [head_dim] or empty
  std::vector<float> k_norm;
  // Of RopeAppendParams.
  bool has_gates = false, rounds_once = false;
  int rotary_dim = 0;

  size_t num_rows() const { return slots.size(); }
  size_t dim() const { return static_cast<size_t>(head_dim); }
  size_t num_heads() const {
    return static_cast<size_t>((has_gates ? 2 : 1) * num_q_heads + 2 * num_kv_heads);
  }
  /// Of a row of qkv, where a head of q, K or V is.
  size_t head_in(size_t head) const {
    return has_gates ? head + std::min(head, static_cast<size_t>(num_q_heads)) : head;
  }
  size_t turning() const { return rotary_dim > 0 ? static_cast<size_t>(rotary_dim) : dim(); }
  size_t kv_size() const {
    return static_cast<size_t>(num_pages * 2 * num_kv_heads * page_size) * dim();
  }
  /// Where a slot's line of one of the 2 * num_kv_heads K and V heads begins.
  size_t kv_at(int64_t slot, size_t head) const {
    const size_t page_tokens = static_cast<size_t>(page_size), at = static_cast<size_t>(slot);
    const size_t page_head = at / page_tokens * 2 * static_cast<size_t>(num_kv_heads) + head;
    return (page_head * page_tokens + at % page_tokens) * dim();
  }
};

Input random_input(Rng& rng, int num_q_heads, int num_kv_heads, int head_dim, int page_size,
                   int num_rows, int rotary_dim = 0, bool has_gates = false) {
  Input input;
  input.rotary_dim = rotary_dim;
  input.has_gates = has_gates;
  input.num_q_heads = num_q_heads;
  input.num_kv_heads = num_kv_heads;
  input.head_dim = head_dim;
  input.page_size = page_size;
  input.num_pages = num_rows / page_size + 3;
  const size_t rows = static_cast<size_t>(num_rows);
  input.qkv = to_bf16(rng.normals(rows * input.num_heads() * input.dim(), 2));
  const std::vector<float> inv_freq = inverse_frequencies(static_cast<int>(input.turning()));
  // Distinct slots, in no order; every seventh row writes no KV.
  const int num_slots = input.num_pages * page_size;
  const int begin = rng.integer(0, num_slots - 1);
  for (int row = 0; row < num_rows; ++row) {
    const float position = static_cast<float>(rng.integer(0, 40000));
    for (const float f : inv_freq) input.cos_sin.push_back(std::cos(position * f));
    for (const float f : inv_freq) input.cos_sin.push_back(std::sin(position * f));
    input.slots.push_back(row % 7 == 3 ? -1 : num_slots - 1 - (begin + row) % num_slots);
  }
  input.q_norm = rng.normals(input.dim());
  input.k_norm = rng.normals(input.dim());
  return input;
}

Input row_of(const Input& input, size_t row) {
  Input one = input;
  const size_t width = input.num_heads() * input.dim();
  one.qkv.assign(input.qkv.data() + row * width, input.qkv.data() + (row + 1) * width);
  one.cos_sin.assign(input.cos_sin.data() + row * input.turning(),
                     input.cos_sin.data() + (row + 1) * input.turning());
  one.slots = {input.slots[row]};
  return one;
}

struct Result {
  Bits q;
  Bits kv;
};

RopeAppendParams shape_of(const Input& input) {
  RopeAppendParams params;
  params.rows.num_rows = static_cast<int>(input.num_rows());
  params.kv = {nullptr, input.num_kv_heads, input.head_dim, input.page_size};
  params.num_q_heads = input.num_q_heads;
  params.has_gates = input.has_gates;
  params.rotary_dim = input.rotary_dim;
  params.rounds_once = input.rounds_once;
  params.eps = kEps;
  params.dtype = DType::kBF16;
  return params;
}

Result run_cuda(const Input& input) {
  const DeviceBuffer qkv(input.qkv), cos_sin(input.cos_sin), slots(input.slots),
      q_norm(input.q_norm), k_norm(input.k_norm),
      q(input.num_rows() * static_cast<size_t>(input.num_q_heads) * input.dim() * 2),
      kv(input.kv_size() * 2);
  RopeAppendParams params = shape_of(input);
  params.rows.row_kv_slot = slots.as<int64_t>();
  params.qkv = qkv.data();
  params.cos_sin = cos_sin.as<float>();
  if (!input.q_norm.empty()) params.q_norm = q_norm.as<float>();
  if (!input.k_norm.empty()) params.k_norm = k_norm.as<float>();
  params.q = q.data();
  params.kv.data = kv.data();
  CHECK_CUDA(rope_append_cuda(params, nullptr));
  CHECK(q.guard_is_whole() && kv.guard_is_whole());
  return {q.download<uint16_t>(), kv.download<uint16_t>()};
}

/// Every element is one that the op's rounding steps allow (norm_testing.h).
void check_rotated_head(const Input& input, const uint16_t* head, const std::vector<float>& weight,
                        const float* cos_sin, const uint16_t* got) {
  const size_t dim = input.dim(), half = input.turning() / 2;
  const double scale = exact_scale(head, dim, static_cast<double>(kEps));
  const auto values = [&](size_t i) -> std::array<float, 2> {
    if (weight.empty()) return {from_bf16(head[i]), from_bf16(head[i])};
    return input.rounds_once ? normed_once(head[i], scale, weight[i])
                             : normed(head[i], scale, weight[i]);
  };
  for (size_t i = 2 * half; i < dim; ++i) {  // what does not turn
    const auto allowed = values(i);
    const float found = from_bf16(got[i]);
    if (found != allowed[0] && found != allowed[1]) CHECK_EQ(found, allowed[0]);
  }
  // Products and sum rounded to fp32 one by one, whatever the host's compiler fuses.
  const auto product = [](float a, float b) {
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
  };
  const auto sum = [](float a, float b) {
    return static_cast<float>(static_cast<double>(a) + static_cast<double>(b));
  };
  for (size_t j = 0; j < half; ++j) {
    const float cosine = cos_sin[j], sine = cos_sin[half + j];
    const float got_low = from_bf16(got[j]), got_high = from_bf16(got[half + j]);
    bool is_low_allowed = false, is_high_allowed = false;
    float low_rotated = 0, high_rotated = 0;
    for (const float low : values(j)) {
      for (const float high : values(half + j)) {
        low_rotated = from_bf16(to_bf16(sum(product(low, cosine), -product(high, sine))));
        high_rotated = from_bf16(to_bf16(sum(product(high, cosine), product(low, sine))));
        is_low_allowed |= got_low == low_rotated;
        is_high_allowed |= got_high == high_rotated;
      }
    }
    if (!is_low_allowed) CHECK_EQ(got_low, low_rotated);
    if (!is_high_allowed) CHECK_EQ(got_high, high_rotated);
  }
}

void check_result(const Input& input, const Result& result) {
  const size_t dim = input.dim();
  const size_t num_q = static_cast<size_t>(input.num_q_heads);
  const size_t num_kv = static_cast<size_t>(input.num_kv_heads);
  std::vector<bool> is_written(input.kv_size(), false);
  for (size_t row = 0; row < input.num_rows(); ++row) {
    const uint16_t* heads = input.qkv.data() + row * input.num_heads() * dim;
    const float* cos_sin = input.cos_sin.data() + row * input.turning();
    for (size_t head = 0; head < num_q; ++head) {
      check_rotated_head(input, heads + input.head_in(head) * dim, input.q_norm, cos_sin,
                         result.q.data() + (row * num_q + head) * dim);
    }
    if (input.slots[row] < 0) continue;
    for (size_t head = 0; head < 2 * num_kv; ++head) {
      const size_t at = input.kv_at(input.slots[row], head);
      const uint16_t* from = heads + input.head_in(num_q + head) * dim;
      if (head < num_kv) {
        check_rotated_head(input, from, input.k_norm, cos_sin, result.kv.data() + at);
      } else {
        CHECK(std::memcmp(result.kv.data() + at, from, dim * 2) == 0);
      }
      std::fill_n(is_written.begin() + static_cast<std::ptrdiff_t>(at), dim, true);
    }
  }
  for (size_t i = 0; i < is_written.size(); ++i) {
    if (!is_written[i]) CHECK_EQ(result.kv[i], 0xffff);
  }
}

struct Heads {
  int q;
  int kv;
};

}  // namespace

TEST(rope_angles_equal_those_of_the_cpu) {
  for (const int head_dim : {2, 64, 96, 128, 256}) {
    const std::vector<float> inv_freq = inverse_frequencies(head_dim);
    std::vector<int32_t> position;
    for (int i = 0; i < 4000; ++i) position.push_back(i < 2000 ? i : (i - 2000) * 131);
    const size_t size = position.size() * static_cast<size_t>(head_dim);
    RopeAnglesParams params;
    params.num_rows = static_cast<int>(position.size());
    params.head_dim = head_dim;
    params.scale = 1.25f;
    const DeviceBuffer device_position(position), device_inv_freq(inv_freq), cos_sin(size * 4);
    RopeAnglesParams cuda = params;
    cuda.position = device_position.as<int32_t>();
    cuda.inv_freq = device_inv_freq.as<float>();
    cuda.cos_sin = cos_sin.as<float>();
    CHECK_CUDA(rope_angles_cuda(cuda, nullptr));
    CHECK(cos_sin.guard_is_whole());
    const std::vector<float> got = cos_sin.download<float>();
    for_each_isa([&] {
      std::vector<float> expected(size);
      ThreadPool pool(4);
      params.position = position.data();
      params.inv_freq = inv_freq.data();
      params.cos_sin = expected.data();
      rope_angles_cpu({.pool = &pool}, params);
      CHECK(std::memcmp(got.data(), expected.data(), size * sizeof(float)) == 0);
    });
  }
}

TEST(rope_append_matches_reference) {
  Rng rng(2);
  for (const Heads heads : {Heads{32, 8}, Heads{16, 8}, Heads{40, 8}, Heads{4, 1}}) {
    for (const int page_size : {8, 16, 24, 64}) {
      const Input input = random_input(rng, heads.q, heads.kv, 128, page_size, 37);
      check_result(input, run_cuda(input));
    }
  }
  for (const int head_dim : {64, 256}) {
    for (const Heads heads : {Heads{14, 2}, Heads{5, 1}}) {
      const Input input = random_input(rng, heads.q, heads.kv, head_dim, 16, 29);
      check_result(input, run_cuda(input));
    }
  }
  Input input = random_input(rng, 8, 2, 128, 16, 20);
  input.q_norm.clear();
  check_result(input, run_cuda(input));
  input.k_norm.clear();
  check_result(input, run_cuda(input));
}

TEST(heads_that_turn_partly_beside_gates_match_reference) {
  Rng rng(7);
  for (const int rotary_dim : {8, 64, 128}) {
    for (const bool has_gates : {false, true}) {
      for (const bool rounds_once : {false, true}) {
        for (const Heads heads : {Heads{16, 4}, Heads{24, 4}, Heads{2, 1}}) {
          Input input = random_input(rng, heads.q, heads.kv, 256, 16, 23, rotary_dim, has_gates);
          input.rounds_once = rounds_once;
          const Result all = run_cuda(input);
          check_result(input, all);
          const Result alone = run_cuda(row_of(input, 11));
          const size_t q_width = static_cast<size_t>(heads.q) * input.dim();
          CHECK(std::memcmp(alone.q.data(), all.q.data() + 11 * q_width, q_width * 2) == 0);
        }
      }
    }
  }
  Input whole = random_input(rng, 8, 2, 128, 16, 20, /*rotary_dim=*/0, /*has_gates=*/true);
  check_result(whole, run_cuda(whole));
}

TEST(rope_append_rows_are_invariant_bit_for_bit) {
  Rng rng(3);
  for (const int num_rows : {2, 31, 256}) {
    Input input = random_input(rng, 32, 8, 128, 16, num_rows);
    const Result all = run_cuda(input);
    for (size_t row = 0; row < input.num_rows(); row += num_rows > 31 ? 17 : 1) {
      // Alone, elsewhere in pages of another size.
      Input one = row_of(input, row);
      one.page_size = 64;
      one.num_pages = 2;
      one.slots[0] = input.slots[row] < 0 ? -1 : 77;
      const Result alone = run_cuda(one);
      const size_t q_width = 32 * input.dim();
      CHECK(std::memcmp(alone.q.data(), all.q.data() + row * q_width, q_width * 2) == 0);
      if (input.slots[row] < 0) continue;
      for (size_t head = 0; head < 16; ++head) {
        CHECK(std::memcmp(alone.kv.data() + one.kv_at(77, head),
                          all.kv.data() + input.kv_at(input.slots[row], head),
                          input.dim() * 2) == 0);
      }
    }
  }
}

TEST(rope_append_keeps_nan_in_its_row) {
  Rng rng(4);
  constexpr size_t kKept = 5;
  const Input input = random_input(rng, 16, 8, 128, 16, 12);
  Input poisoned = input;
  const size_t width = input.num_heads() * input.dim();
  for (size_t i = 0; i < poisoned.qkv.size(); ++i) {
    if (i / width != kKept) poisoned.qkv[i] = 0x7fc0;
  }
  const Result result = run_cuda(poisoned);
  const Result expected = run_cuda(row_of(input, kKept));
  const size_t q_width = 16 * input.dim();
  CHECK(std::memcmp(result.q.data() + kKept * q_width, expected.q.data(), q_width * 2) == 0);
  for (size_t head = 0; head < 16; ++head) {
    const size_t at = input.kv_at(input.slots[kKept], head);
    CHECK(std::memcmp(result.kv.data() + at, expected.kv.data() + at, input.dim() * 2) == 0);
  }
}

TEST(append_context_equals_the_layers_one_by_one) {
  Rng rng(6);
  for (const auto& [num_layers, num_kv_heads, head_dim, num_rows] : {std::array{1, 8, 128, 5},
                                                                     {5, 8, 128, 37},
                                                                     {kMaxContextLayers, 1, 64, 9},
                                                                     {2, 3, 256, 20}}) {
    std::vector<Input> layers;
    for (int i = 0; i < num_layers; ++i) {
      layers.push_back(random_input(rng, 0, num_kv_heads, head_dim, 16, num_rows));
      layers.back().cos_sin = layers[0].cos_sin;
      layers.back().slots = layers[0].slots;
    }
    layers.back().k_norm.clear();
    Bits packed;  // by row, then by layer
    const size_t width = layers[0].num_heads() * layers[0].dim();
    for (size_t row = 0; row < layers[0].num_rows(); ++row) {
      for (const Input& layer : layers) {
        const uint16_t* from = layer.qkv.data() + row * width;
        packed.insert(packed.end(), from, from + width);
      }
    }
    const DeviceBuffer kv(packed), cos_sin(layers[0].cos_sin), slots(layers[0].slots);
    AppendContextParams params;
    params.rows.num_rows = num_rows;
    params.rows.row_kv_slot = slots.as<int64_t>();
    params.kv = kv.data();
    params.cos_sin = cos_sin.as<float>();
    params.num_layers = num_layers;
    params.eps = kEps;
    params.dtype = DType::kBF16;
    std::vector<std::unique_ptr<DeviceBuffer>> norms, pools;
    for (size_t i = 0; i < layers.size(); ++i) {
      norms.push_back(std::make_unique<DeviceBuffer>(layers[i].k_norm));
      pools.push_back(std::make_unique<DeviceBuffer>(layers[i].kv_size() * 2));
      params.layers[i].kv = {pools[i]->data(), num_kv_heads, head_dim, 16};
      if (!layers[i].k_norm.empty()) params.layers[i].k_norm = norms[i]->as<float>();
    }
    CHECK_CUDA(append_context_cuda(params, nullptr));
    for (size_t i = 0; i < layers.size(); ++i) {
      CHECK(pools[i]->guard_is_whole());
      const Result got = {{}, pools[i]->download<uint16_t>()};
      CHECK(got.kv == run_cuda(layers[i]).kv);
      check_result(layers[i], got);
    }
  }
}

TEST(rope_refuses_what_it_cannot_do) {
  const DeviceBuffer memory(1 << 16), slots(std::vector<int64_t>{0});
  RopeAppendParams good;
  good.rows.num_rows = 1;
  good.rows.row_kv_slot = slots.as<int64_t>();
  good.qkv = good.q = memory.data();
  good.cos_sin = memory.as<float>();
  good.kv = {memory.data(), 1, 128, 16};
  good.num_q_heads = 1;
  good.dtype = DType::kBF16;
  const auto result_of = [&](auto change) {
    RopeAppendParams params = good;
    change(params);
    return rope_append_cuda(params, nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.dtype = DType::kF32; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.kv.head_dim = 96; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.kv.page_size = 0; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { ++p.cos_sin; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.rotary_dim = 12; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.rotary_dim = 72; }), kInvalid);
  CHECK_EQ(result_of([](RopeAppendParams& p) { p.rows.num_rows = 0; }),
           static_cast<int>(cudaSuccess));
  AppendContextParams context;
  context.rows.num_rows = 1;
  context.dtype = DType::kBF16;
  context.num_layers = kMaxContextLayers + 1;
  CHECK_EQ(append_context_cuda(context, nullptr), kInvalid);
  context.num_layers = 2;
  context.layers[0].kv = good.kv;
  context.layers[1].kv = {memory.data(), 2, 128, 16};
  CHECK_EQ(append_context_cuda(context, nullptr), kInvalid);
  RopeAnglesParams angles;
  angles.num_rows = 1;
  angles.head_dim = 3;
  CHECK_EQ(rope_angles_cuda(angles, nullptr), kInvalid);
  CHECK_EQ(memory.download<uint16_t>()[0], 0xffff);
}
