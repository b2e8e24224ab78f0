#include "runtime/device/graph_book.h"

#include <algorithm>
#include <utility>

#include "kernels/attention/span_attention.h"

namespace openspec {

namespace {

constexpr int kGraphRows[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};

}  // namespace

GraphBook::GraphBook(const Limits& limits) : limits_(limits) {
  const int most = std::min(limits.max_num_batched_tokens, limits.max_num_logits_rows);
  for (int num_rows : kGraphRows) {
    if (num_rows <= most) add_shapes(num_rows);
  }
}

void GraphBook::add_shapes(int num_rows) {
  const int most_spans = std::min(num_rows, limits_.max_num_seqs);
  const bool is_on_device = limits_.proposes_on_device();
  const auto add_spans = [&](StepShape shape) {
    shapes_.insert(shape);
    if (num_rows < kMinRowsOfLongSpans && !limits_.parts_spans) return;
    shape.has_long_spans = false;
    shapes_.insert(shape);
  };
  // Chains of few short sequences are attended to faster, and blocks that are drafted for them.
  const auto add_lengths = [&](StepShape shape) {
    add_spans(shape);
    if (num_rows < kMinRowsOfFewSpans || num_rows > kMaxRowsOfFewSpans) return;
    if (shape.has_trees && !(shape.proposes && limits_.is_costly)) return;
    shape.is_general = false;
    for (const int most : {std::max(limits_.most_short_spans, kFewSpans), kFewSpans, 1}) {
      shape.num_spans = std::min(shape.num_spans, most);
      if (most == kFewSpans || num_rows <= kMaxRowsOfShortSpans) add_spans(shape);
    }
  };
  const auto add = [&](StepShape shape) {
    add_lengths(shape);
    if (shape.proposes || !limits_.is_costly || !limits_.works_on_arrays) return;
    // Where the drafter is left out it may learn later.
    shape.keeps_rows = true;
    add_lengths(shape);
  };
  // A drafter that costs nothing is always asked.
  if (!is_on_device || limits_.is_costly) add({num_rows, most_spans, false, false});
  if (limits_.max_draft_tokens > 0 && !is_on_device && limits_.takes_trees) {
    add({num_rows, most_spans, false, true});
  }
  if (is_on_device && !limits_.is_costly) add({num_rows, most_spans, true, limits_.makes_trees});
  if (is_on_device && limits_.is_costly) {
    // Drafts cost time per sequence: each has two rows at least, and all its drafts at most.
    const int most_rows = 1 + limits_.max_draft_tokens;
    const int least_spans = std::min(std::max(1, num_rows / most_rows), most_spans);
    for (int num_spans = std::min(num_rows / 2, most_spans); num_spans > 0;) {
      add({num_rows, num_spans, true, limits_.makes_trees});
      if (num_spans <= least_spans) break;
      num_spans = std::max(least_spans, num_spans / 2);
    }
  }
}

const StepShape* GraphBook::find(const StepShape& least) const {
  const auto found = std::find_if(shapes_.lower_bound({.num_rows = least.num_rows}), shapes_.end(),
                                  [&](const StepShape& shape) {
                                    return shape.num_spans >= least.num_spans &&
                                           shape.proposes == least.proposes &&
                                           shape.has_trees == least.has_trees &&
                                           shape.keeps_rows == least.keeps_rows &&
                                           (shape.is_general || !least.is_general) &&
                                           (shape.has_long_spans || !least.has_long_spans);
                                  });
  return found == shapes_.end() ? nullptr : &*found;
}

StepShape GraphBook::choose(StepShape least) const {
  if (const StepShape* found = find(least)) return *found;
  least.is_general = true;
  return least;
}

std::vector<StepShape> GraphBook::larger_shapes() const {
  std::vector<StepShape> shapes;
  const int most = limits_.max_num_batched_tokens;
  for (int num_rows = most_rows(); num_rows < most;) {
    num_rows = std::min(2 * num_rows, most);
    const int num_spans = std::min(num_rows / 2, limits_.max_num_seqs);
    shapes.push_back({num_rows, num_spans});
    if (!limits_.proposes_on_device()) continue;
    shapes.push_back({num_rows, num_spans, true, limits_.makes_trees});
  }
  return shapes;
}

std::vector<StepKind> GraphBook::step_kinds() const {
  const bool is_costly = limits_.is_costly;
  // Without a drafter only what a grammar forces is verified, which pays by any close time.
  const bool has_free_drafts = limits_.max_draft_tokens > 0 && !is_costly;
  std::set<std::pair<int, std::pair<bool, int>>> kinds;  // rows, whether it proposes, sequences
  for (const StepShape& shape : shapes_) {
    kinds.insert({shape.num_rows, {shape.proposes && is_costly, shape.num_spans}});
    // Drafts that cost nothing are verified in the graphs of as many sequences as rows.
    const int least = (shape.num_rows + limits_.most_draft_rows() - 1) / limits_.most_draft_rows();
    for (int num_seqs = shape.num_spans; has_free_drafts && num_seqs > least;) {
      num_seqs = std::max(least, num_seqs / 2);
      kinds.insert({shape.num_rows, {false, num_seqs}});
    }
  }
  // Larger steps have any size; drafts there stand beside prompts. Linears take them in bands of
  // rows, so that up to most_sized_rows() their times rise in steps.
  for (int rows : {most_rows() + most_rows() / 2, most_sized_rows(), 4 * most_rows()}) {
    if (rows > limits_.max_num_batched_tokens) break;
    kinds.insert({rows, {false, limits_.max_num_seqs}});
    for (int num_seqs = limits_.max_num_seqs; is_costly && num_seqs > 1; num_seqs /= 4) {
      if (2 * num_seqs <= rows) kinds.insert({rows, {true, num_seqs}});
    }
  }
  std::vector<StepKind> list;
  for (const auto& [rows, kind] : kinds) list.push_back({kind.second, rows, kind.first});
  return list;
}

}  // namespace openspec
