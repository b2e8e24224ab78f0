#pragma once

/// What the tests of attention on CUDA share: sequences, steps of them on the device, and the
/// comparison of rows.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/cuda_testing.h"
#include "kernels/attention/span_attention.h"
#include "kernels/attention_reference.h"
#include "kernels/rope/rope.h"
#include "kernels/steps/gather_rows.h"

namespace openspec::testing {

struct Shape {
  int num_q_heads = 8;
  int num_kv_heads = 2;
  int head_dim = 128;

  int group() const { return num_q_heads / num_kv_heads; }
  size_t q_width() const { return static_cast<size_t>(num_q_heads * head_dim); }
  size_t kv_width() const { return static_cast<size_t>(num_kv_heads * head_dim); }
};

using Bits = std::vector<uint16_t>;  // bf16

inline Bits random_bits(Rng& rng, size_t count, float scale) {
  Bits bits(count);
  for (uint16_t& x : bits) x = to_bf16(rng.normal(scale));
  return bits;
}

// One sequence: the K and V of its tokens, and its rows. A row's token index is kv_len + row.
struct Sequence : Sight {
  int kv_len = 0;
  std::vector<int> parents;  // within the span; -1: the committed prefix
  Bits k, v;                 // [token, num_kv_heads, head_dim]
  Bits q;                    // [row, num_q_heads, head_dim]

