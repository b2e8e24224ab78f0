#pragma once

#include <cmath>

#include "core/host_device.h"

namespace openspec {

// Tokens that the end of a text has in common with an earlier place, to be copied from there. After
// fewer a drafter is right more often, whatever chance says for a while; more are not compared.
inline constexpr int kMinMatchLen = 4, kMaxMatchLen = 16;
/// Copies are the likelier the longer the match. Their acceptance is estimated by class, each of
/// matches twice as long as those of the one before.
inline constexpr int kNumMatchClasses = 3;

OPENSPEC_HD int match_class(int match_len) {
  int number = 0;
  for (int least = 2 * kMinMatchLen; least <= match_len && number + 1 < kNumMatchClasses;
       least *= 2) {
    ++number;
  }
  return number;
}

/// What a draft is worth, so that the sources of a sequence can be compared: the tokens that it is
/// expected to bring, less the `price` of its row in tokens, or nothing. `scores`: see Draft; null:
/// each draft is accepted after those before it with the probability `acceptance`.
OPENSPEC_HD float worth_of_draft(int draft, float acceptance, const float* scores, float price) {
  const float survival =
      scores != nullptr ? expf(scores[draft]) : powf(acceptance, static_cast<float>(draft + 1));
  return survival > price ? survival - price : 0.0f;
}

}  // namespace openspec
