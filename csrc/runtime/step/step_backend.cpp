#include "runtime/step/step_backend.h"

#include <algorithm>

#include "kernels/drafts/kept_rows.h"

namespace openspec {

bool StepBackend::may_keep_rows(const StepContext& context, const StepLease& lease) {
  if (!context.drafter.needs().is_costly || !context.drafter.works_on_arrays()) return false;
  return std::all_of(lease.requests.begin(), lease.requests.end(),
                     [](const SpanRequest& request) { return request.num_new_tokens == 1; });
}

int StepBackend::most_kept_steps(const RunnerConfig& config) {
  return std::min(kMaxKeptRows, config.max_num_batched_tokens);
}

}  // namespace openspec
