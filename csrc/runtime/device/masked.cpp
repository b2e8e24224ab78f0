#ifdef OPENSPEC_CUDA

#include "runtime/device/masked.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace openspec {

namespace {

// Sequences of a grammar have microseconds of work each: more threads cost more than they do.
constexpr int kMostThreads = 8;
// Of a step, what waiting for the one before it must save.
constexpr double kLeastSaved = 0.03;

}  // namespace

MaskedSteps::MaskedSteps(const StepContext& context, const GraphBook& book,
                         const DeviceBuffers& arrays, const StepRing& ring, DeviceStages& stages,
                         void* stream)
    : context_(context),
      book_(book),
      arrays_(arrays),
      ring_(ring),
      stages_(stages),
      stream_(stream),
      committed_(
          context.table, [this](int slot) { return context_.table.copy_tokens(slot); },
          [this]() -> ThreadPool& { return threads(); }),
      known_(
          context.table, [this](int slot) { return known_tokens(slot); },
          [this]() -> ThreadPool& { return threads(); }),
      masks_(context.config.target.vocab_size, Memory::kPinned) {}

bool MaskedSteps::has_masks(const StepLease& lease, const SequenceTable& table) {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (lease.is_sampled[i] && table.grammar(lease.requests[i].slot) != nullptr) return true;
  }
  return false;
}

void MaskedSteps::offer(StepLease& lease) {
  const SequenceTable& table = context_.table;
  lease.offers.assign(lease.requests.size(), {});
  std::vector<size_t> spans;
  std::vector<ProposeRequest> wanted, first_two;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    if (!lease.is_sampled[i] || request.max_drafts == 0) continue;
    if (table.grammar(request.slot) == nullptr) continue;
    spans.push_back(i);
    wanted.push_back({request.slot, request.max_drafts});
    first_two.push_back({request.slot, 2});
  }
  if (spans.empty()) return;
  // The host is a step ahead, and what a grammar offers after a step that runs is not known. To
  // wait for it leaves the device without work for some tens of microseconds, which a step that is
  // saved is worth, and a step of sequences whose grammars seldom have any is not.
  const auto expects_to_save = [&](std::span<const Draft> seen) {
    double num_saved = 0.0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool goes_on = !seen.empty() && seen[i].size() > 1;
      num_saved +=
          goes_on ? 1.0 : table.estimate(wanted[i].slot, kGrammarDrafts).availability.ratio();
    }
    return num_saved >= kLeastSaved * static_cast<double>(lease.requests.size());
  };
  std::vector<Draft> drafts(wanted.size());
  if (!expects_to_save({})) {
    // Where a run of them is under way, it goes on.
    std::vector<Draft> seen(wanted.size());
    committed_.offer(first_two, seen);
    if (!expects_to_save(seen)) return;
  }
  ring_.await_before(lease.ring_index);
  known_.offer(wanted, drafts);
  for (size_t i = 0; i < spans.size(); ++i) {
    lease.offers[spans[i]].add(kGrammarDrafts, std::move(drafts[i]));
  }
}

ThreadPool& MaskedSteps::threads() {
  if (threads_ == nullptr) {
    threads_ = std::make_unique<ThreadPool>(std::min(context_.config.num_threads, kMostThreads));
  }
  return *threads_;
}

void MaskedSteps::run(const StepLease& lease, const StepShape& shape, int num_samples) {
  if (shape.proposes) run_part(draft_graphs_, shape, [&] { stages_.propose(shape); });
  const bool has_offers =
      std::any_of(lease.offers.begin(), lease.offers.end(),
                  [](const MergedDraft& offer) { return offer.draft.size() > 0; });
  if (has_offers) {
    stages_.merge(lease.ring_index, shape, static_cast<int>(lease.requests.size()),
                  lease.has_proposed);
  }
  stages_.lay_out(shape, num_samples);
  download_rows(shape);
  is_laid_out_.record(stream_);
  run_part(score_graphs_, shape, [&] { stages_.score(shape); });
  is_laid_out_.wait();
  fill_masks(lease, num_samples);
  upload_masks();
  run_part(choice_graphs_, shape, [&] {
    const DeviceStages::Masks masks{mask_words_.as<int32_t>(), sample_mask_.as<int32_t>()};
    stages_.enqueue_choices(shape, num_samples, &masks);
  });
}

void MaskedSteps::run_part(StepGraphs& graphs, const StepShape& shape,
                           const std::function<void()>& enqueue) {
  if (!book_.shapes().contains(shape)) return enqueue();
  auto graph = graphs.find(shape);
  // All that is launched has run before, as a part of the shape's own graph.
  if (graph == graphs.end()) graph = graphs.try_emplace(shape, stream_, enqueue).first;
  graph->second.launch(stream_);
}

