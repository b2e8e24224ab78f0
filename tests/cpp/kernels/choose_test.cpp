#include "kernels/choose/choose.h"

#include "choose_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

Request greedy(std::vector<float> logits) {
  Request request;
  request.logits = {std::move(logits)};
  return request;
}

Request sampled(std::vector<float> logits, uint64_t seed, float temperature = 1.0f) {
  Request request = greedy(std::move(logits));
  request.sampling.temperature = temperature;
  request.sampling.seed = seed;
  return request;
}

// A sequence with everything: history, a tree of drafts, any sampling parameter.
Request random_request(Rng& rng, int vocab_size) {
  Request request;
  SamplingParams& p = request.sampling;
  const auto sometimes = [&] { return rng.integer(0, 2) == 0; };
  const auto id = [&] { return rng.integer(0, vocab_size - 1); };
  p.temperature = sometimes() ? 0.0f : 0.2f + 0.1f * static_cast<float>(rng.integer(0, 15));
  p.seed = static_cast<uint64_t>(rng.integer(0, 1 << 30)) << 10;
  if (sometimes()) p.top_k = rng.integer(1, vocab_size + 3);
  if (sometimes()) p.top_p = 0.05f * static_cast<float>(rng.integer(1, 20));
  if (sometimes()) p.min_p = 0.04f * static_cast<float>(rng.integer(0, 20));
  if (sometimes()) p.presence_penalty = rng.normal();
  if (sometimes()) p.frequency_penalty = rng.normal();
  if (sometimes()) p.repetition_penalty = 0.5f + 0.25f * static_cast<float>(rng.integer(0, 6));
  if (sometimes()) p.min_tokens = rng.integer(0, 12);
  for (int i = rng.integer(0, 3); i > 0; --i) request.stop_ids.push_back(id());
  for (int i = sometimes() ? rng.integer(1, 5) : 0; i > 0; --i) {
    request.bias_ids.push_back(id());
    request.bias_values.push_back(sometimes() ? -kInfinity : rng.normal(3));
  }
  for (int i = sometimes() ? rng.integer(1, 30) : 0; i > 0; --i)
    request.allowed_ids.push_back(id());
  const bool is_narrow = sometimes();  // so that the same ids follow each other again and again
  const auto said = [&] { return is_narrow ? rng.integer(0, std::min(2, vocab_size - 1)) : id(); };
  for (int i = sometimes() ? rng.integer(1, 9) : 0; i > 0; --i) {
    std::vector<int32_t>& word = request.bad_words.emplace_back();
    for (int length = rng.integer(1, 4); length > 0; --length) word.push_back(said());
  }
  request.history.clear();
  for (int i = rng.integer(1, 20); i > 0; --i) request.history.push_back(said());
  request.prompt_len = rng.integer(1, static_cast<int>(request.history.size()));
  for (int i = 0, count = rng.integer(0, 5); i < count; ++i) {
    request.drafts.push_back(said());
    request.parents.push_back(rng.integer(-1, i - 1));
  }
  const float scale = 0.5f + static_cast<float>(rng.integer(0, 5));
  for (int row = 0; row < request.num_rows(); ++row) {
    request.logits.push_back(rng.normals(static_cast<size_t>(vocab_size), scale));
    if (sometimes()) {  // ties
      for (float& logit : request.logits.back()) logit = std::round(logit);
    }
  }
  if (sometimes()) add_random_masks(rng, request);
  return request;
}

std::vector<double> softmax(const std::vector<float>& logits) {
  double total = 0;
  std::vector<double> p;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  for (const float logit : logits) p.push_back(std::exp(static_cast<double>(logit)) / total);
  return p;
}

// Chi-square of choices over many seeds (and positions) against expected probabilities.
double chi_square(const Request& prototype, const std::vector<double>& expected, int num_draws) {
  std::vector<int> counts(expected.size(), 0);
  constexpr int kBatch = 500;
  for (int done = 0; done < num_draws; done += kBatch) {
    std::vector<Request> batch(kBatch, prototype);
    for (int i = 0; i < kBatch; ++i) {
      batch[static_cast<size_t>(i)].sampling.seed = static_cast<uint64_t>(done + i) / 2;
      batch[static_cast<size_t>(i)].history.resize(static_cast<size_t>(1 + i % 2), 0);
    }
    for (const Choice& choice : choose_all(batch, 2)) ++counts[static_cast<size_t>(choice.id)];
  }
  double sum = 0;
  for (size_t id = 0; id < expected.size(); ++id) {
    if (expected[id] == 0) {
      CHECK_EQ(counts[id], 0);
      continue;
    }
    const double mean = expected[id] * num_draws;
    sum += (counts[id] - mean) * (counts[id] - mean) / mean;
  }
  return sum;
}

