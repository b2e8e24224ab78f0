// Step 4 of `choose`, rejection sampling: the bits of the CPU op, whose distribution
// tests/cpp/kernels/choose_rejection_test.cpp checks.

#include "cuda/choose_calls.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Logits = std::vector<float>;

struct Kind {
  int vocab_size = 0;
  float scale = 1.0f;  // of the logits
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
};

/// A chain of drafts, some of them without rows; the drafter's logits are the target's with noise.
Request chain(Rng& rng, const Kind& kind, const Ids& token_of) {
  const auto one_in = [&](int n) { return rng.integer(1, n) == 1; };
  const auto id = [&] { return rng.integer(0, kind.vocab_size - 1); };
  Request request;
  SamplingParams& p = request.sampling;
  p.temperature = one_in(6) ? 0.0f : 0.4f + 0.2f * static_cast<float>(rng.integer(0, 4));
  p.top_k = kind.top_k;
  p.top_p = kind.top_p;
  p.min_p = kind.min_p;
  p.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30)) << rng.integer(0, 34);
  if (one_in(3)) p.num_logprobs = rng.integer(0, kMaxLogprobs);
  p.raw_logprobs = one_in(2);
  if (one_in(4)) p.frequency_penalty = 0.4f;
  if (one_in(5)) {
    request.bias_ids = {id(), id()};
    request.bias_values = {-kInfinity, 1.5f};
  }
  request.history.clear();
  for (int i = rng.integer(1, 30); i > 0; --i) request.history.push_back(id());
  const int num_drafts = rng.integer(0, 4), num_rows = rng.integer(0, num_drafts);
  for (int i = 0; i <= num_drafts; ++i) {
    request.logits.push_back(rng.normals(static_cast<size_t>(kind.vocab_size), kind.scale));
    if (one_in(10)) request.logits.back()[static_cast<size_t>(id())] = NAN;
    if (i == num_drafts) break;
    Logits& draft = request.drawn_logits.emplace_back();
    const size_t num_columns = token_of.empty() ? request.logits[0].size() : token_of.size();
    for (size_t column = 0; column < num_columns; ++column) {
      const size_t token = token_of.empty() ? column : static_cast<size_t>(token_of[column]);
      draft.push_back(request.logits.back()[token] + rng.normal(0.5f));
    }
    auto column = std::max_element(draft.begin(), draft.end()) - draft.begin();
    if (one_in(3)) column = rng.integer(0, static_cast<int>(num_columns) - 1);
    if (one_in(20)) draft[static_cast<size_t>(column)] = -kInfinity;  // cannot have been drawn
    const auto at = static_cast<size_t>(column);
    request.drawn.push_back(token_of.empty() ? static_cast<int32_t>(column) : token_of[at]);
    if (i >= num_rows) continue;
    request.drafts.push_back(request.drawn.back());
    request.parents.push_back(i - 1);
  }
  request.logits.resize(static_cast<size_t>(1 + num_rows));
  return request;
}

/// Every third token, about.
Ids some_tokens(Rng& rng, int vocab_size) {
  Ids tokens;
  for (int id = 0; id < vocab_size; ++id) {
    if (rng.integer(0, 2) == 0) tokens.push_back(id);
  }
  return tokens.empty() ? Ids{0} : tokens;
}

/// Of the rows that have a draft, how many chose it.
struct Share {
  int num_accepted = 0, num_rejected = 0;
};

Share check_equals_cpu(const std::vector<Request>& requests, const Ids& token_of,
                       const std::vector<bool>& is_padding, const char* what) {
  const Batch batch = flatten(requests, 0, is_padding, token_of);
  const Outputs found = choose_on_cuda(batch);
  check_same(found, choose_on_cpu(batch), what);
  Share share;
  size_t sample = 0;
  for (const Request& request : requests) {
    for (size_t row = 0; row < static_cast<size_t>(request.num_rows()); ++row, ++sample) {
      while (batch.sample_row[sample] < 0) ++sample;
      if (row >= request.drawn.size() || request.sampling.temperature == 0.0f) continue;
      const bool is_draft = found.chosen[sample] == request.drawn[row];
      ++(is_draft ? share.num_accepted : share.num_rejected);
    }
  }
  return share;
}

}  // namespace

