#include "model/eagle3.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/check.h"
#include "kernels/ops.h"
#include "runtime/drafter.h"

namespace openspec {
namespace {

constexpr int kMaxDrafts = 8;

/// "1,17,32".
std::vector<int> parse_layers(const std::string& text, int num_layers) {
  std::vector<int> layers;
  const char* at = text.data();
  const char* end = at + text.size();
  while (at < end) {
    int layer = 0;
    const auto [next, error] = std::from_chars(at, end, layer);
    OPENSPEC_CHECK_ARG(error == std::errc() && (next == end || *next == ','),
                       "capture_layers must be numbers with commas between, got ", text);
    OPENSPEC_CHECK_ARG(layer >= 0 && layer < num_layers, "capture_layers: layer ", layer,
                       " is outside the target's ", num_layers);
    OPENSPEC_CHECK_ARG(layers.empty() || layer > layers.back(), "capture_layers must rise, got ",
                       text);
    layers.push_back(layer);
    at = next == end ? end : next + 1;
  }
  OPENSPEC_CHECK_ARG(!layers.empty(), "capture_layers is empty");
  return layers;
}

/// Autoregressive drafts from a one-layer head over the target's features, as chains.
///
/// Its state per sequence: entries in the page pool up to the last known token, and the output of
/// that token's row, from which the first draft is drawn.
class Eagle3Drafter final : public Drafter {
 public:
  explicit Eagle3Drafter(const DrafterConfig& config)
      : config_(config),
        num_drafts_(config.num_speculative_tokens),
        max_chains_(std::min(config.max_num_seqs, config.limits.max_rows)) {
    constexpr int kMost = 1 << 24;
    const TargetConfig& target = config.target;
    OPENSPEC_CHECK_ARG(num_drafts_ >= 1 && num_drafts_ <= kMaxDrafts,
                       "num_speculative_tokens must be in [1, ", kMaxDrafts, "], got ",
                       num_drafts_);
    needs_.capture_layers = parse_layers(config.text("capture_layers", ""), target.num_layers);
    head_ = {.hidden_size = target.hidden_size,
             .num_captures = static_cast<int>(needs_.capture_layers.size()),
             .num_q_heads = config.integer("num_q_heads", target.num_q_heads, 1, kMost),
             .num_kv_heads = config.integer("num_kv_heads", target.num_kv_heads, 1, kMost),
             .head_dim = config.integer("head_dim", target.head_dim, 1, kMost),
             .intermediate_size =
                 config.integer("intermediate_size", target.intermediate_size, 1, kMost),
             .vocab_size = target.vocab_size,
             .draft_vocab_size = config.integer("draft_vocab_size", target.vocab_size, 1, kMost),
             .rms_norm_eps = static_cast<float>(config.number("rms_norm_eps", 1e-6)),
             .rope_theta = config.number("rope_theta", 1e4),
             .has_qk_norm = config.flag("has_qk_norm", false),
             .has_embedding = config.flag("has_embedding", false),
             .has_token_map = config.flag("has_token_map", false),
             .norm_before_residual = config.flag("norm_before_residual", false)};
    head_.validate();
    needs_.num_speculative_tokens = num_drafts_;
    needs_.kv_layers = {{head_.num_kv_heads, head_.head_dim}};
    needs_.is_costly = true;
    at_ = plan();
    needs_.fixed_bytes =
        Eagle3::weight_bytes(head_, config_.device) +
        Eagle3::scratch_bytes(head_, config_.dtype, config_.device, limits(), config_.num_threads) +
        at_.total;
  }

  const DrafterNeeds& needs() const override { return needs_; }
  Weights* weights() override { return model_ ? &model_->weights() : nullptr; }
  bool works_on_arrays() const override { return true; }

  void attach(const Qwen3& target, std::span<const KvLayerView> kv_layers) override {
    embedding_ = target.embedding();
    kv_ = kv_layers.front();
    model_.emplace(head_, config_.dtype, config_.device, limits(), config_.num_threads);
    const bool is_cuda = config_.device == Device::kCuda;
    memory_ = Buffer(at_.total, is_cuda ? Memory::kDevice : Memory::kHost);
    if (is_cuda) {
      device::fill_zero(memory_.data(), memory_.bytes(), nullptr);
      device::synchronize(nullptr);
    } else {
      std::fill_n(memory_.as<std::byte>(), memory_.bytes(), std::byte{});
    }
  }

  std::vector<float> last_logits() override {
    std::vector<float> values(static_cast<size_t>(num_last_chains_) *
                              static_cast<size_t>(head_.draft_vocab_size));
    if (config_.device == Device::kCuda) {
      device::copy_to_host(values.data(), memory_.at(at_.logits), values.size() * sizeof(float),
                           nullptr);
      device::synchronize(nullptr);
    } else {
      std::copy_n(at<float>(at_.logits), values.size(), values.begin());
    }
    return values;
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    num_last_chains_ = wanted.num_seqs;
    DraftRows rows = draft_rows(wanted.num_seqs, wanted.num_seqs);
    OPENSPEC_CHECK(wanted.num_seqs <= max_chains_, wanted.num_seqs, " chains, at most ",
                   max_chains_);
    void* hidden = memory_.at(at_.hidden);
    for (int depth = 0; depth <= wanted.max_drafts; ++depth) {
      ops::chain_rows(exec, {.table = table,
                             .seq = wanted.seq,
                             .num_wanted = wanted.num_wanted,
                             .num_seqs = wanted.num_seqs,
                             .max_drafts = wanted.max_drafts,
                             .depth = depth,
                             .page_size = config_.page_size,
                             .chosen = at<int32_t>(at_.chosen),
                             .out = rows,
                             .drafts = wanted.drafts,
                             .num_drafts = wanted.num_drafts});
      if (depth == wanted.max_drafts) break;
      if (depth == 0) {
        copy_rows(exec, rows.source, memory_.at(at_.hidden_of_slot), hidden, rows.num_rows,
                  head_.hidden_size);
      } else {
        model_->forward(exec, rows.batch(), table.pages, kv_, embedding_, hidden);
      }
      model_->logits(exec, hidden, rows.num_rows, at<float>(at_.logits));
      ops::choose(exec, {.rows = rows.batch(),
                         .sample_row = rows.row_span,  // a row's own number; -1: padding
                         .num_samples = rows.num_rows,
                         .logits = at<float>(at_.logits),
                         .vocab_size = head_.draft_vocab_size,
                         .is_draft = true,
                         .token_of = model_->token_of(),
                         .sampling = table.sampling,
                         .chosen = at<int32_t>(at_.chosen),
                         .workspace = at<float>(at_.choose)});
    }
  }

