#pragma once

#include <cstddef>
#include <string>

#include "kernels/common/rows.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/linear/packed_linear.h"
#include "model/parts/forward_limits.h"
#include "model/parts/layer_spec.h"
#include "model/parts/running_states.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

class DecoderPass;
class DecoderScratch;

/// Throws ArgumentError naming the field that cannot be.
DeltaShape delta_shape(const DeltaNetSpec& spec);

/// The mixer of a layer with a running state, see DeltaNetParams.
struct DeltaNetLayer {
  // Of all that goes in: q, k, v, z, and what the gates are made of, unless it is apart: of types
  // of its own.
  PackedLinear in, gates, out;
  bool has_gates_apart = false;
  const float *taps = nullptr, *a_log = nullptr, *dt_bias = nullptr, *norm = nullptr;
};

/// Takes its place among the weights; names as in Hugging Face checkpoints below `prefix`.
DeltaNetLayer add_delta_net(Weights& weights, const DeltaShape& shape, int hidden_size,
                            const std::string& prefix);

/// Memory of passes through such layers, and the passes.
class DeltaNetPart {
 public:
  DeltaNetPart(const DeltaShape& shape, float eps, DType dtype, Device device,
               const ForwardLimits& limits, int num_threads);
  static size_t bytes(const DeltaShape& shape, DType dtype, Device device,
                      const ForwardLimits& limits, int num_threads);

  /// x [num_rows, hidden_size] through layer `index` of those with a state; what comes out is due
  /// in `pass`.
  void run(const ExecContext& exec, DecoderPass& pass, DecoderScratch& scratch,
           const DeltaNetLayer& layer, int index, const RowBatch& rows, const RunningStates& states,
           const void* x);

 private:
  struct Places {
    size_t in, gates, out, workspace, total;
  };
  static Places plan(const DeltaShape& shape, DType dtype, Device device,
                     const ForwardLimits& limits, int num_threads);

  DeltaShape shape_;
  float eps_;
  DType dtype_;
  int max_step_rows_;
  Places at_;
  Buffer buffer_;
};

}  // namespace openspec
