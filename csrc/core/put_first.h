#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace openspec {

/// Puts a chain in front of a sequence's drafts, in place: the chain, then what the drafts have
/// after these very tokens. Drafts that do not follow the chain go. Returns how many there are
/// then.
///
/// Both engines merge with it, so what they draft is the same. The arrays are as in Draft, with
/// room for the longer of both; `parents` is null where drafts are chains, `scores` where there are
/// none. A chain's own score is 0, and what follows is as likely as it was after these tokens.
OPENSPEC_HD int put_first(const int32_t* lead, int num_lead, int32_t* tokens, int32_t* parents,
                          float* scores, int num_drafts) {
  if (num_lead == 0) return num_drafts;
  // Children come after their parent: one pass follows the path.
  int end = -1, depth = 0;
  for (int i = 0; i < num_drafts && depth < num_lead; ++i) {
    const int parent = parents != nullptr ? parents[i] : i - 1;
    if (parent >= i) break;
    if (parent != end || tokens[i] != lead[depth]) continue;
    end = i;
    ++depth;
  }
  int count = num_lead;
  if (depth == num_lead) {
    const float certain = scores != nullptr ? scores[end] : 0.0f;
    // Each that stays moves to `count`, never beyond its own place. What its place becomes is noted
    // where its parent stood, as place * kShift + the parent's: its children come later.
    constexpr int kShift = 1 << 15;
    const auto new_parent = [&](int parent) {
      if (parent == end) return num_lead - 1;
      return parent > end && parents[parent] >= kShift ? parents[parent] / kShift : -1;
    };
    for (int i = end + 1; parents != nullptr && i < num_drafts; ++i) {
      if (parents[i] >= i) num_drafts = i;  // there the drafts end
      const int parent = i < num_drafts ? new_parent(parents[i]) : -1;
      parents[i] = parent < 0 ? -1 : kShift * count++ + parent;
    }
    count = num_lead;
    for (int i = end + 1; i < num_drafts; ++i) {
      if (parents != nullptr && parents[i] < 0) continue;
      tokens[count] = tokens[i];
      if (parents != nullptr) parents[count] = parents[i] % kShift;
      if (scores != nullptr) scores[count] = scores[i] - certain;
      ++count;
    }
  }
  for (int i = 0; i < num_lead; ++i) {
    tokens[i] = lead[i];
    if (parents != nullptr) parents[i] = i - 1;
    if (scores != nullptr) scores[i] = 0.0f;
  }
  return count;
}

}  // namespace openspec