// `count` tokens of a vocabulary, rising.
std::vector<int32_t> random_tokens(Rng& rng, int count, int vocab_size) {
  std::vector<int32_t> tokens;
  for (int id = 0; id < vocab_size; ++id) {
    const int num_wanted = count - static_cast<int>(tokens.size());
    if (rng.integer(1, vocab_size - id) <= num_wanted) tokens.push_back(id);
  }
  return tokens;
}

// A row of a drafter: what its sequence asks for, which but for the choice of step 3 is ignored.
Request random_draft(Rng& rng, int vocab_size) {
  Request request = random_request(rng, vocab_size);
  request.logits.resize(1);
  request.sampling.num_logprobs = rng.integer(-1, 20);
  if (rng.integer(0, 3) == 0) {
    for (float& logit : request.logits[0]) logit = rng.integer(0, 2) == 0 ? logit : -kInfinity;
    request.logits[0][static_cast<size_t>(rng.integer(0, vocab_size - 1))] = 0.0f;
  }
  return request;
}

// What the first rows of the requests propose; `token_of` may be empty. Whatever drafts do not need
// is absent or must not be followed.
std::vector<int32_t> propose(const std::vector<Request>& requests,
                             const std::vector<int32_t>& token_of, int num_threads = 1) {
  const size_t num_rows = requests.size();
  const size_t vocab_size = requests[0].logits[0].size();
  std::vector<SamplingParams> sampling;
  std::vector<float> logits;
  std::vector<int32_t> position, span, seq, sample_row;
  for (size_t i = 0; i < num_rows; ++i) {
    SamplingParams& p = sampling.emplace_back(requests[i].sampling);
    p.num_stop_ids = p.num_bias = p.num_allowed = p.num_bad_words = 1 << 20;
    p.stop_ids = p.bias_ids = p.allowed_ids = p.bad_words = nullptr;
    position.push_back(requests[i].position(0));
    span.push_back(static_cast<int32_t>(i));
    seq.push_back(static_cast<int32_t>(i));
    sample_row.push_back(static_cast<int32_t>(num_rows - 1 - i));
  }
  for (size_t i = num_rows; i > 0; --i) {
    logits.insert(logits.end(), requests[i - 1].logits[0].begin(), requests[i - 1].logits[0].end());
  }
  const std::vector<int32_t> scored(num_rows, 0);
  std::vector<int32_t> chosen(num_rows, -7), ids(num_rows * (1 + kMaxLogprobs), -7), ranks(chosen);
  std::vector<float> logprobs(ids.size(), -7.0f);
  const std::vector<float> logits_before = logits;
  std::vector<float> workspace =
      poisoned_floats(choose_workspace_bytes_cpu(num_threads, static_cast<int>(vocab_size)));
  ThreadPool pool(num_threads);
  ChooseParams params;
  params.rows.num_rows = params.rows.num_spans = params.num_samples = static_cast<int>(num_rows);
  params.rows.row_position = position.data();
  params.rows.row_span = span.data();
  params.rows.span_seq = seq.data();
  params.sample_row = sample_row.data();
  params.score_token = scored.data();
  params.logits = logits.data();
  params.vocab_size = static_cast<int>(vocab_size);
  params.is_draft = true;
  params.token_of = token_of.empty() ? nullptr : token_of.data();
  params.sampling = sampling.data();
  params.chosen = chosen.data();
  params.logprob_ids = ids.data();
  params.logprobs = logprobs.data();
  params.ranks = ranks.data();
  params.workspace = workspace.data();
  choose_cpu({.pool = &pool}, params);
  CHECK(std::memcmp(logits.data(), logits_before.data(), logits.size() * 4) == 0);
  CHECK(ids == std::vector<int32_t>(ids.size(), -7) &&
        ranks == std::vector<int32_t>(num_rows, -7) &&
        logprobs == std::vector<float>(logprobs.size(), -7.0f));
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

// The sequence that asks for nothing but what drafts heed, as the whole vocabulary sees the row.
Request as_choice(const Request& draft, const std::vector<int32_t>& token_of, int vocab_size) {
  Request request;
  request.history = draft.history;
  const SamplingParams& p = draft.sampling;
  request.sampling = {.temperature = p.temperature, .top_p = p.top_p, .min_p = p.min_p};
  request.sampling.top_k = p.top_k;
  request.sampling.seed = p.seed;
  std::vector<float> logits(static_cast<size_t>(vocab_size), -kInfinity);
  for (size_t column = 0; column < draft.logits[0].size(); ++column) {
    const size_t id = token_of.empty() ? column : static_cast<size_t>(token_of[column]);
    logits[id] = draft.logits[0][column];
  }
  request.logits = {logits};
  return request;
}

}  // namespace

