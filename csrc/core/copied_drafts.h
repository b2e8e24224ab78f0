#pragma once

#include <cmath>

#include "core/host_device.h"

namespace openspec {

// Tokens that the end of a text has in common with an earlier place, to be copied from there; more
// are not compared.
inline constexpr int kMinMatchLen = 2, kMaxMatchLen = 16;
/// Copies are the likelier the longer the match. Their acceptance is estimated by class, each of
/// matches twice as long as those of the one before.
inline constexpr int kNumMatchClasses = 4;

OPENSPEC_HD int match_class(int match_len) {
  int number = 0;
  for (int least = 2 * kMinMatchLen; least <= match_len && number + 1 < kNumMatchClasses;
       least *= 2) {
    ++number;
  }
  return number;
}

/// What drafts of a sequence are worth, so that sources can be compared: the tokens that each is
/// expected to bring, less the `price` of its row in tokens. `scores`: see Draft; null: each draft
/// is accepted after those before it with the probability `acceptance`. Both engines choose with it.
OPENSPEC_HD float worth_of(int num_drafts, float acceptance, const float* scores, float price) {
  float worth = 0.0f, survival = 1.0f;
  for (int i = 0; i < num_drafts; ++i) {
    survival = scores != nullptr ? expf(scores[i]) : survival * acceptance;
    if (!(survival > price)) break;
    worth += survival - price;
  }
  return worth;
}

}  // namespace openspec
