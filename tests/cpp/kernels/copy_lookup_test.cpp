#include "kernels/drafts/copy_lookup.h"

#include <algorithm>

#include "kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

struct Options {
  int ngram_min = 1;
  int ngram_max = 4;
  int max_lookback = 4096;
  bool earliest = false;
};

struct Found {
  std::vector<int32_t> drafts;
  int match_len = 0;
  bool operator==(const Found&) const = default;
};

// The definition: for n from long to short, the most recent (or earliest) earlier occurrence of the
// last n tokens of the window; then a copy that may run on into itself.
Found brute_force(const std::vector<int32_t>& history, int num_wanted, const Options& options) {
  const int num_tokens = static_cast<int>(history.size());
  const int size = std::min(num_tokens, options.max_lookback);
  const std::vector<int32_t> window(history.end() - size, history.end());
  if (num_wanted == 0) return {};
  for (int n = std::min(options.ngram_max, size - 1); n >= options.ngram_min; --n) {
    int found = -1;
    for (int begin = 0; begin + n < size; ++begin) {
      if (!std::equal(window.end() - n, window.end(), window.begin() + begin)) continue;
      if (found < 0 || !options.earliest) found = begin;
    }
    if (found < 0) continue;
    std::vector<int32_t> text = window;
    for (int i = 0; i < num_wanted; ++i) text.push_back(text[static_cast<size_t>(found + n + i)]);
    return {std::vector<int32_t>(text.begin() + size, text.end()), n};
  }
  return {};
}

std::vector<Found> look_up(const std::vector<std::vector<int32_t>>& histories,
                           const std::vector<int32_t>& num_wanted, int max_drafts,
                           const Options& options, int num_threads) {
  const size_t num_seqs = histories.size();
  size_t stride = 1;
  for (const auto& history : histories) stride = std::max(stride, history.size() + 2);
  std::vector<int32_t> tokens(num_seqs * stride, -99);
  std::vector<int32_t> num_tokens(num_seqs), seq(num_seqs);
  for (size_t i = 0; i < num_seqs; ++i) {
    const size_t slot = num_seqs - 1 - i;
    std::copy(histories[i].begin(), histories[i].end(),
              tokens.begin() + static_cast<std::ptrdiff_t>(slot * stride));
    num_tokens[slot] = static_cast<int32_t>(histories[i].size());
    seq[i] = static_cast<int32_t>(slot);
  }
  const size_t num_drafts_all = num_seqs * static_cast<size_t>(max_drafts);
  std::vector<int32_t> drafts(num_drafts_all + 1, -7), num_drafts(num_seqs, -7),
      match_len(num_seqs, -7);
  std::vector<int32_t> workspace(
      copy_lookup_workspace_bytes(static_cast<int>(num_seqs), options.max_lookback) / 4, -7);
  ThreadPool pool(num_threads);
  CopyLookupParams params;
  params.tokens = tokens.data();
  params.tokens_stride = static_cast<int64_t>(stride);
  params.num_tokens = num_tokens.data();
  params.seq = seq.data();
  params.num_wanted = num_wanted.data();
  params.num_seqs = static_cast<int>(num_seqs);
  params.max_drafts = max_drafts;
  params.min_match_len = options.ngram_min;
  params.max_match_len = options.ngram_max;
  params.max_lookback = options.max_lookback;
  params.earliest = options.earliest;
  params.drafts = drafts.data();
  params.num_drafts = num_drafts.data();
  params.match_len = match_len.data();
  params.workspace = workspace.data();
  copy_lookup_cpu({.pool = &pool}, params);
  CHECK_EQ(drafts.back(), -7);
  std::vector<Found> found(num_seqs);
  for (size_t i = 0; i < num_seqs; ++i) {
    const auto begin =
        drafts.begin() + static_cast<std::ptrdiff_t>(i * static_cast<size_t>(max_drafts));
    found[i] = {{begin, begin + num_drafts[i]}, match_len[i]};
    for (int j = num_drafts[i]; j < max_drafts; ++j) CHECK_EQ(begin[j], -1);
  }
  return found;
}

