// Step 4 of `choose`: a draft becomes the choice as often as its probabilities say, and over drafts
// the choice is distributed as without them.

#include "choose_testing.h"
#include "kernels/choose/rejection.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Logits = std::vector<float>;
using Ids = std::vector<int32_t>;

std::vector<double> softmax(const Logits& logits, float temperature) {
  double total = 0;
  std::vector<double> p;
  for (const float logit : logits) p.push_back(std::exp(static_cast<double>(logit / temperature)));
  for (const double weight : p) total += weight;
  for (double& weight : p) weight /= total;
  return p;
}

/// Drafts that the requests' first rows draw from `logits`, one of each.
Ids draw_drafts(const std::vector<Request>& requests, const std::vector<Logits>& logits,
                const Ids& token_of) {
  const size_t num_rows = requests.size();
  std::vector<SamplingParams> sampling;
  Ids position, span;
  Logits flat;
  for (size_t i = 0; i < num_rows; ++i) {
    sampling.push_back(requests[i].sampling);
    position.push_back(requests[i].position(0));
    span.push_back(static_cast<int32_t>(i));
    flat.insert(flat.end(), logits[i].begin(), logits[i].end());
  }
  Ids chosen(num_rows, -7);
  const int vocab_size = static_cast<int>(logits[0].size());
  Logits workspace = poisoned_floats(choose_workspace_bytes_cpu(1, vocab_size));
  ThreadPool pool(1);
  ChooseParams params;
  params.rows.num_rows = params.rows.num_spans = params.num_samples = static_cast<int>(num_rows);
  params.rows.row_position = position.data();
  params.rows.row_span = params.rows.span_seq = params.sample_row = span.data();
  params.logits = flat.data();
  params.vocab_size = vocab_size;
  params.is_draft = params.has_own_noise = true;
  params.token_of = token_of.empty() ? nullptr : token_of.data();
  params.sampling = sampling.data();
  params.chosen = chosen.data();
  params.workspace = workspace.data();
  choose_cpu({.pool = &pool}, params);
  return chosen;
}

/// A request for one choice, without a draft so far.
Request drawn(Logits logits, float temperature = 1.0f) {
  Request request;
  request.sampling.temperature = temperature;
  request.logits = {std::move(logits)};
  return request;
}

/// Of many seeds and positions: draws a draft from `draft_logits`, then the choice.
struct Tally {
  std::vector<int> counts;  // by token
  int num_accepted = 0, num_draws = 0;
};
Tally tally(const Request& prototype, const Logits& draft_logits, const Ids& token_of,
            int num_draws) {
  constexpr int kBatch = 500;
  Tally result{std::vector<int>(prototype.logits[0].size(), 0), 0, num_draws};
  for (int done = 0; done < num_draws; done += kBatch) {
    std::vector<Request> batch(kBatch, prototype);
    for (int i = 0; i < kBatch; ++i) {
      Request& request = batch[static_cast<size_t>(i)];
      request.sampling.seed = static_cast<uint64_t>(done + i) / 2;
      request.history.resize(static_cast<size_t>(1 + i % 2), 0);
    }
    const Ids drafts = draw_drafts(batch, std::vector<Logits>(kBatch, draft_logits), token_of);
    for (size_t i = 0; i < kBatch; ++i) {
      batch[i].drawn = {drafts[i]};
      batch[i].drawn_logits = {draft_logits};
    }
    const std::vector<Choice> choices = choose_all(batch, 2, token_of);
    for (size_t i = 0; i < kBatch; ++i) {
      ++result.counts[static_cast<size_t>(choices[i].id)];
      result.num_accepted += choices[i].id == drafts[i];
    }
  }
  return result;
}

/// Upper 0.1 % point (Wilson and Hilferty, 1931); seeds are fixed, so the tests never waver.
double chi_square_limit(int num_cells) {
  const double k = num_cells - 1;
  return k * std::pow(1 - 2 / (9 * k) + 3.0902 * std::sqrt(2 / (9 * k)), 3.0);
}