TEST(equals_the_definition) {
  for_each_isa([] {
    Rng rng(1);
    int num_checked = 0;
    int num_close = 0;
    for (int round = 0; round < 250; ++round) {
      const int vocab_size = rng.integer(0, 3) == 0 ? rng.integer(1, 9) : rng.integer(10, 600);
      std::vector<Request> requests;
      for (int i = rng.integer(1, 5); i > 0; --i)
        requests.push_back(random_request(rng, vocab_size));
      const std::vector<Choice> choices = choose_all(requests, rng.integer(1, 3));
      size_t at = 0;
      for (const Request& request : requests) {
        for (int row = 0; row < request.num_rows(); ++row, ++at) {
          bool is_close = false;
          const int32_t expected = reference_choice(request, row, is_close);
          ++(is_close ? num_close : num_checked);
          if (!is_close) CHECK_EQ(choices[at].id, expected);
        }
      }
    }
    CHECK_GT(num_checked, 10 * num_close);
  });
}

TEST(every_instruction_set_chooses_the_same_bits) {
  Rng rng(2);
  for (int round = 0; round < 60; ++round) {
    std::vector<Request> requests;
    const int vocab_size = rng.integer(1, 3000);
    for (int i = 0; i < 4; ++i) {
      requests.push_back(random_request(rng, vocab_size));
      requests.back().sampling.num_logprobs = rng.integer(-1, 20);
      requests.back().sampling.raw_logprobs = rng.integer(0, 1) == 1;
    }
    std::vector<std::vector<Choice>> results;
    for_each_isa([&] { results.push_back(choose_all(requests)); });
    for (const std::vector<Choice>& result : results) CHECK(result == results[0]);
  }
}

TEST(a_choice_depends_on_neither_batch_nor_threads) {
  for_each_isa([] {
    Rng rng(3);
    for (int round = 0; round < 20; ++round) {
      std::vector<Request> requests;
      for (int i = 0; i < 12; ++i) {
        requests.push_back(random_request(rng, 700));
        requests.back().sampling.num_logprobs = rng.integer(-1, 5);
      }
      const std::vector<Choice> all = choose_all(requests, 4);
      size_t at = 0;
      for (const Request& request : requests) {
        for (const Choice& choice : choose_all({request})) CHECK(choice == all[at++]);
      }
    }
  });
}

// A draft row chooses what the last token's row chooses once the drafts are history.
TEST(drafts_count_like_committed_tokens) {
  for_each_isa([] {
    Rng rng(4);
    for (int round = 0; round < 100; ++round) {
      const Request request = random_request(rng, 300);
      const std::vector<Choice> choices = choose_all({request});
      for (int row = 0; row < request.num_rows(); ++row) {
        Request committed = request;
        committed.history = request.prefix(row);
        committed.drafts.clear();
        committed.parents.clear();
        committed.logits = {request.logits[static_cast<size_t>(row)]};
        if (!request.mask_ids.empty()) {
          committed.mask_ids = {request.mask_ids[static_cast<size_t>(row)]};
        }
        CHECK(choose_one(committed) == choices[static_cast<size_t>(row)]);
      }
    }
  });
}

