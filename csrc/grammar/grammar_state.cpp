#include "grammar/grammar_state.h"

#include <xgrammar/matcher.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "core/check.h"
#include "grammar/classes_library.h"
#include "grammar/library.h"

namespace openspec {

struct GrammarState::Library {
  xgrammar::GrammarMatcher matcher;
  std::vector<int32_t> mask = {};  // of `offer`
};

namespace {

/// Calls visit(draft) for each draft with the state after those before it, if visit(parent) was
/// true, and takes the drafts back.
template <typename Visit>
void walk(const Draft& draft, const Visit& enter, const std::function<void()>& leave) {
  // Depth first: in a chain each draft follows the last one, and nothing is taken back before the
  // end.
  const int count = draft.size();
  std::vector<std::vector<int>> children(static_cast<size_t>(count) + 1);
  for (int i = 0; i < count; ++i) {
    children[static_cast<size_t>(draft.parents[static_cast<size_t>(i)] + 1)].push_back(i);
  }
  std::vector<std::pair<int, size_t>> path = {{-1, 0}};
  while (!path.empty()) {
    auto& [node, next] = path.back();
    const std::vector<int>& below = children[static_cast<size_t>(node + 1)];
    if (next == below.size()) {
      if (node >= 0) leave();
      path.pop_back();
      continue;
    }
    const int child = below[next++];
    if (enter(child)) path.emplace_back(child, 0);
  }
}

}  // namespace

GrammarState::GrammarState(std::shared_ptr<const CompiledGrammar> grammar)
    : grammar_(std::move(grammar)) {
  library_ = library::checked([&] {
    return std::make_unique<Library>(
        Library{xgrammar::GrammarMatcher(grammar_->library().grammar)});
  });
}

GrammarState::~GrammarState() = default;

void GrammarState::sync(std::span<const int32_t> output) {
  if (std::exchange(is_cut_, false)) is_ended_ = false;
  const size_t most = std::min(tokens_.size(), output.size());
  const size_t num_same = static_cast<size_t>(
      std::mismatch(output.begin(), output.begin() + static_cast<ptrdiff_t>(most), tokens_.begin())
          .first -
      output.begin());
  rollback(static_cast<int>(tokens_.size() - num_same));
  if (num_same < spelt_from_) bytes_to_spell_.clear();
  for (size_t i = num_same; i < output.size() && !is_ended_; ++i) {
    if (accept(output[i])) continue;
    is_cut_ = is_ended_ = vocabulary().is_stop(output[i]);
    OPENSPEC_CHECK(is_cut_, "output token ", i, ", id ", output[i],
                   ", is not one that the request's grammar allows there");
  }
  if (!bytes_to_spell_.empty() &&
      grammar_->spellings().learn(vocabulary(), bytes_to_spell_,
                                  std::span(tokens_).subspan(spelt_from_))) {
    bytes_to_spell_.clear();
  }
}

bool GrammarState::accept(int32_t token) {
  if (is_ended_ || !vocabulary().is_usable(token)) return false;
  if (!library::checked([&] { return library_->matcher.AcceptToken(token); })) return false;
  tokens_.push_back(token);
  is_ended_ = library_->matcher.IsTerminated();
  return true;
}

void GrammarState::rollback(int num_tokens) {
  if (num_tokens == 0) return;
  library::checked([&] { library_->matcher.Rollback(num_tokens); });
  tokens_.resize(tokens_.size() - static_cast<size_t>(num_tokens));
  is_ended_ = library_->matcher.IsTerminated();
}

bool GrammarState::fill(std::span<int32_t> mask) {
  if (is_ended_) return false;
  const int num_ids = vocabulary().library_size();
  int64_t size = (num_ids + 31) / 32;
  DLTensor tensor{.data = mask.data(),
                  .device = {kDLCPU, 0},
                  .ndim = 1,
                  .dtype = xgrammar::GetBitmaskDLType(),
                  .shape = &size,
                  .strides = nullptr,
                  .byte_offset = 0};
  library::checked([&] { return library_->matcher.FillNextTokenBitmask(&tensor); });
  // The library leaves the ids open that it does not know.
  if (num_ids % 32 != 0) mask[static_cast<size_t>(num_ids / 32)] &= (1 << (num_ids % 32)) - 1;
  std::fill(mask.begin() + size, mask.end(), 0);
  return true;
}

int GrammarState::prune(Draft& draft) {
  std::vector<bool> is_kept(static_cast<size_t>(draft.size()), false);
  walk(
      draft,
      [&](int i) {
        return is_kept[static_cast<size_t>(i)] = accept(draft.tokens[static_cast<size_t>(i)]);
      },
      [&] { rollback(1); });
  const auto num_kept = static_cast<int>(std::count(is_kept.begin(), is_kept.end(), true));
  const int num_refused = draft.size() - num_kept;
  if (num_refused == 0) return 0;
  Draft kept;
  std::vector<int32_t> place(is_kept.size(), -1);
  for (size_t i = 0; i < is_kept.size(); ++i) {
    if (!is_kept[i]) continue;
    place[i] = kept.size();
    kept.append(draft.tokens[i]);
    const int32_t parent = draft.parents[i];
    kept.parents.back() = parent < 0 ? -1 : place[static_cast<size_t>(parent)];
    if (!draft.scores.empty()) kept.scores.push_back(draft.scores[i]);
  }
  draft = std::move(kept);
  return num_refused;
}

void GrammarState::fill_rows(const Draft& draft, MaskRows& masks, std::span<int32_t> index) {
  std::fill(index.begin(), index.end(), -1);
  const auto fill_next = [&](int row) {
    OPENSPEC_CHECK(static_cast<size_t>(masks.num_rows + 1) * static_cast<size_t>(masks.num_words) <=
                       masks.words.size(),
                   "a step has more masks than it has room for");
    if (fill(masks.row(masks.num_rows))) index[static_cast<size_t>(row)] = masks.num_rows++;
  };
  fill_next(0);
  walk(
      draft,
      [&](int i) {
        if (!accept(draft.tokens[static_cast<size_t>(i)])) return false;
        fill_next(1 + i);
        return true;
      },
      [&] { rollback(1); });
}

bool GrammarState::may_take_tag() {
  for (const int32_t token : grammar_->library().tags) {
    if (!accept(token)) continue;
    rollback(1);
    return true;
  }
  return false;
}

std::vector<int32_t> GrammarState::offer(int most) {
  std::vector<int32_t> tokens;
  const auto num_known = tokens_.size();
  while (static_cast<int>(tokens.size()) < most && !is_ended_) {
    const size_t room = static_cast<size_t>(most) - tokens.size();
    // As many as the longest tokens hold; a text whose spelling is learned is known as a whole.
    const size_t wanted =
        std::max(room * vocabulary().max_token_bytes(), Spellings::kMostBytes + 1);
    const auto most_bytes = static_cast<int>(std::min(wanted, size_t{INT32_MAX}));
    const std::string bytes =
        library::checked([&] { return library_->matcher.FindJumpForwardString(most_bytes); });
    std::vector<int32_t> next;
    const bool may_be_tag = may_take_tag();
    if (!bytes.empty()) {
      if (may_be_tag) break;  // the library counts bytes alone
      if (bytes_to_spell_.empty() && tokens.empty()) {
        bytes_to_spell_ = bytes;
        spelt_from_ = tokens_.size();
      }
      next = grammar_->spellings().of(bytes);
      if (next.empty()) next = vocabulary().tokenize(bytes, static_cast<int>(room));
      next.resize(std::min(next.size(), room));
    } else {
      // Where bytes may follow and none must, several tokens are left: masks are dear. What has no
      // bytes is the end, or a token that the grammar names.
      if (!library_->matcher.IsCompleted() && !may_be_tag) break;
      std::vector<int32_t>& mask = library_->mask;
      mask.resize(static_cast<size_t>(vocabulary().num_mask_words()));
      fill(mask);
      int count = 0;
      for (size_t word = 0; word < mask.size() && count < 2; ++word) {
        const auto bits = static_cast<uint32_t>(mask[word]);
        if (bits == 0) continue;
        count += std::popcount(bits);
        next = {static_cast<int32_t>(32 * word) + std::countr_zero(bits)};
      }
      if (count != 1) break;
    }
    const size_t before = tokens.size();
    for (const int32_t token : next) {
      if (!accept(token)) break;
      tokens.push_back(token);
    }
    if (tokens.size() == before + next.size() && !next.empty()) continue;
    break;
  }
  rollback(static_cast<int>(tokens_.size() - num_known));
  return tokens;
}

}  // namespace openspec