/// Granted drafts, the sample of each last known token, and the drafts themselves: [S], [S], [S, D]
/// and [S, D], S the room of the shape and D the most drafts of a sequence.
void MaskedSteps::download_rows(const StepShape& shape) {
  const size_t seqs = as_index(shape.num_spans), drafts = seqs * arrays_.drafts_per_seq;
  const size_t bytes = (2 * seqs + 2 * drafts) * sizeof(int32_t);
  if (laid_out_.bytes() < bytes) laid_out_ = Buffer(bytes, Memory::kPinned);
  const DeviceStages::Proposals proposed = stages_.proposals(shape.has_trees, shape.num_spans);
  laid_out_spans_ = seqs;
  laid_out_trees_ = proposed.parents != nullptr;
  auto* to = laid_out_.as<int32_t>();
  const auto download = [&](const int32_t* from, size_t count) {
    device::copy_to_host(to, from, count * sizeof(int32_t), stream_);
    to += count;
  };
  download(arrays_.num_granted, seqs);
  download(arrays_.first_choice, seqs);
  download(proposed.tokens, drafts);
  if (laid_out_trees_) download(proposed.parents, drafts);
}

std::vector<int32_t> MaskedSteps::known_tokens(int slot) const {
  std::vector<int32_t> known = context_.table.copy_tokens(slot);
  for (const LaunchedSpan& launched : launched_) {
    if (launched.slot != slot || launched.serial != context_.table.serial(slot)) continue;
    const std::span<const int32_t> tokens = ring_.tokens(launched.entry, launched.span);
    known.insert(known.end(), tokens.begin(), tokens.end());
  }
  return known;
}

void MaskedSteps::fill_masks(const StepLease& lease, int num_samples) {
  const SequenceTable& table = context_.table;
  const size_t most = arrays_.drafts_per_seq;
  const auto* num_granted = laid_out_.as<int32_t>();
  const int32_t* first_choice = num_granted + laid_out_spans_;
  const int32_t* tokens = first_choice + laid_out_spans_;
  const int32_t* parents = laid_out_trees_ ? tokens + laid_out_spans_ * most : nullptr;
  masks_.begin(as_index(num_samples));
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    // One that ended in the step before has no rows.
    if (table.grammar(slot) == nullptr || first_choice[i] < 0) continue;
    Draft draft;
    draft.append(tokens, parents, /*score_of=*/nullptr, i * most, num_granted[i]);
    masks_.add(slot, known_tokens(slot), std::move(draft), as_index(first_choice[i]));
  }
  masks_.fill(table, threads());
}

void MaskedSteps::upload_masks() {
  const std::vector<int32_t>& samples = masks_.sample_mask();
  const size_t num_bytes = as_index(masks_.num_masks()) * masks_.num_words() * sizeof(int32_t);
  const size_t sample_bytes = samples.size() * sizeof(int32_t);
  if (sample_mask_.bytes() == 0 || num_bytes > mask_words_.bytes()) {
    device::synchronize(stream_);  // what is freed may be in use, and graphs have its address
    choice_graphs_.clear();
    const size_t sample_room = as_index(context_.config.max_num_batched_tokens) * sizeof(int32_t);
    Buffer words(std::bit_ceil(std::max(num_bytes, size_t{1} << 20)), Memory::kDevice),
        sample_mask(sample_room, Memory::kDevice), staging(sample_room, Memory::kPinned);
    mask_words_ = std::move(words);  // all or none
    sample_mask_ = std::move(sample_mask);
    sample_staging_ = std::move(staging);
  }
  // The step before has taken its own from these: the rows of this one are laid out.
  std::memcpy(sample_staging_.data(), samples.data(), sample_bytes);
  const auto upload = [&](Buffer& to, const void* from, size_t bytes) {
    if (bytes > 0) device::copy_to_device(to.data(), from, bytes, uploads_.handle());
  };
  upload(sample_mask_, sample_staging_.data(), sample_bytes);
  upload(mask_words_, masks_.masks(), num_bytes);
  is_uploaded_.record(uploads_.handle());
  is_uploaded_.hold(stream_);
}

void MaskedSteps::note_launched(const StepLease& lease) {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    if (context_.table.grammar(slot) == nullptr) continue;
    launched_.push_back({lease.ring_index, i, slot, lease.serials[i]});
  }
}

void MaskedSteps::note_collected(const StepLease& lease) {
  std::erase_if(launched_,
                [&](const LaunchedSpan& launched) { return launched.entry == lease.ring_index; });
}

void MaskedSteps::clear_graphs() {
  for (StepGraphs* graphs : {&draft_graphs_, &score_graphs_, &choice_graphs_}) graphs->clear();
}

}  // namespace openspec

#endif
