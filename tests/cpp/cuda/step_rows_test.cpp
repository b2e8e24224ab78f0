// The ops around the forward pass against the host's own way: RowLayout, accept_drafts and a loop
// over tokens.

#include "kernels/step_rows.h"

#include <algorithm>
#include <numeric>

#include "core/row_layout.h"
#include "cuda/cuda_testing.h"

using namespace openspec;
using testing::DeviceBuffer;

namespace {

testing::NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

constexpr int kSeqs = 40, kMaxLen = 400, kPageSize = 16, kVocab = 90, kDrafts = 5, kRing = 3;
constexpr int kPagesPerSeq = (kMaxLen + 2 * (1 + kDrafts) + kPageSize - 1) / kPageSize;

struct Sequence {
  Ids tokens, pages, stop_ids;
  int kv_len = 0, prompt_len = 1, max_num_tokens = kMaxLen, min_tokens = 0;
  bool is_active = true, scores_prompt = false;
};

struct Step {
  std::vector<StepSpan> spans;
  std::vector<Ids> drafts;
  int row_budget = 0;
};

/// A table and a step that uses some of its slots, as a scheduler would.
struct Case {
  explicit Case(uint64_t seed) : rng(seed), sequences(kSeqs) {
    for (int slot = 0; slot < kSeqs; ++slot) {
      Sequence& sequence = sequences[static_cast<size_t>(slot)];
      const int count = rng.integer(2, kMaxLen - 1);
      for (int i = 0; i < count; ++i) sequence.tokens.push_back(rng.integer(0, kVocab - 1));
      for (int i = 0; i < kPagesPerSeq; ++i) sequence.pages.push_back(rng.integer(0, 5000));
      sequence.prompt_len = rng.integer(1, count);
      sequence.max_num_tokens = std::min(kMaxLen, count + rng.integer(1, 2 * kDrafts));
      sequence.min_tokens = rng.integer(0, 1) * rng.integer(0, 50);
      for (int i = rng.integer(0, 3); i > 0; --i) {
        sequence.stop_ids.push_back(rng.integer(0, kVocab - 1));
      }
      sequence.is_active = rng.integer(0, 9) > 0;
      sequence.scores_prompt = rng.integer(0, 4) == 0;
      const bool decodes = rng.integer(0, 2) > 0;
      sequence.kv_len = decodes ? count - 1 : rng.integer(0, count - 1);
    }
    for (int slot = 0; slot < kSeqs; ++slot) {
      if (rng.integer(0, 3) == 0) continue;
      const Sequence& sequence = sequences[static_cast<size_t>(slot)];
      const int left = static_cast<int>(sequence.tokens.size()) - sequence.kv_len;
      const int num_new = rng.integer(0, 1) ? left : rng.integer(1, left);
      step.spans.push_back({.slot = slot,
                            .num_new_tokens = num_new,
                            .max_drafts = num_new == left ? rng.integer(0, kDrafts) : 0,
                            .acceptance = static_cast<float>(rng.integer(0, 4)) / 4});
      Ids draft;
      for (int i = rng.integer(0, kDrafts); i > 0; --i) {
        draft.push_back(rng.integer(0, 12) == 0 ? rng.integer(-2, 2 * kVocab)
                                                : rng.integer(0, kVocab - 1));
      }
      step.drafts.push_back(draft);
    }
  }
  testing::Rng rng;
  std::vector<Sequence> sequences;
  Step step;
};

/// The same in device memory; freed with the object.
struct OnDevice {
  explicit OnDevice(const Case& at)
      : tokens(size_t{kSeqs} * kMaxLen * 4),
        numbers(size_t{5} * kSeqs * 4),
        pages(size_t{kSeqs} * kPagesPerSeq * 4),
        sampling(kSeqs * sizeof(SamplingParams)),
        stop_ids(size_t{kSeqs} * 4 * 4),
        header(sizeof(StepHeader)),
        spans(kSeqs * sizeof(StepSpan)),
        slot_updates(kSeqs * sizeof(SlotUpdate)),
        page_updates(size_t{kSeqs} * kPagesPerSeq * sizeof(PageUpdate)) {
    Ids history(size_t{kSeqs} * kMaxLen, -7), stops(size_t{kSeqs} * 4, -7);
    std::vector<SamplingParams> params(kSeqs);
    std::vector<SlotUpdate> slots;
    std::vector<PageUpdate> page_list;
    for (int slot = 0; slot < kSeqs; ++slot) {
      const Sequence& sequence = at.sequences[static_cast<size_t>(slot)];
      std::copy(sequence.tokens.begin(), sequence.tokens.end(), history.begin() + slot * kMaxLen);
      std::copy(sequence.stop_ids.begin(), sequence.stop_ids.end(), stops.begin() + slot * 4);
      SamplingParams& p = params[static_cast<size_t>(slot)];
      p.min_tokens = sequence.min_tokens;
      p.num_stop_ids = static_cast<int32_t>(sequence.stop_ids.size());
      p.stop_ids = stop_ids.as<int32_t>() + slot * 4;
      p.num_prompt_logprobs = sequence.scores_prompt ? 1 : -1;
      slots.push_back({.slot = slot,
                       .num_tokens = static_cast<int32_t>(sequence.tokens.size()),
                       .kv_len = sequence.kv_len,
                       .prompt_len = sequence.prompt_len,
                       .max_num_tokens = sequence.max_num_tokens,
                       .is_active = sequence.is_active});
      for (int i = 0; i < kPagesPerSeq; ++i) {
        page_list.push_back({slot, i, sequence.pages[static_cast<size_t>(i)]});
      }
    }
    tokens.upload(history);
    stop_ids.upload(stops);
    sampling.upload(params);
    slot_updates.upload(slots);
    page_updates.upload(page_list);
    spans.upload(at.step.spans);
    header.upload(
        std::vector<StepHeader>{{.num_spans = static_cast<int32_t>(at.step.spans.size()),
                                 .num_slot_updates = static_cast<int32_t>(slots.size()),
                                 .num_page_updates = static_cast<int32_t>(page_list.size()),
                                 .row_budget = at.step.row_budget,
                                 .ring_index = 1}});
  }
  DeviceTable table() const {
    auto* number = numbers.as<int32_t>();
    return {.tokens = tokens.as<int32_t>(),
            .tokens_stride = kMaxLen,
            .num_tokens = number,
            .kv_len = number + kSeqs,
            .prompt_len = number + 2 * kSeqs,
            .max_num_tokens = number + 3 * kSeqs,
            .is_active = number + 4 * kSeqs,
            .pages = pages.as<int32_t>(),
            .max_pages_per_seq = kPagesPerSeq,
            .sampling = sampling.as<SamplingParams>()};
  }
  StepInput input() const {
    return {header.as<StepHeader>(), spans.as<StepSpan>(), slot_updates.as<SlotUpdate>(),
            page_updates.as<PageUpdate>()};
  }
  DeviceBuffer tokens, numbers, pages, sampling, stop_ids, header, spans, slot_updates,
      page_updates;
};

int usable_drafts(const Case& at, size_t span) {
  const StepSpan& of = at.step.spans[span];
  const Sequence& sequence = at.sequences[static_cast<size_t>(of.slot)];
  const int num_tokens = static_cast<int>(sequence.tokens.size());
  if (!sequence.is_active || sequence.kv_len + of.num_new_tokens != num_tokens) return 0;
  const int most = std::min({of.max_drafts, sequence.max_num_tokens - num_tokens - 1,
                             static_cast<int>(at.step.drafts[span].size())});
  int count = 0;
  while (count < most && at.step.drafts[span][static_cast<size_t>(count)] >= 0 &&
         at.step.drafts[span][static_cast<size_t>(count)] < kVocab) {
    ++count;
  }
  return std::max(count, 0);
}

/// Drafts in falling order of survival, equal ones in rounds over the spans.
Ids grant(const Case& at, const Ids& offered, int room) {
  Ids granted(offered.size(), 0);
  for (; room > 0; --room) {
    int best = -1, best_round = 0;
    float best_survival = -1.0f;
    for (size_t s = 0; s < offered.size(); ++s) {
      if (granted[s] == offered[s]) continue;
      const float acceptance = at.step.spans[s].acceptance;
      float survival = 1.0f;
      for (int i = 0; i <= granted[s]; ++i) survival *= acceptance;
      const int round = acceptance == 0.0f || acceptance == 1.0f ? granted[s] : 0;
      if (survival > best_survival || (survival == best_survival && round < best_round)) {
        best_survival = survival;
        best_round = round;
        best = static_cast<int>(s);
      }
    }
    if (best < 0) break;
    ++granted[static_cast<size_t>(best)];
  }
  return granted;
}

void check_case(uint64_t seed, bool is_short) {
  Case at(seed);
  const size_t num_spans = at.step.spans.size();
  Ids offered;
  int num_base = 0;
  for (size_t s = 0; s < num_spans; ++s) {
    offered.push_back(usable_drafts(at, s));
    if (at.sequences[static_cast<size_t>(at.step.spans[s].slot)].is_active) {
      num_base += at.step.spans[s].num_new_tokens;
    }
  }
  const int num_offered = std::accumulate(offered.begin(), offered.end(), 0);
  at.step.row_budget = num_base + (is_short ? num_offered / 2 : num_offered + 3);
  const Ids granted = grant(at, offered, at.step.row_budget - num_base);

  RowLayout expected;
  expected.clear();
  for (size_t s = 0; s < num_spans; ++s) {
    const StepSpan& of = at.step.spans[s];
    const Sequence& sequence = at.sequences[static_cast<size_t>(of.slot)];
    if (!sequence.is_active) {  // an empty span, which RowLayout does not have
      expected.span_begin.push_back(expected.num_rows());
      expected.span_kv_len.push_back(sequence.kv_len);
      expected.span_seq.push_back(of.slot);
      expected.sample_begin.push_back(static_cast<int32_t>(expected.sample_row.size()));
      expected.first_choice.push_back(-1);
      continue;
    }
    Span span{.slot = of.slot,
              .num_new_tokens = of.num_new_tokens,
              .kv_len = sequence.kv_len,
              .num_tokens = static_cast<int>(sequence.tokens.size()),
              .draft = {}};
    for (int i = 0; i < granted[s]; ++i) {
      span.draft.append(at.step.drafts[s][static_cast<size_t>(i)]);
    }
    expected.append(span, sequence.tokens, sequence.pages, kPageSize,
                    sequence.scores_prompt ? 0 : kMaxLen, sequence.prompt_len);
  }

  const int num_rows = at.step.row_budget + 9;
  const int num_samples = static_cast<int>(expected.sample_row.size()) + 5;
  const OnDevice device(at);
  Ids draft_ids(size_t{kSeqs} * kDrafts, -1), draft_counts(kSeqs, 77);
  for (size_t s = 0; s < num_spans; ++s) {
    draft_counts[s] = static_cast<int32_t>(at.step.drafts[s].size());
    std::copy(at.step.drafts[s].begin(), at.step.drafts[s].end(),
              draft_ids.begin() + static_cast<std::ptrdiff_t>(s) * kDrafts);
  }
  const DeviceBuffer drafts(draft_ids), num_drafts(draft_counts);
  const DeviceBuffer seq(kSeqs * 4), num_wanted(kSeqs * 4);
  CHECK_CUDA(begin_step_cuda({.input = device.input(),
                              .table = device.table(),
                              .seq = seq.as<int32_t>(),
                              .num_wanted = num_wanted.as<int32_t>(),
                              .max_spans = kSeqs},
                             nullptr));
  const auto rows = static_cast<size_t>(num_rows) * 4;
  const DeviceBuffer token(rows), position(rows), span(rows), parent(rows), kv_slot(2 * rows),
      span_begin((kSeqs + 1) * 4), span_kv_len(kSeqs * 4), span_seq(kSeqs * 4),
      num_usable(kSeqs * 4), num_granted(kSeqs * 4), first_choice(kSeqs * 4),
      sample_begin((kSeqs + 1) * 4), sample_row(static_cast<size_t>(num_samples) * 4),
      score_token(static_cast<size_t>(num_samples) * 4);
  CHECK_CUDA(layout_rows_cuda({.input = device.input(),
                               .table = device.table(),
                               .num_wanted = num_wanted.as<int32_t>(),
                               .drafts = drafts.as<int32_t>(),
                               .num_drafts = num_drafts.as<int32_t>(),
                               .max_spans = kSeqs,
                               .max_drafts = kDrafts,
                               .page_size = kPageSize,
                               .vocab_size = kVocab,
                               .num_rows = num_rows,
                               .num_samples = num_samples,
                               .row_token = token.as<int32_t>(),
                               .row_position = position.as<int32_t>(),
                               .row_span = span.as<int32_t>(),
                               .row_parent = parent.as<int32_t>(),
                               .row_kv_slot = kv_slot.as<int64_t>(),
                               .span_begin = span_begin.as<int32_t>(),
                               .span_kv_len = span_kv_len.as<int32_t>(),
                               .span_seq = span_seq.as<int32_t>(),
                               .num_offered = num_usable.as<int32_t>(),
                               .num_granted = num_granted.as<int32_t>(),
                               .first_choice = first_choice.as<int32_t>(),
                               .sample_begin = sample_begin.as<int32_t>(),
                               .sample_row = sample_row.as<int32_t>(),
                               .score_token = score_token.as<int32_t>()},
                              nullptr));
  const auto head = [](const DeviceBuffer& buffer, size_t count) {
    Ids values = buffer.download<int32_t>();
    values.resize(count);
    return values;
  };
  const auto padded = [](Ids values, size_t count, int32_t with) {
    values.resize(count, with);
    return values;
  };
  const auto n = static_cast<size_t>(num_rows);
  CHECK_EQ(head(num_usable, num_spans), offered);
  CHECK_EQ(head(num_granted, num_spans), granted);
  CHECK_EQ(head(span_begin, kSeqs + 1),
           padded(expected.span_begin, kSeqs + 1, expected.num_rows()));
  CHECK_EQ(head(span_kv_len, kSeqs), padded(expected.span_kv_len, kSeqs, 0));
  CHECK_EQ(head(span_seq, kSeqs), padded(expected.span_seq, kSeqs, 0));
  CHECK_EQ(head(first_choice, kSeqs), padded(expected.first_choice, kSeqs, -1));
  CHECK_EQ(head(token, n), padded(expected.token, n, 0));
  CHECK_EQ(head(position, n), padded(expected.position, n, 0));
  CHECK_EQ(head(span, n), padded(expected.span, n, -1));
  CHECK_EQ(head(parent, n), padded(expected.parent, n, -1));
  std::vector<int64_t> slots = expected.kv_slot;
  slots.resize(n, -1);
  CHECK(kv_slot.download<int64_t>() == slots);
  const auto samples = static_cast<size_t>(num_samples);
  CHECK_EQ(head(sample_begin, num_spans + 1), expected.sample_begin);
  CHECK_EQ(head(sample_row, samples), padded(expected.sample_row, samples, -1));
  CHECK_EQ(head(score_token, samples), padded(expected.score_token, samples, -1));

  // Choices that follow the drafts for a while.
  Ids choices(samples);
  for (int32_t& choice : choices) choice = at.rng.integer(0, kVocab - 1);
  for (size_t s = 0; s < num_spans; ++s) {
    if (expected.first_choice[s] < 0) continue;
    const int num_right = at.rng.integer(0, granted[s] + 1);
    for (int i = 0; i < std::min(num_right, offered[s]); ++i) {
      choices[static_cast<size_t>(expected.first_choice[s] + i)] =
          at.step.drafts[s][static_cast<size_t>(i)];
    }
  }
  const DeviceBuffer chosen(choices);
  const DeviceBuffer num_computed_rows(kSeqs * sizeof(int32_t)),
      outcomes(size_t{kRing} * kSeqs * sizeof(StepOutcome)),
      out_tokens(size_t{kRing} * kSeqs * (1 + kDrafts) * 4);
  CHECK_CUDA(commit_rows_cuda({.input = device.input(),
                               .table = device.table(),
                               .drafts = drafts.as<int32_t>(),
                               .num_offered = num_usable.as<int32_t>(),
                               .num_granted = num_granted.as<int32_t>(),
                               .first_choice = first_choice.as<int32_t>(),
                               .sample_begin = sample_begin.as<int32_t>(),
                               .chosen = chosen.as<int32_t>(),
                               .num_spans = kSeqs,
                               .max_spans = kSeqs,
                               .max_drafts = kDrafts,
                               .max_samples = num_samples,
                               .num_computed = num_computed_rows.as<int32_t>(),
                               .outcomes = outcomes.as<StepOutcome>(),
                               .tokens = out_tokens.as<int32_t>()},
                              nullptr));
  const auto all_outcomes = outcomes.download<StepOutcome>();
  const Ids all_tokens = out_tokens.download<int32_t>(),
            history = device.tokens.download<int32_t>();
  const Ids numbers = device.numbers.download<int32_t>();
  for (size_t s = 0; s < num_spans; ++s) {
    const StepSpan& of = at.step.spans[s];
    const Sequence& sequence = at.sequences[static_cast<size_t>(of.slot)];
    const StepOutcome& outcome = all_outcomes[kSeqs + s];
    Ids tokens;
    int finish = 0, num_accepted = 0, num_right = 0, num_judged = 0;
    const int first = expected.first_choice[s];
    if (first >= 0) {
      Draft draft;
      for (int i = 0; i < granted[s]; ++i) draft.append(at.step.drafts[s][static_cast<size_t>(i)]);
      const auto choice = [&](int i) { return choices[static_cast<size_t>(first + i)]; };
      const int num_path = static_cast<int>(
          accept_drafts(draft, std::span(choices).subspan(static_cast<size_t>(first))).size());
      for (int i = 0; i <= num_path && finish == 0; ++i) {
        tokens.push_back(choice(i));
        num_accepted += i < num_path;
        const int num_known = static_cast<int>(sequence.tokens.size()) + i + 1;
        const bool is_stop = num_known - sequence.prompt_len > sequence.min_tokens &&
                             std::find(sequence.stop_ids.begin(), sequence.stop_ids.end(),
                                       choice(i)) != sequence.stop_ids.end();
        finish = is_stop ? 1 : num_known >= sequence.max_num_tokens ? 2 : 0;
      }
      num_judged = std::min(offered[s], granted[s] + 1);
      while (num_right < num_judged &&
             choice(num_right) == at.step.drafts[s][static_cast<size_t>(num_right)]) {
        ++num_right;
      }
    }
    const Ids found(all_tokens.begin() + static_cast<std::ptrdiff_t>((kSeqs + s) * (1 + kDrafts)),
                    all_tokens.begin() + static_cast<std::ptrdiff_t>((kSeqs + s) * (1 + kDrafts)) +
                        outcome.num_tokens);
    CHECK_EQ(found, tokens);
    CHECK_EQ(outcome.finish, finish);
    CHECK_EQ(outcome.num_accepted, num_accepted);
    CHECK_EQ(outcome.num_drafts, first < 0 ? 0 : granted[s]);
    CHECK_EQ(outcome.num_judged, num_judged);
    CHECK_EQ(outcome.num_right, num_right);
    CHECK_EQ(outcome.first_choice, first);
    const int num_computed =
        !sequence.is_active ? 0
                            : of.num_new_tokens + std::max(0, static_cast<int>(tokens.size()) - 1);
    CHECK_EQ(outcome.num_computed, num_computed);
    CHECK_EQ(num_computed_rows.download<int32_t>()[s], num_computed);
    const auto slot = static_cast<size_t>(of.slot);
    CHECK_EQ(numbers[slot], static_cast<int>(sequence.tokens.size() + tokens.size()));
    CHECK_EQ(numbers[kSeqs + slot], sequence.kv_len + num_computed);
    CHECK_EQ(numbers[4 * kSeqs + slot], sequence.is_active && finish == 0 ? 1 : 0);
    for (size_t i = 0; i < tokens.size(); ++i) {
      CHECK_EQ(history[slot * kMaxLen + sequence.tokens.size() + i], tokens[i]);
    }
  }
  for (const DeviceBuffer* buffer :
       {&token, &position, &span, &parent, &kv_slot, &span_begin, &sample_begin, &sample_row,
        &score_token, &out_tokens, &outcomes, &device.tokens, &device.numbers}) {
    CHECK(buffer->guard_is_whole());
  }
}

}  // namespace

TEST(rows_and_commits_equal_the_hosts) {
  for (uint64_t seed = 0; seed < 60; ++seed) check_case(seed, false);
}

TEST(short_budgets_go_to_the_likeliest_drafts) {
  for (uint64_t seed = 100; seed < 160; ++seed) check_case(seed, true);
}
