#include "model/eagle3.h"

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

const char* const kPrefix = "midlayer.";
// Entry 0 of a sequence would need the feature of position -1.
constexpr int kFirstToken = 1;

}  // namespace

LayerGeometry Eagle3Config::layer() const {
  LayerGeometry layer = DraftModelConfig::layer();
  layer.attention_inputs = 2 * hidden_size;
  layer.has_qk_norm = has_qk_norm;
  return layer;
}

Eagle3::Eagle3(const Eagle3Config& config, DType dtype, Device device, const ForwardLimits& limits,
               int num_threads)
    : config_((config.validate(), check_geometry(config.layer(), dtype, device), config)),
      dtype_(dtype),
      weights_(device, weight_bytes(config, device)),
      at_(plan_scratch(config_, dtype_, limits)),
      pass_scratch_(config_.layer(), dtype_, device, config_.pass_limits(limits), num_threads) {
  const Eagle3Config& c = config_;
  fc_ = weights_.add_linear("", {"fc.weight"}, {c.hidden_size}, c.num_captures * c.hidden_size,
                            LinearEpilogue::kNone, /*may_split=*/true);
  layer_ = add_decoder_layer(weights_, c.layer(), kPrefix);
  hidden_norm_ = weights_.add_norm(std::string(kPrefix) + "hidden_norm.weight", c.hidden_size);
  final_norm_ = weights_.add_norm("norm.weight", c.hidden_size);
  head_ = weights_.add_linear("", {"lm_head.weight"}, {c.draft_vocab_size}, c.hidden_size,
                              LinearEpilogue::kNone);
  if (c.has_embedding) {
    embedding_ = weights_.add_table("embed_tokens.weight", c.vocab_size, c.hidden_size);
  }
  if (c.has_token_map) token_map_ = weights_.add_token_map("d2t", c.draft_vocab_size, c.vocab_size);

  inv_freq_ = c.inv_freq(device);
  scratch_ = Buffer(at_.total, memory_of(device));
}

size_t Eagle3::weight_bytes(const Eagle3Config& c, Device device) {
  const auto linear = [&](int outputs, int inputs) {
    return Weights::linear_bytes(device, outputs, inputs, LinearEpilogue::kNone);
  };
  return linear(c.hidden_size, c.num_captures * c.hidden_size) +
         decoder_layer_bytes(c.layer(), device) + 2 * Weights::norm_bytes(c.hidden_size) +
         linear(c.draft_vocab_size, c.hidden_size) +
         (c.has_embedding ? Weights::table_bytes(c.vocab_size, c.hidden_size) : 0) +
         (c.has_token_map ? Weights::token_map_bytes(c.draft_vocab_size, c.vocab_size) : 0);
}

Eagle3::Scratch Eagle3::plan_scratch(const Eagle3Config& c, DType dtype,
                                     const ForwardLimits& limits) {
  Scratch at{};
  const auto take = [&](int width) {
    const size_t offset = at.total;
    at.total += area_bytes(static_cast<size_t>(limits.max_rows) * static_cast<size_t>(width) *
                           dtype_bytes(dtype));
    return offset;
  };
  at.embedded = take(c.hidden_size);
  at.attention_in = take(2 * c.hidden_size);
  at.residual = take(c.norm_before_residual ? c.hidden_size : 0);
  at.normed = take(c.hidden_size);
  return at;
}

size_t Eagle3::scratch_bytes(const Eagle3Config& config, DType dtype, Device device,
                             const ForwardLimits& limits, int num_threads) {
  return plan_scratch(config, dtype, limits).total +
         DecoderScratch::bytes(config.layer(), dtype, device, config.pass_limits(limits),
                               num_threads);
}

DecoderPass Eagle3::begin_pass(const ExecContext& exec, const RowBatch& rows,
                               const PageTableView& page_table, const KvLayerView& kv,
                               const void* embedding, const void* captured, void* hidden) {
  const Eagle3Config& c = config_;
  void* embedded = scratch_.at(at_.embedded);
  std::byte* attention_in = scratch_.at(at_.attention_in);
  const int64_t stride = 2 * c.hidden_size;
  ops::embedding(exec, {.token = rows.row_token,
                        .table = c.has_embedding ? embedding_ : embedding,
                        .out = embedded,
                        .num_rows = rows.num_rows,
                        .width = c.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, pass_scratch_, rows, page_table, kv, inv_freq_.floats(), 1.0f,
                   kFirstToken);
  if (captured != nullptr) pass.project(fc_, captured);
  pass.norm(hidden, hidden_norm_, attention_in + row_bytes(), stride);
  pass.norm(embedded, layer_.input_norm, attention_in, stride);
  return pass;
}

void Eagle3::append(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                    const KvLayerView& kv, const void* embedding, const void* captured,
                    void* hidden) {
  begin_pass(exec, rows, page_table, kv, embedding, captured, hidden)
      .append(layer_, scratch_.at(at_.attention_in), kv);
}

void Eagle3::forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                     const KvLayerView& kv, const void* embedding, void* hidden) {
  void* normed = scratch_.at(at_.normed);
  DecoderPass pass =
      begin_pass(exec, rows, page_table, kv, embedding, /*captured=*/nullptr, hidden);
  void* residual = hidden;
  if (config_.norm_before_residual) {
    residual = scratch_.at(at_.residual);
    pass.norm(hidden, hidden_norm_, residual);
  }
  pass.attend(layer_, scratch_.at(at_.attention_in), kv);
  pass.norm(residual, layer_.post_norm, normed);
  pass.mlp(layer_, normed);
  pass.norm(residual, final_norm_, normed);
  if (config_.norm_before_residual) {
    ops::gather_rows(exec, {.in = residual,
                            .out = hidden,
                            .num_rows = rows.num_rows,
                            .width_bytes = row_bytes(),
                            .out_stride = row_bytes()});
  }
}

void Eagle3::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  void* normed = scratch_.at(at_.normed);
  if (row != nullptr) {
    void* gathered = scratch_.at(at_.embedded);  // which only a pass needs
    ops::gather_rows(exec, {.row = row,
                            .in = normed,
                            .out = gathered,
                            .num_rows = count,
                            .width_bytes = row_bytes(),
                            .out_stride = row_bytes()});
    normed = gathered;
  }
  pass_scratch_.linear(exec, head_, normed, out, count, DType::kF32);
}

}  // namespace openspec
