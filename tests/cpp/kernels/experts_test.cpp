#include "kernels/experts/experts.h"

#include "experts_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

constexpr ExpertsShape kShapes[] = {
    {8, 2, 64, 96}, {5, 5, 33, 70, false}, {37, 8, 96, 32}, {1, 1, 40, 24}, {128, 8, 64, 32}};

void check_routes(const ExpertsShape& shape, DType dtype) {
  constexpr int kRows = 23;
  Rng rng(7);
  const RandomExperts layer(rng, shape, LinearLayout::kLines);
  Buffer x(rng.normals(static_cast<size_t>(kRows * shape.hidden)), dtype);
  const Routes routes = route(layer, x, kRows, 2);
  for (int row = 0; row < kRows; ++row) {
    const Buffer alone = row_of(x, row, shape.hidden);
    std::vector<double> logits = logits_of(layer, alone);
    const double slack = dtype == DType::kBF16 ? 0.05 : 1e-4;  // more than a step of bf16
    std::vector<double> sorted = logits;
    std::sort(sorted.rbegin(), sorted.rend());
    const auto top_k = static_cast<size_t>(shape.top_k);
    const int32_t* expert = &routes.expert[static_cast<size_t>(row) * top_k];
    const float* weight = &routes.weight[static_cast<size_t>(row) * top_k];
    double total = 0, chosen = 0;
    for (const double logit : logits) total += std::exp(logit - sorted[0]);
    for (size_t s = 0; s < top_k; ++s) {
      CHECK(s == 0 || expert[s] > expert[s - 1]);
      CHECK(expert[s] >= 0 && expert[s] < shape.num_experts);
      CHECK(logits[static_cast<size_t>(expert[s])] >= sorted[top_k - 1] - slack);
      chosen += std::exp(logits[static_cast<size_t>(expert[s])] - sorted[0]);
    }
    for (size_t s = 0; s < top_k; ++s) {
      const double share = std::exp(logits[static_cast<size_t>(expert[s])] - sorted[0]);
      CHECK_NEAR(static_cast<double>(weight[s]), share / (shape.norm_top_k ? chosen : total),
                 dtype == DType::kBF16 ? 0.05 : 1e-5);
    }
  }
}

void check_rows(const ExpertsShape& shape, DType dtype, LinearLayout layout) {
  constexpr int kRows = 9;
  Rng rng(11);
  const RandomExperts layer(rng, shape, layout);
  Buffer x(rng.normals(static_cast<size_t>(kRows * shape.hidden)), dtype);
  const Routes routes = route(layer, x, kRows, 2);
  const Buffer out = run_experts(layer, x, routes, kRows, 2);
  CHECK(out.guard_is_whole());
  double error = 0, size = 0;
  for (int row = 0; row < kRows; ++row) {
    const auto at = static_cast<size_t>(row * shape.top_k);
    const std::vector<double> expected =
        expected_row(layer, row_of(x, row, shape.hidden), &routes.expert[at], &routes.weight[at]);
    for (int c = 0; c < shape.hidden; ++c) {
      const auto column = static_cast<size_t>(c);
      const double found =
          static_cast<double>(out[static_cast<size_t>(row * shape.hidden) + column]);
      error += (found - expected[column]) * (found - expected[column]);
      size += expected[column] * expected[column];
    }
  }
  // Three roundings to bf16, each of up to 2^-9.
  CHECK(std::sqrt(error / size) < (dtype == DType::kBF16 ? 6e-3 : 1e-5));
}

}  // namespace

TEST(routes_are_those_of_a_plain_loop) {
  for_each_isa([] {
    for (const ExpertsShape& shape : kShapes) {
      for (const DType dtype : both_dtypes()) check_routes(shape, dtype);
    }
  });
}

TEST(rows_are_those_of_a_plain_loop) {
  for_each_isa([] {
    for (const ExpertsShape& shape : kShapes) {
      for (const DType dtype : both_dtypes()) check_rows(shape, dtype, LinearLayout::kLines);
    }
  });
  if (has_matrix_unit()) {
    for (const DType dtype : both_dtypes()) check_rows({8, 2, 64, 96}, dtype, LinearLayout::kPairs);
  }
}

