#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/row_layout.h"
#include "kernels/exec.h"
#include "kernels/step_rows.h"
#include "runtime/sequence_table.h"

namespace openspec {

/// A layer that a drafter keeps in the page pool beside the target's.
struct KvLayerSpec {
  int num_kv_heads = 0;
  int head_dim = 0;
};

/// What a drafter takes from the engine, declared before memory is planned. The engine asks for
/// these and never for the drafter's type.
struct DrafterNeeds {
  int num_speculative_tokens = 0;      // rows of look-ahead per sequence
  std::vector<int> capture_layers;     // target layers whose output it reads, rising
  std::vector<KvLayerSpec> kv_layers;  // layers it keeps in the page pool
  size_t fixed_bytes = 0;              // memory of its own: weights and scratch
  int max_context = 0;                 // tokens it can serve; 0: no limit of its own
};

struct ProposeRequest {
  int slot = 0;
  int num_wanted = 0;
};

/// Where a drafter on the device finds what is wanted and puts its proposals; all device memory.
struct DeviceDrafts {
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const int32_t* num_wanted = nullptr;  // [num_seqs] drafts wanted, at most max_drafts; 0: none
  int num_seqs = 0;                     // room: entries behind the last sequence want nothing
  int max_drafts = 0;
  int32_t* drafts = nullptr;      // out [num_seqs, max_drafts], chains
  int32_t* num_drafts = nullptr;  // out [num_seqs]
};

/// Rows of one sequence that were committed by a step, for drafters that learn from them.
struct CommittedRows {
  int slot = 0;
  int first_position = 0;
  std::span<const int32_t> tokens;  // tokens of the rows, in order of position
  const void* features = nullptr;   // [tokens.size(), num_captures * hidden_size], activation type;
                                    // valid during the call
};

/// A source of draft tokens. Whatever it proposes, the text stays that of plain decoding: proposals
/// are checked against the target's own choice, and one that throws costs its step the drafts only.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const DrafterNeeds& needs() const = 0;
  /// Fills drafts[i] with at most requests[i].num_wanted guesses of what follows the sequence's
  /// known tokens. `drafts` come empty.
  virtual void propose(const ExecContext& exec, const SequenceTable& table,
                       std::span<const ProposeRequest> requests, std::span<Draft> drafts) = 0;
  /// Whether it can propose inside a device step, by propose_on_device; else a device step waits
  /// for the host to propose.
  virtual bool proposes_on_device() const { return false; }
  /// Enqueues the proposals. What it launches may be captured in a graph, so lengths come from
  /// `table`, on the device.
  virtual void propose_on_device(const ExecContext&, const DeviceTable&, const DeviceDrafts&) {}
  /// Told of every committed row, prompt rows included, before the next propose.
  virtual void observe(std::span<const CommittedRows>) {}
};

using DrafterOption = std::variant<bool, int64_t, double, std::string>;

/// What a drafter is built from.
struct DrafterConfig {
  Device device = Device::kCpu;
  int num_speculative_tokens = 0;
  int max_num_seqs = 0;
  int max_model_len = 0;
  int vocab_size = 0;
  std::map<std::string, DrafterOption> options;  // the method's own; unknown names are refused

  /// The option's value, or `fallback`; throws ArgumentError on another type or a value outside
  /// [low, high].
  int integer(const std::string& name, int fallback, int low, int high) const;
  std::string text(const std::string& name, const std::string& fallback) const;
};

using DrafterFactory = std::unique_ptr<Drafter> (*)(const DrafterConfig& config);

/// Makes a drafter known under a name; a drafter's source file holds one of these at namespace
/// scope.
struct DrafterRegistration {
  DrafterRegistration(const std::string& name, DrafterFactory factory);
};

std::vector<std::string> drafter_names();
/// Throws ArgumentError naming the known drafters if there is none of this name.
std::unique_ptr<Drafter> make_drafter(const std::string& name, const DrafterConfig& config);

}  // namespace openspec