TEST(rejection_equals_the_cpu_op) {
  Rng rng(41);
  Share all;
  const Kind kinds[] = {{.vocab_size = 2},
                        {.vocab_size = 97},
                        {.vocab_size = 97, .top_k = 5},
                        {.vocab_size = 3000, .scale = 2.0f},
                        {.vocab_size = 3000, .scale = 2.0f, .top_p = 0.9f},
                        // More than the list of candidates holds.
                        {.vocab_size = 32000, .scale = 0.3f, .top_p = 0.95f},
                        {.vocab_size = 32000, .scale = 3.0f, .top_k = 40, .top_p = 0.9f},
                        {.vocab_size = 32000, .scale = 3.0f, .top_k = 9000},
                        {.vocab_size = 32000, .scale = 3.0f, .min_p = 0.05f}};
  for (const Kind& kind : kinds) {
    for (const bool has_table : {false, true}) {
      const Ids token_of = has_table ? some_tokens(rng, kind.vocab_size) : Ids();
      std::vector<Request> requests;
      for (int i = 0; i < 24; ++i) requests.push_back(chain(rng, kind, token_of));
      std::vector<bool> is_padding;
      for (int i = 0; i < 40; ++i) is_padding.push_back(rng.integer(0, 3) == 0);
      const Share share = check_equals_cpu(requests, token_of, is_padding, "rejection");
      all.num_accepted += share.num_accepted;
      all.num_rejected += share.num_rejected;
    }
  }
  CHECK_GT(all.num_accepted, 50);
  CHECK_GT(all.num_rejected, 50);
}

TEST(rejection_over_the_vocabularies_of_a_checkpoint_equals_the_cpu_op) {
  Rng rng(42);
  constexpr int kVocab = 151936;
  const Ids token_of = some_tokens(rng, kVocab);
  for (const Kind& kind :
       {Kind{.vocab_size = kVocab, .scale = 2.5f},
        Kind{.vocab_size = kVocab, .scale = 2.5f, .top_k = 20, .top_p = 0.95f}}) {
    std::vector<Request> requests;
    for (int i = 0; i < 6; ++i) requests.push_back(chain(rng, kind, token_of));
    check_equals_cpu(requests, token_of, {}, "rejection of a large vocabulary");
  }
}

// A row's choice does not depend on what else the call chooses.
TEST(rejection_alone_equals_rejection_in_a_batch) {
  Rng rng(43);
  const Kind kind{.vocab_size = 3072, .scale = 2.0f};
  const Ids token_of = some_tokens(rng, kind.vocab_size);
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) requests.push_back(chain(rng, kind, token_of));
  const Outputs all = choose_on_cuda(flatten(requests, 0, {}, token_of));
  size_t at = 0;
  for (const Request& request : requests) {
    for (const int32_t chosen : choose_on_cuda(flatten({request}, 0, {}, token_of)).chosen) {
      CHECK_EQ(all.chosen[at++], chosen);
    }
  }
}

TEST(drafts_with_noise_of_their_own_equal_the_cpu_op) {
  Rng rng(44);
  for (const int vocab_size : {131, 3072, 32000}) {
    std::vector<Request> requests;
    for (int i = 0; i < 30; ++i) {
      Request request = chain(rng, {.vocab_size = vocab_size, .scale = 2.0f, .top_p = 0.5f}, {});
      request.drafts.clear();
      request.parents.clear();
      request.drawn.clear();
      request.logits.resize(1);
      requests.push_back(std::move(request));
    }
    Batch drafts = flatten(requests);
    drafts.is_draft = true;
    const Outputs shared = choose_on_cuda(drafts);
    drafts.has_own_noise = true;
    const Outputs own = choose_on_cuda(drafts);
    check_same(own, choose_on_cpu(drafts), "drafts with noise of their own");
    CHECK(own.chosen != shared.chosen);
  }
}