TEST(samples_follow_the_distribution) {
  Rng rng(5);
  const std::vector<float> logits = rng.normals(12, 1.5f);
  // 11 degrees of freedom: 31.3 is exceeded once in a thousand.
  CHECK_LT(chi_square(sampled(logits, 0), softmax(logits), 60000), 31.3);
  std::vector<float> warm = logits;
  for (float& logit : warm) logit /= 1.7f;
  CHECK_LT(chi_square(sampled(logits, 0, 1.7f), softmax(warm), 60000), 31.3);
}

TEST(filtered_samples_follow_the_renormalised_distribution) {
  Rng rng(6);
  const std::vector<float> logits = rng.normals(40, 1.0f);
  Request request = sampled(logits, 0);
  request.sampling.top_k = 9;
  request.sampling.top_p = 0.9f;
  request.sampling.min_p = 0.1f;
  bool is_close = false;
  const std::vector<bool> kept = kept_tokens(request.sampling, logits, is_close);
  CHECK(!is_close);
  std::vector<double> expected = softmax(logits);
  double total = 0;
  for (size_t id = 0; id < expected.size(); ++id) total += kept[id] ? expected[id] : 0.0;
  for (size_t id = 0; id < expected.size(); ++id)
    expected[id] = kept[id] ? expected[id] / total : 0.0;
  CHECK_LT(chi_square(request, expected, 60000), 26.1);  // at most 8 degrees of freedom
}

TEST(a_flat_distribution_over_a_large_vocabulary_has_no_holes) {
  const std::vector<float> logits(2000, 0.25f);
  const std::vector<double> expected(2000, 1.0 / 2000);
  // 1999 degrees of freedom: mean 1999, deviation 63.
  const double found = chi_square(sampled(logits, 0), expected, 40000);
  CHECK_LT(found, 1999 + 5 * 63);
  CHECK_GT(found, 1999 - 5 * 63);
}

TEST(greedy_takes_the_lowest_id_among_equals) {
  for_each_isa([] {
    for (const int size : {1, 5, 64, 100, 1000}) {
      Rng rng(7);
      for (int round = 0; round < 50; ++round) {
        std::vector<float> logits(static_cast<size_t>(size), 0.0f);
        int lowest = size;
        for (int i = 0; i < 3; ++i) {
          const int id = rng.integer(0, size - 1);
          logits[static_cast<size_t>(id)] = 2.5f;
          lowest = std::min(lowest, id);
        }
        CHECK_EQ(choose_one(greedy(logits)).id, lowest);
      }
    }
  });
}

TEST(broken_logits_stay_in_range) {
  for_each_isa([] {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float temperature : {0.0f, 1.0f}) {
      for (const int filter : {0, 1, 2, 3}) {
        const auto choose = [&](std::vector<float> logits) {
          Request request = sampled(std::move(logits), 3, temperature);
          if (filter == 1) request.sampling.top_k = 7;
          if (filter == 2) request.sampling.top_p = 0.5f;
          if (filter == 3) request.sampling.min_p = 0.3f;
          request.sampling.num_logprobs = 20;
          const Choice raw = choose_one(request);
          request.sampling.raw_logprobs = false;
          CHECK_EQ(choose_one(request).id, raw.id);
          for (const float value : raw.logprobs) CHECK(!std::isnan(value));
          return raw.id;
        };
        for (const size_t size : {1, 30, 200}) {
          CHECK_EQ(choose(std::vector<float>(size, nan)), 0);
          CHECK_EQ(choose(std::vector<float>(size, -kInfinity)), 0);
          std::vector<float> logits(size, nan);
          logits[size / 2] = -5.0f;
          CHECK_EQ(choose(logits), static_cast<int32_t>(size / 2));
          logits.assign(size, 1.0f);
          logits[size - 1] = kInfinity;
          CHECK_EQ(choose(logits), static_cast<int32_t>(size - 1));
          const int32_t id = choose(std::vector<float>(size, kInfinity));
          CHECK(id >= 0 && id < static_cast<int32_t>(size));
        }
      }
    }
  });
}

