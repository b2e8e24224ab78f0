#pragma once

#include <cstdint>

#include "kernels/choose/choose.h"
#include "kernels/choose/sample_math.h"

namespace openspec {

/// The id that bad word `index` of the slot's parameters takes from a row: the word's last, if the
/// tokens up to the row, committed ones and then its own draft ancestors, end in those before it;
/// else -1.
OPENSPEC_HD int32_t id_of_bad_word(const ChooseParams& params, int row, int slot, int index) {
  const SamplingParams& sampling = params.sampling[slot];
  const int32_t* word = sampling.bad_words;
  const int first = index == 0 ? sampling.num_bad_words : word[index - 1];
  const int last = word[index] - 1;
  const int32_t* known = params.tokens + slot * params.tokens_stride;
  int position = params.rows.row_position[row];
  for (int i = last - 1; i >= first; --i, --position) {
    if (position < 0) return -1;
    int32_t token;
    if (position >= params.num_tokens[slot]) {
      token = params.rows.row_token[row];
      row = params.rows.row_parent[row];
    } else {
      token = known[position];
    }
    if (token != word[i]) return -1;
  }
  return word[last];
}

}  // namespace openspec
