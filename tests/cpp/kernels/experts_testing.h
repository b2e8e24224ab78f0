#pragma once

/// What the tests of experts share: a layer of random experts, and what it computes in plain loops.

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "kernel_testing.h"
#include "kernels/experts/experts.h"
#include "linear_testing.h"

namespace openspec::testing {

struct ExpertsShape {
  int num_experts, top_k, hidden, inner;
  bool norm_top_k = true;
};

/// A router and experts, as they lie in memory and as numbers.
struct RandomExperts {
  ExpertsShape shape;
  Matrix router;
  std::vector<Matrix> gate_up, down;
  std::vector<uint8_t> packed[2];
  LinearStack stacks[2];

  RandomExperts(Rng& rng, const ExpertsShape& s, LinearLayout layout)
      : shape(s), router(rng, s.num_experts, s.hidden, LinearEpilogue::kNone, layout) {
    for (int i = 0; i < s.num_experts; ++i) {
      gate_up.emplace_back(rng, 2 * s.inner, s.hidden, LinearEpilogue::kSwiGlu, layout);
      down.emplace_back(rng, s.hidden, s.inner, LinearEpilogue::kNone, layout);
    }
    stack(gate_up, 0);
    stack(down, 1);
  }
  RandomExperts(const RandomExperts&) = delete;

 private:
  void stack(const std::vector<Matrix>& matrices, int which) {
    for (const Matrix& one : matrices) {
      packed[which].insert(packed[which].end(), one.packed.begin(), one.packed.end());
    }
    stacks[which] = {matrices.front().view, shape.num_experts, matrices.front().packed.size()};
    stacks[which].first.data = packed[which].data();
  }
};

struct Routes {
  std::vector<int32_t> expert;
  std::vector<float> weight;
};

inline Routes route(const RandomExperts& layer, Buffer& x, int num_rows, int num_threads) {
  const auto count = static_cast<size_t>(num_rows * layer.shape.top_k);
  Routes routes{std::vector<int32_t>(count, -1), std::vector<float>(count, NAN)};
  std::vector<float> workspace = poisoned_floats(
      route_experts_workspace_bytes_cpu(num_rows, layer.shape.hidden, layer.shape.num_experts));
  ThreadPool pool(num_threads);
  route_experts_cpu({.pool = &pool}, {.router = layer.router.view,
                                      .x = x.data(),
                                      .expert = routes.expert.data(),
                                      .weight = routes.weight.data(),
                                      .num_rows = num_rows,
                                      .top_k = layer.shape.top_k,
                                      .norm_top_k = layer.shape.norm_top_k,
                                      .dtype = x.dtype(),
                                      .workspace = workspace.data()});
  return routes;
}

inline Buffer run_experts(const RandomExperts& layer, Buffer& x, const Routes& routes, int num_rows,
                          int num_threads) {
  const ExpertsShape& s = layer.shape;
  Buffer out(static_cast<size_t>(num_rows * s.hidden), x.dtype());
  std::vector<float> workspace = poisoned_floats(
      experts_workspace_bytes_cpu(num_rows, s.hidden, s.inner, s.num_experts, s.top_k, x.dtype()));
  ThreadPool pool(num_threads);
  experts_cpu({.pool = &pool}, {.gate_up = layer.stacks[0],
                                .down = layer.stacks[1],
                                .x = x.data(),
                                .expert = routes.expert.data(),
                                .weight = routes.weight.data(),
                                .out = out.data(),
                                .num_rows = num_rows,
                                .top_k = s.top_k,
                                .dtype = x.dtype(),
                                .workspace = workspace.data()});
  return out;
}

inline Buffer row_of(const Buffer& x, int row, int width) {
  std::vector<float> values;
  for (int i = 0; i < width; ++i) values.push_back(x[static_cast<size_t>(row * width + i)]);
  return {values, x.dtype()};
}

/// One row's logits in double precision.
inline std::vector<double> logits_of(const RandomExperts& layer, const Buffer& row) {
  std::vector<double> logits;
  for (int i = 0; i < layer.shape.num_experts; ++i) logits.push_back(layer.router.dot(row, 0, i));
  return logits;
}

/// What a row's output is, in double precision, for the experts that it goes to.
inline std::vector<double> expected_row(const RandomExperts& layer, const Buffer& row,
                                        const int32_t* expert, const float* weight) {
  const ExpertsShape& s = layer.shape;
  std::vector<double> out(static_cast<size_t>(s.hidden));
  for (int slot = 0; slot < s.top_k; ++slot) {
    const auto number = static_cast<size_t>(expert[slot]);
    std::vector<float> inner;
    for (int i = 0; i < s.inner; ++i) {
      inner.push_back(static_cast<float>(layer.gate_up[number].expected(row, 0, i)));
    }
    const Buffer activated(inner, DType::kF32);
    for (int c = 0; c < s.hidden; ++c) {
      out[static_cast<size_t>(c)] +=
          static_cast<double>(weight[slot]) * layer.down[number].dot(activated, 0, c);
    }
  }
  return out;
}

}  // namespace openspec::testing
