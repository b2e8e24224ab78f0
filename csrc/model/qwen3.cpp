#include "model/qwen3.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

// Weights stay as published: bf16, converted in registers.
constexpr DType kWeights = DType::kBF16;

// Tensors and scratch areas start on cache lines.
size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

void copy_to_float(const void* data, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* source = static_cast<const uint16_t*>(data);
  for (int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(uint32_t{source[i]} << 16);
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

Qwen3::Qwen3(const TargetConfig& config, DType dtype, int max_rows, int max_logits_rows,
             int max_model_len, int num_threads)
    : config_(config),
      dtype_(dtype),
      max_rows_(max_rows),
      max_logits_rows_(max_logits_rows),
      max_model_len_(max_model_len) {
  config_.validate();
  inv_freq_ = Buffer(config_.inv_freq.size() * sizeof(float));
  std::copy(config_.inv_freq.begin(), config_.inv_freq.end(), inv_freq_.floats());
  plan_weights();
  at_ = plan_scratch(config_, dtype_, max_rows, max_logits_rows, max_model_len, num_threads);
  scratch_ = Buffer(at_.total);
}

PackedLinear Qwen3::add_linear(const std::string& prefix, const std::vector<std::string>& parts,
                               const std::vector<int>& outputs, int inputs,
                               LinearEpilogue epilogue) {
  PackedLinear linear;
  for (int count : outputs) linear.num_outputs += count;
  linear.num_inputs = inputs;
  linear.dtype = kWeights;
  linear.epilogue = epilogue;
  linear.layout = linear_layout_cpu(inputs, kWeights);
  void* packed =
      take_weights(linear_packed_bytes_cpu(linear.num_outputs, inputs, kWeights, epilogue));
  linear.data = packed;
  int first = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int count = outputs[i];
    destinations_[prefix + parts[i]] = {
        {count, inputs}, [linear, packed, first, count](const void* data, DType source) {
          linear_pack_cpu(linear, data, source, first, count, packed);
        }};
    first += count;
  }
  return linear;
}

void* Qwen3::take_weights(size_t bytes) {
  void* data = weights_.at(num_weight_bytes_);
  num_weight_bytes_ += round_up(bytes);
  OPENSPEC_CHECK(num_weight_bytes_ <= weights_.bytes(), "weights outgrow their plan");
  return data;
}

const float* Qwen3::add_norm(const std::string& name, int width) {
  auto* weight = static_cast<float*>(take_weights(static_cast<size_t>(width) * sizeof(float)));
  destinations_[name] = {{width}, [weight, width](const void* data, DType source) {
                           copy_to_float(data, source, width, weight);
                         }};
  return weight;
}

void Qwen3::plan_weights() {
  const TargetConfig& c = config_;
  weights_ = Buffer(weight_bytes(c, kWeights));
  const int q_width = c.num_q_heads * c.head_dim;
  const int kv_width = c.num_kv_heads * c.head_dim;
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer layer;
    layer.qkv = add_linear(attention, {"q_proj.weight", "k_proj.weight", "v_proj.weight"},
                           {q_width, kv_width, kv_width}, c.hidden_size, LinearEpilogue::kNone);
    layer.o =
        add_linear(attention, {"o_proj.weight"}, {c.hidden_size}, q_width, LinearEpilogue::kNone);
    layer.gate_up = add_linear(mlp, {"gate_proj.weight", "up_proj.weight"},
                               {c.intermediate_size, c.intermediate_size}, c.hidden_size,
                               LinearEpilogue::kSwiGlu);
    layer.down = add_linear(mlp, {"down_proj.weight"}, {c.hidden_size}, c.intermediate_size,
                            LinearEpilogue::kNone);
    layer.input_norm = add_norm(prefix + "input_layernorm.weight", c.hidden_size);
    layer.post_norm = add_norm(prefix + "post_attention_layernorm.weight", c.hidden_size);
    layer.q_norm = add_norm(attention + "q_norm.weight", c.head_dim);
    layer.k_norm = add_norm(attention + "k_norm.weight", c.head_dim);
    layers_.push_back(layer);
  }
  final_norm_ = add_norm("model.norm.weight", c.hidden_size);
  head_ = add_linear("", {"lm_head.weight"}, {c.vocab_size}, c.hidden_size, LinearEpilogue::kNone);
  const size_t embedding_bytes = static_cast<size_t>(c.vocab_size) *
                                 static_cast<size_t>(c.hidden_size) * dtype_bytes(kWeights);
  embedding_ = take_weights(embedding_bytes);
  const auto pack_head = destinations_.at("lm_head.weight").store;
  destinations_["model.embed_tokens.weight"] = {
      {c.vocab_size, c.hidden_size},
      [this, pack_head, embedding_bytes](const void* data, DType source) {
        std::memcpy(embedding_, data, embedding_bytes);
        if (config_.tie_word_embeddings) pack_head(data, source);
      }};
  if (c.tie_word_embeddings) destinations_.erase("lm_head.weight");
}

