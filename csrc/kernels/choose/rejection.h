#pragma once

/// The arithmetic of rejection sampling (step 4 of `choose`), the same bits on every device; see
/// sample_math.h, also on how to compile.

#include <cstdint>

#include "kernels/choose/sample_math.h"

namespace openspec::sample_math {

/// What turns weights into probabilities, given their sum above 0.
OPENSPEC_HD float inverse_of_mass(uint64_t total) { return 1.0f / mass_to_float(total); }

/// Whether a draft of probability q > 0 is accepted where the target's is p: with probability
/// min(1, p / q), and never where p is 0. `position` is that of the draft.
OPENSPEC_HD bool accepts_draft(float p, float q, uint64_t seed, int32_t position) {
  const float u = uniform(noise_bits(seed ^ kAcceptanceNoise, position, 0));
  return p > 0.0f && u * q <= p;
}

/// What the draw from the residual (p - q)+ takes the largest of; -inf: not in it. A rejected draft
/// is not, since its p is below q. Less than 2^-60 counts as nothing, as log_f32 needs it.
OPENSPEC_HD float residual_score(float p, float q, uint64_t seed, int32_t position, int32_t id) {
  const float rest = p - q;
  if (!(rest > 8.673617379884035e-19f)) return float_of(0xff800000u);
  return log_f32(rest) + gumbel(seed, position, id);
}

/// The column of a drafter's logits that is for a token of the target's vocabulary, -1 where there
/// is none. See DraftLogits::column_of.
OPENSPEC_HD int32_t column_of_token(const int32_t* column_of, int32_t num_columns, int32_t token) {
  if (column_of != nullptr) return column_of[token];
  return token < num_columns ? token : -1;
}

}  // namespace openspec::sample_math
