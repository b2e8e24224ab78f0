#include <cmath>

#include "choose_testing.h"
#include "kernels/choose/choose.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

// Log-probabilities of logits / temperature over the kept tokens; -inf elsewhere.
std::vector<double> log_softmax(const std::vector<float>& logits, double temperature,
                                const std::vector<bool>& kept) {
  double best = -1e300;
  double total = 0;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (kept[id]) best = std::max(best, static_cast<double>(logits[id]) / temperature);
  }
  for (size_t id = 0; id < logits.size(); ++id) {
    if (kept[id]) total += std::exp(static_cast<double>(logits[id]) / temperature - best);
  }
  std::vector<double> values(logits.size(), -std::numeric_limits<double>::infinity());
  for (size_t id = 0; id < logits.size(); ++id) {
    if (kept[id])
      values[id] = static_cast<double>(logits[id]) / temperature - best - std::log(total);
  }
  return values;
}

void check_report(const Choice& choice, const std::vector<double>& expected, int num_logprobs) {
  const auto value_of = [&](int32_t id) { return expected[static_cast<size_t>(id)]; };
  CHECK_EQ(choice.logprob_ids[0], choice.id);
  int rank = 1;
  for (size_t id = 0; id < expected.size(); ++id) {
    if (expected[id] > value_of(choice.id) + 1e-9) ++rank;
  }
  CHECK_EQ(choice.rank, rank);
  for (int i = 0; i <= num_logprobs; ++i) {
    const size_t at = static_cast<size_t>(i);
    const double value = value_of(choice.logprob_ids[at]);
    const double found = static_cast<double>(choice.logprobs[at]);
    CHECK(found == value || std::abs(found - value) < 2e-6 * (1 + std::abs(value)));
    if (i > 0 && choice.logprob_ids[at] == choice.id) {
      CHECK(std::memcmp(&choice.logprobs[at], &choice.logprobs[0], 4) == 0);
      CHECK_EQ(i, choice.rank);
    }
    if (i > 1) CHECK(choice.logprobs[at] <= choice.logprobs[at - 1]);
  }
  // Nothing that is missing from the list is better than its end.
  if (num_logprobs == 0) return;
  const size_t end = static_cast<size_t>(num_logprobs);
  for (size_t id = 0; id < expected.size(); ++id) {
    bool is_listed = false;
    for (size_t i = 1; i <= end; ++i)
      is_listed = is_listed || choice.logprob_ids[i] == static_cast<int32_t>(id);
    if (!is_listed) CHECK(expected[id] <= static_cast<double>(choice.logprobs[end]) + 1e-5);
  }
  // Entries behind the list are not written.
  for (size_t i = end + 1; i <= kMaxLogprobs; ++i) CHECK_EQ(choice.logprob_ids[i], -7);
}

Request request_of(Rng& rng, size_t vocab_size, float temperature, int num_logprobs) {
  Request request;
  request.logits = {rng.normals(vocab_size, 2)};
  request.sampling.temperature = temperature;
  request.sampling.num_logprobs = num_logprobs;
  return request;
}

}  // namespace

TEST(raw_logprobs_are_the_models) {
  for_each_isa([] {
    Rng rng(1);
    for (const size_t size : {20, 77, 4096}) {
      for (const int num_logprobs : {0, 1, 5, 20}) {
        for (const float temperature : {0.0f, 0.7f}) {
          Request request = request_of(rng, size, temperature, num_logprobs);
          request.sampling.top_k = 5;  // none of these shows
          request.bias_ids = {3};
          request.bias_values = {9.0f};
          const std::vector<bool> all(size, true);
          check_report(choose_one(request), log_softmax(request.logits[0], 1, all), num_logprobs);
        }
      }
    }
  });
}

TEST(processed_logprobs_are_of_the_distribution_drawn_from) {
  for_each_isa([] {
    Rng rng(2);
    for (const size_t size : {25, 500}) {
      for (const int top_k : {0, 4, 20}) {
        for (const float temperature : {0.0f, 0.7f}) {
          for (const float top_p : {1.0f, 0.8f}) {
            Request request = request_of(rng, size, temperature, 6);
            request.sampling.raw_logprobs = false;
            request.sampling.top_k = top_k;
            request.sampling.top_p = top_p;
            request.bias_ids = {3};
            request.bias_values = {9.0f};
            const std::vector<float> logits = edited_logits(request, 0);
            std::vector<bool> kept(size, true);
            bool is_close = false;
            if (temperature > 0) kept = kept_tokens(request.sampling, logits, is_close);
            CHECK(!is_close);
            const double scale = temperature > 0 ? static_cast<double>(temperature) : 1.0;
            check_report(choose_one(request), log_softmax(logits, scale, kept), 6);
          }
        }
      }
    }
  });
}

TEST(equal_values_are_listed_by_id) {
  Request request;
  request.logits = {{1, 2, 2, 1, 2, 0, 1}};
  request.sampling.num_logprobs = 5;
  const Choice choice = choose_one(request);
  CHECK_EQ(choice.id, 1);
  CHECK_EQ(choice.rank, 1);
  CHECK_EQ(std::vector<int32_t>(choice.logprob_ids.begin() + 1, choice.logprob_ids.begin() + 6),
           (std::vector<int32_t>{1, 2, 4, 0, 3}));
}

TEST(prompt_rows_score_their_token) {
  for_each_isa([] {
    Rng rng(3);
    Request request = request_of(rng, 300, 0.9f, 1);
    request.sampling.num_prompt_logprobs = 4;
    request.sampling.top_k = 2;
    request.bias_ids = {5};
    request.bias_values = {kInfinity};
    request.score_tokens = {123};
    const Choice choice = choose_one(request);
    CHECK_EQ(choice.id, 123);
    check_report(choice, log_softmax(request.logits[0], 1, std::vector<bool>(300, true)), 4);
    // Its own value is reported all the same.
    request.sampling.num_logprobs = request.sampling.num_prompt_logprobs = -1;
    const Choice alone = choose_one(request);
    CHECK_EQ(alone.logprobs[0], choice.logprobs[0]);
    CHECK_EQ(alone.rank, choice.rank);
  });
}

TEST(nothing_is_written_unasked) {
  Rng rng(4);
  const Choice choice = choose_one(request_of(rng, 100, 0.5f, -1));
  CHECK_EQ(choice.rank, -7);
  CHECK_EQ(choice.logprob_ids[0], -7);
}

TEST(a_short_list_is_filled_up) {
  Request request;
  request.logits = {{0, 3, 1}};
  request.sampling.temperature = 1.0f;
  request.sampling.top_k = 1;
  request.sampling.num_logprobs = 5;
  request.sampling.raw_logprobs = false;
  const Choice choice = choose_one(request);
  CHECK_EQ(choice.logprobs[0], 0.0f);
  CHECK_EQ(std::vector<int32_t>(choice.logprob_ids.begin() + 1, choice.logprob_ids.begin() + 6),
           (std::vector<int32_t>{1, 0, 2, -1, -1}));
  CHECK_EQ(choice.logprobs[2], -kInfinity);
}