std::vector<TensorSpec> Qwen3::expected_tensors() const {
  std::vector<TensorSpec> specs;
  for (const auto& [name, destination] : destinations_) specs.push_back({name, destination.shape});
  return specs;
}

void Qwen3::load_tensor(const std::string& name, const void* data, size_t bytes, DType dtype) {
  const auto found = destinations_.find(name);
  OPENSPEC_CHECK_ARG(found != destinations_.end(), "tensor ", name, " is not part of the model");
  Destination& destination = found->second;
  const size_t expected = static_cast<size_t>(num_elements(destination.shape)) * dtype_bytes(dtype);
  OPENSPEC_CHECK_ARG(bytes == expected, "tensor ", name, " has ", bytes, " bytes, expected ",
                     expected);
  const bool is_matrix = destination.shape.size() == 2;
  OPENSPEC_CHECK_ARG(!is_matrix || dtype == kWeights, "tensor ", name,
                     " must be bf16; convert the checkpoint with torch_dtype=bfloat16");
  destination.store(data, dtype);
  destination.loaded = true;
}

void Qwen3::finish_loading() const {
  for (const auto& [name, destination] : destinations_) {
    OPENSPEC_CHECK_ARG(destination.loaded, "tensor ", name, " is missing");
  }
}

size_t Qwen3::weight_bytes(const TargetConfig& c, DType weights) {
  const auto packed = [&](int outputs, int inputs, LinearEpilogue epilogue) {
    return round_up(linear_packed_bytes_cpu(outputs, inputs, weights, epilogue));
  };
  const auto norm = [](int width) { return round_up(static_cast<size_t>(width) * sizeof(float)); };
  const int q_width = c.num_q_heads * c.head_dim;
  const size_t layer = packed(c.qkv_width(), c.hidden_size, LinearEpilogue::kNone) +
                       packed(c.hidden_size, q_width, LinearEpilogue::kNone) +
                       packed(2 * c.intermediate_size, c.hidden_size, LinearEpilogue::kSwiGlu) +
                       packed(c.hidden_size, c.intermediate_size, LinearEpilogue::kNone) +
                       2 * norm(c.hidden_size) + 2 * norm(c.head_dim);
  return layer * static_cast<size_t>(c.num_layers) + norm(c.hidden_size) +
         packed(c.vocab_size, c.hidden_size, LinearEpilogue::kNone) +
         round_up(static_cast<size_t>(c.vocab_size) * static_cast<size_t>(c.hidden_size) *
                  dtype_bytes(weights));
}

Qwen3::Scratch Qwen3::plan_scratch(const TargetConfig& c, DType dtype, int max_rows,
                                   int max_logits_rows, int max_model_len, int num_threads) {
  Scratch at{};
  const auto take = [&](size_t bytes) {
    const size_t offset = at.total;
    at.total += round_up(bytes);
    return offset;
  };
  const auto rows_of = [&](int width) {
    return static_cast<size_t>(max_rows) * static_cast<size_t>(width) * dtype_bytes(dtype);
  };
  const int q_width = c.num_q_heads * c.head_dim;
  at.residual = take(rows_of(c.hidden_size));
  at.normed = take(rows_of(c.hidden_size));
  at.qkv = take(rows_of(c.qkv_width()));
  at.q = take(rows_of(q_width));
  at.attended = take(rows_of(q_width));
  at.delta = take(rows_of(c.hidden_size));
  at.activated = take(rows_of(c.intermediate_size));
  at.gathered = take(static_cast<size_t>(max_logits_rows) * static_cast<size_t>(c.hidden_size) *
                     dtype_bytes(dtype));
  at.cos_sin =
      take(static_cast<size_t>(max_rows) * static_cast<size_t>(c.head_dim) * sizeof(float));
  const int widest = std::max({c.hidden_size, q_width, c.intermediate_size});
  size_t linear_bytes = 0;
  for (LinearLayout layout : {LinearLayout::kLines, linear_layout_cpu(widest, kWeights)}) {
    linear_bytes = std::max(
        linear_bytes,
        linear_workspace_bytes_cpu(std::max(max_rows, max_logits_rows), widest, dtype, layout));
  }
  at.linear = take(linear_bytes);
  at.attention =
      take(span_attention_workspace_bytes_cpu(num_threads, c.num_q_heads, max_model_len));
  return at;
}

