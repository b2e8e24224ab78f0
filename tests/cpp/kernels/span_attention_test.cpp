#include "kernels/attention/span_attention.h"

#include <algorithm>
#include <cmath>

#include "attention_reference.h"
#include "kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

// Where a model's heads and pages are.
struct Shape {
  int num_q_heads = 4;
  int num_kv_heads = 1;
  int head_dim = 64;
  int page_size = 16;
  DType dtype = DType::kF32;
  bool is_causal = true;
  int first_position = 0;  // of the first token that the page table holds
  int window = 0;
  bool window_follows_rows = false;

  size_t q_width() const { return static_cast<size_t>(num_q_heads * head_dim); }
  Sight sight() const { return {0, is_causal, window, window_follows_rows}; }
};

// One sequence: the K and V of its tokens, and its rows. A row's token index is kv_len + row.
struct Sequence {
  int kv_len = 0;
  std::vector<int> parents;           // within the span; -1: the committed prefix
  std::vector<std::vector<float>> k;  // [token] [num_kv_heads * head_dim]
  std::vector<std::vector<float>> v;
  std::vector<std::vector<float>> q;  // [row] [num_q_heads * head_dim]

  int num_rows() const { return static_cast<int>(parents.size()); }
  std::vector<int> path(int row, const Sight& sight = {}) const {
    return path_of_row(sight, kv_len, parents, row);
  }
  // Tokens that a row sees in a causal span, its own included.
  int num_seen(int row) const { return static_cast<int>(path(row).size()); }
};

Sequence random_sequence(Rng& rng, const Shape& shape, int kv_len, int num_rows, bool is_tree) {
  Sequence sequence;
  sequence.kv_len = kv_len;
  for (int row = 0; row < num_rows; ++row) {
    sequence.parents.push_back(is_tree ? rng.integer(std::max(-1, row - 6), row - 1) : row - 1);
    sequence.q.push_back(rng.normals(shape.q_width()));
  }
  for (int token = 0; token < kv_len + num_rows; ++token) {
    const size_t width = static_cast<size_t>(shape.num_kv_heads * shape.head_dim);
    sequence.k.push_back(rng.normals(width));
    sequence.v.push_back(rng.normals(width));
  }
  return sequence;
}

// Lays the sequences out over pages in random order, runs the op, returns out.
Buffer run(Rng& rng, const Shape& shape, const std::vector<Sequence>& sequences, int num_threads,
           int spare_context = 0) {
  std::vector<int32_t> token, position, span, parent, begin = {0}, kv_len, seq;
  int num_pages = 3;  // never used: full of NaN, like all that no token fills
  int max_pages = 1;
  int max_tokens = spare_context;
  for (const Sequence& s : sequences) {
    const int tokens = static_cast<int>(s.k.size());
    max_tokens = std::max(max_tokens, tokens);
    num_pages += (tokens + shape.page_size - 1) / shape.page_size;
    max_pages = std::max(max_pages, (tokens + shape.page_size - 1) / shape.page_size);
  }
  std::vector<int32_t> free_pages;
  for (int page = 0; page < num_pages; ++page) {
    free_pages.insert(free_pages.begin() + rng.integer(0, page), page);
  }
  const size_t head_dim = static_cast<size_t>(shape.head_dim);
  Buffer kv(static_cast<size_t>(num_pages * 2 * shape.num_kv_heads * shape.page_size) * head_dim,
            shape.dtype);
  std::vector<int32_t> pages(sequences.size() * static_cast<size_t>(max_pages), -1);
  std::vector<float> q;
  for (size_t index = 0; index < sequences.size(); ++index) {
    const Sequence& s = sequences[index];
    const size_t slot = sequences.size() - 1 - index;
    for (size_t t = 0; t < s.k.size(); ++t) {
      const size_t page_size = static_cast<size_t>(shape.page_size);
      int32_t& page = pages[slot * static_cast<size_t>(max_pages) + t / page_size];
      if (page < 0) {
        page = free_pages.back();
        free_pages.pop_back();
      }
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        for (size_t d = 0; d < head_dim; ++d) {
          const size_t line =
              (static_cast<size_t>(page) * 2 * static_cast<size_t>(shape.num_kv_heads) +
               static_cast<size_t>(head)) *
                  page_size +
              t % page_size;
          const size_t v_line = line + static_cast<size_t>(shape.num_kv_heads) * page_size;
          kv.set(line * head_dim + d, s.k[t][static_cast<size_t>(head) * head_dim + d]);
          kv.set(v_line * head_dim + d, s.v[t][static_cast<size_t>(head) * head_dim + d]);
        }
      }
    }
    for (int row = 0; row < s.num_rows(); ++row) {
      const int above = s.parents[static_cast<size_t>(row)];
      parent.push_back(above < 0 ? -1 : begin.back() + above);
      token.push_back(0);
      position.push_back(shape.first_position + s.num_seen(row) - 1);
      span.push_back(static_cast<int32_t>(index));
      q.insert(q.end(), s.q[static_cast<size_t>(row)].begin(), s.q[static_cast<size_t>(row)].end());
    }
    begin.push_back(static_cast<int32_t>(token.size()));
    kv_len.push_back(s.kv_len);
    seq.push_back(static_cast<int32_t>(slot));
  }
  ThreadPool pool(num_threads);
  Buffer queries(q, shape.dtype);
  Buffer out(q.size(), shape.dtype);
  std::vector<float> workspace = poisoned_floats(
      span_attention_workspace_bytes_cpu(num_threads, shape.num_q_heads, max_tokens));
  SpanAttentionParams params;
  params.rows.num_rows = static_cast<int>(token.size());
  params.rows.num_spans = static_cast<int>(sequences.size());
  params.rows.row_token = token.data();
  params.rows.row_position = position.data();
  params.rows.row_span = span.data();
  params.rows.row_parent = parent.data();
  params.rows.span_begin = begin.data();
  params.rows.span_kv_len = kv_len.data();
  params.rows.span_seq = seq.data();
  params.q = queries.data();
  params.out = out.data();
  params.kv = {kv.data(), shape.num_kv_heads, shape.head_dim, shape.page_size};
  params.page_table = {pages.data(), max_pages};
  params.num_q_heads = shape.num_q_heads;
  params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  params.dtype = shape.dtype;
  params.workspace = workspace.data();
  params.max_tokens = max_tokens;
  params.is_causal = shape.is_causal;
  params.window = shape.window;
  params.window_follows_rows = shape.window_follows_rows;
  span_attention_cpu({.pool = &pool}, params);
  CHECK(out.guard_is_whole());
  return out;
}

