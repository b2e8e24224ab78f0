// Sequences, pages and records as a device has them, with a second step under way before the first
// is collected: a device on the host, which runs what is launched at once and in order.

#include "runtime/state/sequences.h"

#include <cstring>
#include <functional>
#include <numeric>

#include "check_test.h"
#include "core/row_layout.h"
#include "core/thread_pool.h"
#include "kernels/steps/move_kv.h"
#include "runtime/running_target.h"

using namespace openspec;
using testing::Chances;
using testing::Ids;
using testing::kRunningVocab;

namespace {

constexpr int kNumLayers = 3, kMaxDrafts = 5, kPage = 4, kNumPages = 400;

SequenceLimits limits_of(int num_rows_behind) {
  return {.max_num_seqs = 6,
          .max_model_len = 320,
          .page_size = kPage,
          .max_num_batched_tokens = 1024,
          .draft_room = kMaxDrafts,
          .num_steps = 2,
          .num_lookahead = 2 * (1 + kMaxDrafts) + 1,
          .num_rows_behind = num_rows_behind};
}

class Engine {
 public:
  Engine(bool makes_trees, int num_rows_behind)
      : makes_trees_(makes_trees),
        limits_(limits_of(num_rows_behind)),
        sequences_(limits_,
                   RecordPlan({.kv_layers = {},
                               .record_bytes = kNumLayers * testing::kStateWords * 4,
                               .num_read = testing::kStateReads},
                              limits_),
                   BasePlan({}, 0, 0), kNumPages,
                   [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }),
        device_(6),
        states_(1024 * kNumLayers * testing::kStateWords) {}

  const SequenceTable& table() const { return sequences_.table(); }
  int num_free_slots() const { return table().num_free_slots(); }
  int num_steps_ahead() const { return 1; }
  void check_integrity() const { sequences_.check_integrity(/*keeps_more=*/true); }
  int64_t num_found() const { return sequences_.prefixes().num_found(); }

  int add_sequence(const Ids& tokens, int prompt_len, const SequenceParams& params,
                   std::span<const uint8_t> salt) {
    const int slot = sequences_.add(tokens, prompt_len, params, salt);
    sequences_.prefixes().attach(slot);
    restore(slot);
    return slot;
  }
  void remove_sequence(int slot) { sequences_.remove(slot); }

  std::unique_ptr<StepLease> reserve(std::span<const SpanRequest> requests) {
    auto lease = sequences_.reserve(requests);
    lease->on_abandon = [this](StepLease& abandoned) {
      sequences_.abandon(abandoned);
      for (size_t i = 0; i < abandoned.requests.size(); ++i) {
        if (sequences_.is_current(abandoned, i)) restore(abandoned.requests[i].slot);
      }
    };
    return lease;
  }

  void launch(StepLease& lease) {
    sequences_.begin(lease);
    lease.state = StepLease::State::kLaunched;
    RowLayout layout;
    layout.clear();
    std::vector<Span> spans;
    for (const SpanRequest& request : lease.requests) {
      const OnDevice& sequence = device_[static_cast<size_t>(request.slot)];
      Span span{request.slot,
                request.num_new_tokens,
                sequence.kv_len,
                static_cast<int>(sequence.tokens.size()),
                {}};
      if (span.is_sampled()) span.draft = draft_of(sequence, request.max_drafts);
      layout.append(span, sequence.tokens, sequences_.table().page_row(request.slot), kPage,
                    limits_.max_model_len, 0);
      spans.push_back(std::move(span));
    }
    const RowBatch rows{.num_rows = layout.num_rows(),
                        .num_spans = static_cast<int>(spans.size()),
                        .row_token = layout.token.data(),
                        .row_parent = layout.parent.data(),
                        .span_begin = layout.span_begin.data(),
                        .span_kv_len = layout.span_kv_len.data(),
                        .span_seq = layout.span_seq.data()};
    const testing::RunningPass pass{rows, sequences_.records(), kNumLayers, states_.data()};
    for (int span = 0; span < rows.num_spans; ++span) {
      for (int word = 0; word < testing::kStateWords; ++word) run_span(pass, span, word);
    }
    std::vector<int32_t> committed_row(layout.token.size()), num_computed;
    std::iota(committed_row.begin(), committed_row.end(), 0);
    for (size_t i = 0; i < spans.size(); ++i) {
      lease.results.push_back(accept(spans[i], layout, i, committed_row));
      num_computed.push_back(lease.results.back().num_computed);
    }
    move_records_cpu({}, {sequences_.records(), rows, num_computed.data(), committed_row.data()});
  }
  const std::vector<SpanResult>& collect(const StepLease& lease) { return lease.results; }
  void commit(StepLease& lease) {
    for (size_t i = 0; i < lease.requests.size(); ++i) {
      if (sequences_.is_current(lease, i)) sequences_.commit(lease, i, true, [] {});
    }
    lease.on_abandon = nullptr;
    lease.close();
  }