  void extend(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    // On the host exactly the rows that count, on a device room for all.
    const int num_rows = exec.device == Device::kCuda ? step.rows.num_rows : step.num_committed;
    if (num_rows == 0) return;
    const DraftRows rows = draft_rows(num_rows, step.rows.num_spans);
    ops::extend_rows(exec, {.step = step.rows,
                            .num_computed = step.num_computed,
                            .table = table,
                            .page_size = config_.page_size,
                            .out = rows,
                            .last_row = at<int32_t>(at_.last_row)});
    void* features = memory_.at(at_.features);
    void* hidden = memory_.at(at_.hidden);
    copy_rows(exec, rows.source, step.features, features, num_rows,
              head_.num_captures * head_.hidden_size);
    model_->project(exec, features, num_rows, hidden);
    model_->forward(exec, rows.batch(), table.pages, kv_, embedding_, hidden);
    copy_rows(exec, at<int32_t>(at_.last_row), hidden, memory_.at(at_.hidden_of_slot),
              table.max_num_seqs, head_.hidden_size);
  }

 private:
  struct Places {
    size_t row_token, row_position, row_span, row_parent, source, row_kv_slot, span_begin,
        span_kv_len, span_seq, last_row, chosen, features, hidden, hidden_of_slot, logits, choose,
        total;
  };

  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits;
    limits.max_logits_rows = max_chains_;
    return limits;
  }

  Places plan() const {
    Places places{};
    const auto take = [&](int count, size_t bytes) {
      const size_t offset = places.total;
      places.total += (static_cast<size_t>(count) * bytes + 255) / 256 * 256;
      return offset;
    };
    const int rows = config_.limits.max_rows, seqs = config_.max_num_seqs;
    for (size_t* array : {&places.row_token, &places.row_position, &places.row_span,
                          &places.row_parent, &places.source}) {
      *array = take(rows, sizeof(int32_t));
    }
    places.row_kv_slot = take(rows, sizeof(int64_t));
    places.span_begin = take(seqs + 1, sizeof(int32_t));
    for (size_t* array :
         {&places.span_kv_len, &places.span_seq, &places.last_row, &places.chosen}) {
      *array = take(seqs, sizeof(int32_t));
    }
    const size_t width = static_cast<size_t>(head_.hidden_size) * dtype_bytes(config_.dtype);
    places.features = take(rows, static_cast<size_t>(head_.num_captures) * width);
    places.hidden = take(rows, width);
    places.hidden_of_slot = take(seqs, width);
    places.logits = take(max_chains_, static_cast<size_t>(head_.draft_vocab_size) * sizeof(float));
    places.choose = take(1, choose_bytes());
    return places;
  }

  size_t choose_bytes() const {
#ifdef OPENSPEC_CUDA
    if (config_.device == Device::kCuda) {
      return choose_workspace_bytes_cuda(max_chains_, head_.draft_vocab_size);
    }
#endif
    return choose_workspace_bytes_cpu(config_.num_threads, head_.draft_vocab_size);
  }

  template <typename T>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(memory_.at(offset));
  }

  DraftRows draft_rows(int num_rows, int num_spans) {
    return {.num_rows = num_rows,
            .num_spans = num_spans,
            .row_token = at<int32_t>(at_.row_token),
            .row_position = at<int32_t>(at_.row_position),
            .row_span = at<int32_t>(at_.row_span),
            .row_parent = at<int32_t>(at_.row_parent),
            .source = at<int32_t>(at_.source),
            .row_kv_slot = at<int64_t>(at_.row_kv_slot),
            .span_begin = at<int32_t>(at_.span_begin),
            .span_kv_len = at<int32_t>(at_.span_kv_len),
            .span_seq = at<int32_t>(at_.span_seq)};
  }

  /// to[i] = from[row[i]], rows of `width` activations; rows of -1 keep what they hold.
  void copy_rows(const ExecContext& exec, const int32_t* row, const void* from, void* to,
                 int num_rows, int width) const {
    const auto bytes =
        static_cast<int64_t>(width) * static_cast<int64_t>(dtype_bytes(config_.dtype));
    ops::gather_rows(exec, {.row = row,
                            .in = from,
                            .out = to,
                            .num_rows = num_rows,
                            .width_bytes = bytes,
                            .out_stride = bytes});
  }

  DrafterConfig config_;
  int num_drafts_, max_chains_;
  int num_last_chains_ = 0;
  Eagle3Config head_;
  DrafterNeeds needs_;
  Places at_;
  std::optional<Eagle3> model_;
  Buffer memory_;
  KvLayerView kv_;
  const void* embedding_ = nullptr;
};

const DrafterRegistration kRegistration(
    "eagle3", [](const DrafterConfig& config) -> std::unique_ptr<Drafter> {
      return std::make_unique<Eagle3Drafter>(config);
    });

}  // namespace
}  // namespace openspec