// Tokens before those that a row sees for its window.
int num_hidden(const Shape& shape, const Sequence& s, int row) {
  return num_hidden_of(shape.sight(), s.kv_len, s.num_seen(row));
}

float stored(float x, DType dtype) { return dtype == DType::kBF16 ? from_bf16(to_bf16(x)) : x; }

void check_row(const Shape& shape, const Sequence& s, int row, const Buffer& out, size_t out_row) {
  std::vector<int> tokens = s.path(row, shape.sight());
  tokens.erase(tokens.begin(), tokens.begin() + num_hidden(shape, s, row));
  const size_t dim = static_cast<size_t>(shape.head_dim);
  for (int head = 0; head < shape.num_q_heads; ++head) {
    const size_t q_at = static_cast<size_t>(head) * dim;
    const size_t kv_at = static_cast<size_t>(head / (shape.num_q_heads / shape.num_kv_heads)) * dim;
    const auto element = [&](const std::vector<std::vector<float>>& lines, int line, size_t at) {
      return stored(lines[static_cast<size_t>(line)][at], shape.dtype);
    };
    const AttendedHead expected = attend_to(
        tokens, dim, [&](size_t d) { return element(s.q, row, q_at + d); },
        [&](int token, size_t d) { return element(s.k, token, kv_at + d); },
        [&](int token, size_t d) { return element(s.v, token, kv_at + d); });
    for (size_t d = 0; d < dim; ++d) {
      const double found = static_cast<double>(out[out_row * shape.q_width() + q_at + d]);
      CHECK_NEAR(found, expected.out[d], tolerance(shape.dtype, std::abs(expected.out[d]), 2e-6));
    }
  }
}

void check_all(Rng& rng, const Shape& shape, const std::vector<Sequence>& sequences) {
  const Buffer out = run(rng, shape, sequences, 2);
  size_t out_row = 0;
  for (const Sequence& s : sequences) {
    for (int row = 0; row < s.num_rows(); ++row) check_row(shape, s, row, out, out_row++);
  }
}

}  // namespace

TEST(matches_reference_on_ragged_batches) {
  for_each_isa([] {
    Rng rng(1);
    for (const DType dtype : both_dtypes()) {
      for (const int group : {1, 2, 4, 5, 8}) {
        const Shape shape = {2 * group, 2, 64, 16, dtype};
        std::vector<Sequence> sequences;
        for (const int kv_len : {0, 1, 31, 127, 128, 300}) {
          sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(1, 9), false));
          sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(1, 20), true));
        }
        check_all(rng, shape, sequences);
      }
    }
  });
}

