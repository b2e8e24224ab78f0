#pragma once

/// What the tests of Gated DeltaNet share, on the CPU and on CUDA.

#include <algorithm>
#include <numeric>

#include "kernels/delta_net/delta_net.h"
#include "kernels/kernel_testing.h"

namespace openspec::testing {

/// What comes into a layer at the positions of one sequence, representable in `dtype`.
struct DeltaTokens {
  DeltaTokens(Rng& rng, const DeltaShape& shape, int num_tokens, DType dtype)
      : num_tokens(num_tokens) {
    const auto make = [&](int width, float scale) {
      std::vector<float> values = rng.normals(static_cast<size_t>(num_tokens * width), scale);
      for (float& x : values) x = dtype == DType::kF32 ? x : from_bf16(to_bf16(x));
      return values;
    };
    qkv = make(shape.conv_width(), 1.0f);
    z = make(shape.v_width(), 1.0f);
    b = make(shape.num_v_heads, 1.5f);
    a = make(shape.num_v_heads, 1.5f);
  }
  int num_tokens;
  std::vector<float> qkv, z, b, a;  // [num_tokens, width]
};

struct DeltaWeights {
  DeltaWeights(Rng& rng, const DeltaShape& shape)
      : conv(rng.normals(static_cast<size_t>(kDeltaTaps * shape.conv_width()), 0.5f)),
        a_log(static_cast<size_t>(shape.num_v_heads)),
        dt_bias(a_log.size()),
        norm(rng.normals(kDeltaHeadDim, 0.3f)) {
    // From heads that hardly forget to heads that forget within a few positions.
    for (size_t i = 0; i < a_log.size(); ++i) {
      a_log[i] = std::log(0.003f) + 2.5f * static_cast<float>(i % 4);
      dt_bias[i] = rng.normal(0.5f);
    }
    for (float& x : norm) x = from_bf16(to_bf16(x + 1.0f));
  }
  std::vector<float> conv, a_log, dt_bias, norm;
};

/// The output of each position, [num_tokens, v_width], by the sequential recurrence in double. Of
/// all that the op rounds only what the convolution leaves is rounded here.
inline std::vector<double> delta_reference(const DeltaShape& shape, const DeltaTokens& tokens,
                                           const DeltaWeights& weights, DType dtype) {
  const auto silu = [](double x) { return x / (1.0 + std::exp(-x)); };
  const int width = shape.conv_width(), dim = kDeltaHeadDim;
  std::vector<double> state(static_cast<size_t>(shape.num_v_heads * dim * dim));
  std::vector<double> out, x(static_cast<size_t>(width));
  for (int t = 0; t < tokens.num_tokens; ++t) {
    for (int c = 0; c < width; ++c) {
      double sum = 0;
      for (int tap = 0; tap < kDeltaTaps; ++tap) {
        const int from = t - kDeltaTaps + 1 + tap;
        if (from < 0) continue;
        sum += double{weights.conv[static_cast<size_t>(tap * width + c)]} *
               double{tokens.qkv[static_cast<size_t>(from * width + c)]};
      }
      const auto value = static_cast<float>(silu(sum));
      x[static_cast<size_t>(c)] = dtype == DType::kF32 ? value : from_bf16(to_bf16(value));
    }
    const auto normed = [&](int at, double scale) {
      std::vector<double> head(x.begin() + at, x.begin() + at + dim);
      const double sum = std::inner_product(head.begin(), head.end(), head.begin(), 1e-6);
      for (double& value : head) value *= scale / std::sqrt(sum);
      return head;
    };
    for (int h = 0; h < shape.num_v_heads; ++h) {
      const int k_head = h / (shape.num_v_heads / shape.num_k_heads);
      const std::vector<double> q = normed(k_head * dim, 1 / std::sqrt(128.0));
      const std::vector<double> k = normed(shape.k_width() + k_head * dim, 1.0);
      const auto gate = static_cast<size_t>(t * shape.num_v_heads + h);
      const auto head = static_cast<size_t>(h);
      const double beta = 1.0 / (1.0 + std::exp(-double{tokens.b[gate]}));
      const double softplus = std::log1p(std::exp(double{tokens.a[gate]} + weights.dt_bias[head]));
      const double kept = std::exp(-std::exp(double{weights.a_log[head]}) * softplus);
      std::vector<double> o(static_cast<size_t>(dim));
      double* column = &state[head * size_t{kDeltaHeadDim} * kDeltaHeadDim];
      for (size_t v = 0; v < o.size(); ++v, column += dim) {
        double seen = 0;
        for (size_t i = 0; i < k.size(); ++i) seen += k[i] * (column[i] *= kept);
        const double value = x[static_cast<size_t>(2 * shape.k_width() + h * dim) + v];
        for (size_t i = 0; i < k.size(); ++i) {
          column[i] += k[i] * beta * (value - seen);
          o[v] += q[i] * column[i];
        }
      }
      const double mean = std::inner_product(o.begin(), o.end(), o.begin(), 0.0) / dim;
      for (size_t v = 0; v < o.size(); ++v) {
        const double z = tokens.z[static_cast<size_t>(t * shape.v_width() + h * dim) + v];
        out.push_back(o[v] / std::sqrt(mean + 1e-6) * double{weights.norm[v]} * silu(z));
      }
    }
  }
  return out;
}

/// The rows of a sequence in a step.
struct DeltaSpan {
  int slot;
  const DeltaTokens* tokens;
  int begin, num_rows;  // positions
  int settled = -1;     // positions that are folded into memory as far as may be; -1: those before
                        // the span, of a prompt all
};

/// Sequences' rings and states on a device, and steps over them. `Array` is memory there, poisoned:
/// Array(bytes), Array(vector), data(), upload(vector), download<T>().
template <typename Array>
class DeltaRig {
 public:
  static constexpr int kSlots = 4, kLayers = 2, kRing = 64, kConvRing = 32, kPages = 40;

