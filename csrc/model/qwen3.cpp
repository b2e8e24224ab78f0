#include "model/qwen3.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

// Matrices stay as published and are converted in registers.
constexpr DType kWeights = DType::kBF16;

// Scratch areas start on cache lines, and where CUDA's copy engine can begin.
size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Up to so many rows the sums of split linears are left to the next op; with more rows the extra
// memory traffic costs more than the parallelism of the splits brings.
constexpr int kMaxPartialRows = 256;

// What attention and RoPE kernels are written for.
void check_cuda_geometry(const TargetConfig& c, DType dtype) {
  OPENSPEC_CHECK_ARG(dtype == DType::kBF16, "on CUDA the dtype must be bfloat16");
  OPENSPEC_CHECK_ARG(c.head_dim == 128, "on CUDA head_dim must be 128, got ", c.head_dim,
                     "; use --device cpu");
  const int group = c.num_q_heads / c.num_kv_heads;
  OPENSPEC_CHECK_ARG(group <= 8, "on CUDA at most 8 query heads share a KV head, got ", group,
                     "; use --device cpu");
}

}  // namespace

void TargetConfig::validate() const {
  const auto positive = [](const char* name, int value) {
    OPENSPEC_CHECK_ARG(value > 0 && value <= (1 << 24), name, " must be positive, got ", value);
  };
  positive("hidden_size", hidden_size);
  positive("num_layers", num_layers);
  positive("num_q_heads", num_q_heads);
  positive("num_kv_heads", num_kv_heads);
  positive("head_dim", head_dim);
  positive("intermediate_size", intermediate_size);
  positive("vocab_size", vocab_size);
  OPENSPEC_CHECK_ARG(num_q_heads % num_kv_heads == 0, "num_q_heads (", num_q_heads,
                     ") must be a multiple of num_kv_heads (", num_kv_heads, ")");
  OPENSPEC_CHECK_ARG(head_dim % 2 == 0, "head_dim must be even, got ", head_dim);
  OPENSPEC_CHECK_ARG(static_cast<int>(inv_freq.size()) == head_dim / 2, "inv_freq has ",
                     inv_freq.size(), " entries, expected ", head_dim / 2);
  OPENSPEC_CHECK_ARG(rms_norm_eps > 0.0f, "rms_norm_eps must be positive, got ", rms_norm_eps);
}

Qwen3::Qwen3(const TargetConfig& config, DType dtype, Device device, const ForwardLimits& limits,
             int num_threads)
    : config_((config.validate(), config)),
      dtype_(dtype),
      device_(device),
      limits_(limits),
      weights_(device, weight_bytes(config, device)) {
  if (device_ == Device::kCuda) check_cuda_geometry(config_, dtype_);
  const Memory memory = device_ == Device::kCuda ? Memory::kDevice : Memory::kHost;
  const size_t freq_bytes = config_.inv_freq.size() * sizeof(float);
  inv_freq_ = Buffer(freq_bytes, memory);
  if (device_ == Device::kCuda) {
    device::copy_to_device(inv_freq_.data(), config_.inv_freq.data(), freq_bytes, nullptr);
  } else {
    std::copy(config_.inv_freq.begin(), config_.inv_freq.end(), inv_freq_.floats());
  }
  add_weights();
  at_ = plan_scratch(config_, dtype_, device_, limits_, num_threads);
  scratch_ = Buffer(at_.total, memory);
}

void Qwen3::add_weights() {
  const TargetConfig& c = config_;
  const int q_width = c.num_q_heads * c.head_dim;
  const int kv_width = c.num_kv_heads * c.head_dim;
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer layer;
    layer.qkv =
        weights_.add_linear(attention, {"q_proj.weight", "k_proj.weight", "v_proj.weight"},
                            {q_width, kv_width, kv_width}, c.hidden_size, LinearEpilogue::kNone);
    layer.o = weights_.add_linear(attention, {"o_proj.weight"}, {c.hidden_size}, q_width,
                                  LinearEpilogue::kNone, /*may_split=*/true);
    layer.gate_up = weights_.add_linear(mlp, {"gate_proj.weight", "up_proj.weight"},
                                        {c.intermediate_size, c.intermediate_size}, c.hidden_size,
                                        LinearEpilogue::kSwiGlu);
    layer.down = weights_.add_linear(mlp, {"down_proj.weight"}, {c.hidden_size},
                                     c.intermediate_size, LinearEpilogue::kNone,
                                     /*may_split=*/true);
    layer.input_norm = weights_.add_norm(prefix + "input_layernorm.weight", c.hidden_size);
    layer.post_norm = weights_.add_norm(prefix + "post_attention_layernorm.weight", c.hidden_size);
    layer.q_norm = weights_.add_norm(attention + "q_norm.weight", c.head_dim);
    layer.k_norm = weights_.add_norm(attention + "k_norm.weight", c.head_dim);
    layers_.push_back(layer);
  }
  final_norm_ = weights_.add_norm("model.norm.weight", c.hidden_size);
  head_ = weights_.add_linear("", {"lm_head.weight"}, {c.vocab_size}, c.hidden_size,
                              LinearEpilogue::kNone);
  embedding_ = weights_.add_table("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  if (c.tie_word_embeddings) weights_.tie("lm_head.weight", "model.embed_tokens.weight");
}

