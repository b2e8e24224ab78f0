#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/choose/choose.h"
#include "kernels/common/exec.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/table_rows.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/shared_tensors.h"
#include "model/targets/target.h"
#include "model/weights/buffer.h"
#include "runtime/drafting/drafter.h"

namespace openspec {

/// What drafters have in common that run a network of their own over rows of their own, on the
/// device of the step: memory, the arrays of the rows, how far rows see, how drafts are drawn.
///
/// Options: `draft_noise` (drafts are drawn as the request is, with the noise of the choice to be
/// guessed; off: always the best) and `draft_window` (tokens of the context that draft rows see,
/// the last ones; 0: all).
class NetworkDrafter : public Drafter {
 public:
  const DrafterNeeds& needs() const final { return needs_; }
  bool works_on_arrays() const final { return true; }

 protected:
  explicit NetworkDrafter(const RunnerConfig& config);

  /// Declares what is drafted from the best `top_k` tokens; 1: chains.
  void declare_trees(int top_k, int draft_vocab_size);
  /// Plans memory for passes of so many rows; a draft pass has at most `max_span_rows` for a
  /// sequence. Before memory of the drafter's own is planned.
  void plan_rows(int max_rows, int max_span_rows);
  /// Plans memory for draws of drafts from logits of `vocab_size` columns.
  void plan_draws(int max_num_samples, int vocab_size);
  /// Plans memory for the `top_k` best drafts of logits of `vocab_size` columns.
  void plan_best(int max_num_samples, int vocab_size, int top_k);
  /// A place for `count` entries of `bytes` each, which `at` finds once memory is allocated.
  size_t take(int count, size_t bytes) { return areas_.take(count, bytes); }
  size_t planned_bytes() const { return areas_.bytes; }
  /// Takes the memory that is planned, zeroed.
  void allocate();
  /// Other ranks' drafters, which have theirs planned alike, share what comes to lie there.
  void give_memory(SumExchange& exchange) { exchange.give_area(memory_.data(), memory_.bytes()); }
  template <typename T>
  T* at(size_t place) {
    return reinterpret_cast<T*>(memory_.at(place));
  }

  DraftRows draft_rows(int num_rows, int num_spans);
  /// The rows of a step that count, as the drafter's own, with their features in `features`
  /// [num_rows, width]. With `last_row` (ExtendRowsParams, as `from_start`) rows move one position
  /// ahead.
  DraftRows extend_rows(const ExecContext& exec, const TableView& table, const CommittedStep& step,
                        void* features, int width, int32_t* last_row = nullptr,
                        bool from_start = false);
  /// What layers that see the whole context see in a pass over draft rows.
  Sight sight_of(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                 int expected_kv_len, bool may_have_trees = false) {
    return look(exec, table, rows, expected_kv_len, may_have_trees, whole_);
  }
  /// What layers that slide see in a pass over draft rows.
  Sight sliding_sight_of(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                         int expected_kv_len, bool may_have_trees = false) {
    Sight sight = look(exec, table, rows, expected_kv_len, may_have_trees, sliding_);
    sight.window = sliding_window_;
    return sight;
  }

  /// to[i] = from[row[i]], rows of `width` activations; rows of -1 keep what they hold.
  void copy_rows(const ExecContext& exec, const int32_t* row, const void* from, void* to,
                 int num_rows, int width) const;
  int64_t row_bytes(int width) const;
  /// The last `width` columns of states [num_rows, stride] pass the target's final norm.
  void norm_last(const ExecContext& exec, const FinalNorm& norm, void* states, int num_rows,
                 int stride, int width) const;

  /// Tokens that layers which slide see, as the head was trained; 0: none slides.
  int head_window() const { return head_window_; }

  /// How drafts are drawn; see draft_noise.
  const SamplingParams* sampling(const TableView& table);
  /// Whether the logits of all drafts are to be kept, for acceptance by rejection.
  bool keeps_logits() const { return needs_.keeps_logits; }
  /// Draws drafts; `params` says of which rows and logits, and where to.
  void draw(const ExecContext& exec, const TableView& table, ChooseParams params);
  /// Finds the best; `params` says of which rows and logits, how many, and how sequences sample if
  /// it is not as they draft. Without a place of its own the tokens go to `top_tokens`.
  void find_best(const ExecContext& exec, const TableView& table, TopDraftsParams params);
  int32_t* top_tokens() { return at<int32_t>(at_.top_tokens); }
  float* top_scores() { return at<float>(at_.top_scores); }

