#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace openspec {

// Tokens that the end of a text has in common with an earlier place, to be copied from there. After
// fewer a drafter is right more often, whatever chance says for a while; more are not compared.
inline constexpr int kMinMatchLen = 4, kMaxMatchLen = 16;
/// Copies are the likelier the longer the match, and where a drafter of the same step begins with
/// the same token. Their acceptance is estimated by class: of matches by length, each twice as long
/// as those before, and by what the drafter says. Where it was not asked, it says nothing.
inline constexpr int kNumMatchClasses = 3;
enum CopyOpinion : int { kNoOpinion, kAgrees, kDiffers, kNumOpinions };
inline constexpr int kNumCopyClasses = kNumOpinions * kNumMatchClasses;

OPENSPEC_HD int match_class(int match_len) {
  int number = 0;
  for (int least = 2 * kMinMatchLen; least <= match_len && number + 1 < kNumMatchClasses;
       least *= 2) {
    ++number;
  }
  return number;
}

OPENSPEC_HD int copy_class(int match_len, CopyOpinion opinion) {
  return opinion * kNumMatchClasses + match_class(match_len);
}

/// Of a drafter with so many drafts, the first of which is the most likely.
OPENSPEC_HD CopyOpinion opinion_of(int num_drafts, const int32_t* drafts, int32_t first_copied) {
  if (num_drafts == 0) return kNoOpinion;
  return drafts[0] == first_copied ? kAgrees : kDiffers;
}

/// What a draft is worth, so that the sources of a sequence can be compared: the tokens that it is
/// expected to bring, less the `price` of its row in tokens, or nothing. `scores`: see Draft; null:
/// each draft is accepted after those before it with the probability `acceptance`.
OPENSPEC_HD float worth_of_draft(int draft, float acceptance, const float* scores, float price) {
  const float survival =
      scores != nullptr ? expf(scores[draft]) : powf(acceptance, static_cast<float>(draft + 1));
  return survival > price ? survival - price : 0.0f;
}

/// Whether a copy of this worth is taken in place of a drafter's drafts. Where a copy is likely to
/// be right a drafter is right more often than in the mean, too: so a copy has to promise more.
OPENSPEC_HD bool is_copy_better(float copied, float drafter) { return copied > 1.25f * drafter; }

}  // namespace openspec
