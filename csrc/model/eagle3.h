#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/draft_rows.h"
#include "model/buffer.h"
#include "model/decoder_layer.h"
#include "model/draft_model.h"
#include "model/weights.h"

namespace openspec {

/// Geometry of an EAGLE-3 head.
struct Eagle3Config : DraftModelConfig {
  bool has_qk_norm = false;
  bool norm_before_residual = false;  // the stream begins with the normed feature

  LayerGeometry layer() const;
};

/// One decoder layer over [token embedding, feature], with a head of its own. A row's feature is
/// made of the target's captured states, or is the row's output on the draft before it.
///
/// Source: EAGLE-3 (Li et al., arXiv 2503.01840) and the checkpoints' reference code: h = f +
/// attention([input_norm(e), hidden_norm(f)]); h += mlp(post_norm(h)); logits = head(norm(h)); h,
/// before the norm, is the next row's feature.
class Eagle3 {
 public:
  Eagle3(const Eagle3Config& config, DType dtype, Device device, const ForwardLimits& limits,
         int num_threads);

  Weights& weights() { return weights_; }

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
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out);
  /// Token ids of the head's columns, on the device; null: its numbers.
  const int32_t* token_of() const { return token_map_.token_of; }
  /// The other way round, see DraftLogits; null: likewise.
  const int32_t* column_of() const { return token_map_.column_of; }

  static size_t weight_bytes(const Eagle3Config& config, Device device);
  static size_t scratch_bytes(const Eagle3Config& config, DType dtype, Device device,
                              const ForwardLimits& limits, int num_threads);

 private:
  struct Scratch {
    size_t embedded, attention_in, residual, normed, total;
  };
  /// A pass with the layer's inputs in place, from `hidden` or from `captured`, which become it.
  DecoderPass begin_pass(const ExecContext& exec, const RowBatch& rows,
                         const PageTableView& page_table, const KvLayerView& kv,
                         const void* embedding, const void* captured, void* hidden);
  int64_t row_bytes() const {
    return int64_t{config_.hidden_size} * static_cast<int64_t>(dtype_bytes(dtype_));
  }
  static Scratch plan_scratch(const Eagle3Config& config, DType dtype, const ForwardLimits& limits);

  Eagle3Config config_;
  DType dtype_;
  Weights weights_;
  PackedLinear fc_, head_;
  DecoderLayer layer_;
  const float *hidden_norm_ = nullptr, *final_norm_ = nullptr;
  const void* embedding_ = nullptr;
  Weights::TokenMap token_map_;
  Buffer inv_freq_;
  Scratch at_;
  Buffer scratch_;
  DecoderScratch pass_scratch_;
};

}  // namespace openspec
