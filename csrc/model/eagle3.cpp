#include "model/eagle3.h"

#include <string>

#include "kernels/ops.h"

namespace openspec {

namespace {

const std::string kPrefix = "midlayer.";
// Entry 0 of a sequence would need the feature of position -1.
constexpr int kFirstToken = 1;

}  // namespace

Eagle3Tensors::Eagle3Tensors(Weights& weights, const Eagle3Config& config)
    : DraftTensors(weights, config, kPrefix + "hidden_norm.weight", /*has_head=*/true),
      layer(add_decoder_layer(weights, config, kPrefix)) {}

DecoderPass Eagle3::begin_pass(const ExecContext& exec, const RowBatch& rows,
                               const PageTableView& page_table, const KvLayerView& kv,
                               const void* embedding, const void* captured, void* hidden) {
  void* embedded = scratch_.residual();
  std::byte* attention_in = scratch_.attention_in();
  const int64_t stride = config_.attention_inputs();
  ops::embedding(exec, {.token = rows.row_token,
                        .table = config_.has_embedding ? tensors_.embedding : embedding,
                        .out = embedded,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, scratch_, rows, page_table, kv, inv_freq_.floats(), kFirstToken);
  if (captured != nullptr) pass.project(tensors_.fc, captured);
  pass.norm(hidden, tensors_.hidden_norm, attention_in + row_bytes(), stride);
  pass.norm(embedded, tensors_.layer.input_norm, attention_in, stride);
  return pass;
}

void Eagle3::append(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                    const KvLayerView& kv, const void* embedding, const void* captured,
                    void* hidden) {
  begin_pass(exec, rows, page_table, kv, embedding, captured, hidden)
      .append(tensors_.layer, scratch_.attention_in(), kv);
}

void Eagle3::forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                     const KvLayerView& kv, const void* embedding, void* hidden) {
  void* normed = scratch_.normed();
  DecoderPass pass =
      begin_pass(exec, rows, page_table, kv, embedding, /*captured=*/nullptr, hidden);
  void* residual = hidden;
  if (config_.norm_before_residual) {
    residual = scratch_.residual();
    pass.norm(hidden, tensors_.hidden_norm, residual);
  }
  pass.attend(tensors_.layer, scratch_.attention_in(), kv);
  pass.norm(residual, tensors_.layer.post_norm, normed);
  pass.mlp(tensors_.layer, normed);
  pass.norm(residual, tensors_.final_norm, normed);
  if (config_.norm_before_residual) {
    ops::gather_rows(exec, {.in = residual,
                            .out = hidden,
                            .num_rows = rows.num_rows,
                            .width_bytes = row_bytes(),
                            .out_stride = row_bytes()});
  }
}

}  // namespace openspec
