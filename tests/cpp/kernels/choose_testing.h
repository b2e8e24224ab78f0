#pragma once

/// A batch of sequences for `choose`, and the op's definition written plainly.

#include <algorithm>
#include <cmath>
#include <map>

#include "kernel_testing.h"
#include "kernels/choose/choose.h"
#include "kernels/choose/sample_math.h"

namespace openspec::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// One sequence: its history, and drafts behind its last token (parents: draft index, -1 the last
/// token). Row 0 is the last known token, row 1 + i draft i; every row has logits.
struct Request {
  SamplingParams sampling;
  std::vector<int32_t> stop_ids, bias_ids, allowed_ids;
  std::vector<float> bias_values;
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> history = {0};
  int prompt_len = 1;
  std::vector<int32_t> drafts, parents;
  std::vector<int32_t> score_tokens;  // by row, or empty
  // By row, or empty: the tokens that its mask allows. A row without any has no mask, and one with
  // kHeldMask alone has no choice.
  std::vector<std::vector<int32_t>> mask_ids;
  std::vector<std::vector<float>> logits;  // by row
  // A chain drawn behind the last token, and the drafter's logits of each; not all need rows.
  std::vector<int32_t> drawn;
  std::vector<std::vector<float>> drawn_logits;

  int num_rows() const { return 1 + static_cast<int>(drafts.size()); }
  /// As SamplingParams has them.
  std::vector<int32_t> flat_bad_words() const {
    std::vector<int32_t> flat(bad_words.size());
    for (size_t i = 0; i < bad_words.size(); ++i) {
      flat.insert(flat.end(), bad_words[i].begin(), bad_words[i].end());
      flat[i] = static_cast<int32_t>(flat.size());
    }
    return flat;
  }
  bool has_mask(int row) const {
    return !mask_ids.empty() && !mask_ids[static_cast<size_t>(row)].empty();
  }
  bool is_held(int row) const {
    return has_mask(row) && mask_ids[static_cast<size_t>(row)][0] == kHeldMask;
  }
  int position(int row) const {
    int depth = 0;
    for (; row > 0; row = parents[static_cast<size_t>(row) - 1] + 1) ++depth;
    return static_cast<int>(history.size()) - 1 + depth;
  }
  /// Tokens before the one that the row chooses.
  std::vector<int32_t> prefix(int row) const {
    std::vector<int32_t> path;
    for (; row > 0; row = parents[static_cast<size_t>(row) - 1] + 1) {
      path.insert(path.begin(), drafts[static_cast<size_t>(row) - 1]);
    }
    std::vector<int32_t> tokens = history;
    tokens.insert(tokens.end(), path.begin(), path.end());
    return tokens;
  }
};

struct Choice {
  int32_t id = -7;
  int32_t rank = -7;
  std::vector<int32_t> logprob_ids;
  std::vector<float> logprobs;
  bool operator==(const Choice&) const = default;
};

/// Masks of samples, added one after the other.
struct MaskBatch {
  std::vector<int32_t> words, sample_mask;

  void add_none() { sample_mask.push_back(-1); }
  void add(const Request& request, int row) {
    if (!request.has_mask(row)) return add_none();
    if (request.is_held(row)) return sample_mask.push_back(kHeldMask);
    const size_t num_words = (request.logits[static_cast<size_t>(row)].size() + 31) / 32;
    const size_t first = words.size();
    sample_mask.push_back(static_cast<int32_t>(first / num_words));
    words.resize(first + num_words);
    for (const int32_t id : request.mask_ids[static_cast<size_t>(row)]) {
      words[first + static_cast<size_t>(id) / 32] |= static_cast<int32_t>(1u << (id % 32));
    }
  }
};

/// Gives some rows a mask of random tokens, a few or most of them.
inline void add_random_masks(Rng& rng, Request& request) {
  for (const std::vector<float>& logits : request.logits) {
    const auto size = static_cast<int>(logits.size());
    std::vector<int32_t>& ids = request.mask_ids.emplace_back();
    const int share = rng.integer(0, 2);
    if (share == 0) continue;
    ids.push_back(rng.integer(0, size - 1));
    for (int32_t id = 0; id < size; ++id) {
      if (rng.integer(0, 30) < (share == 1 ? 1 : 28)) ids.push_back(id);
    }
  }
}

