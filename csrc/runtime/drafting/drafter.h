#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/registry.h"
#include "core/row_layout.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/table_rows.h"
#include "model/targets/state_needs.h"
#include "runtime/drafting/draft_source.h"
#include "runtime/drafting/runner_config.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

class TargetModel;
class Weights;

/// What a drafter takes from the engine, declared before memory is planned. The engine asks for
/// these and never for the drafter's type.
struct DrafterNeeds {
  bool makes_trees = false;         // with parents and scores; else chains
  bool has_scores = false;          // of chains; trees always have them
  std::vector<int> capture_layers;  // target layers whose output it reads, rising
  StateNeeds state;                 // its KV has an entry for the last known token too
  int num_draft_entries = 0;  // entries after that one that proposing writes for a sequence, at
                              // most; 0: not beyond its drafts
  size_t fixed_bytes = 0;     // memory of its own: weights and scratch
  // Proposing takes long enough that a step goes without where drafts do not pay.
  bool is_costly = false;
  bool keeps_logits = false;  // see Drafter::draft_logits; asked for by Acceptance::kRejection
};

/// Where a drafter finds what is wanted and puts its proposals, on the device that runs the step.
struct WantedDrafts {
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const int32_t* num_wanted = nullptr;  // [num_seqs] drafts wanted, at most max_drafts; 0: none
  int num_seqs = 0;                     // on CUDA room: entries after the last want nothing
  int max_drafts = 0;
  int max_rows = 0;  // of the step that the drafts are for, with a row for each last known token
  int expected_kv_len = 0;        // see RowBatch
  int32_t* drafts = nullptr;      // out [num_seqs, max_drafts]
  int32_t* num_drafts = nullptr;  // out [num_seqs]
  // Of drafters that make trees, see Draft; else null, and drafts are chains.
  int32_t* parents = nullptr;  // out [num_seqs, max_drafts]
  // Of drafters that make trees or have scores, where the step looks at them; else null.
  float* scores = nullptr;  // out [num_seqs, max_drafts]

  /// What is wanted of `count` sequences from the `first` one on.
  WantedDrafts part(int first, int count) const {
    const ptrdiff_t draft = ptrdiff_t{first} * max_drafts;
    WantedDrafts part = *this;
    part.seq += first;
    part.num_wanted += first;
    part.num_seqs = count;
    part.drafts += draft;
    part.num_drafts += first;
    if (parents != nullptr) part.parents += draft;
    if (scores != nullptr) part.scores += draft;
    return part;
  }
};

/// A step after its commit, on the device that ran it.
struct CommittedStep {
  RowBatch rows;                           // as they ran
  const int32_t* num_computed = nullptr;   // [rows.num_spans] rows of a span that count
  const int32_t* committed_row = nullptr;  // which they are, see ExtendRowsParams; null: the first
  int num_committed = 0;                   // rows that count, at most
  const void* features = nullptr;  // [rows.num_rows, num_captures * hidden_size], activation type
};

/// A source of draft tokens. Whatever it proposes, the text stays that of plain decoding: proposals
/// are checked against the target's own choice, and one that throws costs its step the drafts only.
/// With Acceptance::kRejection the distribution of texts stays, if its logits are what it says.
///
/// A drafter works on arrays (`works_on_arrays`), written over ops for both devices, or sequence by
/// sequence on the host, which on CUDA keeps steps from being launched ahead.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const DrafterNeeds& needs() const = 0;

  /// Its own weights, to be loaded like the target's; null: it has none. From `attach` on.
  virtual Weights* weights() { return nullptr; }
  /// Others, which may be loaded beside steps; null: there is no room for such. From `attach` on.
  virtual Weights* spare_weights() { return nullptr; }
  /// Between steps, as `refresh`: the spare weights and its own take each other's place.
  virtual void exchange(const ExecContext&) {}
  /// Called once before anything else, with the target that it may share tensors with and its
  /// layers of the page pool. Here memory is taken: a drafter is also made only to ask for its
  /// needs.
  virtual void attach(const TargetModel& /*target*/, std::span<const KvLayerView> /*kv_layers*/) {}

  /// Called once all weights are there, before the first step.
  virtual void prepare(const ExecContext&) {}

  /// Told on the host what a sequence got in a step, once it is committed. True: `refresh` follows.
  virtual bool observe(std::span<const int32_t> /*token_ids*/) { return false; }
  /// Between steps, after all that was launched: what `propose` reads may change here, in place.
  virtual void refresh(const ExecContext&) {}

  virtual bool works_on_arrays() const { return false; }
  /// Proposes for the sequences of a step. On CUDA what it launches is captured in a graph, so
  /// lengths come from `table`.
  virtual void propose(const ExecContext&, const TableView& /*table*/, const WantedDrafts&) {}
  /// Learns from committed rows, prompt rows included: a step's, or where proposing is costly also
  /// those of several steps in which it was left out. `table` is that after the commit. On CUDA one
  /// that works on the host is not told.
  virtual void learn(const ExecContext&, const TableView& /*table*/, const CommittedStep&) {}

  /// Where it keeps the logits of the drafts that it draws, by sequence of WantedDrafts, until the
  /// next proposal; from `attach` on the same. Such drafts are drawn as DrawnDrafts asks for.
  virtual DraftLogits draft_logits() { return {}; }

  /// For tests: logits of the last drafts of the last proposal [chains, draft vocabulary].
  virtual std::vector<float> last_logits() { return {}; }

  /// On the host: fills drafts[i] with at most requests[i].num_wanted guesses of what follows the
  /// sequence's known tokens. `drafts` come empty.
  virtual void propose_on_host(const SequenceTable&, std::span<const ProposeRequest>,
                               std::span<Draft>) {}
};

using DrafterFactory = std::unique_ptr<Drafter> (*)(const RunnerConfig& config);

/// The factory of a drafter of class T.
template <typename T>
std::unique_ptr<Drafter> make_drafter_of(const RunnerConfig& config) {
  return std::make_unique<T>(config);
}

/// Makes a drafter known under a name; a drafter's source file holds one of these at namespace
/// scope.
using DrafterRegistration = Registry<DrafterFactory>::Registration;

inline std::vector<std::string> drafter_names() { return Registry<DrafterFactory>::names(); }
/// The drafter that `config` names. Throws ArgumentError naming the known ones if there is none of
/// this name.
inline std::unique_ptr<Drafter> make_drafter(const RunnerConfig& config) {
  return Registry<DrafterFactory>::find("drafter", config.method)(config);
}

}  // namespace openspec
