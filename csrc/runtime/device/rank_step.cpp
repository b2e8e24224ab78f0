#ifdef OPENSPEC_CUDA

#include "runtime/device/rank_step.h"

#include <algorithm>
#include <utility>

namespace openspec {

RankStep::RankStep(StepContext context, const StepInputs& inputs, const GraphBook& book)
    : context_(std::move(context)),
      inputs_(inputs),
      book_(book),
      arrays_(context_.config, context_.drafter.needs(), context_.bases.num_pages(),
              stream_.handle()),
      mirror_(context_.config, context_.table, context_.bases, arrays_, stream_.handle()),
      stages_(context_, arrays_, stream_.handle()),
      masks_(context_.config, book, stages_, stream_.handle()) {
  for (auto* events : {&begun_, &ended_}) {
    events->reserve(StepInputs::kRing);
    for (int i = 0; i < StepInputs::kRing; ++i) events->emplace_back();
  }
}

void RankStep::prepare() {
  graphs_.clear();
  masks_.clear_graphs();
  if (context_.drafter.works_on_arrays()) context_.drafter.prepare(stages_.exec());
  for (const StepShape& shape : book_.shapes()) {
    // Once for real, without sequences: launching loads kernels and sets their limits, which has to
    // precede recording. The device works them off while the host records.
    stages_.begin(inputs_[0], {}, shape.num_spans);
    stages_.enqueue(shape, shape.num_rows);
    graphs_.try_emplace(shape, stream_.handle(), [&] { stages_.enqueue(shape, shape.num_rows); });
  }
  synchronize();
}

void RankStep::launch_others() {
  if (stages_.keeps_rows()) stages_.teach_kept(inputs_[0], /*num_slots=*/1, /*num_steps=*/1);
  stages_.merge(inputs_[0], *book_.shapes().begin(), /*num_spans=*/1, /*has_proposed=*/false);
  for (const StepShape& shape : book_.larger_shapes()) {
    stages_.begin(inputs_[0], {}, shape.num_spans);
    stages_.enqueue(shape, std::min(shape.num_rows, context_.config.max_num_logits_rows));
  }
  synchronize();
}

void RankStep::begin(const StepOrder& order) {
  const StepInputArrays& input = inputs_[order.header.ring_index];
  if (order.num_kept_slots > 0) {
    stages_.teach_kept(input, order.num_kept_slots, order.num_kept_steps);
  }
  begun_[as_index(order.header.ring_index)].record(stream_.handle());
  if (stages_.proposes_on_host()) arrays_.upload_proposals(input, stream_.handle());
  stages_.begin(input, order.header, order.shape.num_spans);
}

void RankStep::run(const StepOrder& order) {
  const auto graph = graphs_.find(order.shape);
  if (graph != graphs_.end()) {
    graph->second.launch(stream_.handle());
  } else {
    stages_.enqueue(order.shape, order.num_samples);
  }
}

void RankStep::end(const StepOrder& order) {
  ended_[as_index(order.header.ring_index)].record(stream_.handle());
}

}  // namespace openspec

#endif