/// What the requests' drafts were drawn from, as it lies in memory: by depth, rows in an order of
/// their own, NaN where nobody may read.
struct DrawnBatch {
  int vocab_size = 0, max_drafts = 0;
  std::vector<int32_t> tokens, counts, row, column_of;
  std::vector<float> values;
  int64_t row_stride = 0, depth_stride = 0;

  /// `token_of`: the tokens of the drafter's columns; empty: their numbers.
  explicit DrawnBatch(const std::vector<Request>& requests,
                      const std::vector<int32_t>& token_of = {}) {
    if (!token_of.empty()) column_of.assign(requests.at(0).logits.at(0).size(), -1);
    for (size_t i = 0; i < token_of.size(); ++i) {
      column_of[static_cast<size_t>(token_of[i])] = static_cast<int32_t>(i);
    }
    for (const Request& request : requests) {
      max_drafts = std::max(max_drafts, static_cast<int>(request.drawn.size()));
      if (request.drawn.empty()) continue;
      vocab_size = static_cast<int>(request.drawn_logits[0].size());
    }
    if (max_drafts == 0) return;
    const auto num_seqs = static_cast<int>(requests.size());
    row_stride = vocab_size + 3;
    depth_stride = row_stride * (num_seqs + 1);
    values.assign(static_cast<size_t>(max_drafts * depth_stride), NAN);
    for (int i = 0; i < num_seqs; ++i) {
      const Request& request = requests[static_cast<size_t>(i)];
      counts.push_back(static_cast<int32_t>(request.drawn.size()));
      row.push_back(request.drawn.empty() ? 1 << 28 : num_seqs - i);
      tokens.insert(tokens.end(), request.drawn.begin(), request.drawn.end());
      tokens.resize(counts.size() * static_cast<size_t>(max_drafts), 1 << 28);
      for (size_t depth = 0; depth < request.drawn.size(); ++depth) {
        const std::vector<float>& from = request.drawn_logits[depth];
        std::copy(
            from.begin(), from.end(),
            values.begin() + static_cast<int64_t>(depth) * depth_stride + row.back() * row_stride);
      }
    }
  }
  DrawnDrafts view() const {
    if (max_drafts == 0) return {};
    return {.tokens = tokens.data(),
            .counts = counts.data(),
            .max_drafts = max_drafts,
            .logits = {.values = values.data(),
                       .row_stride = row_stride,
                       .depth_stride = depth_stride,
                       .row = row.data(),
                       .vocab_size = vocab_size,
                       .column_of = column_of.empty() ? nullptr : column_of.data()}};
  }
};