size_t Qwen3::weight_bytes(const TargetConfig& c, Device device) {
  const auto linear = [&](int outputs, int inputs, LinearEpilogue epilogue) {
    return Weights::linear_bytes(device, outputs, inputs, epilogue);
  };
  const int q_width = c.num_q_heads * c.head_dim;
  const size_t layer = linear(c.qkv_width(), c.hidden_size, LinearEpilogue::kNone) +
                       linear(c.hidden_size, q_width, LinearEpilogue::kNone) +
                       linear(2 * c.intermediate_size, c.hidden_size, LinearEpilogue::kSwiGlu) +
                       linear(c.hidden_size, c.intermediate_size, LinearEpilogue::kNone) +
                       2 * Weights::norm_bytes(c.hidden_size) + 2 * Weights::norm_bytes(c.head_dim);
  return layer * static_cast<size_t>(c.num_layers) + Weights::norm_bytes(c.hidden_size) +
         linear(c.vocab_size, c.hidden_size, LinearEpilogue::kNone) +
         Weights::table_bytes(c.vocab_size, c.hidden_size);
}

Qwen3::Scratch Qwen3::plan_scratch(const TargetConfig& c, DType dtype, Device device,
                                   const ForwardLimits& limits, int num_threads) {
  Scratch at{};
  const auto take = [&](size_t bytes) {
    const size_t offset = at.total;
    at.total += round_up(bytes);
    return offset;
  };
  const auto rows_of = [&](int width) {
    return static_cast<size_t>(limits.max_rows) * static_cast<size_t>(width) * dtype_bytes(dtype);
  };
  const int q_width = c.num_q_heads * c.head_dim;
  at.residual = take(rows_of(c.hidden_size));
  at.normed = take(rows_of(c.hidden_size));
  at.qkv = take(rows_of(c.qkv_width()));
  at.q = take(rows_of(q_width));
  at.attended = take(rows_of(q_width));
  at.delta = take(rows_of(c.hidden_size));
  at.activated = take(rows_of(c.intermediate_size));
  at.gathered = take(static_cast<size_t>(limits.max_logits_rows) *
                     static_cast<size_t>(c.hidden_size) * dtype_bytes(dtype));
  at.cos_sin =
      take(static_cast<size_t>(limits.max_rows) * static_cast<size_t>(c.head_dim) * sizeof(float));
#ifdef OPENSPEC_CUDA
  if (device == Device::kCuda) {
    const int num_splits = std::max(linear_num_splits_cuda(c.hidden_size, q_width),
                                    linear_num_splits_cuda(c.hidden_size, c.intermediate_size));
    at.partials = take(static_cast<size_t>(num_splits) *
                       static_cast<size_t>(std::min(limits.max_rows, kMaxPartialRows)) *
                       static_cast<size_t>(c.hidden_size) * sizeof(float));
    at.attention = take(span_attention_workspace_bytes_cuda(
        limits.max_rows, limits.max_spans, c.num_q_heads, c.head_dim, limits.max_tokens));
    return at;
  }
#else
  (void)device;
#endif
  const int widest = std::max({c.hidden_size, q_width, c.intermediate_size});
  size_t linear_bytes = 0;
  for (LinearLayout layout : {LinearLayout::kLines, linear_layout_cpu(widest, kWeights)}) {
    linear_bytes = std::max(
        linear_bytes, linear_workspace_bytes_cpu(std::max(limits.max_rows, limits.max_logits_rows),
                                                 widest, dtype, layout));
  }
  at.linear = take(linear_bytes);
  at.attention =
      take(span_attention_workspace_bytes_cpu(num_threads, c.num_q_heads, limits.max_tokens));
  return at;
}

size_t Qwen3::scratch_bytes(const TargetConfig& config, DType dtype, Device device,
                            const ForwardLimits& limits, int num_threads) {
  return plan_scratch(config, dtype, device, limits, num_threads).total;
}

void Qwen3::apply(const ExecContext& exec, const PackedLinear& weight, const void* x, void* out,
                  int num_rows, DType out_dtype) {
  ops::linear(exec, {.weight = weight,
                     .x = x,
                     .out = out,
                     .num_rows = num_rows,
                     .dtype = dtype_,
                     .out_dtype = out_dtype,
                     .workspace = reinterpret_cast<float*>(scratch_.at(at_.linear))});
}

