#pragma once

#include <cstddef>
#include <string>

#include "kernels/common/rows.h"
#include "kernels/experts/experts.h"
#include "model/parts/forward_limits.h"
#include "model/parts/layer_spec.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

class DecoderPass;

/// A mixture of experts in place of a layer's MLP, see ExpertsParams.
struct ExpertsLayer {
  PackedLinear router;
  LinearStack gate_up, down;
};

/// Takes its place among the weights; names as in Hugging Face checkpoints below `prefix`.
ExpertsLayer add_experts(Weights& weights, const ExpertsSpec& spec, int hidden_size,
                         const std::string& prefix);

/// Memory of passes through such mixtures of one shape, and the passes.
class ExpertsPart {
 public:
  /// Throws ArgumentError naming the field that cannot be.
  ExpertsPart(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
              const ForwardLimits& limits);
  static size_t bytes(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
                      const ForwardLimits& limits);

  /// x [rows.num_rows, hidden_size] through one of them; what comes out is due in `pass`.
  void run(const ExecContext& exec, DecoderPass& pass, const ExpertsLayer& layer, const void* x,
           const RowBatch& rows);
  /// What all passes have done, where the device's ops work.
  const ExpertCounts* counts() const { return counts_; }

 private:
  struct Places {
    size_t counts, expert, weight, out, workspace, total;
  };
  static Places plan(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
                     const ForwardLimits& limits);

  ExpertsSpec spec_;
  DType dtype_;
  Places at_;
  Buffer buffer_;
  ExpertCounts* counts_;  // in the buffer
};

}  // namespace openspec