/// Runs the op over all rows of all requests; `drawn_token_of` may be empty.
inline std::vector<Choice> choose_all(std::vector<Request> requests, int num_threads = 1,
                                      const std::vector<int32_t>& drawn_token_of = {}) {
  const size_t num_seqs = requests.size();
  size_t stride = 1;
  for (const Request& request : requests) stride = std::max(stride, request.history.size());
  const int vocab_size = static_cast<int>(requests[0].logits[0].size());
  std::vector<SamplingParams> sampling(num_seqs);
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> tokens(num_seqs * stride, 1 << 28), num_tokens(num_seqs),
      prompt_len(num_seqs);
  std::vector<int32_t> row_token, position, span, parent, seq, sample_row, score_token;
  std::vector<float> logits;
  MaskBatch masks;
  for (size_t index = 0; index < num_seqs; ++index) {
    Request& request = requests[index];
    const size_t slot = num_seqs - 1 - index;
    SamplingParams& p = sampling[slot];
    p = request.sampling;
    p.stop_ids = request.stop_ids.data();
    p.num_stop_ids = static_cast<int32_t>(request.stop_ids.size());
    p.bias_ids = request.bias_ids.data();
    p.bias_values = request.bias_values.data();
    p.num_bias = static_cast<int32_t>(request.bias_ids.size());
    p.allowed_ids = request.allowed_ids.data();
    p.num_allowed = static_cast<int32_t>(request.allowed_ids.size());
    p.bad_words = bad_words.emplace_back(request.flat_bad_words()).data();
    p.num_bad_words = static_cast<int32_t>(request.bad_words.size());
    std::copy(request.history.begin(), request.history.end(),
              tokens.begin() + static_cast<std::ptrdiff_t>(slot * stride));
    num_tokens[slot] = static_cast<int32_t>(request.history.size());
    prompt_len[slot] = request.prompt_len;
    seq.push_back(static_cast<int32_t>(slot));
    const int32_t first = static_cast<int32_t>(row_token.size());
    for (int row = 0; row < request.num_rows(); ++row) {
      const size_t r = static_cast<size_t>(row);
      row_token.push_back(row == 0 ? request.history.back() : request.drafts[r - 1]);
      position.push_back(request.position(row));
      span.push_back(static_cast<int32_t>(index));
      parent.push_back(row == 0 ? -1 : first + 1 + request.parents[r - 1]);
      sample_row.push_back(first + row);
      score_token.push_back(request.score_tokens.empty() ? -1 : request.score_tokens[r]);
      logits.insert(logits.end(), request.logits[r].begin(), request.logits[r].end());
      masks.add(request, row);
    }
  }
  const std::vector<float> logits_before = logits;
  const size_t num_samples = sample_row.size();
  constexpr size_t kWidth = 1 + kMaxLogprobs;
  std::vector<int32_t> chosen(num_samples, -7), ids(num_samples * kWidth, -7),
      ranks(num_samples, -7);
  std::vector<float> values(num_samples * kWidth, -7.0f);
  std::vector<float> workspace =
      poisoned_floats(choose_workspace_bytes_cpu(num_threads, vocab_size));
  ThreadPool pool(num_threads);
  ChooseParams params;
  params.rows.num_rows = static_cast<int>(row_token.size());
  params.rows.num_spans = static_cast<int>(num_seqs);
  params.rows.row_token = row_token.data();
  params.rows.row_position = position.data();
  params.rows.row_span = span.data();
  params.rows.row_parent = parent.data();
  params.rows.span_seq = seq.data();
  params.sample_row = sample_row.data();
  params.score_token = score_token.data();
  params.num_samples = static_cast<int>(num_samples);
  params.logits = logits.data();
  params.vocab_size = vocab_size;
  const DrawnBatch drawn(requests, drawn_token_of);
  params.drafts = drawn.view();
  params.row_masks = masks.words.data();
  params.sample_mask = masks.sample_mask.data();
  params.sampling = sampling.data();
  params.tokens = tokens.data();
  params.tokens_stride = static_cast<int64_t>(stride);
  params.num_tokens = num_tokens.data();
  params.prompt_len = prompt_len.data();
  params.chosen = chosen.data();
  params.logprob_ids = ids.data();
  params.logprobs = values.data();
  params.ranks = ranks.data();
  params.workspace = workspace.data();
  choose_cpu({.pool = &pool}, params);
  CHECK(std::memcmp(logits.data(), logits_before.data(), logits.size() * 4) == 0);
  std::vector<Choice> choices;
  for (size_t i = 0; i < num_samples; ++i) {
    const auto at = static_cast<std::ptrdiff_t>(i * kWidth);
    choices.push_back({chosen[i],
                       ranks[i],
                       {ids.begin() + at, ids.begin() + at + kWidth},
                       {values.begin() + at, values.begin() + at + kWidth}});
  }
  return choices;
}

inline Choice choose_one(const Request& request) { return choose_all({request})[0]; }

inline float read(float logit) { return sample_math::sanitize(logit); }