void check_distribution(const Tally& found, const std::vector<double>& p,
                        const std::vector<double>& q) {
  double statistic = 0, overlap = 0;
  int num_cells = 0;
  for (size_t id = 0; id < p.size(); ++id) {
    overlap += std::min(p[id], q[id]);
    const double mean = p[id] * found.num_draws;
    if (mean == 0) {
      CHECK_EQ(found.counts[id], 0);
      continue;
    }
    statistic += (found.counts[id] - mean) * (found.counts[id] - mean) / mean;
    ++num_cells;
  }
  CHECK_LT(statistic, chi_square_limit(num_cells));
  // sum(min(p, q)) is the rate of rejection sampling, the highest that there is.
  const double rate = static_cast<double>(found.num_accepted) / found.num_draws;
  const double deviation = std::sqrt(overlap * (1 - overlap) / found.num_draws);
  CHECK_LT(std::abs(rate - overlap), 3.3 * deviation + 1e-12);
}

/// `logits` at the tokens of the table, -inf elsewhere.
Logits spread(const Logits& logits, const Ids& token_of, size_t vocab_size) {
  Logits all(vocab_size, -kInfinity);
  for (size_t i = 0; i < logits.size(); ++i) all[static_cast<size_t>(token_of[i])] = logits[i];
  return all;
}

constexpr int kDraws = 100000;
const Logits kTarget = {1.0f,  0.2f, -0.7f, 0.9f, -2.0f, 0.4f,
                        -0.1f, 1.6f, -1.2f, 0.0f, 0.7f,  -3.0f};
const Logits kDrafter = {0.1f,  1.2f, -0.7f, 1.9f, -0.5f, -1.4f,
                         -0.2f, 0.8f, -1.0f, 0.6f, -0.7f, 0.3f};

/// Step 4 in double precision; `is_close` reports that rounding could decide.
int32_t reference_rejection(const Request& request, int row, const Ids& token_of, bool& is_close) {
  const SamplingParams& p = request.sampling;
  const int32_t drawn = reference_choice(request, row, is_close);
  const auto depth = static_cast<size_t>(request.position(row)) + 1 - request.history.size();
  if (p.temperature == 0 || depth >= request.drawn.size()) return drawn;
  const Logits logits = edited_logits(request, row);
  const auto probabilities = [&](const Logits& values, const std::vector<bool>& kept) {
    double best = -std::numeric_limits<double>::infinity(), total = 0;
    std::vector<double> of(values.size(), 0.0);
    for (const float value : values) best = std::max(best, static_cast<double>(read(value)));
    for (size_t id = 0; id < values.size(); ++id) {
      const double below = static_cast<double>(read(values[id])) - best;
      if (kept[id]) of[id] = std::exp(below / static_cast<double>(p.temperature));
      total += of[id];
    }
    for (double& value : of) value /= total;
    return of;
  };
  const std::vector<bool> kept = kept_tokens(p, logits, is_close);
  const std::vector<double> target = probabilities(logits, kept);
  const Logits draft_logits = spread(request.drawn_logits[depth], token_of, logits.size());
  const std::vector<double> draft =
      probabilities(draft_logits, std::vector<bool>(logits.size(), true));
  const int32_t token = request.drawn[depth];
  const auto at = static_cast<size_t>(token);
  const int position = request.position(row) + 1;
  const double u = static_cast<double>(sample_math::uniform(
      sample_math::noise_bits(p.seed ^ sample_math::kAcceptanceNoise, position, 0)));
  is_close = is_close || std::abs(u * draft[at] - target[at]) < 1e-5 * draft[at];
  if (target[at] > 0 && u * draft[at] <= target[at]) return token;
  double best = -std::numeric_limits<double>::infinity();
  int32_t chosen = drawn;
  for (size_t id = 0; id < logits.size(); ++id) {
    const double rest = target[id] - draft[id];
    // Cancellation leaves few digits of what is nearly nothing.
    if (rest <= 1e-6 * target[id]) continue;
    const double score = std::log(rest) + static_cast<double>(sample_math::gumbel(
                                              p.seed, position, static_cast<int32_t>(id)));
    is_close = is_close || std::abs(score - best) < 1e-4 * (1 + std::abs(best)) ||
               (rest < 1e-3 * target[id] && score > best - 0.1);
    if (score > best) {
      best = score;
      chosen = static_cast<int32_t>(id);
    }
  }
  return chosen;
}

