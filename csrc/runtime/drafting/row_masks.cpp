#include "runtime/drafting/row_masks.h"

#include <algorithm>
#include <bit>
#include <utility>

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

/// Takes from a mask what the other parameters forbid after `path`, but for min_tokens.
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
  GrammarState& state = *table.grammar(part.slot);
  const SequenceParams& params = table.params(part.slot);
  const int prompt_len = table.prompt_len(part.slot);
  const auto num_rows = static_cast<size_t>(1 + part.draft.size());
  const auto index = std::span(sample_mask_).subspan(part.first, num_rows);
  MaskRows masks{.num_words = num_words_,
                 .words = std::span(words_.as<int32_t>(), words_.bytes() / sizeof(int32_t))
                              .subspan(static_cast<size_t>(part.first_mask) * num_words(),
                                       num_rows * num_words())};
  state.sync(std::span(part.known).subspan(static_cast<size_t>(prompt_len)));
  state.fill_rows(part.draft, masks, index);

  const bool has_more = params.grammar_min_tokens > 0 || !params.lists.allowed_ids.empty() ||
                        params.num_bad_words > 0;
  for (size_t row = 0; row < num_rows; ++row) {
    if (index[row] < 0) continue;
    const std::span<int32_t> mask = masks.row(index[row]);
    index[row] += part.first_mask;
    if (!has_more) {
      end_if_empty(mask, params);
      continue;
    }
    std::vector<int32_t> path = part.known;
    for (int i = static_cast<int>(row) - 1; i >= 0;
         i = part.draft.parents[static_cast<size_t>(i)]) {
      path.push_back(part.draft.tokens[static_cast<size_t>(i)]);
    }
    std::reverse(path.begin() + static_cast<ptrdiff_t>(part.known.size()), path.end());
    restrict_mask(mask, params, path, static_cast<int>(path.size()) - prompt_len);
  }
}

void RowMasks::end_if_empty(std::span<int32_t> mask, const SequenceParams& params) {
  if (!is_empty(mask)) return;
  for (const int32_t id : params.grammar->vocabulary().stop_ids()) allow(mask, id);
}

void RowMasks::restrict_mask(std::span<int32_t> mask, const SequenceParams& params,
                             std::span<const int32_t> path, int num_output) {
  std::vector<int32_t> rest(mask.begin(), mask.end());
  forbid_others(rest, params, path);
  if (is_empty(rest)) {
    std::fill(mask.begin(), mask.end(), 0);
  } else if (num_output < params.grammar_min_tokens) {
    for (const int32_t id : params.lists.stop_ids) forbid(rest, id);
    if (!is_empty(rest)) std::copy(rest.begin(), rest.end(), mask.begin());
  }
  end_if_empty(mask, params);
}

}  // namespace openspec