/// Steps 1 and 2 of the definition (choose.h).
inline std::vector<float> edited_logits(const Request& request, int row) {
  std::vector<float> logits = request.logits[static_cast<size_t>(row)];
  const SamplingParams& p = request.sampling;
  const size_t size = logits.size();
  for (size_t i = 0; i < request.bias_ids.size(); ++i) {
    logits[static_cast<size_t>(request.bias_ids[i])] += request.bias_values[i];
  }
  if (!request.allowed_ids.empty()) {
    std::vector<bool> is_allowed(size, false);
    for (const int32_t id : request.allowed_ids) is_allowed[static_cast<size_t>(id)] = true;
    for (size_t id = 0; id < size; ++id) {
      if (!is_allowed[id]) logits[id] = -kInfinity;
    }
  }
  if (request.has_mask(row)) {
    std::vector<bool> is_allowed(size, false);
    for (const int32_t id : request.mask_ids[static_cast<size_t>(row)]) {
      is_allowed[static_cast<size_t>(id)] = true;
    }
    for (size_t id = 0; id < size; ++id) {
      if (!is_allowed[id]) logits[id] = -kInfinity;
    }
  }
  const std::vector<int32_t> prefix = request.prefix(row);
  if (static_cast<int>(prefix.size()) - request.prompt_len < p.min_tokens) {
    for (const int32_t id : request.stop_ids) logits[static_cast<size_t>(id)] = -kInfinity;
  }
  for (const std::vector<int32_t>& word : request.bad_words) {
    std::vector<int32_t> text = prefix;  // with the word's last id behind it
    text.push_back(word.back());
    if (text.size() >= word.size() && std::equal(word.rbegin(), word.rend(), text.rbegin())) {
      logits[static_cast<size_t>(word.back())] = -kInfinity;
    }
  }
  std::map<int32_t, int> num_out;
  for (size_t i = 0; i < prefix.size(); ++i) {
    num_out[prefix[i]] += static_cast<int>(i) >= request.prompt_len ? 1 : 0;
  }
  for (const auto& [id, count] : num_out) {
    float& logit = logits[static_cast<size_t>(id)];
    logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    logit -= p.frequency_penalty * static_cast<float>(count);
    if (count > 0) logit -= p.presence_penalty;
  }
  return logits;
}

/// Step 3's filters, by sorting; `is_close` reports that rounding could decide.
inline std::vector<bool> kept_tokens(const SamplingParams& p, const std::vector<float>& logits,
                                     bool& is_close) {
  const size_t size = logits.size();
  std::vector<size_t> order(size);
  for (size_t i = 0; i < size; ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return read(logits[a]) > read(logits[b]); });
  const auto weight = [&](size_t id) {
    const double difference =
        static_cast<double>(read(logits[id])) - static_cast<double>(read(logits[order[0]]));
    return std::exp(difference / static_cast<double>(p.temperature));
  };
  const auto note = [&](double a, double b) { is_close = is_close || std::abs(a - b) < 1e-5 * b; };
  std::vector<bool> kept(size, true);
  double total = 0;
  for (size_t rank = 0; rank < size; ++rank) {
    const size_t id = order[rank];
    if (p.min_p > 0) note(weight(id), static_cast<double>(p.min_p));
    if (weight(id) < static_cast<double>(p.min_p)) kept[id] = false;
    if (p.top_k > 0 && p.top_k < static_cast<int>(size) &&
        read(logits[id]) < read(logits[order[static_cast<size_t>(p.top_k) - 1]])) {
      kept[id] = false;
    }
    if (kept[id]) total += weight(id);
  }
  if (p.top_p >= 1) return kept;
  double mass = 0;
  float last_needed = -kInfinity;  // the logit with which the mass is reached
  for (const size_t id : order) {
    if (read(logits[id]) < last_needed) kept[id] = false;
    if (!kept[id]) continue;
    mass += weight(id);
    note(mass, static_cast<double>(p.top_p) * total);
    if (mass >= static_cast<double>(p.top_p) * total) last_needed = read(logits[id]);
  }
  return kept;
}

/// Step 3.
inline int32_t reference_choice(const Request& request, int row, bool& is_close) {
  const std::vector<float> logits = edited_logits(request, row);
  const SamplingParams& p = request.sampling;
  std::vector<bool> kept(logits.size(), true);
  if (p.temperature > 0) kept = kept_tokens(p, logits, is_close);
  double best = -std::numeric_limits<double>::infinity();
  int32_t chosen = 0;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (!kept[id]) continue;
    double score = static_cast<double>(read(logits[id]));
    if (p.temperature > 0) {
      score = score / static_cast<double>(p.temperature) +
              static_cast<double>(
                  sample_math::gumbel(p.seed, request.position(row) + 1, static_cast<int32_t>(id)));
      is_close = is_close || std::abs(score - best) < 1e-5 * (1 + std::abs(best));
    }
    if (score > best) {
      best = score;
      chosen = static_cast<int32_t>(id);
    }
  }
  if (request.has_mask(row)) {
    const std::vector<int32_t>& ids = request.mask_ids[static_cast<size_t>(row)];
    const bool is_allowed = std::find(ids.begin(), ids.end(), chosen) != ids.end();
    if (!is_allowed) chosen = *std::min_element(ids.begin(), ids.end());
  }
  return chosen;
}

}  // namespace openspec::testing