  DeltaRig(const DeltaShape& shape, const DeltaWeights& weights, DType dtype)
      : shape_(shape),
        dtype_(dtype),
        records_(kSlots * kRing * kLayers * shape.record_bytes(dtype)),
        conv_rows_(kSlots * kConvRing * kLayers * shape.conv_row_bytes(dtype)),
        // A slice takes three tiles, a page two slices.
        pages_per_state_((kLayers * shape.num_tiles() + 5) / 6),
        states_(static_cast<size_t>(2 * kSlots * pages_per_state_) * 6 * DeltaStates::kTileBytes),
        conv_(weights.conv),
        a_log_(weights.a_log),
        dt_bias_(weights.dt_bias),
        norm_(weights.norm),
        folded_(kSlots, 0),
        tables_(2, std::vector<int32_t>(static_cast<size_t>(kSlots * pages_per_state_))) {
    std::vector<int32_t> pages(2 * tables_[0].size());
    std::iota(pages.begin(), pages.end(), 0);
    std::reverse(pages.begin(), pages.end());
    for (size_t i = 0; i < pages.size(); ++i) tables_[i % 2][i / 2] = pages[i];
  }

  /// The slot begins anew.
  void clear(int slot) { folded_[static_cast<size_t>(slot)] = 0; }
  int max_step_rows = kMaxDeltaStepRows;
  /// The last step is given up: slots have the states that they had before.
  void give_up() {
    folded_ = folded_before_;
    tables_ = tables_before_;
  }
  /// Slot `to` goes on where slot `from` stands after `length` positions, a multiple of 16, in the
  /// same pages.
  void attach(int from, int to, int length) {
    CHECK_EQ(folded_[static_cast<size_t>(from)], folded_blocks(length));
    folded_[static_cast<size_t>(to)] = folded_[static_cast<size_t>(from)];
    for (int i = 0; i < pages_per_state_; ++i) {
      tables_[0][static_cast<size_t>(to * pages_per_state_ + i)] =
          tables_[0][static_cast<size_t>(from * pages_per_state_ + i)];
    }
    const auto copy = [&](Array& array, size_t bytes, int ring) {
      auto all = array.template download<uint8_t>();
      std::copy_n(all.begin() + static_cast<ptrdiff_t>(bytes) * ring * from,
                  bytes * static_cast<size_t>(ring),
                  all.begin() + static_cast<ptrdiff_t>(bytes) * ring * to);
      array.upload(all);
    };
    copy(records_, kLayers * shape_.record_bytes(dtype_), kRing);
    copy(conv_rows_, kLayers * shape_.conv_row_bytes(dtype_), kConvRing);
  }

