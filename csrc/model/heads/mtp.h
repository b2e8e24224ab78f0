#pragma once

#include <cstdint>
#include <span>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/heads/draft_model.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

/// Geometry of an MTP head.
struct MtpConfig : DraftModelConfig {
  MtpConfig(const HeadSpec& head, const TargetSpec& target) : DraftModelConfig(head, target) {
    num_inputs = 2;  // the token's embedding and the state, for fc
    norms_from_one = true;
  }
  void validate() const;
  ForwardLimits pass_limits(ForwardLimits limits) const {
    limits.max_inputs = attention_inputs();
    return limits;
  }
};

struct MtpTensors {
  MtpTensors(Weights& weights, const MtpConfig& config);

  PackedLinear fc;  // [embedding, state] -> hidden_size
  DecoderLayer layer;
  const float *embedding_norm = nullptr, *state_norm = nullptr, *final_norm = nullptr;
};

/// One decoder layer over the next token's embedding and a state: the target's after its final
/// norm, or the head's own output on the draft before.
///
/// Source: vLLM's and SGLang's qwen3_5_mtp: x = fc([norm(embedding), norm(state)]); one layer of
/// attention as the target's; output = norm(x), which the target's LM head reads, and the next row.
class Mtp : public DecoderModel<MtpConfig, MtpTensors> {
 public:
  using DecoderModel::DecoderModel;

  /// The entries of rows of the target: hidden [num_rows, hidden_size] = captured, the states that
  /// the rows read. The layer sees `whole`; it does not slide. `embedding` [vocab_size,
  /// hidden_size] bf16 is the target's.
  void append(const ExecContext& exec, const Sight& whole, const Sight& sliding,
              std::span<const KvLayerView> kv, const void* embedding, void* captured, void* hidden);
  /// One pass; `hidden` [num_rows, hidden_size] holds the states before and the outputs after it.
  void forward(const ExecContext& exec, const Sight& whole, const Sight& sliding,
               std::span<const KvLayerView> kv, const void* embedding, void* hidden);
  /// Logits of rows of the last pass: out [count, outputs of the head] fp32; row [count], of -1
  /// comes anything; null: its first ones.
  void logits(const ExecContext& exec, const LogitsHead& head, const int32_t* row, int count,
              float* out) {
    scratch_.logits(exec, head, row, count, out);
  }

 private:
  /// A pass up to the layer's input, which lies in `normed`.
  DecoderPass begin_pass(const ExecContext& exec, const Sight& whole, const KvLayerView& kv,
                         const void* embedding, void* state);
  int64_t row_bytes() const {
    return int64_t{config_.hidden_size} * static_cast<int64_t>(dtype_bytes(dtype_));
  }
};

}  // namespace openspec