/// A chain of drafts behind a history, with everything that a choice may depend on.
Request random_request(Rng& rng, int vocab_size, const Ids& token_of) {
  const auto sometimes = [&] { return rng.integer(0, 2) == 0; };
  const auto id = [&] { return rng.integer(0, vocab_size - 1); };
  Request request;
  SamplingParams& p = request.sampling;
  p.temperature =
      rng.integer(0, 5) == 0 ? 0.0f : 0.3f + 0.1f * static_cast<float>(rng.integer(0, 12));
  p.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30)) << 10;
  if (sometimes()) p.top_k = rng.integer(1, vocab_size + 3);
  if (sometimes()) p.top_p = 0.05f * static_cast<float>(rng.integer(1, 20));
  if (sometimes()) p.min_p = 0.04f * static_cast<float>(rng.integer(0, 20));
  if (sometimes()) p.presence_penalty = rng.normal();
  if (sometimes()) p.min_tokens = rng.integer(0, 12);
  for (int i = rng.integer(0, 3); i > 0; --i) request.stop_ids.push_back(id());
  for (int i = sometimes() ? rng.integer(1, 5) : 0; i > 0; --i) {
    request.bias_ids.push_back(id());
    request.bias_values.push_back(sometimes() ? -kInfinity : rng.normal(3));
  }
  p.num_logprobs = rng.integer(-1, 9);
  p.raw_logprobs = sometimes();
  request.history.clear();
  for (int i = rng.integer(1, 20); i > 0; --i) request.history.push_back(id());
  request.prompt_len = rng.integer(1, static_cast<int>(request.history.size()));
  const int num_drafts = rng.integer(0, 4), num_rows = rng.integer(0, num_drafts);
  const float scale = 0.5f + static_cast<float>(rng.integer(0, 3));
  for (int i = 0; i <= num_drafts; ++i) {
    request.logits.push_back(rng.normals(static_cast<size_t>(vocab_size), scale));
    Logits& draft = request.drawn_logits.emplace_back();
    for (const int32_t token : token_of) {
      draft.push_back(request.logits.back()[static_cast<size_t>(token)] + rng.normal(0.7f));
    }
    if (i == num_drafts) break;
    // Mostly what is likely, so that some are accepted.
    const auto best = std::max_element(draft.begin(), draft.end()) - draft.begin();
    const auto column =
        sometimes() ? rng.integer(0, static_cast<int>(draft.size()) - 1) : static_cast<int>(best);
    request.drawn.push_back(token_of[static_cast<size_t>(column)]);
    if (i >= num_rows) continue;
    request.drafts.push_back(request.drawn.back());
    request.parents.push_back(i - 1);
  }
  request.drawn_logits.resize(request.drawn.size());
  request.logits.resize(static_cast<size_t>(1 + num_rows));
  return request;
}

Ids random_tokens(Rng& rng, int count, int vocab_size) {
  Ids tokens;
  for (int id = 0; id < vocab_size; ++id) {
    const int num_wanted = count - static_cast<int>(tokens.size());
    if (rng.integer(1, vocab_size - id) <= num_wanted) tokens.push_back(id);
  }
  return tokens;
}

}  // namespace

TEST(equals_the_definition) {
  for_each_isa([] {
    Rng rng(31);
    int num_checked = 0, num_close = 0, num_accepted = 0, num_rejected = 0;
    for (int round = 0; round < 150; ++round) {
      const int vocab_size = rng.integer(2, 400);
      const Ids token_of = random_tokens(rng, rng.integer(1, vocab_size), vocab_size);
      std::vector<Request> requests;
      for (int i = 0; i < 4; ++i) requests.push_back(random_request(rng, vocab_size, token_of));
      const std::vector<Choice> choices = choose_all(requests, rng.integer(1, 3), token_of);
      size_t at = 0;
      for (const Request& request : requests) {
        for (int row = 0; row < request.num_rows(); ++row, ++at) {
          bool is_close = false;
          const int32_t expected = reference_rejection(request, row, token_of, is_close);
          ++(is_close ? num_close : num_checked);
          if (is_close) continue;
          CHECK_EQ(choices[at].id, expected);
          if (static_cast<size_t>(row) >= request.drawn.size()) continue;
          const bool is_draft = expected == request.drawn[static_cast<size_t>(row)];
          ++(is_draft ? num_accepted : num_rejected);
        }
      }
    }
    CHECK_GT(num_checked, 10 * num_close);
    CHECK_GT(num_accepted, 100);
    CHECK_GT(num_rejected, 100);
  });
}