TEST(matches_reference_for_head_dims_and_page_sizes) {
  for_each_isa([] {
    Rng rng(2);
    for (const int head_dim : {32, 96, 128, 256}) {
      for (const int page_size : {1, 7, 64}) {
        const Shape shape = {4, 1, head_dim, page_size, DType::kF32};
        check_all(rng, shape,
                  {random_sequence(rng, shape, 140, 5, false),
                   random_sequence(rng, shape, 125, 12, true)});
      }
    }
  });
}

TEST(matches_reference_on_a_prefill_chunk) {
  for_each_isa([] {
    Rng rng(3);
    const Shape shape = {4, 1, 32, 16, DType::kF32};
    check_all(
        rng, shape,
        {random_sequence(rng, shape, 0, 150, false), random_sequence(rng, shape, 90, 200, false)});
  });
}

// A row's output is the same however its tokens are spread over committed prefix and span, whatever
// else is in the batch, and however many threads there are.
TEST(chunks_and_batches_are_invariant_bit_for_bit) {
  for_each_isa([] {
    Rng rng(4);
    for (const DType dtype : both_dtypes()) {
      const Shape shape = {8, 2, 64, 16, dtype};
      const size_t width = shape.q_width();
      const Sequence whole = random_sequence(rng, shape, 0, 300, false);
      const Buffer expected = run(rng, shape, {whole}, 1);
      for (int num_rows = 1; num_rows <= 70; ++num_rows) {
        const int first = num_rows < 4 ? 300 - num_rows : rng.integer(0, 300 - num_rows);
        Sequence part;
        part.kv_len = first;
        part.k.assign(whole.k.begin(), whole.k.begin() + first + num_rows);
        part.v.assign(whole.v.begin(), whole.v.begin() + first + num_rows);
        part.q.assign(whole.q.begin() + first, whole.q.begin() + first + num_rows);
        for (int row = 0; row < num_rows; ++row) part.parents.push_back(row - 1);
        Shape other = shape;
        other.page_size = rng.integer(1, 40);
        std::vector<Sequence> batch;
        const int num_before = rng.integer(0, 2);
        int first_row = 0;
        for (int i = 0; i < num_before; ++i) {
          batch.push_back(
              random_sequence(rng, shape, rng.integer(0, 200), rng.integer(1, 5), i == 0));
          first_row += batch.back().num_rows();
        }
        batch.push_back(part);
        if (rng.integer(0, 1) == 1) batch.push_back(random_sequence(rng, shape, 10, 3, false));
        const Buffer out = run(rng, other, batch, rng.integer(1, 5), rng.integer(0, 20000));
        CHECK(out.same(static_cast<size_t>(first_row) * width, expected,
                       static_cast<size_t>(first) * width, static_cast<size_t>(num_rows) * width));
      }
    }
  });
}

// Every path of a tree gives the bits of the chain with the same tokens.
TEST(trees_equal_chains_bit_for_bit) {
  for_each_isa([] {
    Rng rng(5);
    for (const DType dtype : both_dtypes()) {
      const Shape shape = {4, 1, 64, 16, dtype};
      const size_t width = shape.q_width();
      for (const int kv_len : {0, 5, 100, 127, 128, 131, 250}) {
        const Sequence tree = random_sequence(rng, shape, kv_len, 60, true);
        const Buffer out = run(rng, shape, {tree}, 2);
        for (int row = 0; row < tree.num_rows(); ++row) {
          const std::vector<int> path = tree.path(row);
          Sequence chain;
          chain.kv_len = kv_len;
          for (const int token : path) {
            chain.k.push_back(tree.k[static_cast<size_t>(token)]);
            chain.v.push_back(tree.v[static_cast<size_t>(token)]);
            if (token < kv_len) continue;
            chain.q.push_back(tree.q[static_cast<size_t>(token - kv_len)]);
            chain.parents.push_back(static_cast<int>(chain.parents.size()) - 1);
          }
          const Buffer alone = run(rng, shape, {chain}, rng.integer(1, 3));
          CHECK(out.same(static_cast<size_t>(row) * width, alone,
                         static_cast<size_t>(chain.num_rows() - 1) * width, width));
        }
      }
    }
  });
}