void Qwen3::forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                    const std::vector<KvLayerView>& kv, const std::vector<int>& capture_layers,
                    void* captured) {
  const TargetConfig& c = config_;
  const int n = rows.num_rows;
  OPENSPEC_CHECK(n >= 1 && n <= limits_.max_rows, "a step of ", n, " rows, at most ",
                 limits_.max_rows);
  void* residual = scratch_.at(at_.residual);
  void* normed = scratch_.at(at_.normed);
  void* qkv = scratch_.at(at_.qkv);
  void* q = scratch_.at(at_.q);
  void* attended = scratch_.at(at_.attended);
  void* delta = scratch_.at(at_.delta);
  void* activated = scratch_.at(at_.activated);
  auto* cos_sin = reinterpret_cast<float*>(scratch_.at(at_.cos_sin));
  auto* partials = reinterpret_cast<float*>(scratch_.at(at_.partials));
  const size_t row_bytes = static_cast<size_t>(c.hidden_size) * dtype_bytes(dtype_);

  // A linear whose output is added to the residual stream by the next norm.
  const auto is_split = [&](const PackedLinear& weight) {
    return weight.num_splits > 1 && n <= kMaxPartialRows;
  };
  const auto apply_delta = [&](const PackedLinear& weight, const void* x) {
    ops::linear(exec, {.weight = weight,
                       .x = x,
                       .out = delta,
                       .num_rows = n,
                       .dtype = dtype_,
                       .out_dtype = dtype_,
                       .workspace = reinterpret_cast<float*>(scratch_.at(at_.linear)),
                       .partials = is_split(weight) ? partials : nullptr});
  };
  const auto norm = [&](const float* weight, const PackedLinear* before) {
    const bool has_partials = before != nullptr && is_split(*before);
    ops::rms_norm(exec, {.residual = residual,
                         .delta = before == nullptr || has_partials ? nullptr : delta,
                         .delta_partials = has_partials ? partials : nullptr,
                         .num_partials = has_partials ? before->num_splits : 0,
                         .weight = weight,
                         .out = normed,
                         .num_rows = n,
                         .width = c.hidden_size,
                         .eps = c.rms_norm_eps,
                         .dtype = dtype_});
  };
  // Layer i's output is complete once the next norm has added its last delta.
  const auto capture = [&](int layer) {
    const auto found = std::find(capture_layers.begin(), capture_layers.end(), layer);
    if (found == capture_layers.end()) return;
    ops::gather_rows(exec, {.in = residual,
                            .out = static_cast<std::byte*>(captured) +
                                   row_bytes * static_cast<size_t>(found - capture_layers.begin()),
                            .num_rows = n,
                            .width_bytes = static_cast<int64_t>(row_bytes),
                            .out_stride = static_cast<int64_t>(row_bytes * capture_layers.size())});
  };
  SpanAttentionParams attention{.rows = rows,
                                .q = q,
                                .out = attended,
                                .kv = kv.front(),
                                .page_table = page_table,
                                .num_q_heads = c.num_q_heads,
                                .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                                .dtype = dtype_,
                                .workspace = reinterpret_cast<float*>(scratch_.at(at_.attention)),
                                .max_tokens = limits_.max_tokens,
                                .may_have_trees = false};  // every draft is a chain so far

  ops::embedding(exec, {.token = rows.row_token,
                        .table = embedding_,
                        .out = residual,
                        .num_rows = n,
                        .width = c.hidden_size,
                        .table_dtype = kWeights,
                        .dtype = dtype_});
  ops::rope_angles(exec, {.position = rows.row_position,
                          .inv_freq = inv_freq_.floats(),
                          .cos_sin = cos_sin,
                          .num_rows = n,
                          .head_dim = c.head_dim,
                          .scale = c.rope_scale});
  ops::span_attention_plan(exec, attention);

  for (int i = 0; i < c.num_layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    norm(layer.input_norm, i == 0 ? nullptr : &layers_[static_cast<size_t>(i) - 1].down);
    if (i > 0) capture(i - 1);
    apply(exec, layer.qkv, normed, qkv, n, dtype_);
    attention.kv = kv[static_cast<size_t>(i)];
    ops::rope_append(exec, {.rows = rows,
                            .qkv = qkv,
                            .cos_sin = cos_sin,
                            .q_norm = layer.q_norm,
                            .k_norm = layer.k_norm,
                            .q = q,
                            .kv = attention.kv,
                            .num_q_heads = c.num_q_heads,
                            .eps = c.rms_norm_eps,
                            .dtype = dtype_});
    ops::span_attention(exec, attention);
    apply_delta(layer.o, attended);
    norm(layer.post_norm, &layer.o);
    apply(exec, layer.gate_up, normed, activated, n, dtype_);
    apply_delta(layer.down, activated);
  }
  norm(final_norm_, &layers_.back().down);
  capture(c.num_layers - 1);
}

void Qwen3::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  const int64_t width =
      static_cast<int64_t>(config_.hidden_size) * static_cast<int64_t>(dtype_bytes(dtype_));
  ops::gather_rows(exec, {.row = row,
                          .in = scratch_.at(at_.normed),
                          .out = scratch_.at(at_.gathered),
                          .num_rows = count,
                          .width_bytes = width,
                          .out_stride = width});
  apply(exec, head_, scratch_.at(at_.gathered), out, count, DType::kF32);
}

}  // namespace openspec