size_t Qwen3::scratch_bytes(const TargetConfig& config, DType dtype, int max_rows,
                            int max_logits_rows, int max_model_len, int num_threads) {
  return plan_scratch(config, dtype, max_rows, max_logits_rows, max_model_len, num_threads).total;
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
  OPENSPEC_CHECK(n >= 1 && n <= max_rows_, "a step of ", n, " rows, at most ", max_rows_);
  void* residual = scratch_.at(at_.residual);
  void* normed = scratch_.at(at_.normed);
  void* qkv = scratch_.at(at_.qkv);
  void* q = scratch_.at(at_.q);
  void* attended = scratch_.at(at_.attended);
  void* delta = scratch_.at(at_.delta);
  void* activated = scratch_.at(at_.activated);
  auto* cos_sin = reinterpret_cast<float*>(scratch_.at(at_.cos_sin));

  const auto norm = [&](const float* weight, const void* addend) {
    ops::rms_norm(exec, {.residual = residual,
                         .delta = addend,
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
    const size_t width = static_cast<size_t>(c.hidden_size) * dtype_bytes(dtype_);
    const size_t stride = width * capture_layers.size();
    auto* out = static_cast<std::byte*>(captured) +
                width * static_cast<size_t>(found - capture_layers.begin());
    for (int r = 0; r < n; ++r) {
      std::memcpy(out + stride * static_cast<size_t>(r),
                  static_cast<const std::byte*>(residual) + width * static_cast<size_t>(r), width);
    }
  };

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

  for (int i = 0; i < c.num_layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    norm(layer.input_norm, i == 0 ? nullptr : delta);
    if (i > 0) capture(i - 1);
    apply(exec, layer.qkv, normed, qkv, n, dtype_);
    ops::rope_append(exec, {.rows = rows,
                            .qkv = qkv,
                            .cos_sin = cos_sin,
                            .q_norm = layer.q_norm,
                            .k_norm = layer.k_norm,
                            .q = q,
                            .kv = kv[static_cast<size_t>(i)],
                            .num_q_heads = c.num_q_heads,
                            .eps = c.rms_norm_eps,
                            .dtype = dtype_});
    ops::span_attention(exec, {.rows = rows,
                               .q = q,
                               .out = attended,
                               .kv = kv[static_cast<size_t>(i)],
                               .page_table = page_table,
                               .num_q_heads = c.num_q_heads,
                               .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
                               .dtype = dtype_,
                               .workspace = reinterpret_cast<float*>(scratch_.at(at_.attention)),
                               .max_tokens = max_model_len_});
    apply(exec, layer.o, attended, delta, n, dtype_);
    norm(layer.post_norm, delta);
    apply(exec, layer.gate_up, normed, activated, n, dtype_);
    apply(exec, layer.down, activated, delta, n, dtype_);
  }
  norm(final_norm_, delta);
  capture(c.num_layers - 1);
}

void Qwen3::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= max_logits_rows_, count, " rows of logits, at most ", max_logits_rows_);
  const size_t width = static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype_);
  for (int i = 0; i < count; ++i) {
    std::memcpy(scratch_.at(at_.gathered + width * static_cast<size_t>(i)),
                scratch_.at(at_.normed + width * static_cast<size_t>(row[i])), width);
  }
  apply(exec, head_, scratch_.at(at_.gathered), out, count, DType::kF32);
}

}  // namespace openspec