// A page table may begin behind the first tokens of its sequence, which keeps its positions.
TEST(what_rows_see_is_counted_from_the_page_table) {
  Rng rng(7);
  for (const bool is_tree : {false, true}) {
    for (const int kv_len : {0, 5, 127, 300}) {
      Shape shape;
      const Sequence sequence = random_sequence(rng, shape, kv_len, 9, is_tree);
      const Buffer whole = run(rng, shape, {sequence}, 2);
      shape.first_position = 4096;
      const Buffer windowed = run(rng, shape, {sequence}, 2);
      CHECK(whole.same(0, windowed, 0, 9 * shape.q_width()));
    }
  }
}

TEST(rows_of_a_block_see_all_of_it) {
  Rng rng(31);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Shape shape{.num_q_heads = 8, .num_kv_heads = 2, .dtype = dtype, .is_causal = false};
    std::vector<Sequence> sequences;
    for (const auto& [kv_len, num_rows] : {std::pair{0, 1}, {0, 16}, {3, 8}, {120, 16}, {250, 7}}) {
      sequences.push_back(random_sequence(rng, shape, kv_len, num_rows, /*is_tree=*/false));
    }
    check_all(rng, shape, sequences);
  }
}

// What no row of a span sees may be anything.
TEST(rows_see_the_tokens_of_their_window) {
  for_each_isa([] {
    Rng rng(8);
    for (const DType dtype : both_dtypes()) {
      for (const int form :
           {0, 1, 2}) {  // after a block's first row, causal or not; after each row
        for (const int window : {1, 40, 200}) {
          const Shape shape{.num_q_heads = 8,
                            .num_kv_heads = 2,
                            .dtype = dtype,
                            .is_causal = form != 1,
                            .window = window,
                            .window_follows_rows = form == 2};
          std::vector<Sequence> sequences;
          for (const int kv_len : {0, 128, 250, 400}) {
            const bool is_tree = form == 2 && kv_len % 10 == 0;
            sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(1, 40), is_tree));
            Sequence& s = sequences.back();
            int hidden = num_hidden(shape, s, 0);
            for (int row = 1; row < s.num_rows(); ++row) {
              hidden = std::min(hidden, num_hidden(shape, s, row));
            }
            for (size_t token = 0; token < static_cast<size_t>(hidden); ++token) {
              std::fill(s.k[token].begin(), s.k[token].end(), std::nanf(""));
              std::fill(s.v[token].begin(), s.v[token].end(), std::nanf(""));
            }
          }
          check_all(rng, shape, sequences);
        }
      }
    }
  });
}

TEST(chunks_with_windows_are_invariant_bit_for_bit) {
  Rng rng(9);
  for (const DType dtype : both_dtypes()) {
    for (const int window : {1, 100, 129}) {
      const Shape shape{.num_q_heads = 8,
                        .num_kv_heads = 2,
                        .dtype = dtype,
                        .window = window,
                        .window_follows_rows = true};
      const size_t width = shape.q_width();
      const Sequence whole = random_sequence(rng, shape, 0, 1400, false);
      const Buffer expected = run(rng, shape, {whole}, 1);
      for (const int num_rows : {1, 2, 9, 16, 33, 200}) {
        const int first = rng.integer(0, 1400 - num_rows);
        Sequence part;
        part.kv_len = first;
        part.k.assign(whole.k.begin(), whole.k.begin() + first + num_rows);
        part.v.assign(whole.v.begin(), whole.v.begin() + first + num_rows);
        part.q.assign(whole.q.begin() + first, whole.q.begin() + first + num_rows);
        for (int row = 0; row < num_rows; ++row) part.parents.push_back(row - 1);
        const Buffer out = run(rng, shape, {part}, rng.integer(1, 5), 20000);
        CHECK(out.same(0, expected, static_cast<size_t>(first) * width,
                       static_cast<size_t>(num_rows) * width));
      }
    }
  }
}

TEST(windows_of_blocks_cannot_follow_rows) {
  Rng rng(10);
  const Shape shape{.is_causal = false, .window = 4, .window_follows_rows = true};
  CHECK_THROWS(run(rng, shape, {random_sequence(rng, shape, 9, 4, false)}, 1), EngineError,
               "needs causal rows");
}

TEST(head_dim_that_is_no_multiple_of_32_is_refused) {
  Rng rng(6);
  const Shape shape = {2, 1, 80, 16, DType::kF32};
  CHECK_THROWS(run(rng, shape, {random_sequence(rng, shape, 3, 1, false)}, 1), EngineError,
               "head_dim 80");
}
