#include "model/parts/delta_net_layer.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_layer.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

namespace {

/// Outputs of b and a, and of nothing up to a multiple of 16, as CUDA's linears have them.
int gate_columns(const DeltaShape& shape) { return (2 * shape.num_v_heads + 15) / 16 * 16; }

}  // namespace

DeltaShape delta_shape(const DeltaNetSpec& spec) {
  check_size("num_key_heads", spec.num_key_heads);
  check_size("num_value_heads", spec.num_value_heads);
  OPENSPEC_CHECK_ARG(spec.num_value_heads % spec.num_key_heads == 0, "num_value_heads (",
                     spec.num_value_heads, ") must be a multiple of num_key_heads (",
                     spec.num_key_heads, ")");
  return {spec.num_key_heads, spec.num_value_heads};
}

DeltaNetLayer add_delta_net(Weights& weights, const DeltaShape& shape, int hidden_size,
                            const std::string& prefix) {
  const std::string mixer = prefix + "linear_attn.";
  DeltaNetLayer layer;
  std::vector<std::string> names = {"in_proj_qkv.weight", "in_proj_z.weight"};
  std::vector<Part> outputs = {shape.conv_width(), shape.v_width()};
  layer.has_gates_apart = weights.is_quantized(mixer + names.front());
  if (layer.has_gates_apart) {
    layer.in = weights.add_linear(mixer, names, outputs, hidden_size, LinearEpilogue::kNone);
    names.clear();
    outputs.clear();
  }
  names.insert(names.end(), {"in_proj_b.weight", "in_proj_a.weight"});
  outputs.insert(outputs.end(), {shape.num_v_heads, shape.num_v_heads});
  const int num_others = gate_columns(shape) - 2 * shape.num_v_heads;
  if (num_others > 0) outputs.emplace_back(num_others);
  (layer.has_gates_apart ? layer.gates : layer.in) =
      weights.add_linear(mixer, names, outputs, hidden_size, LinearEpilogue::kNone);
  layer.taps = weights.add_taps(mixer + "conv1d.weight", shape.conv_width(), kDeltaTaps);
  layer.a_log = weights.add_values(mixer + "A_log", {shape.num_v_heads});
  layer.dt_bias = weights.add_values(mixer + "dt_bias", {shape.num_v_heads});
  layer.norm = weights.add_norm(mixer + "norm.weight", kDeltaHeadDim);
  layer.out = weights.add_linear(mixer, {"out_proj.weight"}, {hidden_size}, shape.v_width(),
                                 LinearEpilogue::kNone, /*may_split=*/true);
  return layer;
}

DeltaNetPart::Places DeltaNetPart::plan(const DeltaShape& shape, DType dtype,
                                        [[maybe_unused]] Device device, const ForwardLimits& limits,
                                        int num_threads) {
  Places at{};
  AreaPlan areas;
  const auto take_rows = [&](int width) {
    return areas.take(limits.max_rows, static_cast<size_t>(width) * dtype_bytes(dtype));
  };
  at.in = take_rows(shape.conv_width() + shape.v_width() + gate_columns(shape));
  at.gates = take_rows(gate_columns(shape));
  at.out = take_rows(shape.v_width());
  size_t workspace_bytes = 0;
#ifdef OPENSPEC_CUDA
  if (device == Device::kCuda) {
    workspace_bytes = delta_net_workspace_bytes_cuda(shape, limits.max_rows);
  }
#endif
  if (workspace_bytes == 0) {
    workspace_bytes = delta_net_workspace_bytes_cpu(shape, limits.max_rows, num_threads);
  }
  at.workspace = areas.take(1, workspace_bytes);
  at.total = areas.bytes;
  return at;
}

DeltaNetPart::DeltaNetPart(const DeltaShape& shape, float eps, DType dtype, Device device,
                           const ForwardLimits& limits, int num_threads)
    : shape_(shape),
      eps_(eps),
      dtype_(dtype),
      max_step_rows_(std::min(limits.max_step_rows, kMaxDeltaStepRows)),
      at_(plan(shape, dtype, device, limits, num_threads)),
      buffer_(at_.total, memory_of(device)) {}

size_t DeltaNetPart::bytes(const DeltaShape& shape, DType dtype, Device device,
                           const ForwardLimits& limits, int num_threads) {
  return plan(shape, dtype, device, limits, num_threads).total;
}

void DeltaNetPart::run(const ExecContext& exec, DecoderPass& pass, DecoderScratch& scratch,
                       const DeltaNetLayer& layer, int index, const RowBatch& rows,
                       const RunningStates& states, const void* x) {
  std::byte *in = buffer_.at(at_.in), *out = buffer_.at(at_.out);
  scratch.linear(exec, layer.in, x, in, rows.num_rows);
  const auto columns = [&](int count) { return static_cast<size_t>(count) * dtype_bytes(dtype_); };
  std::byte* gates = in + columns(shape_.conv_width() + shape_.v_width());
  int gates_stride = layer.in.num_outputs;
  if (layer.has_gates_apart) {
    gates = buffer_.at(at_.gates);
    gates_stride = layer.gates.num_outputs;
    scratch.linear(exec, layer.gates, x, gates, rows.num_rows);
  }
  const auto place = static_cast<size_t>(index);
  const bool is_step = rows.max_span_rows > 0 && rows.max_span_rows <= max_step_rows_;
  ops::delta_net(exec, {.shape = shape_,
                        .layer = index,
                        .rows = rows,
                        .qkv = in,
                        .z = in + columns(shape_.conv_width()),
                        .b = gates,
                        .a = gates + columns(shape_.num_v_heads),
                        .qkv_stride = layer.in.num_outputs,
                        .z_stride = layer.in.num_outputs,
                        .b_stride = gates_stride,
                        .a_stride = gates_stride,
                        .out = out,
                        .conv_weight = layer.taps,
                        .a_log = layer.a_log,
                        .dt_bias = layer.dt_bias,
                        .norm_weight = layer.norm,
                        .eps = eps_,
                        .records = states.records,
                        .record_offset = place * shape_.record_bytes(dtype_),
                        .conv_rows = states.tails,
                        .conv_offset = place * shape_.conv_row_bytes(dtype_),
                        .states = states.bases,
                        .folded_read = states.folded_read,
                        .folded_write = states.folded_write,
                        .max_step_rows = max_step_rows_,
                        .may_have_prompts = !is_step,
                        .workspace = buffer_.at(at_.workspace),
                        .dtype = dtype_});
  pass.add_product(layer.out, out);
}

}  // namespace openspec