  /// One step; outputs of its rows, [num_rows, v_width] in `dtype`. `run(params)` calls the op.
  template <typename Run>
  Buffer step(const std::vector<DeltaSpan>& spans, const Run& run) {
    std::vector<int32_t> row_span, span_begin = {0}, kv_len, seq, folded, folded_write;
    std::vector<float> qkv, z, b, a;
    folded_before_ = folded_;
    tables_before_ = tables_;
    bool has_prompts = false;
    for (const DeltaSpan& span : spans) {
      const bool is_prompt = span.num_rows > max_step_rows;
      has_prompts |= is_prompt;
      const int end = span.begin + span.num_rows;
      const int settled = span.settled >= 0 ? span.settled : is_prompt ? end : span.begin;
      row_span.insert(row_span.end(), static_cast<size_t>(span.num_rows),
                      static_cast<int32_t>(seq.size()));
      span_begin.push_back(span_begin.back() + span.num_rows);
      kv_len.push_back(span.begin);
      seq.push_back(span.slot);
      int& held = folded_[static_cast<size_t>(span.slot)];
      folded.push_back(held);
      held = std::max(held, folded_blocks(settled));
      folded_write.push_back(held);
      const auto append = [&](std::vector<float>& to, const std::vector<float>& from) {
        const size_t width = from.size() / static_cast<size_t>(span.tokens->num_tokens);
        const auto first = from.begin() + static_cast<ptrdiff_t>(width) * span.begin;
        to.insert(to.end(), first, first + static_cast<ptrdiff_t>(width) * span.num_rows);
      };
      append(qkv, span.tokens->qkv);
      append(z, span.tokens->z);
      append(b, span.tokens->b);
      append(a, span.tokens->a);
    }
    const int num_rows = span_begin.back();
    const auto values = [&](const std::vector<float>& from) {
      if (dtype_ == DType::kF32) return Array(from);
      std::vector<uint16_t> bits;
      for (const float x : from) bits.push_back(to_bf16(x));
      return Array(bits);
    };
    // Padding, as on CUDA.
    row_span.push_back(-1);
    span_begin.push_back(num_rows);
    kv_len.push_back(0), seq.push_back(0), folded.push_back(0), folded_write.push_back(0);
    const size_t padded = static_cast<size_t>(num_rows) + 1;
    qkv.resize(padded * static_cast<size_t>(shape_.conv_width()));
    z.resize(padded * static_cast<size_t>(shape_.v_width()));
    b.resize(padded * static_cast<size_t>(shape_.num_v_heads));
    a.resize(b.size());
    Array qkv_in = values(qkv), z_in = values(z), b_in = values(b), a_in = values(a);
    Array rows(row_span), begins(span_begin), lengths(kv_len), seqs(seq);
    Array reads(folded), writes(folded_write), read_pages(tables_[0]), write_pages(tables_[1]);
    Array out(z.size() * dtype_bytes(dtype_));

    DeltaNetParams params;
    params.shape = shape_;
    params.layer = 1;
    params.rows.num_rows = num_rows + 1;
    params.rows.num_spans = static_cast<int>(seq.size());
    params.rows.row_span = data<int32_t>(rows);
    params.rows.span_begin = data<int32_t>(begins);
    params.rows.span_kv_len = data<int32_t>(lengths);
    params.rows.span_seq = data<int32_t>(seqs);
    params.rows.may_have_trees = false;
    params.qkv = qkv_in.data();
    params.z = z_in.data();
    params.b = b_in.data();
    params.a = a_in.data();
    params.qkv_stride = shape_.conv_width();
    params.z_stride = shape_.v_width();
    params.b_stride = params.a_stride = shape_.num_v_heads;
    params.out = out.data();
    params.conv_weight = data<float>(conv_);
    params.a_log = data<float>(a_log_);
    params.dt_bias = data<float>(dt_bias_);
    params.norm_weight = data<float>(norm_);
    const size_t record = shape_.record_bytes(dtype_), conv_row = shape_.conv_row_bytes(dtype_);
    params.records = {data<std::byte>(records_), kRing, kLayers * record};
    params.record_offset = record;
    params.conv_rows = {data<std::byte>(conv_rows_), kConvRing, kLayers * conv_row};
    params.conv_offset = conv_row;
    params.states = {.data = data<std::byte>(states_),
                     .page_stride = 3 * DeltaStates::kTileBytes,
                     .slice_stride = states_bytes() / 2,
                     .num_slices = 2,
                     .tiles_per_slice = 3,
                     .pages_per_state = pages_per_state_,
                     .read_pages = data<int32_t>(read_pages),
                     .write_pages = data<int32_t>(write_pages)};
    params.folded_read = data<int32_t>(reads);
    params.folded_write = data<int32_t>(writes);
    params.max_step_rows = max_step_rows;
    params.may_have_prompts = has_prompts;
    params.dtype = dtype_;
    run(params);
    for (size_t i = 0; i < spans.size(); ++i) {
      if (folded_write[i] > folded[i]) swap_pages(spans[i].slot);
    }
    Buffer result(static_cast<size_t>(num_rows * shape_.v_width()), dtype_);
    const auto bytes = out.template download<uint8_t>();
    std::memcpy(result.data(), bytes.data(), result.num_bytes());
    return result;
  }

