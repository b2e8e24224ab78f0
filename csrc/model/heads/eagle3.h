#pragma once

#include <span>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/heads/draft_model.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

/// Geometry of an EAGLE-3 head, or of a P-EAGLE head.
struct Eagle3Config : DraftModelConfig {
  Eagle3Config(const HeadSpec& head, const TargetSpec& target) : DraftModelConfig(head, target) {
    num_inputs = 2;  // the token's embedding and the feature
  }
  bool has_mask_hidden = false;  // captured states of rows whose token is not known

  void validate() const;
};

struct Eagle3Tensors : DraftTensors {
  Eagle3Tensors(Weights& weights, const Eagle3Config& config);

  std::vector<DecoderLayer> layers;         // the first reads [embedding, feature]
  std::vector<const float*> capture_norms;  // as CaptureNorm says
  const void* mask_hidden = nullptr;        // [num_captures * hidden_size] bf16, or null
};

/// Decoder layers, the first of which reads [token embedding, feature]. A row's feature is made of
/// the target's captured states, or is the row's output on the draft before it.
///
/// Source: EAGLE-3 (Li et al., arXiv 2503.01840), P-EAGLE (arXiv 2602.01469) and the checkpoints'
/// reference code: h = f + attention([input_norm(e), hidden_norm(f)]); h += mlp(post_norm(h)); more
/// layers follow as in Llama; logits = head(norm(h)); h, before the norm, is the next row's
/// feature. EAGLE-3.1 norms captured states before fc, and what is fed back.
class Eagle3 : public DecoderModel<Eagle3Config, Eagle3Tensors> {
 public:
  using DecoderModel::DecoderModel;

  /// The entries of rows of the target in all layers: hidden [num_rows, hidden_size] =
  /// fc(captured [num_rows, num_captures * hidden_size]) are the rows' features; `captured` is gone
  /// then where it is normed. What a row passes on to rows after it are its entries alone: of the
  /// last layer no more is computed.
  void append(const ExecContext& exec, const Sight& whole, const Sight& sliding,
              std::span<const KvLayerView> kv, const void* embedding, void* captured, void* hidden);
  /// One pass; `hidden` [num_rows, hidden_size] holds the features before and the outputs after it.
  /// `embedding` [vocab_size, hidden_size] bf16 is the target's. Layers that slide see `sliding`,
  /// the others `whole`.
  void forward(const ExecContext& exec, const Sight& whole, const Sight& sliding,
               std::span<const KvLayerView> kv, const void* embedding, void* hidden);
  /// The feature [hidden_size] of rows whose token is not known; `captured` as for `append` is room
  /// for one row, `zero` is a zero on the device.
  void mask_feature(const ExecContext& exec, const int32_t* zero, void* captured, void* feature);
  /// Logits of rows of the last pass: out [count, draft_vocab_size] fp32; row [count], of -1 comes
  /// anything; null: its first ones. `head` is the target's.
  void logits(const ExecContext& exec, const LogitsHead& head, const int32_t* row, int count,
              float* out) {
    scratch_.logits(exec, config_.has_head ? tensors_.head : head, row, count, out);
  }

 private:
  void norm_captures(const ExecContext& exec, void* captured, int num_rows);
  /// A pass with the first layer's inputs in place, from `hidden` or from `captured`, which become
  /// it.
  DecoderPass begin_pass(const ExecContext& exec, const Sight& whole,
                         std::span<const KvLayerView> kv, const void* embedding, void* captured,
                         void* hidden);
  /// All layers; the last one up to its entries where `is_append`.
  void run_layers(DecoderPass& pass, const Sight& whole, const Sight& sliding,
                  std::span<const KvLayerView> kv, void* residual, bool is_append);
  int64_t row_bytes() const {
    return int64_t{config_.hidden_size} * static_cast<int64_t>(dtype_bytes(dtype_));
  }
};

}  // namespace openspec
