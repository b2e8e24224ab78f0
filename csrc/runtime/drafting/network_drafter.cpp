#include "runtime/drafting/network_drafter.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

/// The window of the head's layers that slide; 0: none does.
int window_of(const HeadSpec& head) {
  int found = 0;
  for (const LayerSpec& layer : head.layers) {
    const int window = std::get<AttentionSpec>(layer.mixer).window;
    OPENSPEC_CHECK_ARG(window >= 0 && (window == 0 || found == 0 || window == found),
                       "layers of a head slide over one window, not ", found, " and ", window);
    found = std::max(found, window);
  }
  return found;
}

}  // namespace

NetworkDrafter::NetworkDrafter(const RunnerConfig& config)
    : config_(config),
      has_noise_(config.flag("draft_noise", true)),
      head_window_(window_of(config.the_head())) {
  whole_.tokens = std::min(config.integer("draft_window", 0, 0, 1 << 24), config.max_model_len);
  sliding_.tokens = sliding_window_ = std::min(head_window_, config.max_model_len);
  if (sliding_window_ == config.max_model_len) sliding_ = whole_, sliding_window_ = 0;
  if (0 < whole_.tokens && whole_.tokens < sliding_.tokens) sliding_.tokens = whole_.tokens;
  needs_.is_costly = true;
  needs_.keeps_logits = config.acceptance == Acceptance::kRejection;
  OPENSPEC_CHECK_ARG(!keeps_logits() || has_noise_,
                     "acceptance by rejection needs drafts that are drawn: set draft_noise");
}

void NetworkDrafter::declare_trees(int top_k, int draft_vocab_size) {
  OPENSPEC_CHECK_ARG(top_k <= draft_vocab_size, "draft_top_k ", top_k, " of a vocabulary of ",
                     draft_vocab_size);
  OPENSPEC_CHECK_ARG(!keeps_logits() || top_k == 1,
                     "acceptance by rejection is for chains: set draft_top_k to 1");
  needs_.makes_trees = top_k > 1;
}

void NetworkDrafter::plan_rows(int max_rows, int max_span_rows) {
  const int seqs = config_.max_num_seqs;
  for (size_t* array :
       {&at_.row_token, &at_.row_position, &at_.row_span, &at_.row_parent, &at_.source}) {
    *array = take(max_rows, sizeof(int32_t));
  }
  at_.row_kv_slot = take(max_rows, sizeof(int64_t));
  at_.span_begin = take(seqs + 1, sizeof(int32_t));
  at_.span_kv_len = take(seqs, sizeof(int32_t));
  at_.span_seq = take(seqs, sizeof(int32_t));
  if (!has_noise_) at_.greedy = take(seqs, sizeof(SamplingParams));
  max_span_rows_ = max_span_rows;
  for (Window* window : {&whole_, &sliding_}) {
    if (window->tokens == 0) continue;
    window->max_pages = window_pages(window->tokens, max_span_rows, config_.page_size);
    window->kv_len = take(seqs, sizeof(int32_t));
    window->seq = take(seqs, sizeof(int32_t));
    window->pages = take(seqs * window->max_pages, sizeof(int32_t));
  }
}

void NetworkDrafter::plan_draws([[maybe_unused]] int max_num_samples, int vocab_size) {
  size_t bytes = choose_workspace_bytes_cpu(config_.num_threads, vocab_size);
#ifdef OPENSPEC_CUDA
  if (config_.device == Device::kCuda) {
    bytes = choose_workspace_bytes_cuda(max_num_samples, vocab_size);
  }
#endif
  at_.choose = take(1, bytes);
}

void NetworkDrafter::plan_best(int max_num_samples, int vocab_size, int top_k) {
  at_.top_tokens = take(max_num_samples * top_k, sizeof(int32_t));
  at_.top_scores = take(max_num_samples * top_k, sizeof(float));
  size_t bytes = top_drafts_workspace_bytes_cpu(config_.num_threads, vocab_size);
#ifdef OPENSPEC_CUDA
  if (config_.device == Device::kCuda) {
    bytes = top_drafts_workspace_bytes_cuda(max_num_samples, vocab_size);
  }
#endif
  at_.top_drafts = take(1, bytes);
}

void NetworkDrafter::allocate() {
  memory_ = Buffer(areas_.bytes, memory_of(config_.device));
  if (config_.device == Device::kCuda) {
    device::fill_zero(memory_.data(), memory_.bytes(), nullptr);
    device::synchronize(nullptr);
  } else {
    std::fill_n(memory_.as<std::byte>(), memory_.bytes(), std::byte{});
  }
}