  int num_rows() const { return static_cast<int>(parents.size()); }
  int num_tokens() const { return kv_len + num_rows(); }
  // Tokens that a row sees without a window, in order, and those before the first token.
  std::vector<int> path(int row) const { return path_of_row(*this, kv_len, parents, row); }
  // Of these, how many come before what it sees.
  int num_hidden(int row) const {
    return num_hidden_of(*this, kv_len, static_cast<int>(path(row).size()));
  }
  std::vector<int> visible(int row) const {
    const std::vector<int> tokens = path(row);
    return {tokens.begin() + num_hidden(row), tokens.end()};
  }
};

enum class Form { kChain, kBushy, kDeep };  // deep: most rows follow the row before

inline Sequence random_sequence(Rng& rng, const Shape& shape, int kv_len, int num_rows,
                                Form form = Form::kChain) {
  Sequence s;
  s.kv_len = kv_len;
  for (int row = 0; row < num_rows; ++row) {
    int parent = row - 1;
    if (form == Form::kBushy) parent = rng.integer(std::max(-1, row - 6), row - 1);
    if (form == Form::kDeep && rng.integer(0, 9) == 0) parent = rng.integer(-1, row - 1);
    s.parents.push_back(parent);
  }
  // Scores of a few units, so that weights are uneven.
  s.q = random_bits(rng, static_cast<size_t>(num_rows) * shape.q_width(), 2.0f);
  s.k = random_bits(rng, static_cast<size_t>(s.num_tokens()) * shape.kv_width(), 1.0f);
  s.v = random_bits(rng, static_cast<size_t>(s.num_tokens()) * shape.kv_width(), 1.0f);
  return s;
}

template <typename T>
std::vector<T> slice(const std::vector<T>& all, size_t begin, size_t end) {
  return {all.begin() + static_cast<std::ptrdiff_t>(begin),
          all.begin() + static_cast<std::ptrdiff_t>(end)};
}

// The rows of tokens [first, first + num_rows) of a chain, as a chunk of it.
inline Sequence chunk_of(const Shape& shape, const Sequence& whole, int first, int num_rows) {
  const auto at = [](int index, size_t width) { return static_cast<size_t>(index) * width; };
  Sequence part;
  static_cast<Sight&>(part) = whole;
  part.kv_len = first;
  for (int row = 0; row < num_rows; ++row) part.parents.push_back(row - 1);
  part.k = slice(whole.k, 0, at(first + num_rows, shape.kv_width()));
  part.v = slice(whole.v, 0, at(first + num_rows, shape.kv_width()));
  const int first_row = first - whole.kv_len;
  part.q =
      slice(whole.q, at(first_row, shape.q_width()), at(first_row + num_rows, shape.q_width()));
  return part;
}

// The path from the root of a tree to one of its rows, as a chain.
inline Sequence path_of(const Shape& shape, const Sequence& tree, int row) {
  const auto append = [](Bits& to, const Bits& from, int index, size_t width) {
    const Bits part =
        slice(from, static_cast<size_t>(index) * width, (static_cast<size_t>(index) + 1) * width);
    to.insert(to.end(), part.begin(), part.end());
  };
  Sequence chain;
  static_cast<Sight&>(chain) = tree;
  chain.kv_len = tree.kv_len;
  for (const int token : tree.path(row)) {
    append(chain.k, tree.k, token, shape.kv_width());
    append(chain.v, tree.v, token, shape.kv_width());
    if (token < tree.kv_len) continue;
    append(chain.q, tree.q, token - tree.kv_len, shape.q_width());
    chain.parents.push_back(chain.num_rows() - 1);
  }
  return chain;
}

struct Layout {
  int page_size = 16;
  int spare_rows = 3;
  int spare_spans = 2;
  int spare_context = 100;
  bool has_gaps = false;  // an empty span before every span
};

// A step on the device. Pages come in random order; what no token fills is NaN, page table entries
// behind the end are -1.
class Step {
 public:
  Step(Rng& rng, const Shape& shape, const std::vector<Sequence>& sequences, const Layout& layout)
      : shape_(shape) {
    const int ps = layout.page_size;
    int num_pages = 3, max_pages = 1, max_tokens = 1;
    for (const Sequence& s : sequences) {
      const int pages = (s.num_tokens() + ps - 1) / ps;
      num_pages += pages;
      max_pages = std::max(max_pages, pages);
      max_tokens = std::max(max_tokens, s.num_tokens());
    }
    std::vector<int32_t> free_pages;
    for (int page = 0; page < num_pages; ++page) {
      free_pages.push_back(page);
      std::swap(free_pages.back(), free_pages[static_cast<size_t>(rng.integer(0, page))]);
    }
    const size_t dim = static_cast<size_t>(shape.head_dim);
    Bits kv(static_cast<size_t>(num_pages) * 2 * shape.kv_width() * static_cast<size_t>(ps),
            0xffff);
    prefix_ = kv;
    std::vector<int32_t> pages(sequences.size() * static_cast<size_t>(max_pages), -1);
    std::vector<int32_t> begin = {0}, kv_len, seq, span, parent, position;
    Bits q;
    for (size_t index = 0; index < sequences.size(); ++index) {
      const Sequence& s = sequences[index];
      const size_t slot = sequences.size() - 1 - index;
      for (int token = 0; token < s.num_tokens(); ++token) {
        int32_t& page =
            pages[slot * static_cast<size_t>(max_pages) + static_cast<size_t>(token / ps)];
        if (page < 0) {
          page = free_pages.back();
          free_pages.pop_back();
        }
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          const auto line = [&](int is_value) {
            return static_cast<size_t>(((page * 2 + is_value) * shape.num_kv_heads + head) * ps +
                                       token % ps);
          };
          const size_t from =
              static_cast<size_t>(token) * shape.kv_width() + static_cast<size_t>(head) * dim;
          std::copy_n(&s.k[from], dim, &kv[line(0) * dim]);
          std::copy_n(&s.v[from], dim, &kv[line(1) * dim]);
          if (token >= s.kv_len) continue;
          std::copy_n(&s.k[from], dim, &prefix_[line(0) * dim]);
          std::copy_n(&s.v[from], dim, &prefix_[line(1) * dim]);
        }
      }
      if (layout.has_gaps) {
        begin.push_back(begin.back());
        kv_len.push_back(rng.integer(0, 50));
        seq.push_back(0);
      }
      most_span_rows_ = std::max(most_span_rows_, s.num_rows());
      for (int row = 0; row < s.num_rows(); ++row) {
        const int above = s.parents[static_cast<size_t>(row)];
        has_trees_ = has_trees_ || above != row - 1;
        parent.push_back(above < 0 ? -1 : begin.back() + above);
        position.push_back(static_cast<int32_t>(s.path(row).size()) - 1);
        span.push_back(static_cast<int32_t>(begin.size()) - 1);
      }
      q.insert(q.end(), s.q.begin(), s.q.end());
      begin.push_back(static_cast<int32_t>(span.size()));
      kv_len.push_back(s.kv_len);
      seq.push_back(static_cast<int32_t>(slot));
    }
    num_rows_ = span.size();
    for (int i = 0; i < layout.spare_rows; ++i) {
      parent.push_back(-1);
      position.push_back(0);
      span.push_back(-1);
    }
    for (int i = 0; i < layout.spare_spans; ++i) {
      begin.push_back(begin.back());
      kv_len.push_back(0);
      seq.push_back(0);
    }
    q.resize(span.size() * shape.q_width(), 0xffff);

