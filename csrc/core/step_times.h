#pragma once

#include <span>
#include <utility>
#include <vector>

#include "core/expert_sharing.h"

namespace openspec {

/// Seconds of a step by its number of rows; between the measured points a straight line. Past the
/// last one a row takes what rows take there on average: with few rows further ones cost next to
/// nothing, because a step has to read the weights, and with many they do not. As far as steps come
/// in sizes, a count between two of them takes the time of the larger.
class StepTimes {
 public:
  StepTimes() = default;
  /// `points` are (rows, seconds) with rising rows, up to `most_sized_rows` sizes. Times are made
  /// non-decreasing.
  explicit StepTimes(std::vector<std::pair<int, double>> points, int most_sized_rows = 0);

  bool empty() const { return points_.empty(); }
  double seconds(double num_rows) const;
  /// Rows of the largest measured step.
  int most_rows() const { return points_.empty() ? 0 : points_.back().first; }

 private:
  std::vector<std::pair<int, double>> points_;
  int most_sized_rows_ = 0;
};

/// What steps of some number of sequences are expected to take. Rows of a mixture of experts cost
/// what the experts cost that they bring: the rows of a timed step were unrelated, and padding goes
/// to no expert.
class StepPrices {
 public:
  StepPrices(StepTimes times) : times_(std::move(times)) {}
  /// `experts`: of a layer in the timed steps, in place of their seconds; `sharing`: the caller's.
  StepPrices(StepTimes times, StepTimes experts, double seconds_per_expert, int num_seqs,
             const ExpertSharing& sharing)
      : times_(std::move(times)),
        experts_(std::move(experts)),
        seconds_per_expert_(seconds_per_expert),
        num_seqs_(num_seqs),
        sharing_(&sharing) {}

  double seconds(int num_rows) const;
  int most_rows() const { return times_.most_rows(); }

 private:
  StepTimes times_, experts_;
  double seconds_per_expert_ = 0.0;
  int num_seqs_ = 1;
  const ExpertSharing* sharing_ = nullptr;
};

/// Seconds of a step by its numbers of sequences and rows, measured on this machine.
class StepTable {
 public:
  struct Point {
    int num_seqs, num_rows;
    double seconds;
    double num_experts = 0.0;  // that its rows went to, of a layer on average
  };
  StepTable() = default;
  /// `most_sized_rows`: up to so many rows a step takes as long as the next larger one that has
  /// room for its sequences and rows; 0: it takes as long as one of the next smaller number of
  /// sequences.
  StepTable(std::vector<Point> points, int most_sized_rows);

  bool empty() const { return points_.empty(); }
  /// `value`: by which the times are those of the points.
  StepTimes of(int num_seqs, double Point::* value = &Point::seconds) const;
  /// What a further expert of each layer takes, apart from what a row does; 0: the points do not
  /// tell.
  double seconds_per_expert() const;
  /// Points of steps with a drafter, of which each number of sequences was timed once, with any
  /// number of rows: what it adds to a step of this table it adds to those with other rows, too.
  std::vector<Point> with_drafter(std::span<const Point> timed) const;

 private:
  std::vector<Point> points_;  // by sequences, then rows
  int most_sized_rows_ = 0;
};

}  // namespace openspec
