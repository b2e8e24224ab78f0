// Prompts: on sm_90a by warpgroup products, elsewhere by the tiles of prefill_mma_kernel. What
// gives the bits that all others must have are parts of a chain, in steps that might have trees and
// have room for few rows (kMinRowsForWgmma of attention/work.cuh).

#include "cuda/attention_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

constexpr int kFewRows = 90;
const Layout kFew = {.spare_rows = 0};
const Layout kMany = {.spare_rows = 300};

// Rows [first, end) of a chain, by steps of few rows.
Bits expected_rows(Rng& rng, const Shape& shape, const Sequence& whole, int first, int end) {
  Bits bits;
  for (int begin = first; begin < end; begin += kFewRows) {
    const int count = std::min(kFewRows, end - begin);
    const Bits part = run(rng, shape, {chunk_of(shape, whole, begin, count)}, kFew);
    bits.insert(bits.end(), part.begin(), part.end());
  }
  return bits;
}

Layout with_pages(int page_size) {
  Layout layout = kMany;
  layout.page_size = page_size;
  return layout;
}

}  // namespace

TEST(prompts_of_all_lengths_equal_steps_of_few_rows) {
  Rng rng(1);
  constexpr int kTokens = 1100;  // three segments
  for (const int group : {1, 2, 3, 4, 5, 8}) {
    const Shape shape = {2 * group, 2};
    const Sequence whole = random_sequence(rng, shape, 0, kTokens);
    const Bits expected = expected_rows(rng, shape, whole, 0, kTokens);
    std::vector<int> lengths = {1, 16, 17, 63, 64, 65, 127, 129, 511, 512, 513, 600, kTokens};
    for (int i = 0; i < 12; ++i) lengths.push_back(rng.integer(1, 600));
    for (const int length : lengths) {
      const Bits out = run(rng, shape, {chunk_of(shape, whole, 0, length)},
                           with_pages(std::vector<int>{8, 16, 24, 32, 64, 128}[rng.integer(0, 5)]));
      check_same_rows(shape, out, 0, expected, 0, static_cast<size_t>(length));
    }
    for (int trial = 0; trial < 10; ++trial) {
      const int first = trial < 4 ? 512 - trial : rng.integer(1, kTokens - 100);
      const int count = rng.integer(40, kTokens - first);
      const Bits out = run(rng, shape, {chunk_of(shape, whole, first, count)}, kMany);
      check_same_rows(shape, out, 0, expected, static_cast<size_t>(first),
                      static_cast<size_t>(count));
    }
  }
}

// More tiles than SMs, and spans of every kind in one step.
TEST(prompts_beside_drafts_and_trees_equal_steps_of_few_rows) {
  Rng rng(2);
  const Shape shape = {32, 8};
  constexpr int kTokens = 900;
  const Sequence whole = random_sequence(rng, shape, 0, kTokens);
  const Bits expected = expected_rows(rng, shape, whole, 0, kTokens);
  for (int trial = 0; trial < 4; ++trial) {
    std::vector<Sequence> batch;
    std::vector<int> begins;
    for (int i = 0; i < 7; ++i) {
      const int first = rng.integer(0, 600);
      const int count = i % 3 == 2 ? rng.integer(1, 5) : rng.integer(20, kTokens - first);
      begins.push_back(first);
      batch.push_back(chunk_of(shape, whole, first, count));
    }
    batch.push_back(random_sequence(rng, shape, 70, 40, Form::kBushy));
    Layout layout = kMany;
    layout.has_gaps = trial % 2 == 1;
    const Bits out = run(rng, shape, batch, layout);
    size_t at = 0;
    for (size_t i = 0; i < begins.size(); ++i) {
      const size_t count = static_cast<size_t>(batch[i].num_rows());
      check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i]), count);
      at += count;
    }
    const Bits tree = run(rng, shape, {batch.back()}, kFew);
    check_same_rows(shape, out, at, tree, 0, 40);
  }
}

// The rest of a prompt behind a long prefix: tiles are cut into segments and merged.
TEST(rows_behind_a_long_prefix_equal_steps_of_few_rows) {
  Rng rng(3);
  const Shape shape = {32, 8};
  constexpr int kTokens = 5000, kFirst = 4790;
  const Sequence whole = random_sequence(rng, shape, 0, kTokens);
  const Bits expected = expected_rows(rng, shape, whole, kFirst, kTokens);
  for (const int count : {17, 33, 100, 210}) {
    for (const int page_size : {16, 24}) {
      const Sequence part = chunk_of(shape, whole, kTokens - count, count);
      const Sequence other = chunk_of(shape, whole, kFirst, 60);
      const Bits out = run(rng, shape, {part, other}, with_pages(page_size));
      check_same_rows(shape, out, 0, expected, static_cast<size_t>(kTokens - count - kFirst),
                      static_cast<size_t>(count));
      check_same_rows(shape, out, static_cast<size_t>(count), expected, 0, 60);
    }
  }
}

// Each has a second tile of a single row, which merges as many segments as a full one.
TEST(many_chains_behind_long_prefixes_equal_steps_of_few_rows) {
  Rng rng(6);
  const Shape shape = {64, 8};
  constexpr int kFirst = 3000, kRows = 17;
  const Sequence whole = random_sequence(rng, shape, 0, kFirst + kRows);
  const Bits expected = expected_rows(rng, shape, whole, kFirst, kFirst + kRows);
  const std::vector<Sequence> batch(10, chunk_of(shape, whole, kFirst, kRows));
  const Bits out = run(rng, shape, batch, with_pages(16));
  for (size_t i = 0; i < batch.size(); ++i)
    check_same_rows(shape, out, i * kRows, expected, 0, kRows);
}

// A layer without entries for the first tokens.
TEST(prompts_behind_hidden_tokens_equal_steps_of_few_rows) {
  Rng rng(5);
  const Shape shape = {16, 4};
  constexpr int kTokens = 700;
  for (const int first_token : {1, 32}) {
    Sequence whole = random_sequence(rng, shape, first_token, kTokens - first_token);
    hide_first_tokens(rng, shape, whole, first_token);
    const Bits expected = expected_rows(rng, shape, whole, first_token, kTokens);
    for (const int first : {first_token, first_token + 1, 64, 500}) {
      for (const int count : {1, 30, 200}) {
        const Bits out = run(rng, shape, {chunk_of(shape, whole, first, count)}, kMany);
        check_same_rows(shape, out, 0, expected, static_cast<size_t>(first - first_token),
                        static_cast<size_t>(count));
      }
    }
    check_same_rows(shape, run(rng, shape, {whole}, kMany), 0, expected, 0,
                    static_cast<size_t>(kTokens - first_token));
  }
}

// One key takes nearly all the weight and maxima differ widely between blocks; or all are alike.
TEST(extreme_scores_equal_steps_of_few_rows) {
  Rng rng(4);
  const Shape shape = {8, 2};
  for (const float scale : {20.0f, 0.0f}) {
    Sequence whole = random_sequence(rng, shape, 0, 700);
    for (uint16_t& x : whole.q) x = to_bf16(from_bf16(x) * scale);
    const Bits expected = expected_rows(rng, shape, whole, 0, 700);
    const Bits out = run(rng, shape, {whole}, kMany);
    check_same_rows(shape, out, 0, expected, 0, 700);
  }
}
