#ifdef OPENSPEC_CUDA

#include "runtime/device/masked.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace openspec {

namespace {

// Sequences of a grammar have microseconds of work each: more threads cost more than they do.
constexpr int kMostThreads = 8;
// Of a step, what waiting for the one before it must save.
constexpr double kLeastSaved = 0.03;

}  // namespace

MaskedSteps::MaskedSteps(const StepContext& context, const StepRing& ring, RankTeam& ranks)
    : context_(context),
      ring_(ring),
      ranks_(ranks),
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

void MaskedSteps::start(const StepLease& lease, const StepOrder& order) {
  const StepShape& shape = order.shape;
  prepare_rows(shape);
  ranks_.each([&](RankStep& rank) { rank.masks().prepare(shape); });
  ranks_.enqueue([&](RankStep& rank) {
    rank.begin(order);
    lay_out(rank, lease, order);
    rank.masks().score(shape);
  });
  // By then all have taken the masks of the step before from where these go.
  for (int rank = 0; rank < ranks_.size(); ++rank) ranks_[rank].masks().await_laid_out();
  ranks_.check();
  fill_masks(lease, order.num_samples);
  const size_t mask_bytes = as_index(masks_.num_masks()) * masks_.num_words() * sizeof(int32_t);
  const size_t sample_bytes = masks_.sample_mask().size() * sizeof(int32_t);
  std::memcpy(samples_.data(), masks_.sample_mask().data(), sample_bytes);
  ranks_.each([&](RankStep& rank) { rank.masks().prepare_choice(shape, mask_bytes); });
  ranks_.enqueue([&](RankStep& rank) {
    rank.masks().choose(shape, order.num_samples,
                        std::as_bytes(std::span(masks_.masks(), mask_bytes / sizeof(int32_t))),
                        {samples_.as<std::byte>(), sample_bytes});
    rank.end(order);
  });
}

/// The rows, with the drafts that have them.
void MaskedSteps::lay_out(RankStep& rank, const StepLease& lease, const StepOrder& order) {
  const StepShape& shape = order.shape;
  if (rank.stages().drafts(shape)) rank.masks().propose(shape);
  const bool has_offers =
      std::any_of(lease.offers.begin(), lease.offers.end(),
                  [](const MergedDraft& offer) { return offer.draft.size() > 0; });
  if (has_offers) {
    rank.stages().merge(ring_.input(lease.ring_index), shape,
                        static_cast<int>(lease.requests.size()),
                        lease.has_proposed || rank.stages().has_copies());
  }
  rank.stages().lay_out(shape, order.num_samples);
  if (&rank == &ranks_.first()) download_rows(rank);
  rank.masks().note_laid_out();
}

ThreadPool& MaskedSteps::threads() {
  if (threads_ == nullptr) {
    threads_ = std::make_unique<ThreadPool>(std::min(context_.config.num_threads, kMostThreads));
  }
  return *threads_;
}

/// Granted drafts, the sample of each last known token, and the drafts themselves: [S], [S], [S, D]
/// and [S, D], S the room of the shape and D the most drafts of a sequence.
void MaskedSteps::prepare_rows(const StepShape& shape) {
  laid_out_spans_ = as_index(shape.num_spans);
  laid_out_trees_ = shape.has_trees;
  const size_t bytes = 2 * laid_out_spans_ * (1 + most_drafts(context_.config)) * sizeof(int32_t);
  if (laid_out_.bytes() < bytes) laid_out_ = Buffer(bytes, Memory::kPinned);
  if (samples_.bytes() > 0) return;
  samples_ =
      Buffer(as_index(context_.config.max_num_batched_tokens) * sizeof(int32_t), Memory::kPinned);
}

void MaskedSteps::download_rows(RankStep& rank) {
  const size_t drafts = laid_out_spans_ * most_drafts(context_.config);
  const DeviceStages::Proposals proposed =
      rank.stages().proposals(laid_out_trees_, static_cast<int>(laid_out_spans_));
  auto* to = laid_out_.as<int32_t>();
  const auto download = [&](const int32_t* from, size_t count) {
    device::copy_to_host(to, from, count * sizeof(int32_t), rank.stream());
    to += count;
  };
  download(rank.arrays().num_granted, laid_out_spans_);
  download(rank.arrays().first_choice, laid_out_spans_);
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
  const size_t most = most_drafts(context_.config);
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

}  // namespace openspec

#endif
