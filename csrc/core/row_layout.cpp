#include "core/row_layout.h"

#include "core/check.h"

namespace openspec {

void Draft::append(const int32_t* token_of, const int32_t* parent_of, const float* score_of,
                   size_t first, int count) {
  for (size_t i = first; i < first + static_cast<size_t>(count); ++i) {
    append(token_of[i]);
    if (parent_of != nullptr) parents.back() = parent_of[i];
    if (score_of != nullptr) scores.push_back(score_of[i]);
  }
}

void RowLayout::clear() {
  for (auto* array : {&token, &position, &span, &parent, &span_kv_len, &span_seq, &sample_row,
                      &score_token, &first_choice}) {
    array->clear();
  }
  kv_slot.clear();
  span_begin.assign(1, 0);
  sample_begin.assign(1, 0);
}

void RowLayout::append(const Span& item, std::span<const int32_t> tokens,
                       std::span<const int32_t> pages, int page_size, int score_from,
                       int prompt_len) {
  OPENSPEC_CHECK(item.num_new_tokens >= 1 && item.kv_len + item.num_new_tokens <= item.num_tokens,
                 "a span of ", item.num_new_tokens, " tokens after ", item.kv_len, " of ",
                 item.num_tokens);
  OPENSPEC_CHECK(item.draft.size() == 0 || item.is_sampled(),
                 "drafts after a span that does not reach the last token");
  const int first_row = num_rows();
  const int32_t index = static_cast<int32_t>(span_seq.size());
  const auto add_row = [&](int32_t token_id, int32_t at, int32_t parent_row) {
    const int kv_index = item.kv_len + (num_rows() - first_row);
    token.push_back(token_id);
    position.push_back(at);
    span.push_back(index);
    parent.push_back(parent_row);
    kv_slot.push_back(int64_t{pages[static_cast<size_t>(kv_index / page_size)]} * page_size +
                      kv_index % page_size);
  };
  const auto add_sample = [&](int32_t row, int32_t scored) {
    sample_row.push_back(row);
    score_token.push_back(scored);
  };

  first_choice.push_back(-1);
  for (int i = 0; i < item.num_new_tokens; ++i) {
    const int at = item.kv_len + i;
    const int32_t row = num_rows();
    add_row(tokens[static_cast<size_t>(at)], at, i == 0 ? -1 : row - 1);
    if (at >= score_from && at + 1 < prompt_len)
      add_sample(row, tokens[static_cast<size_t>(at) + 1]);
    if (at + 1 == item.num_tokens) {
      first_choice.back() = static_cast<int32_t>(sample_row.size());
      add_sample(row, -1);
    }
  }
  const int32_t last_known = num_rows() - 1;
  for (int i = 0; i < item.draft.size(); ++i) {
    const int32_t above = item.draft.parents[static_cast<size_t>(i)];
    OPENSPEC_CHECK(above >= -1 && above < i, "draft ", i, " follows draft ", above);
    const int32_t parent_row = last_known + 1 + above;
    add_sample(num_rows(), -1);
    add_row(item.draft.tokens[static_cast<size_t>(i)],
            position[static_cast<size_t>(parent_row)] + 1, parent_row);
  }
  span_begin.push_back(num_rows());
  span_kv_len.push_back(item.kv_len);
  span_seq.push_back(item.slot);
  sample_begin.push_back(static_cast<int32_t>(sample_row.size()));
}

namespace {

/// The drafts from the last known token on that are each what `next` says. It is called with the
/// draft before it, -1 for none, and with how many those are.
template <typename Next>
std::vector<int32_t> follow(const Draft& draft, const Next& next) {
  std::vector<int32_t> path;
  int32_t at = -1;
  // Children come after their parent, so one pass over the drafts follows the whole path.
  for (int32_t i = 0; i < draft.size(); ++i) {
    const auto index = static_cast<size_t>(i);
    if (draft.parents[index] != at || draft.tokens[index] != next(at, path.size())) continue;
    path.push_back(i);
    at = i;
  }
  return path;
}

}  // namespace

std::vector<int32_t> accept_drafts(const Draft& draft, std::span<const int32_t> chosen) {
  return follow(draft, [&](int32_t at, size_t) { return chosen[static_cast<size_t>(at + 1)]; });
}

std::vector<int32_t> drafts_of_run(const Draft& draft, std::span<const int32_t> tokens) {
  return follow(draft,
                [&](int32_t, size_t count) { return count < tokens.size() ? tokens[count] : -1; });
}

DraftJudgement judge_drafts(const Draft& offered, int num_granted,
                            std::span<const int32_t> chosen) {
  DraftJudgement judgement;
  int32_t at = -1;
  bool is_judged = false;
  for (int32_t i = 0; i < offered.size() && at < num_granted; ++i) {
    const auto index = static_cast<size_t>(i);
    if (offered.parents[index] != at) continue;
    if (chosen[static_cast<size_t>(at + 1)] < 0) break;
    judgement.num_judged += !is_judged;
    is_judged = true;
    if (offered.tokens[index] != chosen[static_cast<size_t>(at + 1)]) continue;
    ++judgement.num_right;
    at = i;
    is_judged = false;
  }
  return judgement;
}

}  // namespace openspec