TEST(choices_follow_the_target_and_drafts_are_accepted_as_often_as_can_be) {
  check_distribution(tally(drawn(kTarget), kDrafter, {}, kDraws), softmax(kTarget, 1.0f),
                     softmax(kDrafter, 1.0f));
  check_distribution(tally(drawn(kTarget, 0.6f), kDrafter, {}, kDraws), softmax(kTarget, 0.6f),
                     softmax(kDrafter, 0.6f));
}

TEST(tokens_that_the_drafter_does_not_know_come_from_the_residual) {
  const Ids token_of = {1, 2, 5, 7, 10};
  const Logits drafter = {0.3f, -0.5f, 1.0f, 0.8f, -1.0f};
  check_distribution(tally(drawn(kTarget), drafter, token_of, kDraws), softmax(kTarget, 1.0f),
                     softmax(spread(drafter, token_of, kTarget.size()), 1.0f));
}

TEST(what_the_filters_drop_is_never_chosen) {
  Request top_k = drawn(kTarget);
  top_k.sampling.top_k = 4;  // 7, 0, 3, 10
  Logits kept(kTarget.size(), -kInfinity);
  for (const size_t id : {7u, 0u, 3u, 10u}) kept[id] = kTarget[id];
  check_distribution(tally(top_k, kDrafter, {}, kDraws), softmax(kept, 1.0f),
                     softmax(kDrafter, 1.0f));

  Request min_p = drawn(kTarget);
  min_p.sampling.min_p = 0.5f;  // within log(2) of 1.6
  min_p.bias_ids = {7};
  min_p.bias_values = {-0.5f};  // 1.1
  Logits near_best(kTarget.size(), -kInfinity);
  for (const size_t id : {0u, 3u, 10u}) near_best[id] = kTarget[id];
  near_best[7] = kTarget[7] - 0.5f;
  check_distribution(tally(min_p, kDrafter, {}, kDraws), softmax(near_best, 1.0f),
                     softmax(kDrafter, 1.0f));
}

TEST(drafts_of_the_target_itself_are_all_accepted) {
  Rng rng(32);
  for (const float temperature : {0.3f, 1.0f}) {
    std::vector<Request> requests;
    std::vector<Logits> logits;
    for (int i = 0; i < 400; ++i) {
      requests.push_back(drawn(rng.normals(300, 2.0f), temperature));
      requests.back().sampling.seed = static_cast<uint64_t>(i);
      logits.push_back(requests.back().logits[0]);
    }
    const Ids drafts = draw_drafts(requests, logits, {});
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].drawn = {drafts[i]};
      requests[i].drawn_logits = {logits[i]};
    }
    const std::vector<Choice> choices = choose_all(requests);
    for (size_t i = 0; i < requests.size(); ++i) CHECK_EQ(choices[i].id, drafts[i]);
  }
}

// What is left of p is all of it: the choice is that of step 3, whose noise is the same.
TEST(drafts_that_the_target_excludes_are_all_rejected) {
  Logits target = kTarget, drafter = kDrafter;
  for (size_t id = 0; id < target.size(); ++id) (id % 2 == 0 ? target : drafter)[id] = -kInfinity;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Request request = drawn(target);
    request.sampling.seed = seed;
    const int32_t expected = choose_one(request).id;
    request.drawn = draw_drafts({request}, {drafter}, {});
    request.drawn_logits = {drafter};
    CHECK_EQ(request.drawn[0] % 2, 0);
    CHECK_EQ(choose_one(request).id, expected);
  }
}

TEST(drafts_are_drawn_without_filters_and_with_noise_of_their_own) {
  int num_equal = 0, num_filtered = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Request request = drawn(Logits(50, 0.0f));
    request.sampling.seed = seed;
    const int32_t draft = draw_drafts({request}, {request.logits[0]}, {})[0];
    num_equal += draft == choose_one(request).id;
    request.sampling.min_p = 0.9f;
    request.logits[0][7] = 1.0f;
    num_filtered += draw_drafts({request}, {request.logits[0]}, {})[0] != 7;
  }
  CHECK_LT(num_equal, 80);  // of 50 tokens one in 50, not all
  CHECK_GT(num_equal, 5);
  CHECK_GT(num_filtered, 1800);
}

