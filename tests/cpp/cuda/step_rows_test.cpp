// The ops around the forward pass against the host's own way: RowLayout, accept_drafts and a loop
// over tokens.

#include "kernels/steps/step_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "core/draft_merge.h"
#include "core/row_layout.h"
#include "cuda/cuda_testing.h"
#include "kernels/delta_net/delta_states.h"

using namespace openspec;
using testing::DeviceBuffer;

namespace {

testing::NeedsDevice needs_device;

using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr int kSeqs = 40, kMaxLen = 400, kPageSize = 16, kVocab = 90, kDrafts = 40, kCopied = 35,
              kRing = 3;
constexpr int kPagesPerBase = 37;  // of a running state
constexpr int kPagesPerSeq = (kMaxLen + 2 * (1 + kDrafts) + kPageSize - 1) / kPageSize;

struct Sequence {
  Ids tokens, pages, stop_ids;
  int kv_len = 0, prompt_len = 1, max_num_tokens = kMaxLen, min_tokens = 0;
  bool is_active = true, scores_prompt = false;
  int num_folded = 0;
};

struct Step {
  std::vector<StepSpan> spans;
  std::vector<Draft> drafts;
  int row_budget = 0;
};

enum class Drafts { kChains, kTrees, kScoredTrees };

/// Up to `most` drafts, at times with one that cannot be.
Draft random_draft(testing::Rng& rng, Drafts kind, int most) {
  Draft draft;
  for (int i = 0, count = rng.integer(0, most); i < count; ++i) {
    draft.append(rng.integer(0, 3 * most) == 0 ? rng.integer(-2, 2 * kVocab)
                                               : rng.integer(0, kVocab - 1));
    if (kind == Drafts::kChains) continue;
    // Siblings may be equal.
    if (i > 0 && rng.integer(0, 9) == 0)
      draft.tokens.back() = draft.tokens[draft.tokens.size() - 2];
    const int highest = rng.integer(0, 3 * most) == 0 ? i : i - 1;
    draft.parents.back() = rng.integer(rng.integer(0, 3 * most) == 0 ? -2 : -1, highest);
    if (kind == Drafts::kTrees) continue;
    const int change = rng.integer(0, 3 * most) == 0 ? 1 : -rng.integer(0, 2);
    const float last = i == 0 ? 0.0f : draft.scores.back();
    draft.scores.push_back(last + 0.25f * static_cast<float>(change));
  }
  return draft;
}

/// A table and a step that uses some of its slots, as a scheduler would.
struct Case {
  Case(uint64_t seed, Drafts kind) : rng(seed), sequences(kSeqs) {
    const int most = seed % 3 == 0 ? kDrafts : 5;
    for (int slot = 0; slot < kSeqs; ++slot) {
      Sequence& sequence = sequences[static_cast<size_t>(slot)];
      const int count = rng.integer(2, kMaxLen - 1);
      for (int i = 0; i < count; ++i) sequence.tokens.push_back(rng.integer(0, kVocab - 1));
      for (int i = 0; i < kPagesPerSeq; ++i) sequence.pages.push_back(rng.integer(0, 5000));
      sequence.prompt_len = rng.integer(1, count);
      sequence.max_num_tokens = std::min(kMaxLen, count + rng.integer(1, 2 * most));
      sequence.min_tokens = rng.integer(0, 1) * rng.integer(0, 50);
      for (int i = rng.integer(0, 3); i > 0; --i) {
        sequence.stop_ids.push_back(rng.integer(0, kVocab - 1));
      }
      sequence.is_active = rng.integer(0, 9) > 0;
      sequence.scores_prompt = rng.integer(0, 4) == 0;
      const bool decodes = rng.integer(0, 2) > 0;
      sequence.kv_len = decodes ? count - 1 : rng.integer(0, count - 1);
      sequence.num_folded = std::max(0, folded_blocks(sequence.kv_len) - rng.integer(0, 1));
    }
    for (int slot = 0; slot < kSeqs; ++slot) {
      if (rng.integer(0, 3) == 0) continue;
      const Sequence& sequence = sequences[static_cast<size_t>(slot)];
      const int left = static_cast<int>(sequence.tokens.size()) - sequence.kv_len;
      const int num_new = rng.integer(0, 1) ? left : rng.integer(1, left);
      step.spans.push_back({.slot = slot,
                            .num_new_tokens = num_new,
                            .max_drafts = num_new == left ? rng.integer(0, most) : 0,
                            .acceptance = static_cast<float>(rng.integer(0, 4)) / 4,
                            .folds = rng.integer(0, 2) > 0});
      step.drafts.push_back(random_draft(rng, kind, most));
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
        host_spans(kSeqs * sizeof(StepSpan)),
        slot_updates(kSeqs * sizeof(SlotUpdate)),
        page_updates(size_t{kSeqs} * kPagesPerSeq * sizeof(PageUpdate)),
        num_folded(size_t{kSeqs} * 4),
        base_pages(Ids(size_t{kSeqs} * kPagesPerBase, -3)),
        base_targets(base_pages.bytes()),
        host_targets(targets_of(at)) {
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
      p.reports_steps = slot % 2 == 1;
      slots.push_back({.slot = slot,
                       .num_tokens = static_cast<int32_t>(sequence.tokens.size()),
                       .kv_len = sequence.kv_len,
                       .prompt_len = sequence.prompt_len,
                       .max_num_tokens = sequence.max_num_tokens,
                       .is_active = sequence.is_active,
                       .num_folded = sequence.num_folded});
      for (int i = 0; i < kPagesPerSeq; ++i) {
        page_list.push_back({slot, i, sequence.pages[static_cast<size_t>(i)]});
      }
    }
    tokens.upload(history);
    stop_ids.upload(stops);
    sampling.upload(params);
    slot_updates.upload(slots);
    page_updates.upload(page_list);
    host_spans.upload(at.step.spans);
    host_header = {.num_spans = static_cast<int32_t>(at.step.spans.size()),
                   .num_slot_updates = static_cast<int32_t>(slots.size()),
                   .num_page_updates = static_cast<int32_t>(page_list.size()),
                   .row_budget = at.step.row_budget,
                   .ring_index = 1};
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
            .sampling = sampling.as<SamplingParams>(),
            .base_pages = base_pages.as<int32_t>(),
            .base_targets = base_targets.as<int32_t>(),
            .num_folded = num_folded.as<int32_t>(),
            .pages_per_base = kPagesPerBase};
  }
  /// Page i that span s folds into.
  static int32_t target(size_t span, size_t i) { return static_cast<int32_t>(1000 * span + i); }
  static Ids targets_of(const Case& at) {
    Ids targets(size_t{kSeqs} * kPagesPerBase, -5);
    for (size_t s = 0; s < at.step.spans.size(); ++s) {
      for (size_t i = 0; at.step.spans[s].folds != 0 && i < kPagesPerBase; ++i) {
        targets[s * kPagesPerBase + i] = target(s, i);
      }
    }
    return targets;
  }
  StepInput input() const { return {header.as<StepHeader>(), spans.as<StepSpan>()}; }
  DeviceBuffer tokens, numbers, pages, sampling, stop_ids, header, spans, host_spans, slot_updates,
      page_updates, num_folded, base_pages, base_targets, host_targets;
  StepHeader host_header;
};

int usable_drafts(const Case& at, size_t span) {
  const StepSpan& of = at.step.spans[span];
  const Sequence& sequence = at.sequences[static_cast<size_t>(of.slot)];
  const int num_tokens = static_cast<int>(sequence.tokens.size());
  if (!sequence.is_active || sequence.kv_len + of.num_new_tokens != num_tokens) return 0;
  const Draft& draft = at.step.drafts[span];
  const int most =
      std::min({of.max_drafts, sequence.max_num_tokens - num_tokens - 1, draft.size()});
  int count = 0;
  for (size_t i = 0; static_cast<int>(i) < most; ++i, ++count) {
    const int32_t token = draft.tokens[i], parent = draft.parents[i];
    if (token < 0 || token >= kVocab || parent < -1 || parent >= count) break;
    if (draft.scores.empty()) continue;
    if (draft.scores[i] > (i == 0 ? 0.0f : draft.scores[i - 1])) break;
  }
  return count;
}

/// Drafts in falling order of survival, equal ones in rounds over the spans.
Ids grant(const Case& at, const Ids& offered, int room) {
  Ids granted(offered.size(), 0);
  const auto survival_of = [&](size_t s, int draft) {
    const Floats& scores = at.step.drafts[s].scores;
    if (!scores.empty()) return std::exp(static_cast<double>(scores[static_cast<size_t>(draft)]));
    float survival = 1.0f;
    for (int i = 0; i <= draft; ++i) survival *= at.step.spans[s].acceptance;
    return static_cast<double>(survival);
  };
  for (; room > 0; --room) {
    int best = -1, best_round = 0;
    double best_survival = -1.0;
    for (size_t s = 0; s < offered.size(); ++s) {
      if (granted[s] == offered[s]) continue;
      const double survival = survival_of(s, granted[s]);
      int round = 0;  // drafts of the span that are just as likely
      while (round < granted[s] && survival_of(s, granted[s] - round - 1) == survival) ++round;
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

/// What the host makes of a case.
struct HostStep {
  HostStep(Case& at, bool is_short) {
    int num_base = 0;
    for (size_t s = 0; s < at.step.spans.size(); ++s) {
      offered.push_back(usable_drafts(at, s));
      if (at.sequences[static_cast<size_t>(at.step.spans[s].slot)].is_active) {
        num_base += at.step.spans[s].num_new_tokens;
      }
    }
    const int num_offered = std::accumulate(offered.begin(), offered.end(), 0);
    at.step.row_budget = num_base + (is_short ? num_offered / 2 : num_offered + 3);
    granted = grant(at, offered, at.step.row_budget - num_base);
    layout.clear();
    for (size_t s = 0; s < at.step.spans.size(); ++s) append_span(at, s);
  }
  Ids offered, granted;
  RowLayout layout;

 private:
  void append_span(const Case& at, size_t s) {
    const StepSpan& of = at.step.spans[s];
    const Sequence& sequence = at.sequences[static_cast<size_t>(of.slot)];
    if (!sequence.is_active) {  // an empty span, which RowLayout does not have
      layout.span_begin.push_back(layout.num_rows());
      layout.span_kv_len.push_back(sequence.kv_len);
      layout.span_seq.push_back(of.slot);
      layout.sample_begin.push_back(static_cast<int32_t>(layout.sample_row.size()));
      layout.first_choice.push_back(-1);
      return;
    }
    Span span{.slot = of.slot,
              .num_new_tokens = of.num_new_tokens,
              .kv_len = sequence.kv_len,
              .num_tokens = static_cast<int>(sequence.tokens.size()),
              .draft = at.step.drafts[s]};
    span.draft.truncate(granted[s]);
    layout.append(span, sequence.tokens, sequence.pages, kPageSize,
                  sequence.scores_prompt ? 0 : kMaxLen, sequence.prompt_len);
  }
};

/// The case's drafts in device memory.
struct DraftsOnDevice {
  explicit DraftsOnDevice(const Case& at)
      : tokens(size_t{kSeqs} * kDrafts * 4),
        counts(kSeqs * 4),
        parents(tokens.bytes()),
        scores(tokens.bytes()) {
    Ids draft_ids(size_t{kSeqs} * kDrafts, -1), draft_parents = draft_ids, draft_counts(kSeqs, 77);
    Floats draft_scores(draft_ids.size(), 5.0f);
    for (size_t s = 0; s < at.step.spans.size(); ++s) {
      const Draft& draft = at.step.drafts[s];
      const auto first = static_cast<std::ptrdiff_t>(s) * kDrafts;
      draft_counts[s] = draft.size();
      std::copy(draft.tokens.begin(), draft.tokens.end(), draft_ids.begin() + first);
      std::copy(draft.parents.begin(), draft.parents.end(), draft_parents.begin() + first);
      std::copy(draft.scores.begin(), draft.scores.end(), draft_scores.begin() + first);
    }
    tokens.upload(draft_ids);
    counts.upload(draft_counts);
    parents.upload(draft_parents);
    scores.upload(draft_scores);
  }
  DeviceBuffer tokens, counts, parents, scores;
};

/// A case by the device's ops, and what they write against the host's.
struct DeviceCheck {
  DeviceCheck(Case& of, Drafts of_kind, const HostStep& by_host)
      : at(of), kind(of_kind), host(by_host), expected(by_host.layout), device(of), drafts(of) {}

  void lay_out() {
    CHECK_CUDA(begin_step_cuda({.header = device.host_header,
                                .host_spans = device.host_spans.as<StepSpan>(),
                                .slot_updates = device.slot_updates.as<SlotUpdate>(),
                                .page_updates = device.page_updates.as<PageUpdate>(),
                                .base_targets = device.host_targets.as<int32_t>(),
                                .table = device.table(),
                                .max_spans = kSeqs,
                                .out_header = device.header.as<StepHeader>(),
                                .spans = device.spans.as<StepSpan>(),
                                .seq = seq.as<int32_t>(),
                                .num_wanted = num_wanted.as<int32_t>()},
                               nullptr));
    CHECK_CUDA(layout_rows_cuda(
        {.input = device.input(),
         .table = device.table(),
         .num_wanted = num_wanted.as<int32_t>(),
         .drafts = drafts.tokens.as<int32_t>(),
         .num_drafts = drafts.counts.as<int32_t>(),
         .parents = has_trees() ? drafts.parents.as<int32_t>() : nullptr,
         .scores = kind == Drafts::kScoredTrees ? drafts.scores.as<float>() : nullptr,
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
         .score_token = score_token.as<int32_t>(),
         .folded_read = folded_read.as<int32_t>(),
         .folded_write = folded_write.as<int32_t>()},
        nullptr));
  }

  void check_layout() const {
    const size_t num_spans = at.step.spans.size();
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
    CHECK_EQ(head(num_usable, num_spans), host.offered);
    CHECK_EQ(head(num_granted, num_spans), host.granted);
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
    Ids read, write;
    for (size_t s = 0; s < num_spans; ++s) {
      read.push_back(sequence_of(s).num_folded);
      write.push_back(folded_of(s));
    }
    CHECK_EQ(head(folded_read, kSeqs), padded(read, kSeqs, 0));
    CHECK_EQ(head(folded_write, kSeqs), padded(write, kSeqs, 0));
  }

  /// Choices that follow the drafts for a while.
  void choose() {
    choices.resize(static_cast<size_t>(num_samples));
    for (int32_t& choice : choices) choice = at.rng.integer(0, kVocab - 1);
    for (size_t s = 0; s < at.step.spans.size(); ++s) {
      if (expected.first_choice[s] < 0) continue;
      const Draft& draft = at.step.drafts[s];
      for (int last = -1; last < host.granted[s] && at.rng.integer(0, 5) > 0;) {
        Ids children;
        for (int i = last + 1; i < host.offered[s]; ++i) {
          if (draft.parents[static_cast<size_t>(i)] == last) children.push_back(i);
        }
        if (children.empty()) break;
        const int32_t child =
            children[static_cast<size_t>(at.rng.integer(0, static_cast<int>(children.size()) - 1))];
        choices[static_cast<size_t>(expected.first_choice[s] + last + 1)] =
            draft.tokens[static_cast<size_t>(child)];
        last = child;
      }
      // Some rows have no choice.
      if (at.rng.integer(0, 3) == 0) {
        const int row = at.rng.integer(0, host.granted[s]);
        choices[static_cast<size_t>(expected.first_choice[s] + row)] = -1;
      }
    }
  }

  /// Copies that follow the choices for a while.
  void copy() {
    for (size_t s = 0; s < kSeqs; ++s) {
      const Ids run = s < at.step.spans.size() ? run_of(s).tokens : Ids{};
      CopiedDraft& copy = copies.emplace_back();
      copy.match_len = at.rng.integer(0, 9);
      copy.opinion = static_cast<CopyOpinion>(at.rng.integer(0, kNumOpinions - 1));
      const int count = copy.match_len > 0 ? at.rng.integer(0, kCopied) : 0;
      for (int i = 0; i < count; ++i) {
        const bool follows = static_cast<size_t>(i) < run.size() && at.rng.integer(0, 5) > 0;
        copy.tokens.push_back(follows ? run[static_cast<size_t>(i)] : at.rng.integer(0, kVocab));
      }
    }
  }

  void commit() {
    const DeviceBuffer chosen(choices);
    Ids copied, num_copied, match_len, is_copied, classes;
    for (const CopiedDraft& copy : copies) {
      num_copied.push_back(static_cast<int32_t>(copy.tokens.size()));
      match_len.push_back(copy.match_len);
      is_copied.push_back(copy.match_len % 2);
      classes.push_back(copy.match_len > 0 ? copy.copy_class() : -1);
      copied.insert(copied.end(), copy.tokens.begin(), copy.tokens.end());
      copied.resize(num_copied.size() * kCopied, -3);
    }
    const DeviceBuffer copied_ids(copied), copied_counts(num_copied), matches(match_len),
        sources(is_copied), copy_classes(classes);
    CHECK_CUDA(commit_rows_cuda(
        {.input = device.input(),
         .table = device.table(),
         .drafts = drafts.tokens.as<int32_t>(),
         .parents = has_trees() ? drafts.parents.as<int32_t>() : nullptr,
         .scores = kind == Drafts::kScoredTrees ? drafts.scores.as<float>() : nullptr,
         .copied = {kCopied, copied_ids.as<int32_t>(), copied_counts.as<int32_t>(),
                    matches.as<int32_t>()},
         .is_copied = sources.as<int32_t>(),
         .copy_class = copy_classes.as<int32_t>(),
         .span_begin = span_begin.as<int32_t>(),
         .num_offered = num_usable.as<int32_t>(),
         .num_granted = num_granted.as<int32_t>(),
         .first_choice = first_choice.as<int32_t>(),
         .sample_begin = sample_begin.as<int32_t>(),
         .chosen = chosen.as<int32_t>(),
         .folded_read = folded_read.as<int32_t>(),
         .folded_write = folded_write.as<int32_t>(),
         .num_spans = kSeqs,
         .max_spans = kSeqs,
         .max_drafts = kDrafts,
         .max_samples = num_samples,
         .num_computed = num_computed_rows.as<int32_t>(),
         .committed_row = committed_row.as<int32_t>(),
         .outcomes = outcomes.as<StepOutcome>(),
         .tokens = out_tokens.as<int32_t>(),
         .samples = out_samples.as<int32_t>(),
         .out_drafts = out_drafts.as<int32_t>(),
         .out_parents = out_parents.as<int32_t>(),
         .out_scores = out_scores.as<float>()},
        nullptr));
  }

  void check_outcomes() const {
    const Found found(*this);
    for (size_t s = 0; s < at.step.spans.size(); ++s) {
      const Run run = run_of(s);
      check_outcome(found, s, run);
      check_report(found, s);
      check_table(found, s, run);
    }
  }

  void check_guards() const {
    for (const DeviceBuffer* buffer : {&token,
                                       &position,
                                       &span,
                                       &parent,
                                       &kv_slot,
                                       &span_begin,
                                       &sample_begin,
                                       &sample_row,
                                       &score_token,
                                       &out_tokens,
                                       &out_samples,
                                       &out_drafts,
                                       &out_parents,
                                       &out_scores,
                                       &committed_row,
                                       &outcomes,
                                       &folded_read,
                                       &folded_write,
                                       &device.tokens,
                                       &device.numbers,
                                       &device.num_folded,
                                       &device.base_pages,
                                       &device.base_targets}) {
      CHECK(buffer->guard_is_whole());
    }
  }

 private:
  /// What the device wrote.
  struct Found {
    explicit Found(const DeviceCheck& of)
        : outcomes(of.outcomes.download<StepOutcome>()),
          tokens(of.out_tokens.download<int32_t>()),
          samples(of.out_samples.download<int32_t>()),
          drafts(of.out_drafts.download<int32_t>()),
          parents(of.out_parents.download<int32_t>()),
          history(of.device.tokens.download<int32_t>()),
          committed_rows(of.committed_row.download<int32_t>()),
          num_computed(of.num_computed_rows.download<int32_t>()),
          numbers(of.device.numbers.download<int32_t>()),
          num_folded(of.device.num_folded.download<int32_t>()),
          base_pages(of.device.base_pages.download<int32_t>()),
          scores(of.out_scores.download<float>()) {}
    std::vector<StepOutcome> outcomes;
    Ids tokens, samples, drafts, parents, history, committed_rows, num_computed, numbers,
        num_folded, base_pages;
    Floats scores;
  };

  /// The tokens of a span that the host would keep.
  struct Run {
    Ids tokens, samples, path;
    int finish = 0, num_accepted = 0, num_computed = 0;
    DraftJudgement judgement;
  };

  const StepSpan& span_at(size_t s) const { return at.step.spans[s]; }
  const Sequence& sequence_of(size_t s) const {
    return at.sequences[static_cast<size_t>(span_at(s).slot)];
  }

  /// Blocks in the span's base after the step.
  int folded_of(size_t s) const {
    const Sequence& sequence = sequence_of(s);
    const int num_rows = expected.span_begin[s + 1] - expected.span_begin[s];
    if (num_rows == 0 || span_at(s).folds == 0) return sequence.num_folded;
    return std::max(sequence.num_folded, folded_after(sequence.kv_len, num_rows));
  }

  Run run_of(size_t s) const {
    const Sequence& sequence = sequence_of(s);
    Run run;
    const int first = expected.first_choice[s];
    if (first >= 0) {
      Draft draft = at.step.drafts[s];
      draft.truncate(host.offered[s]);
      const auto of_span = std::span(choices).subspan(static_cast<size_t>(first));
      run.judgement = judge_drafts(draft, host.granted[s], of_span);
      draft.truncate(host.granted[s]);
      run.path = accept_drafts(draft, of_span);
      for (size_t i = 0; i <= run.path.size() && run.finish == 0; ++i) {
        run.samples.push_back(first + (i == 0 ? 0 : 1 + run.path[i - 1]));
        const int32_t choice = choices[static_cast<size_t>(run.samples.back())];
        if (choice < 0) {
          run.samples.pop_back();
          break;
        }
        run.tokens.push_back(choice);
        run.num_accepted += i < run.path.size();
        const int num_known = static_cast<int>(sequence.tokens.size() + i) + 1;
        const bool is_stop = num_known - sequence.prompt_len > sequence.min_tokens &&
                             std::find(sequence.stop_ids.begin(), sequence.stop_ids.end(),
                                       choice) != sequence.stop_ids.end();
        run.finish = is_stop ? 1 : num_known >= sequence.max_num_tokens ? 2 : 0;
      }
    }
    if (sequence.is_active) {
      run.num_computed = span_at(s).num_new_tokens;
      if (first >= 0) run.num_computed += static_cast<int>(run.tokens.size()) - 1;
    }
    return run;
  }

  void check_outcome(const Found& found, size_t s, const Run& run) const {
    const StepOutcome& outcome = found.outcomes[kSeqs + s];
    const int first = expected.first_choice[s];
    const auto of_ring = [&](const Ids& values) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>((kSeqs + s) * (1 + kDrafts));
      return Ids(begin, begin + outcome.num_tokens);
    };
    CHECK_EQ(of_ring(found.tokens), run.tokens);
    CHECK_EQ(of_ring(found.samples), run.samples);
    CHECK_EQ(outcome.finish, run.finish);
    CHECK_EQ(outcome.num_accepted, run.num_accepted);
    CHECK_EQ(outcome.num_drafts, first < 0 ? 0 : host.granted[s]);
    CHECK_EQ(outcome.num_judged, run.judgement.num_judged);
    CHECK_EQ(outcome.num_right, run.judgement.num_right);
    const CopyJudgement copy = first < 0 ? CopyJudgement{} : judge_copy(copies[s], run.tokens);
    CHECK_EQ(outcome.copy_class, copy.copy_class);
    CHECK_EQ(outcome.is_copied, first < 0 ? 0 : copies[s].match_len % 2);
    CHECK_EQ(outcome.num_copied_judged, copy.num_judged);
    CHECK_EQ(outcome.num_copied_right, copy.num_right);
    CHECK_EQ(outcome.first_choice, first);
    CHECK_EQ(outcome.num_computed, run.num_computed);
    CHECK_EQ(found.num_computed[s], run.num_computed);
  }

  void check_report(const Found& found, size_t s) const {
    if (span_at(s).slot % 2 == 0 || expected.first_choice[s] < 0) return;
    const StepOutcome& outcome = found.outcomes[kSeqs + s];
    const Draft& draft = at.step.drafts[s];
    CHECK_EQ(outcome.has_scores, kind == Drafts::kScoredTrees ? 1 : 0);
    for (size_t i = 0; i < static_cast<size_t>(host.granted[s]); ++i) {
      const size_t entry = (kSeqs + s) * kDrafts + i;
      CHECK_EQ(found.drafts[entry], draft.tokens[i]);
      CHECK_EQ(found.parents[entry], draft.parents[i]);
      if (outcome.has_scores != 0) CHECK_EQ(found.scores[entry], draft.scores[i]);
    }
  }

  void check_table(const Found& found, size_t s, const Run& run) const {
    const StepSpan& of = span_at(s);
    const Sequence& sequence = sequence_of(s);
    const int begin = expected.span_begin[s];
    for (int i = 0; has_trees() && i < run.num_computed; ++i) {
      const int draft = i - of.num_new_tokens;
      const int row = draft < 0 ? i : of.num_new_tokens + run.path[static_cast<size_t>(draft)];
      CHECK_EQ(found.committed_rows[static_cast<size_t>(begin + i)], begin + row);
    }
    const auto slot = static_cast<size_t>(of.slot);
    CHECK_EQ(found.numbers[slot], static_cast<int>(sequence.tokens.size() + run.tokens.size()));
    CHECK_EQ(found.numbers[kSeqs + slot], sequence.kv_len + run.num_computed);
    CHECK_EQ(found.numbers[4 * kSeqs + slot], sequence.is_active && run.finish == 0 ? 1 : 0);
    CHECK_EQ(found.num_folded[slot], folded_of(s));
    CHECK_EQ(found.outcomes[kSeqs + s].num_folded, folded_of(s));
    const bool is_moved = folded_of(s) > sequence.num_folded;
    for (size_t i = 0; i < kPagesPerBase; ++i) {
      CHECK_EQ(found.base_pages[slot * kPagesPerBase + i], is_moved ? OnDevice::target(s, i) : -3);
    }
    for (size_t i = 0; i < run.tokens.size(); ++i) {
      CHECK_EQ(found.history[slot * kMaxLen + sequence.tokens.size() + i], run.tokens[i]);
    }
  }

  bool has_trees() const { return kind != Drafts::kChains; }

  Case& at;
  Drafts kind;
  const HostStep& host;
  const RowLayout& expected;
  const OnDevice device;
  const DraftsOnDevice drafts;
  Ids choices;
  std::vector<CopiedDraft> copies;

  const int num_rows = at.step.row_budget + 9;
  const int num_samples = static_cast<int>(expected.sample_row.size()) + 5;
  const size_t rows = static_cast<size_t>(num_rows) * 4;
  const DeviceBuffer seq{kSeqs * 4}, num_wanted{kSeqs * 4};
  const DeviceBuffer token{rows}, position{rows}, span{rows}, parent{rows}, kv_slot{2 * rows},
      span_begin{(kSeqs + 1) * 4}, span_kv_len{kSeqs * 4}, span_seq{kSeqs * 4},
      num_usable{kSeqs * 4}, num_granted{kSeqs * 4}, first_choice{kSeqs * 4},
      folded_read{kSeqs * 4}, folded_write{kSeqs * 4}, sample_begin{(kSeqs + 1) * 4},
      sample_row{static_cast<size_t>(num_samples) * 4},
      score_token{static_cast<size_t>(num_samples) * 4};
  const DeviceBuffer num_computed_rows{kSeqs * sizeof(int32_t)},
      outcomes{size_t{kRing} * kSeqs * sizeof(StepOutcome)},
      out_tokens{size_t{kRing} * kSeqs * (1 + kDrafts) * 4}, out_samples{out_tokens.bytes()},
      out_drafts{size_t{kRing} * kSeqs * kDrafts * 4}, out_parents{out_drafts.bytes()},
      out_scores{out_drafts.bytes()}, committed_row{rows};
};

void check_case(uint64_t seed, Drafts kind, bool is_short) {
  Case at(seed, kind);
  const HostStep host(at, is_short);
  DeviceCheck check(at, kind, host);
  check.lay_out();
  check.check_layout();
  check.choose();
  check.copy();
  check.commit();
  check.check_outcomes();
  check.check_guards();
}

}  // namespace

TEST(rows_and_commits_equal_the_hosts) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    check_case(seed, Drafts::kChains, false);
    check_case(seed, Drafts::kTrees, false);
    check_case(seed, Drafts::kScoredTrees, false);
  }
}