TEST(a_bad_word_is_masked_behind_its_own_beginning) {
  // Rows: the last token, then a tree: 1 and 2 behind it, 3 behind 1.
  Request request = greedy({0, 0, 0, 0, 1, 0});
  for (int row = 0; row < 3; ++row) request.logits.push_back(request.logits[0]);
  request.history = {5, 0};
  request.drafts = {1, 2, 3};
  request.parents = {-1, -1, 0};
  const auto is_masked = [&](std::vector<std::vector<int32_t>> words) {
    request.bad_words = std::move(words);
    std::vector<int> masked;
    for (const Choice& choice : choose_all({request})) masked.push_back(choice.id != 4);
    return masked;
  };
  CHECK_EQ(is_masked({}), (std::vector<int>{0, 0, 0, 0}));
  CHECK_EQ(is_masked({{4}}), (std::vector<int>{1, 1, 1, 1}));
  CHECK_EQ(is_masked({{0, 4}}), (std::vector<int>{1, 0, 0, 0}));
  CHECK_EQ(is_masked({{5, 0, 4}}), (std::vector<int>{1, 0, 0, 0}));
  CHECK_EQ(is_masked({{0, 2, 4}, {5, 0, 1, 4}}), (std::vector<int>{0, 1, 1, 0}));
  CHECK_EQ(is_masked({{0, 1, 3, 4}, {2, 3, 4}, {4, 4}}), (std::vector<int>{0, 0, 0, 1}));
  CHECK_EQ(is_masked({{9, 5, 0, 4}, {5, 5, 0, 4}}), (std::vector<int>{0, 0, 0, 0}));  // too long
}

TEST(a_mask_leaves_a_row_its_tokens) {
  for_each_isa([] {
    Request request = greedy({5, 4, 3, 2, 1, 0});
    request.logits.resize(3, request.logits[0]);
    request.drafts = {1, 2};
    request.parents = {-1, 0};
    request.mask_ids = {{3, 4}, {}, {5}};
    const auto chosen = [&] {
      std::vector<int32_t> ids;
      for (const Choice& choice : choose_all({request})) ids.push_back(choice.id);
      return ids;
    };
    CHECK_EQ(chosen(), (std::vector<int32_t>{3, 0, 5}));
    // Neither a bias nor a list of allowed tokens brings back what the mask takes.
    request.bias_ids = {0, 4};
    request.bias_values = {100.0f, 50.0f};
    CHECK_EQ(chosen(), (std::vector<int32_t>{4, 0, 5}));
    request.allowed_ids = {0, 3, 5};
    CHECK_EQ(chosen(), (std::vector<int32_t>{3, 0, 5}));
    request.sampling.temperature = 2.0f;
    request.sampling.num_logprobs = 3;
    request.sampling.raw_logprobs = false;
    const Choice choice = choose_all({request})[0];
    CHECK_EQ(choice.id, 3);
    CHECK_EQ(choice.logprobs[0], 0.0f);
    CHECK_EQ(choice.logprobs[2], -kInfinity);
  });
}

TEST(a_held_row_has_no_choice) {
  for_each_isa([] {
    Rng rng(5);
    for (int i = 0; i < 20; ++i) {
      Request request = random_request(rng, 300);
      request.score_tokens.clear();
      request.mask_ids.resize(static_cast<size_t>(request.num_rows()));
      const std::vector<Choice> before = choose_all({request});
      Request held = request;
      std::vector<bool> is_held;
      for (std::vector<int32_t>& ids : held.mask_ids) {
        is_held.push_back(rng.integer(0, 1) == 0);
        if (is_held.back()) ids = {kHeldMask};
      }
      const std::vector<Choice> after = choose_all({held});
      Choice nothing;
      nothing.id = kNoChoice;
      nothing.logprob_ids.assign(1 + kMaxLogprobs, -7);
      nothing.logprobs.assign(1 + kMaxLogprobs, -7.0f);
      for (size_t row = 0; row < before.size(); ++row) {
        CHECK(after[row] == (is_held[row] ? nothing : before[row]));
      }
    }
  });
}

TEST(foreign_ids_are_ignored) {
  Request request = greedy({0.0f, 1.0f, 2.0f});
  request.bias_ids = {-1, 3, 1 << 30};
  request.bias_values = {100.0f, 100.0f, 100.0f};
  request.stop_ids = {-5, 77};
  request.sampling.min_tokens = 9;
  request.sampling.presence_penalty = 1.0f;
  request.history = {0, 55, -1};
  request.bad_words = {{3}, {1 << 30}, {-1, -4}};
  CHECK_EQ(choose_one(request).id, 2);
}