// A greedy row, a row that scores a prompt token, and drafts that were never drawn from their
// logits: all choose as if there were none.
TEST(without_a_temperature_or_a_possible_draft_nothing_changes) {
  const Ids token_of = {0, 3, 4, 8};
  const auto with_draft = [&](Request request, int32_t token, Logits logits) {
    request.drawn = {token};
    request.drawn_logits = {std::move(logits)};
    return choose_all({request}, 1, token_of)[0].id;
  };
  const Logits flat(4, 0.0f), broken(4, NAN);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Request request = drawn(kTarget);
    request.sampling.seed = seed;
    const int32_t expected = choose_one(request).id;
    CHECK_EQ(with_draft(request, 0, broken), expected);
    CHECK_EQ(with_draft(request, 1, flat), expected);   // not in the table
    CHECK_EQ(with_draft(request, 99, flat), expected);  // nor anywhere
    CHECK_EQ(with_draft(request, 3, {0.0f, -kInfinity, 0.0f, 0.0f}), expected);
    Request greedy = request;
    greedy.sampling.temperature = 0.0f;
    CHECK_EQ(with_draft(greedy, 0, flat), 7);
    Request scored = request;
    scored.score_tokens = {5};
    CHECK_EQ(with_draft(scored, 0, flat), 5);
    Request excluded = request;  // p is nowhere
    excluded.logits[0].assign(kTarget.size(), -kInfinity);
    CHECK_EQ(with_draft(excluded, 3, flat), 0);
  }
}

TEST(reported_log_probabilities_are_those_of_the_target) {
  Rng rng(33);
  for (int round = 0; round < 40; ++round) {
    const Ids token_of = random_tokens(rng, 40, 90);
    Request request = random_request(rng, 90, token_of);
    request.sampling.num_logprobs = kMaxLogprobs;
    const std::vector<Choice> found = choose_all({request}, 1, token_of);
    Request plain = request;
    plain.drawn.clear();
    const std::vector<Choice> expected = choose_all({plain});
    for (size_t row = 0; row < found.size(); ++row) {
      CHECK_EQ(found[row].logprob_ids[0], found[row].id);
      for (size_t i = 1; i <= kMaxLogprobs; ++i) {
        CHECK_EQ(found[row].logprob_ids[i], expected[row].logprob_ids[i]);
        CHECK_EQ(found[row].logprobs[i], expected[row].logprobs[i]);
        if (found[row].logprob_ids[i] != found[row].id) continue;
        CHECK_EQ(found[row].logprobs[0], found[row].logprobs[i]);
        CHECK_EQ(found[row].rank, static_cast<int32_t>(i));
      }
    }
  }
}

TEST(rejection_depends_on_neither_instruction_set_nor_batch_nor_threads) {
  Rng rng(34);
  for (int round = 0; round < 20; ++round) {
    const int vocab_size = rng.integer(2, 2000);
    const Ids token_of = random_tokens(rng, rng.integer(1, vocab_size), vocab_size);
    std::vector<Request> requests;
    for (int i = 0; i < 8; ++i) requests.push_back(random_request(rng, vocab_size, token_of));
    std::vector<std::vector<Choice>> results;
    for_each_isa([&] {
      results.push_back(choose_all(requests, 3, token_of));
      std::vector<Choice>& alone = results.emplace_back();
      for (const Request& request : requests) {
        for (Choice& choice : choose_all({request}, 1, token_of))
          alone.push_back(std::move(choice));
      }
    });
    for (const std::vector<Choice>& result : results) CHECK(result == results[0]);
  }
}

TEST(the_residual_is_above_zero_only_where_the_target_is_above_the_draft) {
  CHECK_EQ(sample_math::residual_score(0.25f, 0.25f, 1, 2, 3), -kInfinity);
  CHECK_EQ(sample_math::residual_score(0.0f, 0.25f, 1, 2, 3), -kInfinity);
  CHECK_GT(sample_math::residual_score(0.25f, 0.0f, 1, 2, 3), -10.0f);
  CHECK_EQ(sample_math::column_of_token(nullptr, 4, 3), 3);
  CHECK_EQ(sample_math::column_of_token(nullptr, 4, 4), -1);
  const Ids column_of = {-1, 0, 1, -1};
  for (int token = 0; token < 4; ++token) {
    CHECK_EQ(sample_math::column_of_token(column_of.data(), 2, token),
             column_of[static_cast<size_t>(token)]);
  }
}