DraftRows NetworkDrafter::draft_rows(int num_rows, int num_spans) {
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

DraftRows NetworkDrafter::extend_rows(const ExecContext& exec, const TableView& table,
                                      const CommittedStep& step, void* features, int width,
                                      int32_t* last_row, bool from_start) {
  ExtendRowsParams params = {.step = step.rows,
                             .num_computed = step.num_computed,
                             .committed_row = step.committed_row,
                             .table = table,
                             .page_size = config_.page_size,
                             .shift = last_row == nullptr ? 0 : 1,
                             .from_start = from_start,
                             .out = {},
                             .last_row = last_row};
  // On the host exactly the rows that count, on a device room for all.
  const bool is_cuda = exec.device == Device::kCuda;
  int num_rows = is_cuda ? step.rows.num_rows : step.num_committed;
  for (int span = 0; from_start && span < step.rows.num_spans; ++span) {
    num_rows += is_cuda ? 1 : params.num_before(span);
  }
  params.out = draft_rows(num_rows, step.rows.num_spans);
  if (num_rows == 0) return params.out;
  ops::extend_rows(exec, params);
  if (width > 0) copy_rows(exec, params.out.source, step.features, features, num_rows, width);
  return params.out;
}

Sight NetworkDrafter::look(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                           int expected_kv_len, bool may_have_trees, const Window& window) {
  Sight sight{rows.batch(may_have_trees), table.pages};
  sight.rows.expected_kv_len = expected_kv_len;
  sight.rows.max_span_rows = max_span_rows_;
  if (window.tokens == 0) return sight;
  ops::window_spans(exec, {.span_begin = rows.span_begin,
                           .span_kv_len = rows.span_kv_len,
                           .span_seq = rows.span_seq,
                           .from = table.pages,
                           .num_spans = rows.num_spans,
                           .window = window.tokens,
                           .page_size = config_.page_size,
                           .max_pages = window.max_pages,
                           .out_kv_len = at<int32_t>(window.kv_len),
                           .out_seq = at<int32_t>(window.seq),
                           .out_pages = at<int32_t>(window.pages)});
  sight.rows.span_kv_len = at<int32_t>(window.kv_len);
  sight.rows.span_seq = at<int32_t>(window.seq);
  sight.pages = {at<int32_t>(window.pages), window.max_pages};
  return sight;
}

void NetworkDrafter::copy_rows(const ExecContext& exec, const int32_t* row, const void* from,
                               void* to, int num_rows, int width) const {
  ops::copy_rows(exec, row, from, to, num_rows, row_bytes(width));
}

void NetworkDrafter::norm_last(const ExecContext& exec, const FinalNorm& norm, void* states,
                               int num_rows, int stride, int width) const {
  void* last = static_cast<std::byte*>(states) + row_bytes(stride - width);
  ops::rms_norm(exec, {.residual = last,
                       .residual_stride = stride,
                       .weight = norm.weight,
                       .out = last,
                       .out_stride = stride,
                       .num_rows = num_rows,
                       .width = width,
                       .eps = norm.eps,
                       .rounds_once = norm.rounds_once,
                       .dtype = config_.dtype});
}

int64_t NetworkDrafter::row_bytes(int width) const {
  return static_cast<int64_t>(width) * static_cast<int64_t>(dtype_bytes(config_.dtype));
}

const SamplingParams* NetworkDrafter::sampling(const TableView& table) {
  return has_noise_ ? table.sampling : at<SamplingParams>(at_.greedy);  // zeros: the best
}

void NetworkDrafter::draw(const ExecContext& exec, const TableView& table, ChooseParams params) {
  params.is_draft = true;
  params.has_own_noise = keeps_logits();
  params.sampling = sampling(table);
  params.workspace = at<float>(at_.choose);
  ops::choose(exec, params);
}

void NetworkDrafter::find_best(const ExecContext& exec, const TableView& table,
                               TopDraftsParams params) {
  if (params.sampling == nullptr) params.sampling = sampling(table);
  if (params.tokens == nullptr) params.tokens = top_tokens();
  params.scores = top_scores();
  params.workspace = at<void>(at_.top_drafts);
  ops::top_drafts(exec, params);
}

}  // namespace openspec
