#include "core/step_times.h"

#include <algorithm>
#include <map>

#include "core/check.h"

namespace openspec {

StepTimes::StepTimes(std::vector<std::pair<int, double>> points, int most_sized_rows)
    : points_(std::move(points)), most_sized_rows_(most_sized_rows) {
  for (size_t i = 1; i < points_.size(); ++i) {
    OPENSPEC_CHECK_ARG(points_[i].first > points_[i - 1].first, "row counts must rise");
    // More rows never take less time; a smaller reading is noise.
    points_[i].second = std::max(points_[i].second, points_[i - 1].second);
  }
}

double StepTimes::seconds(double num_rows) const {
  if (points_.empty()) return 0.0;
  if (points_.size() == 1 || num_rows <= points_.front().first) return points_.front().second;
  auto right = std::find_if(points_.begin(), points_.end(),
                            [&](const auto& point) { return point.first >= num_rows; });
  if (right == points_.end()) {
    const auto& [most, longest] = points_.back();
    return longest * num_rows / most;
  }
  if (right->first <= most_sized_rows_ && num_rows <= right->first) return right->second;
  const auto left = right - 1;
  const double slope = (right->second - left->second) / (right->first - left->first);
  return left->second + slope * (num_rows - left->first);
}

double StepPrices::seconds(int num_rows) const {
  const double seconds = times_.seconds(num_rows);
  if (seconds_per_expert_ == 0.0) return seconds;
  const double fewer = experts_.seconds(num_rows) - sharing_->expected(num_seqs_, num_rows);
  return std::max(seconds - seconds_per_expert_ * fewer, times_.seconds(1));
}

StepTable::StepTable(std::vector<Point> points, int most_sized_rows)
    : points_(std::move(points)), most_sized_rows_(most_sized_rows) {
  std::sort(points_.begin(), points_.end(), [](const Point& a, const Point& b) {
    return std::pair(a.num_seqs, a.num_rows) < std::pair(b.num_seqs, b.num_rows);
  });
}

StepTimes StepTable::of(int num_seqs, double Point::* value) const {
  std::map<int, double> best;  // by rows
  if (most_sized_rows_ > 0) {
    // The first that has room for the sequences has the least of it.
    for (const Point& point : points_) {
      if (point.num_seqs >= num_seqs) best.try_emplace(point.num_rows, point.*value);
    }
  } else if (!points_.empty()) {
    int nearest = points_.front().num_seqs;
    for (const Point& point : points_) {
      if (point.num_seqs <= num_seqs) nearest = point.num_seqs;
    }
    for (const Point& point : points_) {
      if (point.num_seqs == nearest) best.emplace(point.num_rows, point.*value);
    }
  }
  return StepTimes({best.begin(), best.end()}, most_sized_rows_);
}

double StepTable::seconds_per_expert() const {
  // Least squares of seconds = fixed + experts * a + rows * b, where a small step counts as much as
  // a large one. Sums of products of (1, experts, rows, seconds), each over the seconds.
  constexpr size_t kLeastPoints = 4;  // three tell nothing of how wrong they are
  constexpr double kLeastRest = 1e-9;
  if (points_.size() < kLeastPoints || points_.front().num_experts == 0.0) return 0.0;
  double sums[3][4] = {};
  for (const Point& point : points_) {
    const double values[] = {1.0, point.num_experts, static_cast<double>(point.num_rows),
                             point.seconds};
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 4; ++j) {
        sums[i][j] += values[i] * values[j] / (point.seconds * point.seconds);
      }
    }
  }
  // Without what the fixed part explains, then without what rows explain.
  const auto left = [&](int i, int j) { return sums[i][j] - sums[0][i] * sums[0][j] / sums[0][0]; };
  const double rows = left(2, 2), both = left(1, 2), experts = left(1, 1);
  const double by_rows = rows > kLeastRest * sums[2][2] ? both / rows : 0.0;
  double rest = experts - by_rows * both, covered = left(1, 3) - by_rows * left(2, 3);
  if (rest <= kLeastRest * sums[1][1]) return 0.0;
  const double per_row = rows > 0.0 ? (left(2, 3) - both * covered / rest) / rows : 0.0;
  // Rows do not save time: then experts are all there is.
  if (per_row < 0.0) rest = experts, covered = left(1, 3);
  return std::max(0.0, covered / rest);
}

std::vector<StepTable::Point> StepTable::with_drafter(std::span<const Point> timed) const {
  std::vector<Point> points;
  for (const Point& point : timed) {
    const StepTimes plain = of(point.num_seqs);
    const StepTimes experts = of(point.num_seqs, &Point::num_experts);
    const double added = std::max(0.0, point.seconds - plain.seconds(point.num_rows));
    for (const Point& own : points_) {
      const int num_rows = std::max(own.num_rows, point.num_seqs);
      const bool is_known = !points.empty() && points.back().num_seqs == point.num_seqs &&
                            points.back().num_rows == num_rows;
      if (is_known) continue;
      points.push_back(
          {point.num_seqs, num_rows, plain.seconds(num_rows) + added, experts.seconds(num_rows)});
    }
  }
  return points;
}

}  // namespace openspec