TEST(equal_logits_go_to_the_lower_index) {
  for_each_isa([] {
    const ExpertsShape shape{8, 3, 32, 16};
    Rng rng(3);
    const RandomExperts layer(rng, shape, LinearLayout::kLines);
    Buffer zeros(std::vector<float>(32, 0.0f), DType::kBF16);
    const Routes routes = route(layer, zeros, 1, 1);
    CHECK(routes.expert == (std::vector<int32_t>{0, 1, 2}));
    for (const float weight : routes.weight) CHECK_NEAR(weight, 1.0f / 3, 1e-7f);
  });
}

TEST(nan_goes_to_experts_that_there_are) {
  const ExpertsShape shape{8, 3, 32, 16};
  Rng rng(4);
  const RandomExperts layer(rng, shape, LinearLayout::kLines);
  Buffer x(std::vector<float>(64, NAN), DType::kF32);
  for (size_t i = 0; i < 32; ++i) x.set(32 + i, 1.0f);
  const Routes routes = route(layer, x, 2, 1);
  CHECK(routes.expert[0] == 0 && routes.expert[1] == 1 && routes.expert[2] == 2);
  Buffer alone(std::vector<float>(32, 1.0f), DType::kF32);
  const Buffer expected = run_experts(layer, alone, route(layer, alone, 1, 1), 1, 1);
  CHECK(run_experts(layer, x, routes, 2, 1).same(32, expected, 0, 32));
}

TEST(a_row_depends_on_itself_alone) {
  for_each_isa([] {
    for (const DType dtype : both_dtypes()) {
      const ExpertsShape shape{16, 4, 64, 48};
      constexpr int kRows = 150;
      Rng rng(5);
      const RandomExperts layer(rng, shape, linear_layout_cpu(64));
      const Buffer all(rng.normals(static_cast<size_t>(kRows * shape.hidden)), dtype);
      std::vector<Buffer> alone;
      std::vector<Routes> alone_routes;
      for (int row = 0; row < kRows; ++row) {
        Buffer x = row_of(all, row, shape.hidden);
        alone_routes.push_back(route(layer, x, 1, 1));
        alone.push_back(run_experts(layer, x, alone_routes.back(), 1, 1));
      }
      for (const int count : {2, 7, 40, kRows}) {
        std::vector<int> chosen(kRows);
        std::iota(chosen.begin(), chosen.end(), 0);
        for (size_t i = 0; i < chosen.size(); ++i) {
          std::swap(chosen[i], chosen[static_cast<size_t>(rng.integer(0, kRows - 1))]);
        }
        std::vector<float> values;
        for (int i = 0; i < count; ++i) {
          const int row = count == 40 ? chosen[0] : chosen[static_cast<size_t>(i)];  // one expert's
          const Buffer own = row_of(all, row, shape.hidden);
          for (size_t c = 0; c < own.size(); ++c) values.push_back(own[c]);
        }
        Buffer x(values, dtype);
        const int num_threads = rng.integer(1, 4);
        const Routes routes = route(layer, x, count, num_threads);
        const Buffer out = run_experts(layer, x, routes, count, num_threads);
        for (int i = 0; i < count; ++i) {
          const auto row =
              static_cast<size_t>(count == 40 ? chosen[0] : chosen[static_cast<size_t>(i)]);
          const auto width = static_cast<size_t>(shape.hidden);
          CHECK(out.same(static_cast<size_t>(i) * width, alone[row], 0, width));
          for (size_t s = 0; s < 4; ++s) {
            const size_t at = static_cast<size_t>(i) * 4 + s;
            CHECK(routes.expert[at] == alone_routes[row].expert[s]);
            CHECK(routes.weight[at] == alone_routes[row].weight[s]);
          }
        }
      }
    }
  });
}