    SpanAttentionParams& p = params_;
    p.rows.num_rows = static_cast<int>(span.size());
    p.rows.num_spans = static_cast<int>(kv_len.size());
    p.rows.row_position = keep(position);
    p.rows.row_span = keep(span);
    p.rows.row_parent = keep(parent);
    p.rows.span_begin = keep(begin);
    p.rows.span_kv_len = keep(kv_len);
    p.rows.span_seq = keep(seq);
    p.q = keep(q);
    p.kv = {keep(kv), shape.num_kv_heads, shape.head_dim, ps};
    p.page_table = {keep(pages), max_pages};
    p.num_q_heads = shape.num_q_heads;
    p.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    p.dtype = DType::kBF16;
    p.max_tokens = max_tokens + layout.spare_context;
    p.rows.may_have_trees = shape.head_dim <= 128;
    p.first_token = sequences.empty() ? 0 : sequences.front().first_token;
    p.is_causal = sequences.empty() || sequences.front().is_causal;
    p.window = sequences.empty() ? 0 : sequences.front().window;
    p.window_follows_rows = !sequences.empty() && sequences.front().window_follows_rows;
    p.out = keep(Bits(q.size(), 0xffff));
    out_ = buffers_.back().get();
    buffers_.push_back(std::make_unique<DeviceBuffer>(span_attention_workspace_bytes_cuda(
        p.rows.num_rows, p.rows.num_spans, p.num_q_heads, shape.head_dim, p.max_tokens)));
    p.workspace = buffers_.back()->as<float>();
  }

  // Twice over the same plan, as two layers would; with what the spans have at most known or
  // not; steps of chains alone as what they are, expected to be short too, and as steps that might
  // have trees.
  Bits run() {
    const Bits first = run_once(params_);
    CHECK(run_behind_fence(params_) == first);
    SpanAttentionParams known_spans = params_;
    known_spans.rows.max_span_rows = most_span_rows_;
    CHECK(run_once(known_spans) == first);
    if (!has_trees_) {
      SpanAttentionParams chains = params_;
      chains.rows.may_have_trees = false;
      CHECK(run_once(chains) == first);
      CHECK(run_behind_fence(chains) == first);
      chains.rows.expected_kv_len = 1;
      CHECK(run_once(chains) == first);
      CHECK(run_behind_fence(chains) == first);
    }
    return first;
  }
  // A step of chains, by a kernel and a cut. Empty: they are not for the step, or the device.
  Bits run(const AttentionChoice& choice) {
    SpanAttentionParams chosen = params_;
    chosen.rows.may_have_trees = false;
    chosen.choice = choice;
    if (span_attention_plan_cuda(chosen, nullptr) != 0) return {};
    const Bits first = run_once(chosen);
    CHECK(run_behind_fence(chosen) == first);
    return first;
  }
  Bits output() const {
    for (const auto& buffer : buffers_) CHECK(buffer->guard_is_whole());
    return slice(out_->download<uint16_t>(), 0, num_rows_ * shape_.q_width());
  }
  const SpanAttentionParams& params() const { return params_; }

 private:
  Bits run_once(const SpanAttentionParams& params) {
    out_->poison();
    CHECK_CUDA(span_attention_plan_cuda(params, nullptr));
    CHECK_CUDA(span_attention_cuda(params, nullptr));
    const Bits first = output();
    out_->poison();
    CHECK_CUDA(span_attention_cuda(params, nullptr));
    const Bits second = output();
    CHECK(first == second);
    return first;
  }
  // As in a model: the prefixes are there before the fence, and behind it comes what the step
  // itself writes, q last of all.
  Bits run_behind_fence(const SpanAttentionParams& params) {
    const int line_bytes = shape_.head_dim * 2;
    const auto copy = [line_bytes](const void* from, void* to, size_t bytes) {
      CHECK_CUDA(
          gather_rows_cuda({.in = from,
                            .out = to,
                            .num_rows = static_cast<int>(bytes / static_cast<size_t>(line_bytes)),
                            .width_bytes = line_bytes,
                            .out_stride = line_bytes},
                           nullptr));
    };
    const size_t kv_bytes = prefix_.size() * 2;
    const size_t q_bytes = static_cast<size_t>(params.rows.num_rows) * shape_.q_width() * 2;
    const DeviceBuffer prefix(prefix_), kv(kv_bytes), q(q_bytes);
    const size_t dim = static_cast<size_t>(shape_.head_dim);
    const DeviceBuffer inv_freq(std::vector<float>(dim / 2, 1.0f)), cos_sin(dim * sizeof(float));
    SpanAttentionParams fenced = params;
    fenced.is_behind_fence = true;
    fenced.kv.data = kv.data();
    fenced.q = q.data();
    out_->poison();
    CHECK_CUDA(cudaDeviceSynchronize());
    copy(prefix.data(), kv.data(), kv_bytes);
    CHECK_CUDA(span_attention_plan_cuda(fenced, nullptr));
    CHECK_CUDA(rope_angles_cuda({.position = params.rows.row_position,
                                 .inv_freq = inv_freq.as<float>(),
                                 .cos_sin = cos_sin.as<float>(),
                                 .num_rows = 1,
                                 .head_dim = shape_.head_dim,
                                 .is_fence = true},
                                nullptr));
    copy(params.kv.data, kv.data(), kv_bytes);
    copy(params.q, q.data(), q_bytes);
    CHECK_CUDA(span_attention_cuda(fenced, nullptr));
    return output();
  }
  template <typename T>
  T* keep(const std::vector<T>& values) {
    buffers_.push_back(std::make_unique<DeviceBuffer>(values));
    return buffers_.back()->template as<T>();
  }

