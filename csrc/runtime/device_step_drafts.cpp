// How many drafts a step of DeviceStep has, and those that the host proposes.

#include <algorithm>

#include "kernels/attention/span_attention.h"
#include "runtime/device_step.h"

namespace openspec {

bool DeviceStep::propose_on_host(const StepLease& lease, std::byte* input) {
  const auto most = index(context_.config.max_draft_tokens);
  auto* num_drafts = reinterpret_cast<int32_t*>(input + input_.num_drafts);
  auto* tokens = reinterpret_cast<int32_t*>(input + input_.drafts);
  auto* parents = reinterpret_cast<int32_t*>(input + input_.parents);
  std::vector<ProposeRequest> wanted;
  std::vector<size_t> span_of;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    num_drafts[i] = 0;
    if (lease.requests[i].max_drafts == 0) continue;
    wanted.push_back({lease.requests[i].slot, lease.requests[i].max_drafts});
    span_of.push_back(i);
  }
  if (wanted.empty()) return false;
  std::vector<Draft> drafts(wanted.size());
  try {
    context_.drafter.propose_on_host(context_.table, wanted, drafts);
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
    return false;
  }
  bool has_trees = false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t first = span_of[i] * most;
    const size_t offered = std::min(index(drafts[i].size()), most);
    // Behind a long prompt only a chain fits attention's limit.
    const auto num_rows = index(lease.requests[span_of[i]].num_new_tokens) + offered;
    const bool may_be_tree = num_rows <= index(kMaxTreeRows);
    size_t count = 0;
    for (; count < offered; ++count) {
      const bool is_next = drafts[i].parents[count] == static_cast<int>(count) - 1;
      if (!is_next && !may_be_tree) break;
      has_trees = has_trees || !is_next;
      tokens[first + count] = drafts[i].tokens[count];
      parents[first + count] = drafts[i].parents[count];
    }
    num_drafts[span_of[i]] = static_cast<int32_t>(count);
  }
  return has_trees;
}

DeviceStep::Shape DeviceStep::choose_shape(StepLease& lease, bool host_has_trees) {
  const RunnerConfig& config = context_.config;
  const DrafterNeeds& needs = context_.drafter.needs();
  const bool is_on_device = config.max_draft_tokens > 0 && num_steps_ahead() > 0;
  const int max_rows = config.max_num_batched_tokens;
  int num_known = 0, num_drafts = 0;
  bool is_general = false, has_long_spans = false;
  std::vector<DraftOffer> offers;
  for (const SpanRequest& request : lease.requests) {
    const double availability = context_.table.availability(request.slot).ratio();
    num_known += request.num_new_tokens;
    num_drafts += request.max_drafts;
    is_general = is_general || context_.table.num_tokens(request.slot) > kShortKvLen;
    has_long_spans =
        has_long_spans || request.num_new_tokens + request.max_drafts > most_draft_rows();
    offers.push_back({.num_drafts = request.max_drafts,
                      .ratio = context_.table.acceptance(request.slot).ratio(),
                      .availability = num_steps_ahead() == 0 ? 1.0 : availability,
                      .num_depths = expected_depths(context_)});
  }
  const auto num_spans = static_cast<int>(lease.requests.size());
  bool proposes = num_drafts > 0 || !needs.is_costly;
  if (config.adaptive && has_step_times() && num_drafts > 0) {
    if (needs.is_costly) proposes = drafts_pay(lease, offers, max_rows, 0.0);
    if (!proposes) offers.clear();
    num_drafts = plan_drafts(lease, offers, needs.is_costly && proposes, max_rows, 0.0).num_drafts;
  }
  int num_rows = num_known + num_drafts;
  // A drafter that works on the host puts its proposals into the input.
  proposes = proposes && is_on_device;
  if (proposes && needs.is_costly) {
    num_rows = std::max(num_rows, 2 * num_spans);
    if (num_rows > max_rows) {
      num_rows = num_known;
      proposes = false;
    }
  }
  Shape shape{num_rows,      num_spans,
              proposes,      proposes ? needs.makes_trees : host_has_trees,
              is_general,    !proposes && may_keep_rows(context_, lease),
              has_long_spans};
  const auto graph = find_graph(shape);
  if (graph != graphs_.end()) return graph->first;
  shape.is_general = true;
  return shape;
}

std::vector<DeviceStep::Shape> DeviceStep::shapes_of(int num_rows) const {
  const RunnerConfig& config = context_.config;
  const DrafterNeeds& needs = context_.drafter.needs();
  const int num_drafts = config.max_draft_tokens;
  const int most_spans = std::min(num_rows, config.max_num_seqs);
  const bool is_on_device = num_drafts > 0 && num_steps_ahead() > 0;
  std::vector<Shape> shapes;
  // A drafter that costs nothing is always asked.
  if (!is_on_device || needs.is_costly) shapes.push_back({num_rows, most_spans, false, false});
  if (num_drafts > 0 && !is_on_device) shapes.push_back({num_rows, most_spans, false, true});
  if (is_on_device && !needs.is_costly) {
    shapes.push_back({num_rows, most_spans, true, needs.makes_trees});
  }
  if (is_on_device && needs.is_costly) {
    // Drafts cost time per sequence: each has two rows at least, and all its drafts at most.
    const int least_spans = std::min(std::max(1, num_rows / (1 + num_drafts)), most_spans);
    for (int num_spans = std::min(num_rows / 2, most_spans); num_spans > 0;) {
      shapes.push_back({num_rows, num_spans, true, needs.makes_trees});
      if (num_spans <= least_spans) break;
      num_spans = std::max(least_spans, num_spans / 2);
    }
  }
  // Where the drafter is left out it may learn later.
  for (size_t i = 0, count = shapes.size(); needs.is_costly && i < count; ++i) {
    Shape keeping = shapes[i];
    keeping.keeps_rows = context_.drafter.works_on_arrays();
    if (!keeping.proposes && keeping.keeps_rows) shapes.push_back(keeping);
  }
  // Chains of few short sequences are attended to faster, and blocks that are drafted for them.
  const bool has_short = num_rows >= kMinRowsOfFewSpans && num_rows <= kMaxRowsOfFewSpans;
  for (size_t i = 0, count = shapes.size(); has_short && i < count; ++i) {
    Shape few = shapes[i];
    few.num_spans = std::min(few.num_spans, kFewSpans);
    few.is_general = false;
    if (few.has_trees && !(few.proposes && needs.is_costly)) continue;
    shapes.push_back(few);
    few.num_spans = 1;
    if (num_rows <= kMaxRowsOfOneSpan) shapes.push_back(few);
  }
  for (size_t i = 0, count = shapes.size(); num_rows >= kMinRowsOfLongSpans && i < count; ++i) {
    shapes.push_back(shapes[i]);
    shapes.back().has_long_spans = false;
  }
  return shapes;
}

std::map<DeviceStep::Shape, device::Graph>::iterator DeviceStep::find_graph(const Shape& least) {
  return std::find_if(
      graphs_.lower_bound({.num_rows = least.num_rows}), graphs_.end(), [&](const auto& graph) {
        const Shape& shape = graph.first;
        return shape.num_spans >= least.num_spans && shape.proposes == least.proposes &&
               shape.has_trees == least.has_trees && shape.keeps_rows == least.keeps_rows &&
               (shape.is_general || !least.is_general) &&
               (shape.has_long_spans || !least.has_long_spans);
      });
}

}  // namespace openspec
