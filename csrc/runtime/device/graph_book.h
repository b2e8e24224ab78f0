#pragma once

#include <compare>
#include <set>
#include <vector>

#include "runtime/state/lease.h"

namespace openspec {

/// What a step launches on the device; the key of its graph.
struct StepShape {
  int num_rows = 0;
  int num_spans = 0;      // room
  bool proposes = false;  // on the device
  bool has_trees = false;
  bool is_general = true;      // false: no sequence is longer than short_kv_len()
  bool keeps_rows = false;     // for the drafter, which else learns from them
  bool has_long_spans = true;  // false: none has more rows than RunnerConfig::step_rows()
  auto operator<=>(const StepShape&) const = default;
};

/// Which shapes of steps there are graphs of, and which of them serves a step: plain data, decided
/// once from sizes and the drafter's needs.
///
/// Graphs have 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192 or 256 rows, where it matters for
/// several numbers of sequences. A step takes the smallest graph that has room; surplus rows are
/// padding. A larger step (prompts) is launched op by op.
class GraphBook {
 public:
  struct Limits {
    int max_num_seqs = 1;
    int max_num_batched_tokens = 1, max_num_logits_rows = 1;
    int max_draft_tokens = 0;
    int draft_room = 0;            // drafts and forced tokens of a sequence
    bool works_on_arrays = false;  // the drafter, as the next; see Drafter and DrafterNeeds
    bool makes_trees = false, is_costly = false;
    // The target: whether trees are drafted for it, and long spans have kernels of their own.
    bool takes_trees = true, parts_spans = false;
    int most_short_spans = 0;  // most_short_spans_cuda()

    /// Whether the step itself asks the drafter.
    bool proposes_on_device() const { return max_draft_tokens > 0 && works_on_arrays; }
    /// Rows of a sequence's known token and all its drafts.
    int most_draft_rows() const { return 1 + draft_room; }
  };
  explicit GraphBook(const Limits& limits);

  /// By rows, then room for sequences.
  const std::set<StepShape>& shapes() const { return shapes_; }
  /// The smallest recorded shape that has room for `least`; null: there is none.
  const StepShape* find(const StepShape& least) const;
  /// The smallest recorded shape that has room for `least`, or `least` where there is none.
  StepShape choose(StepShape least) const;

  /// Of steps that are not recorded: of twice the most rows, four times and so on, up to the most
  /// there may be.
  std::vector<StepShape> larger_shapes() const;
  /// The steps that are worth timing, by rows.
  std::vector<StepKind> step_kinds() const;
  /// Up to so many rows any other step takes as long as the next larger of these.
  int most_sized_rows() const { return 2 * most_rows(); }

 private:
  int most_rows() const { return shapes_.rbegin()->num_rows; }
  void add_shapes(int num_rows);

  Limits limits_;
  std::set<StepShape> shapes_;
};

}  // namespace openspec