TEST(drafts_propose_what_the_whole_vocabulary_would_choose) {
  for_each_isa([] {
    Rng rng(8);
    for (int round = 0; round < 120; ++round) {
      const int vocab_size = rng.integer(1, 1500);
      const int count = rng.integer(0, 3) == 0 ? vocab_size : rng.integer(1, vocab_size);
      const std::vector<int32_t> token_of = random_tokens(rng, count, vocab_size);
      std::vector<Request> drafts, choices;
      for (int i = rng.integer(1, 6); i > 0; --i) {
        drafts.push_back(random_draft(rng, count));
        choices.push_back(as_choice(drafts.back(), token_of, vocab_size));
      }
      const std::vector<int32_t> proposed = propose(drafts, token_of, rng.integer(1, 3));
      const std::vector<Choice> chosen = choose_all(choices);
      for (size_t i = 0; i < drafts.size(); ++i) CHECK_EQ(proposed[i], chosen[i].id);
    }
  });
}

TEST(drafts_over_the_whole_vocabulary_need_no_table) {
  for_each_isa([] {
    Rng rng(9);
    for (int round = 0; round < 60; ++round) {
      const int vocab_size = rng.integer(1, 900);
      const std::vector<Request> drafts = {random_draft(rng, vocab_size),
                                           random_draft(rng, vocab_size)};
      const std::vector<int32_t> proposed = propose(drafts, {});
      CHECK(proposed == propose(drafts, random_tokens(rng, vocab_size, vocab_size)));
      for (size_t i = 0; i < drafts.size(); ++i) {
        CHECK_EQ(proposed[i], choose_one(as_choice(drafts[i], {}, vocab_size)).id);
      }
    }
  });
}

TEST(some_samples_of_many) {
  constexpr int kVocab = 50, kSamples = 6;
  Rng rng(15);
  ThreadPool pool(2);
  const std::vector<float> logits = rng.normals(size_t{kSamples} * kVocab);
  const std::vector<int32_t> row = {0, 1, -1, 2, 3, 4}, list = {4, -1, 2, 0};
  const std::vector<int32_t> index = {0, 1, 2, 3, 4};
  const std::vector<SamplingParams> sampling(5);
  std::vector<float> workspace(choose_workspace_bytes_cpu(2, kVocab) / 4);
  std::vector<int32_t> chosen(kSamples, -7);
  ChooseParams params;
  params.rows.num_rows = params.rows.num_spans = 5;
  params.rows.row_position = params.rows.row_span = params.rows.span_seq = index.data();
  params.sample_row = row.data();
  params.samples = list.data();
  params.num_samples = static_cast<int>(list.size());
  params.logits = logits.data();
  params.vocab_size = kVocab;
  params.is_draft = true;
  params.sampling = sampling.data();
  params.chosen = chosen.data();
  params.workspace = workspace.data();
  choose_cpu({.pool = &pool}, params);
  for (const int sample : {0, 4}) {
    const auto begin = logits.begin() + sample * kVocab;
    CHECK_EQ(chosen[static_cast<size_t>(sample)],
             static_cast<int32_t>(std::max_element(begin, begin + kVocab) - begin));
  }
  for (const size_t sample : {1u, 2u, 3u, 5u}) CHECK_EQ(chosen[sample], -7);
}

TEST(drafts_with_broken_logits_stay_in_the_drafters_vocabulary) {
  for_each_isa([] {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float temperature : {0.0f, 1.0f}) {
      for (const int top_k : {0, 2}) {
        for (const float value : {nan, -kInfinity}) {
          Request draft = sampled(std::vector<float>(70, value), 3, temperature);
          draft.sampling.top_k = top_k;
          std::vector<int32_t> token_of;
          for (int i = 0; i < 70; ++i) token_of.push_back(5 + 3 * i);
          CHECK_EQ(propose({draft}, token_of)[0], 5);
          draft.logits[0][69] = kInfinity;
          CHECK_EQ(propose({draft}, token_of)[0], 5 + 3 * 69);
        }
      }
    }
  });
}