TEST(short_budgets_go_to_the_likeliest_drafts) {
  for (uint64_t seed = 100; seed < 160; ++seed) {
    check_case(seed, Drafts::kChains, true);
    check_case(seed, Drafts::kTrees, true);
    check_case(seed, Drafts::kScoredTrees, true);
  }
}

TEST(drafts_of_the_host_come_first) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    testing::Rng rng(seed);
    const bool has_trees = seed % 3 == 0, has_drafts = seed % 5 != 0, has_scores = seed % 2 == 0;
    Ids num_lead, lead, num_drafts, tokens, parents;
    Floats scores;
    for (int s = 0; s < kSeqs; ++s) {
      const Draft draft =
          random_draft(rng, has_trees ? Drafts::kTrees : Drafts::kChains, rng.integer(0, kDrafts));
      // Often the beginning of a path of the drafts themselves.
      Ids path;
      for (int i = draft.size() - 1; i >= 0; i = draft.parents[static_cast<size_t>(i)]) {
        if (rng.integer(0, 3) == 0) path.clear();
        path.insert(path.begin(), draft.tokens[static_cast<size_t>(i)]);
        if (draft.parents[static_cast<size_t>(i)] >= i) break;
      }
      if (rng.integer(0, 3) == 0) path.assign(static_cast<size_t>(rng.integer(0, kDrafts)), 7);
      num_lead.push_back(static_cast<int32_t>(path.size()));
      num_drafts.push_back(draft.size());
      for (size_t i = 0; i < kDrafts; ++i) {
        const bool is_draft = i < draft.tokens.size();
        lead.push_back(i < path.size() ? path[i] : -5);
        tokens.push_back(is_draft ? draft.tokens[i] : -6);
        parents.push_back(is_draft ? draft.parents[i] : -6);
        scores.push_back(-0.25f * static_cast<float>(i));
      }
    }
    DeviceBuffer lead_counts(num_lead), lead_ids(lead), counts(num_drafts), ids(tokens),
        above(parents), values(scores);
    CHECK_CUDA(merge_drafts_cuda({.num_lead = lead_counts.as<int32_t>(),
                                  .lead = lead_ids.as<int32_t>(),
                                  .num_spans = kSeqs,
                                  .max_drafts = kDrafts,
                                  .has_drafts = has_drafts,
                                  .drafts = ids.as<int32_t>(),
                                  .num_drafts = counts.as<int32_t>(),
                                  .parents = has_trees ? above.as<int32_t>() : nullptr,
                                  .scores = has_scores ? values.as<float>() : nullptr},
                                 nullptr));
    for (size_t s = 0; s < kSeqs; ++s) {
      if (num_lead[s] == 0) continue;
      const size_t first = s * kDrafts;
      num_drafts[s] = put_first(
          &lead[first], num_lead[s], &tokens[first], has_trees ? &parents[first] : nullptr,
          has_scores ? &scores[first] : nullptr, has_drafts ? num_drafts[s] : 0);
    }
    CHECK(counts.download<int32_t>() == num_drafts);
    CHECK(ids.download<int32_t>() == tokens);
    CHECK(above.download<int32_t>() == parents);
    CHECK(values.download<float>() == scores);
    for (const DeviceBuffer* buffer : {&counts, &ids, &above, &values}) {
      CHECK(buffer->guard_is_whole());
    }
  }
}
