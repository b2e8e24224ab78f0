#ifdef OPENSPEC_CUDA

// Steps with a grammar in them, in three launches: drafts and rows; the forward pass, while the
// host fills the masks of the rows; and the choices.
//
// The host is a step ahead, but once the rows are laid out, what came of the step before is in its
// ring, for the device works in order. So each state follows its sequence's tokens before they are
// collected, and whatever becomes of a step, the next one brings the states back to what counts.

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "runtime/device_step.h"

namespace openspec {

bool DeviceStep::has_masks(const StepLease& lease) const {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (lease.is_sampled[i] && context_.table.grammar(lease.requests[i].slot) != nullptr) {
      return true;
    }
  }
  return false;
}

void DeviceStep::run_masked(const StepLease& lease, const StepShape& shape, int num_samples) {
  run_part(row_graphs_, shape, [&] { enqueue_rows(shape, num_samples); });
  download_rows(shape);
  is_laid_out_.record(stream_.handle());
  run_part(score_graphs_, shape, [&] { score(row_batch(shape)); });
  is_laid_out_.wait();
  fill_masks(lease, num_samples);
  upload_masks();
  run_part(choice_graphs_, shape, [&] { enqueue_choices(shape, num_samples, /*has_masks=*/true); });
}

void DeviceStep::run_part(Graphs& graphs, const StepShape& shape,
                          const std::function<void()>& enqueue) {
  if (!book_.shapes().contains(shape)) return enqueue();
  auto graph = graphs.find(shape);
  // All that is launched has run before, as a part of the shape's own graph.
  if (graph == graphs.end()) graph = graphs.try_emplace(shape, stream_.handle(), enqueue).first;
  graph->second.launch(stream_.handle());
}

/// Granted drafts, the sample of each last known token, and the drafts themselves: [S], [S], [S, D]
/// and [S, D], S the room of the shape and D the most drafts of a sequence.
void DeviceStep::download_rows(const StepShape& shape) {
  const size_t seqs = index(shape.num_spans), drafts = seqs * index(drafts_per_seq());
  const size_t bytes = (2 * seqs + 2 * drafts) * sizeof(int32_t);
  if (laid_out_.bytes() < bytes) laid_out_ = Buffer(bytes, Memory::kPinned);
  const Proposals proposed = proposals(shape.has_trees, shape.num_spans);
  laid_out_spans_ = seqs;
  laid_out_trees_ = proposed.parents != nullptr;
  auto* to = laid_out_.as<int32_t>();
  const auto download = [&](const int32_t* from, size_t count) {
    device::copy_to_host(to, from, count * sizeof(int32_t), stream_.handle());
    to += count;
  };
  download(arrays_.num_granted, seqs);
  download(arrays_.first_choice, seqs);
  download(proposed.tokens, drafts);
  if (laid_out_trees_) download(proposed.parents, drafts);
}

std::vector<int32_t> DeviceStep::known_tokens(int slot, uint64_t serial) const {
  const std::span<const int32_t> committed = context_.table.tokens(slot);
  std::vector<int32_t> known(committed.begin(), committed.end());
  for (const LaunchedSpan& launched : launched_) {
    if (launched.slot != slot || launched.serial != serial) continue;
    const size_t entry =
        index(launched.ring_index) * index(context_.config.max_num_seqs) + launched.span;
    const int32_t* tokens = arrays_.outcome.tokens + entry * index(1 + drafts_per_seq());
    known.insert(known.end(), tokens, tokens + arrays_.outcome.outcomes[entry].num_tokens);
  }
  return known;
}

void DeviceStep::fill_masks(const StepLease& lease, int num_samples) {
  const SequenceTable& table = context_.table;
  const size_t most = index(drafts_per_seq());
  const auto* num_granted = laid_out_.as<int32_t>();
  const int32_t* first_choice = num_granted + laid_out_spans_;
  const int32_t* tokens = first_choice + laid_out_spans_;
  const int32_t* parents = laid_out_trees_ ? tokens + laid_out_spans_ * most : nullptr;
  masks_.begin(index(num_samples));
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    GrammarState* grammar = table.grammar(slot);
    // One that ended in the step before has no rows.
    if (grammar == nullptr || first_choice[i] < 0) continue;
    const std::vector<int32_t> known = known_tokens(slot, lease.serials[i]);
    grammar->sync(std::span(known).subspan(index(table.prompt_len(slot))));
    Draft draft;
    for (size_t k = i * most; k < i * most + index(num_granted[i]); ++k) {
      draft.append(tokens[k]);
      if (parents != nullptr) draft.parents.back() = parents[k];
    }
    masks_.add(table, slot, known, draft, index(first_choice[i]));
  }
}

void DeviceStep::upload_masks() {
  const std::vector<int32_t>& samples = masks_.sample_mask();
  const size_t num_bytes = index(masks_.num_masks()) * masks_.num_words() * sizeof(int32_t);
  const size_t sample_bytes = samples.size() * sizeof(int32_t);
  const size_t sample_room = index(context_.config.max_num_batched_tokens) * sizeof(int32_t);
  if (sample_mask_.bytes() == 0 || num_bytes > mask_words_.bytes()) {
    synchronize();  // what is freed may be in use, and graphs have its address
    choice_graphs_.clear();
    const size_t room = std::bit_ceil(std::max(num_bytes, size_t{1} << 20));
    Buffer words(room, Memory::kDevice), sample_mask(sample_room, Memory::kDevice),
        staging(sample_room + room, Memory::kPinned);
    mask_words_ = std::move(words);  // all or none
    sample_mask_ = std::move(sample_mask);
    masks_staging_ = std::move(staging);
  }
  // The step before has taken its own from here: the rows of this one are laid out.
  auto* staged = masks_staging_.as<std::byte>();
  std::memcpy(staged, samples.data(), sample_bytes);
  device::copy_to_device(sample_mask_.data(), staged, sample_bytes, stream_.handle());
  if (num_bytes == 0) return;
  std::memcpy(staged + sample_room, masks_.masks(), num_bytes);
  device::copy_to_device(mask_words_.data(), staged + sample_room, num_bytes, stream_.handle());
}

void DeviceStep::note_launched(const StepLease& lease) {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    if (context_.table.grammar(slot) == nullptr) continue;
    launched_.push_back({lease.ring_index, i, slot, lease.serials[i]});
  }
}

void DeviceStep::note_collected(const StepLease& lease) {
  std::erase_if(launched_, [&](const LaunchedSpan& launched) {
    return launched.ring_index == lease.ring_index;
  });
}

}  // namespace openspec

#endif
