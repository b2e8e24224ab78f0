#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/decoder_model.h"
#include "model/draft_model.h"

namespace openspec {

/// Geometry of an EAGLE-3 head.
struct Eagle3Config : DraftModelConfig {
  explicit Eagle3Config(const DraftModelConfig& config = {}) : DraftModelConfig(config) {
    num_inputs = 2;  // the token's embedding and the feature
  }
  bool norm_before_residual = false;  // the stream begins with the normed feature
};

struct Eagle3Tensors : DraftTensors {
  Eagle3Tensors(Weights& weights, const Eagle3Config& config);
  DecoderLayer layer;
};

/// One decoder layer over [token embedding, feature], with a head of its own. A row's feature is
/// made of the target's captured states, or is the row's output on the draft before it.
///
/// Source: EAGLE-3 (Li et al., arXiv 2503.01840) and the checkpoints' reference code: h = f +
/// attention([input_norm(e), hidden_norm(f)]); h += mlp(post_norm(h)); logits = head(norm(h)); h,
/// before the norm, is the next row's feature.
class Eagle3 : public DecoderModel<Eagle3Config, Eagle3Tensors> {
 public:
  using DecoderModel::DecoderModel;

  /// The entries of rows of the target: hidden [num_rows, hidden_size] = fc(captured [num_rows,
  /// num_captures * hidden_size]) are the rows' features. What a row passes on to rows behind it is
  /// its entry alone, so no more of a pass is needed.
  void append(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
              const KvLayerView& kv, const void* embedding, const void* captured, void* hidden);
  /// One pass; `hidden` [num_rows, hidden_size] holds the features before and the outputs after it.
  /// `embedding` [vocab_size, hidden_size] bf16 is the target's.
  void forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
               const KvLayerView& kv, const void* embedding, void* hidden);
  /// Logits of rows of the last pass: out [count, draft_vocab_size] fp32; row [count], of -1 comes
  /// anything; null: its first ones.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
    scratch_.logits(exec, tensors_.head, row, count, out);
  }

 private:
  /// A pass with the layer's inputs in place, from `hidden` or from `captured`, which become it.
  DecoderPass begin_pass(const ExecContext& exec, const RowBatch& rows,
                         const PageTableView& page_table, const KvLayerView& kv,
                         const void* embedding, const void* captured, void* hidden);
  int64_t row_bytes() const {
    return int64_t{config_.hidden_size} * static_cast<int64_t>(dtype_bytes(dtype_));
  }
};

}  // namespace openspec
