#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/registry.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/parts/forward_limits.h"
#include "model/parts/running_states.h"
#include "model/targets/state_needs.h"
#include "model/targets/target_spec.h"

namespace openspec {

class SumExchange;
class Weights;
struct ExpertCounts;
struct InboxFloats;
struct SharedTensors;

/// What a target is built from, or one rank of it; `spec` is the caller's.
struct TargetSetup {
  const TargetSpec& spec;
  DType dtype = DType::kF32;
  Device device = Device::kCpu;
  ForwardLimits limits = {};
  int num_threads = 1;  // of the CPU ops
  TpRank rank = {};
  SumExchange* exchange = nullptr;  // between ranks
};

/// Where the sequences of a forward pass keep what the target declared.
struct TargetMemory {
  PageTableView page_table;
  std::span<const KvLayerView> kv;  // by layer of StateNeeds::kv_layers
  RunningStates states;
};

/// A target: weights and one forward pass over ragged rows.
class TargetModel {
 public:
  virtual ~TargetModel() = default;
  /// Of each rank; all of them are given every tensor of the checkpoint.
  virtual std::vector<Weights*> weights() = 0;
  virtual SharedTensors shared() const = 0;

  /// Runs all layers over `rows`, which leave their KV and records in `memory`. Afterwards `logits`
  /// may be asked for any of the rows. `capture_layers` (rising) names layers whose output, the
  /// residual stream after the layer, is copied to `captured` [num_rows, num_captures *
  /// hidden_size] in the activation type. On CUDA it is recorded in graphs.
  virtual void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
                       const std::vector<int>& capture_layers, void* captured) = 0;

  /// Logits of rows `row[0 .. count)` of the last forward pass: out [count, vocab_size] fp32. `row`
  /// lies on the device; what stands at a row of -1 is left undefined. Where ranks have devices of
  /// their own, many rows (are_dealt) are dealt: a rank has those that its SumExchange says.
  virtual void logits(const ExecContext& exec, const int32_t* row, int count, float* out) = 0;

  /// What its mixtures of experts have done in all passes, where the device's ops work; null: it
  /// has none.
  virtual const ExpertCounts* expert_counts() const { return nullptr; }
};

/// A kind of target: how to make a rank of one, and what it takes, known before anything is
/// allocated.
struct TargetKind {
  std::unique_ptr<TargetModel> (*make)(const TargetSetup& setup) = nullptr;
  size_t (*weight_bytes)(const TargetSetup& setup) = nullptr;
  size_t (*scratch_bytes)(const TargetSetup& setup) = nullptr;
  /// Throws ArgumentError naming what of the description it does not compute, or why it cannot be
  /// shared by so many ranks, or does not run on the device.
  StateNeeds (*state_needs)(const TargetSetup& setup) = nullptr;
  /// Of its SumExchange; null: the kind is not shared by ranks.
  InboxFloats (*inbox_floats)(const TargetSetup& setup) = nullptr;
};

/// Makes a kind known under a name; its source file holds one of these at namespace scope.
using TargetRegistration = Registry<TargetKind>::Registration;

/// Throws ArgumentError naming the known kinds if there is none of this name.
inline const TargetKind& target_kind(const std::string& name) {
  return Registry<TargetKind>::find("kind of target", name);
}

}  // namespace openspec
