#include <algorithm>

#include "cuda/attention_testing.h"
#include "kernels/attention/span_attention.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

Sequence windowed(Rng& rng, const Shape& shape, Sequence s, int window, bool follows_rows,
                  bool is_causal = true) {
  s.window = window;
  s.window_follows_rows = follows_rows;
  s.is_causal = is_causal;
  int num_hidden = s.num_hidden(0);
  for (int row = 1; row < s.num_rows(); ++row) num_hidden = std::min(num_hidden, s.num_hidden(row));
  spoil_first_tokens(rng, shape, s, num_hidden);
  return s;
}

}  // namespace

// Windows of causal layers: whatever chunk a row comes in, it sees the same and has the same bits.
// Prompts, drafts of few rows and single rows, in kernels of every kind.
TEST(windows_that_follow_rows_are_invariant_bit_for_bit) {
  Rng rng(1);
  constexpr int kTokens = 900;
  for (const int group : {4, 5}) {
    const Shape shape = {2 * group, 2};
    const Sequence plain = random_sequence(rng, shape, 0, kTokens);
    for (const int window : {1, 50, 64, 300, 2000}) {
      Sequence whole = plain;
      whole.window = window;
      whole.window_follows_rows = true;
      const Bits expected = run(rng, shape, {whole});
      check_rows(shape, {whole}, expected, 41);
      for (const int max_rows : {1, 3, 12, 40, 150}) {
        std::vector<Sequence> batch;
        std::vector<int> begins;
        for (int i = 0; i < 4; ++i) {
          const int num_rows = rng.integer(1, max_rows);
          begins.push_back(rng.integer(0, kTokens - num_rows));
          batch.push_back(windowed(rng, shape, chunk_of(shape, whole, begins.back(), num_rows),
                                   window, /*follows_rows=*/true));
        }
        Layout layout;
        layout.page_size = std::vector<int>{8, 16, 24, 64}[static_cast<size_t>(rng.integer(0, 3))];
        const Bits out = run(rng, shape, batch, layout);
        size_t at = 0;
        for (size_t i = 0; i < batch.size(); ++i) {
          const size_t num_rows = static_cast<size_t>(batch[i].num_rows());
          check_same_rows(shape, out, at, expected, static_cast<size_t>(begins[i]), num_rows);
          at += num_rows;
        }
        const Bits alone = run(rng, shape, {batch[0]});
        check_same_rows(shape, alone, 0, expected, static_cast<size_t>(begins[0]),
                        static_cast<size_t>(batch[0].num_rows()));
      }
    }
  }
}

// Windows of blocks that are drafted at once: all rows see the same of the committed prefix.
TEST(windows_before_a_span_match_the_reference) {
  Rng rng(2);
  for (const int group : {1, 4, 5, 8}) {
    const Shape shape = {2 * group, 2};
    for (const bool is_causal : {true, false}) {
      for (const int window : {1, 63, 128, 500}) {
        std::vector<Sequence> sequences;
        for (const int kv_len : {0, 5, 64, 500, 512, 1100}) {
          const int num_rows = kv_len == 1100 ? 120 : rng.integer(1, 16);
          sequences.push_back(windowed(rng, shape, random_sequence(rng, shape, kv_len, num_rows),
                                       window, /*follows_rows=*/false, is_causal));
        }
        const Bits out = run(rng, shape, sequences);
        check_rows(shape, sequences, out, 7);
        size_t at = 0;
        for (const Sequence& s : sequences) {
          const size_t num_rows = static_cast<size_t>(s.num_rows());
          check_same_rows(shape, run(rng, shape, {s}), 0, out, at, num_rows);
          at += num_rows;
        }
      }
    }
  }
}

// Every path of a tree has the bits of the chain with the same tokens.
TEST(trees_with_windows_equal_chains_bit_for_bit) {
  Rng rng(3);
  const Shape shape = {8, 2};
  for (const bool follows_rows : {true, false}) {
    for (const int window : {1, 30, 200}) {
      for (const int kv_len : {0, 63, 300, 505}) {
        const Form form = kv_len % 2 == 0 ? Form::kBushy : Form::kDeep;
        const Sequence tree = windowed(
            rng, shape, random_sequence(rng, shape, kv_len, kv_len == 505 ? 200 : 40, form), window,
            follows_rows);
        const Bits out = run(rng, shape, {tree});
        check_rows(shape, {tree}, out, 5);
        for (int row = 0; row < tree.num_rows(); row += 7) {
          const Sequence path = path_of(shape, tree, row);
          const Bits alone = run(rng, shape, {path});
          check_same_rows(shape, out, static_cast<size_t>(row), alone,
                          static_cast<size_t>(path.num_rows() - 1), 1);
        }
      }
    }
  }
}

TEST(windows_of_blocks_cannot_follow_rows) {
  Rng rng(4);
  const Shape shape;
  Sequence s = random_sequence(rng, shape, 10, 4);
  s.window = 4;
  s.is_causal = false;
  Step step(rng, shape, {s}, {});
  SpanAttentionParams params = step.params();
  params.window_follows_rows = true;
  CHECK(span_attention_cuda(params, nullptr) != 0);
}
