#include "runtime/step/step_backend.h"

#include <algorithm>

#include "kernels/drafts/kept_rows.h"
#include "kernels/ops.h"
#include "model/targets/target.h"
#include "model/weights/buffer.h"

namespace openspec {

void move_kv(const ExecContext& exec, const StepContext& context, const KvLayerView* layers,
             const PageTableView& pages, const CommittedStep& step) {
  ops::move_kv(exec, {.layers = layers,
                      .num_layers = static_cast<int>(context.kv_layers.size()),
                      .page_table = pages,
                      .rows = step.rows,
                      .num_computed = step.num_computed,
                      .committed_row = step.committed_row,
                      .dtype = context.config.dtype});
  if (context.records.data == nullptr) return;
  ops::move_records(exec, {.records = context.records,
                           .rows = step.rows,
                           .num_computed = step.num_computed,
                           .committed_row = step.committed_row});
}

bool StepBackend::may_keep_rows(const StepLease& lease) const {
  if (!context_.drafter.needs().is_costly || !context_.drafter.works_on_arrays()) return false;
  return std::all_of(lease.requests.begin(), lease.requests.end(),
                     [](const SpanRequest& request) { return request.num_new_tokens == 1; });
}

void StepBackend::note_failures(StepLease& lease) const {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const GrammarPlace* place = context_.table.grammar(lease.requests[i].slot);
    if (place == nullptr || place->failure().message.empty()) continue;
    lease.failures.resize(lease.requests.size());
    lease.failures[i] = place->failure();
  }
}

ExpertCounts StepBackend::expert_counts() const {
  const ExpertCounts* counts = context_.target.expert_counts();
  return counts == nullptr ? ExpertCounts{} : copy_from(context_.config.device, counts, 1).front();
}

int StepBackend::most_kept_steps() const {
  return std::min(kMaxKeptRows, context_.config.max_num_batched_tokens);
}

}  // namespace openspec
