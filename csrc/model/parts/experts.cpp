#include "model/parts/experts.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_layer.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

ExpertsLayer add_experts(Weights& weights, const ExpertsSpec& spec, int hidden_size,
                         const std::string& prefix) {
  const std::string mlp = prefix + "mlp.", experts = mlp + "experts.*.";
  const int inner = spec.intermediate_size;
  ExpertsLayer layer;
  layer.router = weights.add_router(mlp + "gate.weight", spec.num_experts, hidden_size);
  layer.gate_up =
      weights.add_stack(experts, {"gate_proj.weight", "up_proj.weight"}, spec.num_experts,
                        {inner, inner}, hidden_size, LinearEpilogue::kSwiGlu);
  layer.down = weights.add_stack(experts, {"down_proj.weight"}, spec.num_experts, {hidden_size},
                                 inner, LinearEpilogue::kNone);
  return layer;
}

namespace {

size_t workspace_bytes(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
                       int max_rows) {
#ifdef OPENSPEC_CUDA
  if (device == Device::kCuda) {
    return std::max(route_experts_workspace_bytes_cuda(max_rows, spec.num_experts),
                    experts_workspace_bytes_cuda(max_rows, hidden_size, spec.intermediate_size,
                                                 spec.num_experts, spec.top_k));
  }
#endif
  OPENSPEC_CHECK(device == Device::kCpu, "experts on a device that this build does not have");
  return std::max(route_experts_workspace_bytes_cpu(max_rows, hidden_size, spec.num_experts),
                  experts_workspace_bytes_cpu(max_rows, hidden_size, spec.intermediate_size,
                                              spec.num_experts, spec.top_k, dtype));
}

}  // namespace

ExpertsPart::Places ExpertsPart::plan(const ExpertsSpec& spec, int hidden_size, DType dtype,
                                      Device device, const ForwardLimits& limits) {
  check_size("num_experts", spec.num_experts);
  check_size("top_k", spec.top_k);
  check_size("intermediate_size", spec.intermediate_size);
  OPENSPEC_CHECK_ARG(
      spec.num_experts <= kMaxExperts && spec.top_k <= std::min(kMaxTopExperts, spec.num_experts),
      "rows go to ", spec.top_k, " of ", spec.num_experts, " experts, at most ", kMaxTopExperts,
      " of ", kMaxExperts, " are supported");
  Places at{};
  AreaPlan areas;
  const auto choices = static_cast<size_t>(spec.top_k);
  at.counts = areas.take(1, sizeof(ExpertCounts));
  at.expert = areas.take(limits.max_rows, choices * sizeof(int32_t));
  at.weight = areas.take(limits.max_rows, choices * sizeof(float));
  at.out = areas.take(device == Device::kCpu ? limits.max_rows : 0,
                      static_cast<size_t>(hidden_size) * dtype_bytes(dtype));
  at.workspace = areas.take(1, workspace_bytes(spec, hidden_size, dtype, device, limits.max_rows));
  at.total = areas.bytes;
  return at;
}

ExpertsPart::ExpertsPart(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
                         const ForwardLimits& limits)
    : spec_(spec),
      dtype_(dtype),
      at_(plan(spec, hidden_size, dtype, device, limits)),
      buffer_(at_.total, memory_of(device)),
      counts_(reinterpret_cast<ExpertCounts*>(buffer_.at(at_.counts))) {
  if (device == Device::kCuda) {
    device::fill_zero(counts_, sizeof *counts_, nullptr);
  } else {
    *counts_ = {};
  }
}

size_t ExpertsPart::bytes(const ExpertsSpec& spec, int hidden_size, DType dtype, Device device,
                          const ForwardLimits& limits) {
  return plan(spec, hidden_size, dtype, device, limits).total;
}

void ExpertsPart::run(const ExecContext& exec, DecoderPass& pass, const ExpertsLayer& layer,
                      const void* x, const RowBatch& rows) {
  auto* expert = reinterpret_cast<int32_t*>(buffer_.at(at_.expert));
  auto* weight = reinterpret_cast<float*>(buffer_.at(at_.weight));
  void* workspace = buffer_.at(at_.workspace);
  void* out = exec.device == Device::kCpu ? buffer_.at(at_.out) : nullptr;
  RowTerms terms;  // of what comes out on CUDA
  ops::route_experts(exec, {.router = layer.router,
                            .num_experts = spec_.num_experts,
                            .x = x,
                            .row_span = rows.row_span,
                            .expert = expert,
                            .weight = weight,
                            .num_rows = rows.num_rows,
                            .top_k = spec_.top_k,
                            .norm_top_k = spec_.norm_top_k,
                            .dtype = dtype_,
                            .workspace = workspace});
  ops::experts(exec, {.gate_up = layer.gate_up,
                      .down = layer.down,
                      .x = x,
                      .expert = expert,
                      .weight = weight,
                      .out = out,
                      .terms = &terms,
                      .num_rows = rows.num_rows,
                      .top_k = spec_.top_k,
                      .dtype = dtype_,
                      .counts = counts_,
                      .workspace = workspace});
  pass.add_rows(out, terms);
}

}  // namespace openspec
