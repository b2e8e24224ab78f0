#pragma once

namespace openspec {

/// How many experts of a layer the rows of a step go to.
///
/// Rows that have nothing in common miss an expert independently: m of them go to
/// E * (1 - (1 - k / E)^m) of E experts, k of each row. Rows of text have something in common: so a
/// further sequence's row counts as a part of such a row, and so does a further row of the same
/// sequence, as a part of its own. Both are learned from what steps went to.
class ExpertSharing {
 public:
  ExpertSharing(int num_experts, int top_k) : num_experts_(num_experts), top_k_(top_k) {}

  /// Expected experts of a layer, of so many sequences that have a row each, and further rows.
  double expected(int num_seqs, double num_rows) const;
  /// The layers of such a step went to so many experts on average.
  void observe(int num_seqs, int num_rows, double num_experts);

  /// Unrelated rows that a row of a further sequence counts as, and a sequence's further row.
  double of_sequences() const { return sequences_.value(); }
  double of_drafts() const { return drafts_.value(); }

 private:
  /// A ratio of sums of which old parts fade; it begins as if some rows had been unrelated.
  struct Share {
    double counted = 4.0, rows = 4.0;
    double value() const { return counted / rows; }
    void observe(double new_counted, double new_rows);
  };
  int num_experts_, top_k_;
  Share sequences_, drafts_;
};

}  // namespace openspec