  const RunnerConfig config_;
  DrafterNeeds needs_;

 private:
  struct Places {
    size_t row_token, row_position, row_span, row_parent, source, row_kv_slot, span_begin,
        span_kv_len, span_seq, greedy;
    size_t choose, top_tokens, top_scores, top_drafts;
  };

  /// The last tokens of contexts, and the pages that hold them.
  struct Window {
    int tokens = 0;  // 0: all
    int max_pages = 0;
    size_t kv_len = 0, seq = 0, pages = 0;
  };
  Sight look(const ExecContext& exec, const TableView& table, const DraftRows& rows,
             int expected_kv_len, bool may_have_trees, const Window& window);

  bool has_noise_;
  int head_window_;
  Window whole_, sliding_;
  int sliding_window_ = 0;
  int max_span_rows_ = 0;
  AreaPlan areas_;
  Places at_{};
  Buffer memory_;
};

/// A drafter whose network is a DecoderModel over captured states of the target.
template <typename Model>
class HeadDrafter : public NetworkDrafter {
 public:
  Weights* weights() final { return model_ ? &model_->weights() : nullptr; }
  Weights* spare_weights() final { return spare_.get(); }
  void exchange(const ExecContext& exec) final {
    model_->weights().exchange(*spare_, exec);
    take_over(exec);
  }
  void attach(const TargetModel& target, std::span<const KvLayerView> kv_layers) override {
    target_ = target.shared();
    kv_.assign(kv_layers.begin(), kv_layers.end());
    model_.emplace(head_, config_.dtype, config_.device, limits_, config_.num_threads);
    if (config_.has_spare_head) spare_ = model_->make_spare();
    if constexpr (requires { model_->tensors().token_map; }) {
      token_map_ = model_->tensors().token_map;
    }
    allocate();
    // Logits of a head that is the target's lie there.
    if (target_.head.exchange != nullptr) give_memory(*target_.head.exchange);
  }
  std::vector<float> last_logits() final {
    return copy_from(config_.device, last_logits_.data(), last_logits_.size());
  }

 protected:
  explicit HeadDrafter(const RunnerConfig& config)
      : NetworkDrafter(config), head_(config.the_head(), config.target) {
    needs_.capture_layers = head_.capture_layers;
  }

  /// Between steps: what was made of the weights before them is made of these.
  virtual void take_over(const ExecContext&) {}

  /// Declares the head's layers and memory: once all else is planned.
  void declare_head(const ForwardLimits& limits) {
    limits_ = limits;
    needs_.state.kv_layers.assign(head_.layers.size(), {head_.num_kv_heads, head_.head_dim});
    const size_t weight_bytes = Model::weight_bytes(head_, config_.device);
    if (config_.has_spare_head)
      needs_.fixed_bytes = Weights::spare_bytes(config_.device, weight_bytes);
    needs_.fixed_bytes +=
        weight_bytes +
        Model::scratch_bytes(head_, config_.dtype, config_.device, limits, config_.num_threads) +
        planned_bytes();
  }
  /// A row of logits.
  size_t logits_bytes() const {
    return static_cast<size_t>(head_.draft_vocab_size) * sizeof(float);
  }
  void set_last_logits(const float* logits, int count) {
    last_logits_ = {logits, static_cast<size_t>(count) * logits_bytes() / sizeof(float)};
  }
  /// Token ids of the logits' columns; null: their numbers.
  const int32_t* token_of() const { return token_map_.token_of; }
  /// See draft_logits().
  DraftLogits kept_logits(const float* values, int64_t depth_stride, const int32_t* row) const {
    if (!keeps_logits()) return {};
    return {.values = values,
            .row_stride = head_.draft_vocab_size,
            .depth_stride = depth_stride,
            .row = row,
            .vocab_size = head_.draft_vocab_size,
            .column_of = token_map_.column_of};
  }

  typename Model::Geometry head_;
  ForwardLimits limits_;
  std::optional<Model> model_;
  std::unique_ptr<Weights> spare_;  // null: there is room for the model's alone
  std::vector<KvLayerView> kv_;
  SharedTensors target_;
  Weights::TokenMap token_map_;  // of its vocabulary; null: the target's

 private:
  std::span<const float> last_logits_;
};

}  // namespace openspec
