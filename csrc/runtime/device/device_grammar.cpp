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
#include <exception>
#include <memory>
#include <utility>

#include "core/check.h"
#include "runtime/device/device_step.h"

namespace openspec {

namespace {

// Sequences of a grammar have microseconds of work each: more threads cost more than they do.
constexpr int kMostThreads = 8;
// Of a step, what waiting for the one before it must save.
constexpr double kLeastSaved = 0.03;

}  // namespace

bool DeviceStep::has_masks(const StepLease& lease) const {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (lease.is_sampled[i] && context_.table.grammar(lease.requests[i].slot) != nullptr) {
      return true;
    }
  }
  return false;
}

void DeviceStep::find_forced(StepLease& lease) {
  SequenceTable& table = context_.table;
  const size_t num_spans = lease.requests.size();
  lease.forced.assign(num_spans, {});
  lease.is_forced.assign(num_spans, false);
  std::vector<size_t> spans;  // that may have forced tokens
  for (size_t i = 0; i < num_spans; ++i) {
    const SpanRequest& request = lease.requests[i];
    const bool has_grammar = lease.is_sampled[i] && table.grammar(request.slot) != nullptr;
    if (has_grammar && request.max_drafts > 0) spans.push_back(i);
  }
  if (spans.empty()) return;
  // The host is a step ahead, and what a grammar forces behind a step that runs is not known. To
  // wait for it leaves the device without work for some tens of microseconds, which a step that is
  // saved is worth, and a step of sequences that seldom have forced tokens is not.
  const auto expects_to_save = [&](double num_saved) {
    return num_saved >= kLeastSaved * static_cast<double>(num_spans);
  };
  double num_saved = 0.0;
  for (const size_t i : spans) {
    num_saved += table.forced_availability(lease.requests[i].slot).ratio();
  }
  if (!expects_to_save(num_saved)) {
    // Where a run of them is under way, it goes on.
    take_forced(lease, spans, /*waits=*/false);
    num_saved = 0.0;
    for (const size_t i : spans) {
      num_saved += lease.forced[i].size() > 1
                       ? 1.0
                       : table.forced_availability(lease.requests[i].slot).ratio();
    }
    lease.forced.assign(num_spans, {});
    if (!expects_to_save(num_saved)) return;
  }
  const int before = (lease.ring_index + DeviceBuffers::kRing - 1) % DeviceBuffers::kRing;
  done_[index(before)].wait();
  take_forced(lease, spans, /*waits=*/true);
}

ThreadPool& DeviceStep::grammar_threads() {
  if (threads_ == nullptr) {
    threads_ = std::make_unique<ThreadPool>(std::min(context_.config.num_threads, kMostThreads));
  }
  return *threads_;
}

void DeviceStep::take_forced(StepLease& lease, std::span<const size_t> spans, bool waits) {
  SequenceTable& table = context_.table;
  std::vector<std::exception_ptr> errors(spans.size());
  grammar_threads().parallel_for(static_cast<int64_t>(spans.size()), [&](int64_t part) {
    const size_t i = spans[static_cast<size_t>(part)];
    const int slot = lease.requests[i].slot;
    try {
      GrammarState& grammar = *table.grammar(slot);
      const std::span<const int32_t> committed = table.tokens(slot);
      const std::vector<int32_t> known =
          waits ? known_tokens(slot, lease.serials[i])
                : std::vector<int32_t>(committed.begin(), committed.end());
      grammar.sync(std::span(known).subspan(index(table.prompt_len(slot))));
      lease.forced[i] = grammar.forced(waits ? lease.requests[i].max_drafts : 2);
    } catch (...) {
      errors[static_cast<size_t>(part)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  for (const size_t i : spans) {
    table.forced_availability(lease.requests[i].slot).observe(1, lease.forced[i].empty() ? 0 : 1);
  }
}

void DeviceStep::force_drafts(const StepLease& lease, const StepShape& shape) {
  const auto is_none = [](const std::vector<int32_t>& forced) { return forced.empty(); };
  if (std::all_of(lease.forced.begin(), lease.forced.end(), is_none)) return;
  const StepInputArrays& input = arrays_.host_input[index(lease.ring_index)];
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  device::check(force_drafts_cuda({.num_forced = input.num_forced,
                                   .forced = input.forced,
                                   .num_spans = static_cast<int>(lease.requests.size()),
                                   .max_drafts = drafts_per_seq(),
                                   .has_drafts = lease.has_proposed,
                                   .drafts = drafts.tokens,
                                   .num_drafts = drafts.counts,
                                   .parents = drafts.parents,
                                   .scores = drafts.scores},
                                  exec_.stream),
                "force_drafts");
}

void DeviceStep::run_masked(StepLease& lease, const StepShape& shape, int num_samples) {
  if (shape.proposes) run_part(draft_graphs_, shape, [&] { propose(row_batch(shape)); });
  force_drafts(lease, shape);
  lay_out(shape, num_samples);
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

void DeviceStep::fill_masks(StepLease& lease, int num_samples) {
  const SequenceTable& table = context_.table;
  const size_t most = index(drafts_per_seq());
  const auto* num_granted = laid_out_.as<int32_t>();
  const int32_t* first_choice = num_granted + laid_out_spans_;
  const int32_t* tokens = first_choice + laid_out_spans_;
  const int32_t* parents = laid_out_trees_ ? tokens + laid_out_spans_ * most : nullptr;
  masks_.begin(index(num_samples));
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    // One that ended in the step before has no rows.
    if (table.grammar(slot) == nullptr || first_choice[i] < 0) continue;
    const size_t num_forced = lease.forced[i].size();
    lease.is_forced[i] =
        num_forced > 0 && (num_forced == most || tokens[i * most + num_forced] < 0);
    Draft draft;
    for (size_t k = i * most; k < i * most + index(num_granted[i]); ++k) {
      draft.append(tokens[k]);
      if (parents != nullptr) draft.parents.back() = parents[k];
    }
    masks_.add(slot, known_tokens(slot, lease.serials[i]), std::move(draft),
               index(first_choice[i]));
  }
  masks_.fill(table, grammar_threads());
}

void DeviceStep::upload_masks() {
  const std::vector<int32_t>& samples = masks_.sample_mask();
  const size_t num_bytes = index(masks_.num_masks()) * masks_.num_words() * sizeof(int32_t);
  const size_t sample_bytes = samples.size() * sizeof(int32_t);
  if (sample_mask_.bytes() == 0 || num_bytes > mask_words_.bytes()) {
    synchronize();  // what is freed may be in use, and graphs have its address
    choice_graphs_.clear();
    const size_t sample_room = index(context_.config.max_num_batched_tokens) * sizeof(int32_t);
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
  is_uploaded_.hold(stream_.handle());
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