Found look_up_one(const std::vector<int32_t>& history, int num_wanted, const Options& options) {
  return look_up({history}, {num_wanted}, num_wanted, options, 1)[0];
}

}  // namespace

TEST(equals_brute_force) {
  Rng rng(1);
  for (int round = 0; round < 400; ++round) {
    Options options;
    options.ngram_min = rng.integer(1, 4);
    options.ngram_max = rng.integer(options.ngram_min, 7);
    options.max_lookback = rng.integer(0, 2) == 0 ? rng.integer(1, 30) : 300;
    options.earliest = rng.integer(0, 1) == 1;
    const int max_drafts = rng.integer(1, 12);
    std::vector<std::vector<int32_t>> histories;
    std::vector<int32_t> num_wanted;
    for (int i = 0; i < 12; ++i) {
      const int alphabet = rng.integer(1, 5);
      const int period = rng.integer(1, 9);
      const bool is_periodic = rng.integer(0, 2) == 0;
      std::vector<int32_t> history;
      for (int length = rng.integer(1, 120); length > 0; --length) {
        const bool repeats = is_periodic && static_cast<int>(history.size()) >= period;
        history.push_back(repeats ? history[history.size() - static_cast<size_t>(period)]
                                  : rng.integer(0, alphabet));
      }
      histories.push_back(history);
      num_wanted.push_back(rng.integer(0, max_drafts));
    }
    const std::vector<Found> found =
        look_up(histories, num_wanted, max_drafts, options, rng.integer(1, 3));
    for (size_t i = 0; i < histories.size(); ++i) {
      CHECK(found[i] == brute_force(histories[i], num_wanted[i], options));
    }
  }
}

TEST(longest_wins_then_most_recent_then_option) {
  //                                   0  1  2  3  4  5  6  7  8  9 10 11
  const std::vector<int32_t> history = {5, 1, 2, 7, 9, 2, 8, 1, 2, 6, 1, 2};
  CHECK_EQ(look_up_one(history, 1, {}).drafts, (std::vector<int32_t>{6}));
  CHECK_EQ(look_up_one(history, 1, {.earliest = true}).drafts, (std::vector<int32_t>{7}));
  CHECK_EQ(look_up_one(history, 1, {}).match_len, 2);
  CHECK_EQ(look_up_one(history, 1, {.ngram_max = 1, .earliest = true}).drafts,
           (std::vector<int32_t>{7}));
  CHECK_EQ(look_up_one(history, 1, {.ngram_min = 3}).match_len, 0);
}

TEST(a_periodic_history_goes_on_with_its_period) {
  const std::vector<int32_t> history = {9, 1, 2, 3, 1, 2, 3, 1, 2};
  CHECK_EQ(look_up_one(history, 8, {}).drafts, (std::vector<int32_t>{3, 1, 2, 3, 1, 2, 3, 1}));
  CHECK_EQ(look_up_one({4, 4, 4}, 5, {}).drafts, (std::vector<int32_t>{4, 4, 4, 4, 4}));
}

TEST(lookback_hides_older_tokens) {
  const std::vector<int32_t> history = {1, 2, 3, 8, 8, 9, 1, 2};
  CHECK_EQ(look_up_one(history, 1, {.max_lookback = 8}).drafts, (std::vector<int32_t>{3}));
  CHECK_EQ(look_up_one(history, 1, {.max_lookback = 6}).match_len, 0);
}

TEST(takes_linear_time) {
  // The worst case of a naive search: a long run, broken at the front.
  std::vector<int32_t> history(400000, 7);
  history[0] = 1;
  const Found found =
      look_up_one(history, 3, {.ngram_min = 1, .ngram_max = 200000, .max_lookback = 400000});
  CHECK_EQ(found.match_len, 200000);
  CHECK_EQ(found.drafts, (std::vector<int32_t>{7, 7, 7}));
}

TEST(bounds_are_checked) {
  CHECK_THROWS(look_up_one({1, 2}, 1, {.ngram_min = 0}), EngineError, "n-grams of 0");
  CHECK_THROWS(look_up_one({1, 2}, 1, {.ngram_min = 5}), EngineError, "n-grams of 5");
}
