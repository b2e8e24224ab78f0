// Heads of 64 and of 256, and every ratio of q heads to KV heads for heads of all sizes. What is
// general of attention is in span_attention_test.cpp.

#include <algorithm>

#include "cuda/attention_testing.h"
#include "kernels/attention/span_attention.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

constexpr int kSmall = 64, kLarge = 256;

// Whatever chunk a row comes in, whatever else is in the step: one row, few, a prompt.
void check_chunks(Rng& rng, int head_dim, int num_kv_heads, const std::vector<int>& groups) {
  constexpr int kTokens = 1100;
  for (const int group : groups) {
    const Shape shape = {num_kv_heads * group, num_kv_heads, head_dim};
    const Sequence whole = random_sequence(rng, shape, 0, kTokens);
    const Bits expected = run(rng, shape, {whole});
    check_rows(shape, {whole}, expected, 97);
    for (const int max_rows : {1, 2, 5, 9, 17, 40, 120, 300}) {
      for (int trial = 0; trial < 3; ++trial) {
        std::vector<Sequence> batch;
        std::vector<int> begins;
        for (int i = 0; i <= 2 * trial; ++i) {
          const int num_rows = rng.integer((max_rows + 1) / 2, max_rows);
          begins.push_back(rng.integer(0, kTokens - num_rows));
          batch.push_back(chunk_of(shape, whole, begins.back(), num_rows));
        }
        Layout layout;
        layout.page_size = std::vector<int>{8, 16, 24, 64}[static_cast<size_t>(rng.integer(0, 3))];
        layout.spare_rows = rng.integer(0, 20);
        const Bits out = run(rng, shape, batch, layout);
        size_t at = 0;
        for (size_t i = 0; i < batch.size(); ++i) {
          const size_t num_rows = static_cast<size_t>(batch[i].num_rows());
          check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i]), num_rows);
          at += num_rows;
        }
      }
    }
  }
}

void check_large_batches(Rng& rng, const Shape& shape, const std::vector<int>& sizes) {
  for (const int num_sequences : sizes) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < num_sequences; ++i) {
      sequences.push_back(random_sequence(rng, shape, rng.integer(0, i % 11 == 3 ? 3000 : 700),
                                          i % 2 == 0 ? 1 : rng.integer(1, 12)));
    }
    const Bits together = run(rng, shape, sequences);
    check_rows(shape, sequences, together, 7);
    size_t at = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const size_t num_rows = static_cast<size_t>(sequences[i].num_rows());
      if (i % 5 == 3) {
        check_same_rows(shape, together, at, run(rng, shape, {sequences[i]}), 0, num_rows);
      }
      at += num_rows;
    }
  }
}

void check_windows(Rng& rng, const Shape& shape) {
  for (const bool is_causal : {true, false}) {
    for (const int window : {0, 70}) {
      std::vector<Sequence> sequences;
      for (const int kv_len : {0, 65, 300, 640}) {
        Sequence s = random_sequence(rng, shape, kv_len, rng.integer(1, 16));
        s.is_causal = is_causal;
        s.window = window;
        s.window_follows_rows = is_causal && window > 0;
        sequences.push_back(s);
      }
      check_rows(shape, sequences, run(rng, shape, sequences));
    }
  }
}

}  // namespace

TEST(every_ratio_matches_the_reference) {
  Rng rng(1);
  for (const int head_dim : {kSmall, 128, kLarge}) {
    for (int group = 1; group <= 8; group += head_dim == kLarge ? 3 : 1) {
      const Shape shape = {2 * group, 2, head_dim};
      std::vector<Sequence> sequences;
      for (const int kv_len : {0, 1, 63, 64, 130, 511, 700}) {
        sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(1, 17)));
        const Form form = head_dim == kLarge ? Form::kChain : Form::kBushy;
        sequences.push_back(random_sequence(rng, shape, kv_len, rng.integer(2, 40), form));
      }
      sequences.push_back(random_sequence(rng, shape, 300, 150));
      check_rows(shape, sequences, run(rng, shape, sequences), 3);
    }
  }
}

TEST(small_heads_are_invariant_bit_for_bit) {
  Rng rng(2);
  check_chunks(rng, kSmall, 8, {1, 4, 7});
}

TEST(large_heads_are_invariant_bit_for_bit) {
  Rng rng(7);
  check_chunks(rng, kLarge, 2, {1, 6});
}

TEST(large_batches_of_small_heads_are_invariant_bit_for_bit) {
  Rng rng(3);
  check_large_batches(rng, {14, 2, kSmall}, {40, 160});
}

TEST(large_batches_of_large_heads_are_invariant_bit_for_bit) {
  Rng rng(8);
  check_large_batches(rng, {12, 2, kLarge}, {160});
}

TEST(trees_of_small_heads_equal_chains_bit_for_bit) {
  Rng rng(4);
  for (const int group : {1, 3, 4, 8}) {
    const Shape shape = {2 * group, 2, kSmall};
    for (const int kv_len : {0, 63, 100, 505, 900}) {
      const Form form = kv_len % 2 == 0 ? Form::kBushy : Form::kDeep;
      const int num_rows = kv_len == 505 ? 256 : 40;
      const Sequence tree = random_sequence(rng, shape, kv_len, num_rows, form);
      const Bits out = run(rng, shape, {tree, random_sequence(rng, shape, 30, 2)});
      for (int row = 0; row < num_rows; row += num_rows / 10) {
        const Sequence path = path_of(shape, tree, row);
        check_same_rows(shape, out, static_cast<size_t>(row), run(rng, shape, {path}),
                        static_cast<size_t>(path.num_rows() - 1), 1);
      }
    }
  }
}

// Every kernel for large heads, cut into ranges of every size.
TEST(all_ways_with_large_heads_give_the_same_bits) {
  Rng rng(9);
  const Shape shape = {12, 2, kLarge};
  const std::vector<Sequence> sequences = {random_sequence(rng, shape, 1500, 4),
                                           random_sequence(rng, shape, 130, 1),
                                           random_sequence(rng, shape, 0, 70)};
  Step step(rng, shape, sequences, {});
  const Bits expected = step.run();
  int num_ways = 0;
  for (const int tile_pairs : {16, 32, 64}) {
    for (const int range_blocks : {1, 3, 8, 12, 24, 1 << 28}) {
      const Bits out = step.run({.kernel = AttentionChoice::Kernel::kCta,
                                 .tile_pairs = tile_pairs,
                                 .ctas_per_sm = 1,
                                 .range_blocks = range_blocks});
      if (out.empty()) continue;
      CHECK(out == expected);
      ++num_ways;
    }
  }
  CHECK_EQ(num_ways, 18);
}

TEST(windows_and_blocks_of_other_heads_match_the_reference) {
  Rng rng(5);
  check_windows(rng, {8, 2, kSmall});
  check_windows(rng, {8, 2, kLarge});
}

TEST(heads_of_other_sizes_are_refused) {
  Rng rng(6);
  const Shape shape = {4, 1, 64};
  const Step step(rng, shape, {random_sequence(rng, shape, 10, 2)}, {});
  SpanAttentionParams params = step.params();
  params.kv.head_dim = 96;
  CHECK(span_attention_plan_cuda(params, nullptr) != 0);
  CHECK(span_attention_cuda(params, nullptr) != 0);
  params.kv.head_dim = kLarge;
  params.rows.may_have_trees = true;
  CHECK(span_attention_plan_cuda(params, nullptr) != 0);
}
