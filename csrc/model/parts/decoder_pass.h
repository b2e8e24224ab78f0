#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/span_attention.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/parts/decoder_layer.h"

namespace openspec {

struct RmsNormParams;

/// What the attention of a layer sees: the rows' spans, whose prefixes may begin after a
/// sequence's first tokens, and how much of them (SpanAttentionParams).
struct Sight {
  RowBatch rows;
  PageTableView pages;
  int window = 0;
  bool is_causal = true;
  bool window_follows_rows = false;
};

/// Layers whose output is kept, rising, and where: [num_rows, layers, hidden_size].
struct Captures {
  const std::vector<int>& layers;
  void* rows = nullptr;
};

/// One pass of a batch of rows through decoder layers: what an attention or an MLP puts out is
/// added to the residual stream by the next `norm`.
class DecoderPass {
 public:
  /// `inv_freq`, the geometry's, lies on the device; `kv` is any of the layers'. Attention does not
  /// see tokens before `first_token`; until `see` says else it sees all others, and is causal. With
  /// `is_fenced` the pass begins when all before it is complete, and its attention reads the
  /// prefixes early: that pays where many layers follow.
  DecoderPass(const ExecContext& exec, DecoderScratch& scratch, const RowBatch& rows,
              const PageTableView& page_table, const KvLayerView& kv, const float* inv_freq,
              int first_token = 0, bool is_fenced = false);

  /// Layers from here on see this. What the rows are, and where their KV goes, stays.
  void see(const Sight& sight);
  /// residual += what is due; out = its norm, in rows of `out_stride` elements (0: the width).
  /// `is_read`: others than norms read the residual stream before it changes again. Of many rows a
  /// rank has else its own alone: the same ones in all rounds of a pass, so they are never stale.
  void norm(void* residual, const float* weight, void* out, int64_t out_stride = 0,
            bool is_read = false);
  /// The norm after layer `layer`, which makes its output complete; that is kept if it is one of
  /// `captures`.
  void norm_after(int layer, const Captures& captures, void* residual, const float* weight,
                  void* out);
  /// The residual stream of the next `norm` begins as x W^T, whatever it was.
  void project(const PackedLinear& weight, const void* x);
  /// K and V of x [num_rows, attention_inputs] go to `kv`; nothing is attended to.
  void append(const DecoderLayer& layer, const void* x, const KvLayerView& kv);
  /// K and V of x [num_rows, hidden_size] for all `layers` at once, of which `context` holds the
  /// k_proj and v_proj, one layer's below the other's.
  void append_context(const PackedLinear& context, std::span<const DecoderLayer> layers,
                      const void* x, std::span<const KvLayerView> kv);
  /// K and V of x go to `kv` as in `append`, then the rows attend.
  void attend(const DecoderLayer& layer, const void* x, const KvLayerView& kv);
  /// x [num_rows, hidden_size].
  void mlp(const DecoderLayer& layer, const void* x);
  /// What a part of another kind puts out, as `attend` and `mlp` do: x W^T.
  void add_product(const PackedLinear& weight, const void* x);
  /// What such a part puts out as rows [num_rows, hidden_size], or, null, as their terms. They stay
  /// until the next `norm`.
  void add_rows(const void* rows, const RowTerms& terms = {}) {
    due_ = {.rows = rows, .terms = terms};
  }
  /// x [num_rows, hidden_size] convolved, for `attend` or `mlp`. What is due after them is
  /// convolved with the other coefficients; it lies in `normed` then, until the next `norm`.
  const void* convolve(const BlockConv& conv, const void* x);
  void convolve_due(const BlockConv& conv);

 private:
  void plan();
  /// `norm` of a product whose sums are all ranks'.
  void norm_of_sums(const RmsNormParams& norm, bool is_read);
  template <typename T = std::byte>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(scratch_.buffer_.at(offset));
  }

  const ExecContext& exec_;
  DecoderScratch& scratch_;
  SpanAttentionParams attention_;
  bool is_planned_ = false;
  Delta due_;            // waits for `norm`
  bool starts_ = false;  // what is due is the stream itself
};

}  // namespace openspec