 private:
  struct OnDevice {
    Ids tokens;
    int kv_len = 0, limit = 0;
  };

  void restore(int slot) {
    const auto tokens = table().tokens(slot);
    device_[static_cast<size_t>(slot)] = {
        {tokens.begin(), tokens.end()}, table().kv_len(slot), table().max_num_tokens(slot)};
  }

  Draft draft_of(const OnDevice& sequence, int num_wanted) const {
    Draft draft;
    draft.tokens.resize(static_cast<size_t>(num_wanted));
    draft.parents.resize(static_cast<size_t>(num_wanted));
    std::iota(draft.parents.begin(), draft.parents.end(), -1);
    testing::guess({&sequence.tokens.back(), static_cast<int>(sequence.tokens.size()), num_wanted,
                    draft.tokens.data(), makes_trees_ ? draft.parents.data() : nullptr, nullptr});
    return draft;
  }

  SpanResult accept(const Span& span, const RowLayout& layout, size_t index,
                    std::vector<int32_t>& committed_row) {
    OnDevice& sequence = device_[static_cast<size_t>(span.slot)];
    SpanResult result;
    result.slot = span.slot;
    result.num_computed = span.num_new_tokens;
    result.num_draft_tokens = span.draft.size();
    if (const int first = layout.first_choice[index]; first >= 0) {
      Ids chosen;
      for (int i = 0; i <= span.draft.size(); ++i) {
        chosen.push_back(best(layout, layout.sample_row[static_cast<size_t>(first + i)]));
      }
      const std::vector<int32_t> path = accept_drafts(span.draft, chosen);
      const int first_draft = layout.span_begin[index] + span.num_new_tokens;
      for (size_t i = 0; i <= path.size(); ++i) {
        if (static_cast<int>(sequence.tokens.size()) == sequence.limit) break;
        result.token_ids.push_back(chosen[i == 0 ? 0 : static_cast<size_t>(1 + path[i - 1])]);
        sequence.tokens.push_back(result.token_ids.back());
        if (i > 0) {
          committed_row[static_cast<size_t>(first_draft) + i - 1] = first_draft + path[i - 1];
          ++result.num_computed;
          ++result.num_accepted_tokens;
        }
      }
      if (static_cast<int>(sequence.tokens.size()) == sequence.limit) {
        result.finish = FinishReason::kLength;
      }
    }
    sequence.kv_len += result.num_computed;
    return result;
  }

  int32_t best(const RowLayout& layout, int32_t row) {
    std::vector<float> logits(kRunningVocab);
    for (int column = 0; column < kRunningVocab; ++column) {
      testing::run_logit(
          {states_.data(), layout.token.data(), &row, kNumLayers, kRunningVocab, logits.data()}, 0,
          column);
    }
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }

  bool makes_trees_;
  SequenceLimits limits_;
  Sequences sequences_;
  std::vector<OnDevice> device_;
  std::vector<uint32_t> states_;
};

}  // namespace

TEST(states_are_right_with_two_steps_under_way) {
  for (const bool makes_trees : {false, true}) {
    for (const int num_rows_behind : {0, 1}) {
      for (size_t i = 0; i < testing::kSchedules.size(); ++i) {
        Engine engine(makes_trees, num_rows_behind);
        for (const int num_jobs : {6, 6, 14, 14}) {
          const testing::RunningJobs work(num_jobs, static_cast<int>(i) + 1);
          testing::RandomSchedule schedule(engine, kMaxDrafts, work, testing::kSchedules[i],
                                           num_jobs);
          schedule.run();
          CHECK_GT(schedule.num_accepted, 0);
        }
        CHECK_GT(engine.num_found(), 0);
      }
    }
  }
}