  Shape shape_;
  Bits prefix_;  // K and V without the step's own; NaN there
  size_t num_rows_ = 0;
  int most_span_rows_ = 0;
  bool has_trees_ = false;
  SpanAttentionParams params_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  DeviceBuffer* out_ = nullptr;
};

inline Bits run(Rng& rng, const Shape& shape, const std::vector<Sequence>& sequences,
                const Layout& layout = {}) {
  return Step(rng, shape, sequences, layout).run();
}

// Nothing is known of K of the first tokens, which no row sees, and V is finite there.
inline void spoil_first_tokens(Rng& rng, const Shape& shape, Sequence& s, int num_tokens) {
  const size_t count = static_cast<size_t>(num_tokens) * shape.kv_width();
  const Bits v = random_bits(rng, count, 1000.0f);
  std::fill_n(s.k.begin(), count, uint16_t{0xffff});
  std::copy(v.begin(), v.end(), s.v.begin());
}
inline void hide_first_tokens(Rng& rng, const Shape& shape, Sequence& s, int first_token) {
  s.first_token = first_token;
  spoil_first_tokens(rng, shape, s, first_token);
}

// Largest errors against fp64, ours and that of plain arithmetic: fp32 softmax, weights rounded to
// bf16 for the product with V, output rounded to bf16.
struct Errors {
  double ours = 0, plain = 0;

  void check() const { CHECK_LE(ours, 2 * plain); }
};

inline void add_row_errors(const Shape& shape, const Sequence& s, int row, const Bits& out,
                           size_t out_row, Errors& errors) {
  const std::vector<int> tokens = s.visible(row);
  const size_t dim = static_cast<size_t>(shape.head_dim);
  for (int head = 0; head < shape.num_q_heads; ++head) {
    const size_t q_at =
        static_cast<size_t>(row) * shape.q_width() + static_cast<size_t>(head) * dim;
    const auto kv_at = [&](int token) {
      return static_cast<size_t>(token) * shape.kv_width() +
             static_cast<size_t>(head / shape.group()) * dim;
    };
    const AttendedHead exact = attend_to(
        tokens, dim, [&](size_t d) { return from_bf16(s.q[q_at + d]); },
        [&](int token, size_t d) { return from_bf16(s.k[kv_at(token) + d]); },
        [&](int token, size_t d) { return from_bf16(s.v[kv_at(token) + d]); });
    std::vector<double> plain(dim, 0.0);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const float rounded = from_bf16(to_bf16(static_cast<float>(exact.weights[i])));
      for (size_t d = 0; d < dim; ++d) {
        plain[d] += static_cast<double>(rounded) *
                    static_cast<double>(from_bf16(s.v[kv_at(tokens[i]) + d]));
      }
    }
    for (size_t d = 0; d < dim; ++d) {
      const double found = static_cast<double>(
          from_bf16(out[out_row * shape.q_width() + static_cast<size_t>(head) * dim + d]));
      CHECK(std::isfinite(found));
      errors.ours = std::max(errors.ours, std::abs(found - exact.out[d]));
      const double rounded =
          static_cast<double>(from_bf16(to_bf16(static_cast<float>(plain[d] / exact.total))));
      errors.plain = std::max(errors.plain, std::abs(rounded - exact.out[d]));
    }
  }
}

// Every stride-th row against the reference.
inline void check_rows(const Shape& shape, const std::vector<Sequence>& sequences, const Bits& out,
                       int stride = 1) {
  Errors errors;
  size_t out_row = 0;
  for (const Sequence& s : sequences) {
    for (int row = 0; row < s.num_rows(); ++row, ++out_row) {
      if (row % stride == 0 || row + 1 == s.num_rows()) {
        add_row_errors(shape, s, row, out, out_row, errors);
      }
    }
  }
  errors.check();
}

inline void check_same_rows(const Shape& shape, const Bits& a, size_t a_row, const Bits& b,
                            size_t b_row, size_t count) {
  const size_t width = shape.q_width();
  CHECK_LE((a_row + count) * width, a.size());
  CHECK_LE((b_row + count) * width, b.size());
  for (size_t i = 0; i < count * width; ++i) {
    if (a[a_row * width + i] == b[b_row * width + i]) continue;
    FAIL("row " + std::to_string(a_row + i / width) + " against " +
         std::to_string(b_row + i / width) + ", element " + std::to_string(i % width));
  }
}

}  // namespace openspec::testing
