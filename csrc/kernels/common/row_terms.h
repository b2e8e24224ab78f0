#pragma once

#include <cstdint>

namespace openspec {

/// Rows that are weighted sums of others, which the op that reads them adds up: row i is the fp32
/// sum of weight[i][k] times a row of `rows` over its terms in order, each a fused multiply-add
/// from zero; it is rounded once. A term's row is that at its place.
struct RowTerms {
  const void* rows = nullptr;      // [.., width] dtype; null: there are no terms
  const int32_t* place = nullptr;  // [num_rows, num_terms]; null: i * num_terms + k
  const int32_t* owner = nullptr;  // [num_rows, num_terms]; below zero: the row has no such term
  const float* weight = nullptr;   // [num_rows, num_terms]
  int num_terms = 0;
};

}  // namespace openspec
