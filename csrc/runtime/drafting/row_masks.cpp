#include "runtime/drafting/row_masks.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/choose/choose.h"

namespace openspec {

namespace {

bool is_empty(std::span<const int32_t> mask) {
  return std::all_of(mask.begin(), mask.end(), [](int32_t word) { return word == 0; });
}

int32_t bit_of(int32_t id) { return static_cast<int32_t>(1u << (id % 32)); }

void allow(std::span<int32_t> mask, int32_t id) {
  mask[static_cast<size_t>(id / 32)] |= bit_of(id);
}

void forbid(std::span<int32_t> mask, int32_t id) {
  if (id >= 0 && static_cast<size_t>(id / 32) < mask.size()) {
    mask[static_cast<size_t>(id / 32)] &= ~bit_of(id);
  }
}

constexpr const char* kNothingLeft =
    "the grammar of this request allows no token of the vocabulary after this text";
constexpr const char* kNothingLeftBeside =
    "allowed_token_ids or bad_words forbid every token that the grammar of this request allows "
    "after this text";

/// Known tokens and the drafts up to the row, which is 1 + the draft's number.
std::vector<int32_t> path_of(std::span<const int32_t> known, const Draft& draft, size_t row) {
  std::vector<int32_t> path(known.begin(), known.end());
  for (int i = static_cast<int>(row) - 1; i >= 0; i = draft.parents[static_cast<size_t>(i)]) {
    path.push_back(draft.tokens[static_cast<size_t>(i)]);
  }
  std::reverse(path.begin() + static_cast<ptrdiff_t>(known.size()), path.end());
  return path;
}

/// Takes from a mask what the other parameters forbid after `path`.
void forbid_others(std::span<int32_t> mask, const SequenceParams& params,
                   std::span<const int32_t> path) {
  if (!params.lists.allowed_ids.empty()) {
    std::vector<int32_t> allowed(mask.size(), 0);
    for (const int32_t id : params.lists.allowed_ids) {
      if (id >= 0 && static_cast<size_t>(id / 32) < mask.size()) allow(allowed, id);
    }
    for (size_t word = 0; word < mask.size(); ++word) mask[word] &= allowed[word];
  }
  int32_t begin = params.num_bad_words;
  for (int word = 0; word < params.num_bad_words; ++word) {
    const std::vector<int32_t>& list = params.lists.bad_words;
    const int32_t end = list[static_cast<size_t>(word)];
    const auto ids =
        std::span(list).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    begin = end;
    const size_t num_before = ids.size() - 1;
    if (num_before > path.size()) continue;
    if (std::equal(ids.begin(), ids.end() - 1, path.end() - static_cast<ptrdiff_t>(num_before))) {
      forbid(mask, ids.back());
    }
  }
}

}  // namespace

void RowMasks::begin(size_t num_samples) {
  num_masks_ = 0;
  parts_.clear();
  sample_mask_.assign(num_samples, -1);
}

void RowMasks::add(int slot, std::vector<int32_t> known, Draft draft, size_t first) {
  const int num_rows = 1 + draft.size();
  parts_.push_back({slot, std::move(known), std::move(draft), first, num_masks_});
  num_masks_ += num_rows;
}

void RowMasks::fill(const SequenceTable& table, ThreadPool& threads) {
  const size_t needed = static_cast<size_t>(num_masks_) * num_words() * sizeof(int32_t);
  if (words_.bytes() < needed) words_ = Buffer(std::bit_ceil(needed), memory_);
  threads.try_parallel_for(parts_.size(), [&](size_t part) { fill(table, parts_[part]); });
}

void RowMasks::fill(const SequenceTable& table, const Part& part) {
  GrammarPlace& place = *table.grammar(part.slot);
  const SequenceParams& params = table.params(part.slot);
  const auto num_rows = static_cast<size_t>(1 + part.draft.size());
  const auto index = std::span(sample_mask_).subspan(part.first, num_rows);
  MaskRows masks{.num_words = num_words_,
                 .words = std::span(words_.as<int32_t>(), words_.bytes() / sizeof(int32_t))
                              .subspan(static_cast<size_t>(part.first_mask) * num_words(),
                                       num_rows * num_words())};
  const auto prompt_len = static_cast<size_t>(table.prompt_len(part.slot));
  fill_rows(place, std::span(part.known).subspan(prompt_len), part.draft, masks, index);

  const bool has_more = !params.lists.allowed_ids.empty() || params.num_bad_words > 0;
  for (size_t row = 0; row < num_rows; ++row) {
    if (index[row] < 0) continue;
    const std::span<int32_t> mask = masks.row(index[row]);
    index[row] += part.first_mask;
    const bool was_empty = is_empty(mask);
    if (has_more) forbid_others(mask, params, path_of(part.known, part.draft, row));
    if (!is_empty(mask)) continue;
    index[row] = kHeldMask;
    // A draft's row says so in a step of its own, if it comes to that.
    if (row == 0) place.fail({was_empty ? kNothingLeft : kNothingLeftBeside, !was_empty});
  }
}

void RowMasks::fill_rows(GrammarPlace& place, std::span<const int32_t> output, const Draft& draft,
                         MaskRows& masks, std::span<int32_t> index) {
  std::fill(index.begin(), index.end(), -1);
  const auto made = place.made(output);
  if (!made || draft.size() > 0) {
    const bool is_whole = place.use(
        output, index.size(), [&](GrammarState& state) { state.fill_rows(draft, masks, index); });
    if (is_whole) return;
    std::replace(index.begin(), index.end(), -1, kHeldMask);
  }
  if (!made) {
    if (index[0] == kHeldMask) place.make(output);
  } else if (!made->empty()) {
    std::copy(made->begin(), made->end(), masks.row(0).begin());
    index[0] = 0;
  }
}

}  // namespace openspec