 private:
  template <typename T>
  static T* data(const Array& array) {
    return static_cast<T*>(array.data());
  }
  size_t states_bytes() const {
    return static_cast<size_t>(2 * kSlots * pages_per_state_) * 6 * DeltaStates::kTileBytes;
  }
  void swap_pages(int slot) {
    for (int i = 0; i < pages_per_state_; ++i) {
      const auto at = static_cast<size_t>(slot * pages_per_state_ + i);
      std::swap(tables_[0][at], tables_[1][at]);
    }
  }

  DeltaShape shape_;
  DType dtype_;
  Array records_, conv_rows_;
  int pages_per_state_;
  Array states_, conv_, a_log_, dt_bias_, norm_;
  std::vector<int> folded_, folded_before_;
  std::vector<std::vector<int32_t>> tables_, tables_before_;  // read, write
};

/// Relative error of an output, over all its numbers.
inline double delta_error(const Buffer& found, const std::vector<double>& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = double{found[i]} - expected[i];
    error += difference * difference;
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

/// Drives a rig by an op; what all engines promise.
template <typename Array>
class DeltaChecks {
 public:
  using Run = void (*)(const DeltaNetParams&);
  using Rig = DeltaRig<Array>;

  DeltaChecks(const DeltaShape& shape, DType dtype, Run run, int num_tokens)
      : shape_(shape),
        dtype_(dtype),
        run_(run),
        rng_(7),
        weights_(rng_, shape),
        tokens_(rng_, shape, num_tokens, dtype),
        others_(rng_, shape, num_tokens, dtype),
        whole_(in_chunks(tokens_, num_tokens)) {}

  double error() const {
    return delta_error(whole_, delta_reference(shape_, tokens_, weights_, dtype_));
  }

  /// Chunks of every size, with every limit of steps.
  void check_chunks(const std::vector<int>& sizes) {
    for (const int max_step_rows : {4, 8, 16}) {
      for (const int size : sizes) {
        const Buffer found = in_chunks(tokens_, size, max_step_rows);
        CHECK(found.same(0, whole_, 0, found.size()));
      }
    }
  }

  /// Steps of `num_rows` of which each commits some, the rest being other tokens: around a block's
  /// edge each number of them. Folds lag so many positions behind, as while steps are under way.
  void check_acceptance(int num_rows, int lag) {
    for (int accepted = 1; accepted <= num_rows; ++accepted) {
      for (int begin = 28; begin <= 36; ++begin) {
        Rig rig(shape_, weights_, dtype_);
        rig.max_step_rows = num_rows <= 4 ? 4 : num_rows <= 8 ? 8 : 16;
        check_rows(rig.step({{0, &tokens_, 0, begin}}, run_), 0, begin, 0);
        int committed = begin, settled = begin;
        while (committed + num_rows <= tokens_.num_tokens && committed < begin + 40) {
          DeltaTokens mixed = tokens_;  // the draft after those that count is another one
          const auto at = static_cast<ptrdiff_t>(committed + accepted) * shape_.conv_width();
          std::copy(others_.qkv.begin() + at, others_.qkv.end(), mixed.qkv.begin() + at);
          settled = std::max(settled, committed - lag);
          check_rows(rig.step({{0, &mixed, committed, num_rows, settled}}, run_), committed,
                     accepted, 0);
          committed += accepted;
        }
      }
    }
  }

  /// Prompts and steps of several sequences together, each as it is alone.
  void check_batch() {
    const Buffer other = in_chunks(others_, others_.num_tokens);
    Rig rig(shape_, weights_, dtype_);
    rig.step({{2, &others_, 0, 45}, {0, &tokens_, 0, 33}}, run_);
    const Buffer out = rig.step(
        {{0, &tokens_, 33, 4}, {3, &tokens_, 0, 50}, {2, &others_, 45, 16}, {1, &others_, 0, 1}},
        run_);
    const auto width = static_cast<size_t>(shape_.v_width());
    CHECK(out.same(0, whole_, 33 * width, 4 * width));
    CHECK(out.same(4 * width, whole_, 0, 50 * width));
    CHECK(out.same(54 * width, other, 45 * width, 16 * width));
    CHECK(out.same(70 * width, other, 0, width));
  }

  /// A step that is given up, then the same and other rows; and a prefix that two go on from.
  void check_pages() {
    Rig rig(shape_, weights_, dtype_);
    rig.step({{0, &tokens_, 0, 64}}, run_);
    rig.attach(0, 1, 64);
    rig.attach(0, 2, 64);
    check_rows(rig.step({{0, &tokens_, 64, 16}}, run_), 64, 16, 0);
    rig.step({{0, &tokens_, 80, 16}}, run_);
    rig.give_up();
    check_rows(rig.step({{0, &tokens_, 80, 1}}, run_), 80, 1, 0);
    check_rows(rig.step({{1, &tokens_, 64, 30}}, run_), 64, 30, 0);
    check_rows(rig.step({{2, &tokens_, 64, 5}, {0, &tokens_, 81, 7}}, run_), 64, 5, 0);
    rig.clear(0);
    check_rows(rig.step({{0, &tokens_, 0, 40}}, run_), 0, 40, 0);
  }

 private:
  Buffer in_chunks(const DeltaTokens& tokens, int size, int max_step_rows = kMaxDeltaStepRows) {
    Rig rig(shape_, weights_, dtype_);
    rig.max_step_rows = max_step_rows;
    Buffer out(static_cast<size_t>(tokens.num_tokens * shape_.v_width()), dtype_);
    for (int begin = 0; begin < tokens.num_tokens; begin += size) {
      const int num_rows = std::min(size, tokens.num_tokens - begin);
      Buffer rows = rig.step({{1, &tokens, begin, num_rows}}, run_);
      const size_t row_bytes = static_cast<size_t>(shape_.v_width()) * dtype_bytes(dtype_);
      std::memcpy(static_cast<uint8_t*>(out.data()) + static_cast<size_t>(begin) * row_bytes,
                  rows.data(), rows.num_bytes());
    }
    return out;
  }
  void check_rows(const Buffer& found, int begin, int num_rows, int at) const {
    const auto width = static_cast<size_t>(shape_.v_width());
    CHECK(found.same(static_cast<size_t>(at) * width, whole_, static_cast<size_t>(begin) * width,
                     static_cast<size_t>(num_rows) * width));
  }

  DeltaShape shape_;
  DType dtype_;
  Run run_;
  Rng rng_;
  DeltaWeights weights_;
  DeltaTokens tokens_, others_;
  Buffer whole_;
};

}  // namespace openspec::testing
