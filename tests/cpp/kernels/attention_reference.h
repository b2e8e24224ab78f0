#pragma once

/// What attention means, in plain loops of double precision. The tests of the CPU engine and of the
/// CUDA kernels compare with it.

#include <algorithm>
#include <cmath>
#include <vector>

namespace openspec::testing {

/// What rows see beside their ancestors; the same for all of a step.
struct Sight {
  int first_token = 0;    // tokens before it are not seen
  bool is_causal = true;  // false: every row of a span sees all of its rows
  int window = 0;         // 0: none
  bool window_follows_rows = false;
};

/// What a row sees without a window, in order: tokens [0, kv_len), then of its span itself and its
/// ancestors, or all rows. Row r of the span is token kv_len + r; its parent is a row, or -1.
inline std::vector<int> path_of_row(const Sight& sight, int kv_len, const std::vector<int>& parents,
                                    int row) {
  std::vector<int> tokens;
  for (int token = 0; token < kv_len; ++token) tokens.push_back(token);
  if (!sight.is_causal) {
    const int num_rows = static_cast<int>(parents.size());
    for (int other = 0; other < num_rows; ++other) tokens.push_back(kv_len + other);
    return tokens;
  }
  std::vector<int> ancestors;
  for (int node = row; node >= 0; node = parents[static_cast<size_t>(node)]) {
    ancestors.push_back(kv_len + node);
  }
  tokens.insert(tokens.end(), ancestors.rbegin(), ancestors.rend());
  return tokens;
}

/// How many tokens of a row's path come before those that it sees.
inline int num_hidden_of(const Sight& sight, int kv_len, int path_length) {
  if (sight.window == 0) return sight.first_token;
  const int end = sight.window_follows_rows ? path_length : kv_len;
  return std::max(sight.first_token, end - sight.window);
}

/// A row's result for one q head.
struct AttendedHead {
  std::vector<double> weights;  // by token; the largest is 1
  double total = 0;             // of the weights
  std::vector<double> out;      // [head_dim]
};

/// out = sum over the tokens seen of v * softmax(q . k / sqrt(head_dim)). `q(d)`, `k(token, d)` and
/// `v(token, d)` give the head's elements.
template <typename Query, typename Key, typename Value>
AttendedHead attend_to(const std::vector<int>& tokens, size_t head_dim, const Query& q,
                       const Key& k, const Value& v) {
  std::vector<double> scores;
  for (const int token : tokens) {
    double score = 0;
    for (size_t d = 0; d < head_dim; ++d) {
      score += static_cast<double>(q(d)) * static_cast<double>(k(token, d));
    }
    scores.push_back(score / std::sqrt(static_cast<double>(head_dim)));
  }
  const double maximum = *std::max_element(scores.begin(), scores.end());
  AttendedHead head;
  head.out.assign(head_dim, 0.0);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const double weight = std::exp(scores[i] - maximum);
    head.weights.push_back(weight);
    head.total += weight;
    for (size_t d = 0; d < head_dim; ++d) {
      head.out[d] += weight * static_cast<double>(v(tokens[i], d));
    }
  }
  for (double& x : head.out) x /= head.total;
  return head;
}

}  // namespace openspec::testing
