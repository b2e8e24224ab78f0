#ifdef OPENSPEC_CUDA

#include "runtime/device/rank_masks.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace openspec {

void RankMasks::prepare(const StepShape& shape) {
  if (stages_.drafts(shape)) record(draft_graphs_, shape, [&] { stages_.propose(shape); });
  record(score_graphs_, shape, [&] { stages_.score(shape); });
}

void RankMasks::propose(const StepShape& shape) {
  run(draft_graphs_, shape, [&] { stages_.propose(shape); });
}

void RankMasks::score(const StepShape& shape) {
  run(score_graphs_, shape, [&] { stages_.score(shape); });
}

void RankMasks::prepare_choice(const StepShape& shape, size_t mask_bytes) {
  if (sample_mask_.bytes() == 0 || mask_bytes > mask_words_.bytes()) {
    device::synchronize(stream_);  // what is freed may be in use, and graphs have its address
    choice_graphs_.clear();
    Buffer words(std::bit_ceil(std::max(mask_bytes, size_t{1} << 20)), Memory::kDevice),
        sample_mask(as_index(config_.max_num_batched_tokens) * sizeof(int32_t), Memory::kDevice);
    mask_words_ = std::move(words);  // both or none
    sample_mask_ = std::move(sample_mask);
  }
  record(choice_graphs_, shape, [&] { enqueue_choices(shape, shape.num_rows); });
}

void RankMasks::choose(const StepShape& shape, int num_samples, std::span<const std::byte> masks,
                       std::span<const std::byte> samples) {
  const auto upload = [&](Buffer& to, std::span<const std::byte> from) {
    if (from.empty()) return;
    device::copy_to_device(to.data(), from.data(), from.size(), uploads_.handle());
  };
  upload(sample_mask_, samples);
  upload(mask_words_, masks);
  is_uploaded_.record(uploads_.handle());
  is_uploaded_.hold(stream_);
  run(choice_graphs_, shape, [&] { enqueue_choices(shape, num_samples); });
}

void RankMasks::enqueue_choices(const StepShape& shape, int num_samples) {
  const DeviceStages::Masks masks{mask_words_.as<int32_t>(), sample_mask_.as<int32_t>()};
  stages_.enqueue_choices(shape, num_samples, &masks);
}

void RankMasks::record(StepGraphs& graphs, const StepShape& shape,
                       const std::function<void()>& enqueue) {
  if (!book_.shapes().contains(shape) || graphs.contains(shape)) return;
  graphs.try_emplace(shape, stream_, enqueue);
}

void RankMasks::run(const StepGraphs& graphs, const StepShape& shape,
                    const std::function<void()>& enqueue) {
  const auto graph = graphs.find(shape);
  if (graph == graphs.end()) return enqueue();
  graph->second.launch(stream_);
}

void RankMasks::clear_graphs() {
  for (StepGraphs* graphs : {&draft_graphs_, &score_graphs_, &choice_graphs_}) graphs->clear();
}

}  // namespace openspec

#endif
