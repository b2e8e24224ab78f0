#include "model/parts/decoder_layer.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/sum_exchange.h"

namespace openspec {

namespace {

// Up to so many rows on CUDA the sums of split linears are left to the next op; with more rows the
// extra memory traffic costs more than the parallelism of the splits brings, and the linear adds
// them as the CPU's always does.
constexpr int kMaxPartialRows = 256;

}  // namespace

void check_size(const char* name, int value) {
  OPENSPEC_CHECK_ARG(value > 0 && value <= (1 << 24), name, " must be positive, got ", value);
}

void LayerGeometry::validate(bool may_turn_partly) const {
  check_size("hidden_size", hidden_size);
  check_size("num_q_heads", num_q_heads);
  check_size("num_kv_heads", num_kv_heads);
  check_size("head_dim", head_dim);
  check_size("intermediate_size", intermediate_size);
  OPENSPEC_CHECK_ARG(num_q_heads % num_kv_heads == 0, "num_q_heads (", num_q_heads,
                     ") must be a multiple of num_kv_heads (", num_kv_heads, ")");
  OPENSPEC_CHECK_ARG(head_dim % 2 == 0, "head_dim must be even, got ", head_dim);
  OPENSPEC_CHECK_ARG(rms_norm_eps > 0.0f, "rms_norm_eps must be positive, got ", rms_norm_eps);
  const bool is_part = may_turn_partly && rotary_dim() > 0 && rotary_dim() < head_dim;
  OPENSPEC_CHECK_ARG(is_part || rotary_dim() == head_dim, "inv_freq has ", inv_freq.size(),
                     " entries, expected ", head_dim / 2);
  part();
}

LayerPart LayerGeometry::part() const {
  const Part q_heads = even_part("query heads", num_q_heads, rank);
  const Part inputs = split_part("o_proj", hidden_size, num_q_heads * head_dim, rank);
  OPENSPEC_CHECK_ARG(
      inputs.first == q_heads.first * head_dim && inputs.count == q_heads.count * head_dim,
      "tensor_parallel_size ", rank.size, ": the sums of o_proj cannot be parted ",
      "between heads of ", head_dim, "; choose a smaller one");
  const Part intermediate = split_part("down_proj", hidden_size, intermediate_size, rank);
  if (num_kv_heads % rank.size == 0) {
    return {q_heads, even_part("KV heads", num_kv_heads, rank), intermediate};
  }
  OPENSPEC_CHECK_ARG(rank.size % num_kv_heads == 0, "tensor_parallel_size ", rank.size,
                     " and the model's ", num_kv_heads, " KV heads: one must divide the other; ",
                     "choose another, or --replicas for more devices");
  return {q_heads, Part(rank.rank * num_kv_heads / rank.size, 1, num_kv_heads), intermediate};
}

int LayerGeometry::max_splits() const {
  const LayerPart all = part();
  return std::max(linear_num_splits(hidden_size, all.q_heads.whole * head_dim),
                  linear_num_splits(hidden_size, all.intermediate.whole));
}

LayerGeometry geometry_of(const std::vector<LayerSpec>& layers, int hidden_size,
                          float rms_norm_eps) {
  OPENSPEC_CHECK_ARG(!layers.empty(), "a model needs layers");
  LayerGeometry geometry;
  AttentionSpec &attention = geometry, without_window;
  DenseMlpSpec& mlp = geometry;
  for (size_t i = 0; i < layers.size(); ++i) {
    without_window = std::get<AttentionSpec>(layers[i].mixer);
    without_window.window = 0;
    if (i == 0) {
      attention = without_window;
      mlp = std::get<DenseMlpSpec>(layers[i].mlp);
    }
    OPENSPEC_CHECK_ARG(attention == without_window && mlp == std::get<DenseMlpSpec>(layers[i].mlp),
                       "layer ", i, " differs from layer 0; layers of one model must be alike");
  }
  geometry.hidden_size = hidden_size;
  geometry.rms_norm_eps = rms_norm_eps;
  return geometry;
}

DecoderLayer add_decoder_layer(Weights& weights, const LayerGeometry& g,
                               const std::string& prefix) {
  DecoderLayer layer;
  add_attention(weights, g, prefix, layer);
  add_mlp(weights, g, prefix, layer);
  return layer;
}

void add_attention(Weights& weights, const LayerGeometry& g, const std::string& prefix,
                   DecoderLayer& layer) {
  const std::string attention = prefix + "self_attn.";
  const Part q = g.part().q_heads.of_size(g.head_dim), kv = g.part().kv_heads.of_size(g.head_dim);
  const Part queries = g.has_gate ? g.part().q_heads.of_size(2 * g.head_dim) : q;
  layer.qkv = weights.add_linear(attention, {"q_proj.weight", "k_proj.weight", "v_proj.weight"},
                                 {queries, kv, kv}, g.attention_inputs(), LinearEpilogue::kNone,
                                 /*may_split=*/false, g.has_qkv_bias);
  layer.o = weights.add_linear(attention, {"o_proj.weight"}, {g.hidden_size}, q,
                               LinearEpilogue::kNone, /*may_split=*/true);
  layer.input_norm =
      weights.add_norm(prefix + "input_layernorm.weight", g.hidden_size, g.norms_from_one);
  if (g.has_qk_norm) {
    layer.q_norm = weights.add_norm(attention + "q_norm.weight", g.head_dim, g.norms_from_one);
    layer.k_norm = weights.add_norm(attention + "k_norm.weight", g.head_dim, g.norms_from_one);
  }
}

void add_mlp(Weights& weights, const LayerGeometry& g, const std::string& prefix,
             DecoderLayer& layer) {
  const std::string mlp = prefix + "mlp.";
  const Part intermediate = g.part().intermediate;
  layer.gate_up =
      weights.add_linear(mlp, {"gate_proj.weight", "up_proj.weight"}, {intermediate, intermediate},
                         g.hidden_size, LinearEpilogue::kSwiGlu);
  layer.down = weights.add_linear(mlp, {"down_proj.weight"}, {g.hidden_size}, intermediate,
                                  LinearEpilogue::kNone, /*may_split=*/true);
  layer.post_norm =
      weights.add_norm(prefix + "post_attention_layernorm.weight", g.hidden_size, g.norms_from_one);
}

void check_geometry(const LayerGeometry& g, DType dtype, Device device) {
  if (device != Device::kCuda) return;
  OPENSPEC_CHECK_ARG(dtype == DType::kBF16, "on CUDA the dtype must be bfloat16");
  OPENSPEC_CHECK_ARG(g.head_dim == 64 || g.head_dim == 128 || g.head_dim == 256,
                     "on CUDA head_dim must be 64, 128 or 256, got ", g.head_dim,
                     "; use --device cpu");
#ifdef OPENSPEC_CUDA
  OPENSPEC_CHECK_ARG(has_span_attention_cuda(g.head_dim), "this device has too little shared ",
                     "memory for attention with heads of ", g.head_dim, "; use --device cpu");
#endif
  const int group = g.num_q_heads / g.num_kv_heads;
  OPENSPEC_CHECK_ARG(group <= 8, "on CUDA at most 8 query heads share a KV head, got ", group,
                     "; use --device cpu");
}

DecoderScratch::DecoderScratch(const LayerGeometry& geometry, DType dtype, Device device,
                               const ForwardLimits& limits, int num_threads, SumExchange* exchange)
    : geometry_(geometry),
      dtype_(dtype),
      max_tokens_(limits.max_tokens),
      exchange_(exchange),
      at_(plan(geometry, dtype, device, limits, num_threads)),
      buffer_(at_.total, memory_of(device)) {
  if (exchange_ != nullptr) {
    exchange_->give_area(buffer_.at(at_.residual), at_.end_of_shared);
    round_rows_ =
        most_round_rows(device, geometry.rank.size, geometry.max_splits(), geometry.hidden_size);
  }
#ifdef OPENSPEC_CUDA
  if (device == Device::kCuda) {
    device::fill_zero(buffer_.at(at_.linear), kLinearWorkspaceBytesCuda, nullptr);
    device::synchronize(nullptr);
  }
#endif
}

size_t DecoderScratch::bytes(const LayerGeometry& geometry, DType dtype, Device device,
                             const ForwardLimits& limits, int num_threads) {
  return plan(geometry, dtype, device, limits, num_threads).total;
}

DecoderScratch::Places DecoderScratch::plan(const LayerGeometry& g, DType dtype,
                                            [[maybe_unused]] Device device,
                                            const ForwardLimits& limits, int num_threads) {
  Places at{};
  AreaPlan areas;
  const LayerPart part = g.part();
  const int most_rows = std::max(limits.max_rows, limits.max_logits_rows);
  const auto take_rows = [&](int width, size_t bytes) {
    return areas.take(limits.max_rows, static_cast<size_t>(width) * bytes);
  };
  at.residual = areas.take(most_rows, static_cast<size_t>(g.hidden_size) * dtype_bytes(dtype));
  at.normed = take_rows(g.hidden_size, dtype_bytes(dtype));
  at.end_of_shared = areas.bytes;  // up to here all ranks' places are the same
  at.attention_in =
      g.num_inputs == 1 ? at.normed : take_rows(g.attention_inputs(), dtype_bytes(dtype));
  at.qkv = take_rows(std::max(g.qkv_width(), limits.max_outputs), dtype_bytes(dtype));
  at.q = take_rows(g.q_width(), dtype_bytes(dtype));
  at.attended = take_rows(g.q_width(), dtype_bytes(dtype));
  at.delta = take_rows(g.hidden_size, dtype_bytes(dtype));
  at.activated = take_rows(part.intermediate.count, dtype_bytes(dtype));
  at.cos_sin = take_rows(g.rotary_dim(), sizeof(float));
  at.taps = take_rows(limits.max_taps, dtype_bytes(dtype));
#ifdef OPENSPEC_CUDA
  if (device == Device::kCuda) {
    int num_splits = 1;
    for (const int inputs : {g.q_width(), g.intermediate_size, limits.max_inputs}) {
      num_splits = std::max(num_splits, linear_num_splits(g.hidden_size, inputs));
    }
    if (g.rank.size > 1) num_splits = 0;  // the sums go to inboxes
    at.linear = areas.take(1, kLinearWorkspaceBytesCuda);
    at.partials = areas.take(num_splits * std::min(limits.max_rows, kMaxPartialRows),
                             static_cast<size_t>(g.hidden_size) * sizeof(float));
    at.attention = areas.take(
        1, span_attention_workspace_bytes_cuda(limits.max_rows, limits.max_spans,
                                               part.q_heads.count, g.head_dim, limits.max_tokens));
    at.total = areas.bytes;
    return at;
  }
#endif
  size_t linear_bytes = 0;
  for (const Part& inputs :
       {Part(g.attention_inputs()), Part(g.hidden_size), part.q_heads.of_size(g.head_dim),
        part.intermediate, Part(limits.max_inputs)}) {
    linear_bytes = std::max(
        linear_bytes,
        linear_workspace_bytes_cpu(most_rows, inputs.count, linear_layout_cpu(inputs.whole)));
  }
  at.linear = areas.take(1, linear_bytes);
  at.attention = areas.take(
      1, span_attention_workspace_bytes_cpu(num_threads, part.q_heads.count, limits.max_tokens));
  at.total = areas.bytes;
  return at;
}

LinearParams DecoderScratch::linear_params(const PackedLinear& weight, const void* x,
                                           int num_rows) {
  return {.weight = weight,
          .x = x,
          .num_rows = num_rows,
          .dtype = dtype_,
          .out_dtype = dtype_,
          .workspace = reinterpret_cast<float*>(buffer_.at(at_.linear))};
}

void DecoderScratch::linear(const ExecContext& exec, const PackedLinear& weight, const void* x,
                            void* out, int num_rows, float* partials) {
  LinearParams params = linear_params(weight, x, num_rows);
  params.out = out;
  params.partials = partials;
  ops::linear(exec, params);
}

void DecoderScratch::logits_of(const ExecContext& exec, const LogitsHead& head, const void* x,
                               int num_rows, float* out, bool deals_rows) {
  for (const PackedLinear& shard : head.shards) {
    LinearParams params = linear_params(shard, x, num_rows);
    params.out = out + shard.shard.first_output;
    params.out_stride = shard.whole_outputs();
    params.out_dtype = DType::kF32;
    ops::linear(exec, params);
  }
  if (head.exchange == nullptr) return;
  const PackedLinear& own = head.shards.front();
  head.exchange->share_columns(exec, out, num_rows,
                               {own.shard.first_output, own.num_outputs, own.whole_outputs()},
                               deals_rows);
}

void DecoderScratch::logits(const ExecContext& exec, const LogitsHead& head, const int32_t* row,
                            int count, float* out, bool deals_rows) {
  const void* in = normed();
  if (row != nullptr) {
    const int64_t width = int64_t{geometry_.hidden_size} * dtype_bytes(dtype_);
    ops::copy_rows(exec, row, in, residual(), count, width);
    in = residual();
  }
  logits_of(exec, head, in, count, out, deals_rows);
}

Delta DecoderScratch::delta(const ExecContext& exec, const PackedLinear& weight, const void* x,
                            int num_rows) {
  if (!weight.has_all_inputs()) return {.weight = &weight, .x = x};
  // On the CPU the sums of a whole matrix meet in registers.
  const bool is_apart =
      exec.device == Device::kCuda && weight.num_splits > 1 && num_rows <= kMaxPartialRows;
  void* out = buffer_.at(at_.delta);
  auto* partials = is_apart ? reinterpret_cast<float*>(buffer_.at(at_.partials)) : nullptr;
  linear(exec, weight, x, out, num_rows, partials);
  if (is_apart) return {.partials = partials, .num_partials = weight.num_splits};
  return {.rows = out};
}

DecoderPass::DecoderPass(const ExecContext& exec, DecoderScratch& scratch, const RowBatch& rows,
                         const PageTableView& page_table, const KvLayerView& kv,
                         const float* inv_freq, int first_token, bool is_fenced)
    : exec_(exec), scratch_(scratch) {
  const LayerGeometry& g = scratch_.geometry_;
  const DecoderScratch::Places& places = scratch_.at_;
  attention_ = {.rows = rows,
                .q = at(places.q),
                .out = at(places.attended),
                .kv = kv,
                .page_table = page_table,
                .num_q_heads = g.part().q_heads.count,
                .scale = 1.0f / std::sqrt(static_cast<float>(g.head_dim)),
                .dtype = scratch_.dtype_,
                .workspace = at<float>(places.attention),
                .max_tokens = scratch_.max_tokens_,
                .first_token = first_token,
                .is_behind_fence = is_fenced};
  if (is_fenced) plan();
  ops::rope_angles(exec_, {.position = rows.row_position,
                           .inv_freq = inv_freq,
                           .cos_sin = at<float>(places.cos_sin),
                           .num_rows = rows.num_rows,
                           .head_dim = g.rotary_dim(),
                           .scale = g.rope_scale,
                           .is_fence = is_fenced});
}

void DecoderPass::plan() {
  if (!is_planned_) ops::span_attention_plan(exec_, attention_);
  is_planned_ = true;
}

void DecoderPass::see(const Sight& sight) {
  const bool is_same = attention_.rows.span_kv_len == sight.rows.span_kv_len &&
                       attention_.window == sight.window &&
                       attention_.is_causal == sight.is_causal &&
                       attention_.window_follows_rows == sight.window_follows_rows;
  if (is_same) return;
  attention_.rows = sight.rows;
  attention_.page_table = sight.pages;
  attention_.window = sight.window;
  attention_.is_causal = sight.is_causal;
  attention_.window_follows_rows = sight.window_follows_rows;
  is_planned_ = false;
}

void DecoderPass::norm(void* residual, const float* weight, void* out, int64_t out_stride,
                       bool is_read) {
  const LayerGeometry& g = scratch_.geometry_;
  const RmsNormParams params = {.residual = residual,
                                .delta = due_.rows,
                                .delta_partials = due_.partials,
                                .num_partials = due_.num_partials,
                                .terms = due_.terms,
                                .starts_residual = starts_,
                                .weight = weight,
                                .out = out,
                                .out_stride = out_stride,
                                .num_rows = attention_.rows.num_rows,
                                .width = g.hidden_size,
                                .eps = g.rms_norm_eps,
                                .rounds_once = g.norms_from_one,
                                .dtype = scratch_.dtype_};
  if (due_.weight != nullptr) {
    norm_of_sums(params, is_read);
  } else {
    ops::rms_norm(exec_, params);
  }
  due_ = {};
  starts_ = false;
}

void DecoderPass::norm_after(int layer, const Captures& captures, void* residual,
                             const float* weight, void* out) {
  const std::vector<int>& layers = captures.layers;
  const auto found = std::find(layers.begin(), layers.end(), layer);
  const bool is_captured = found != layers.end();
  norm(residual, weight, out, /*out_stride=*/0, /*is_read=*/is_captured);
  if (!is_captured) return;
  const size_t row_bytes =
      static_cast<size_t>(scratch_.geometry_.hidden_size) * dtype_bytes(scratch_.dtype_);
  const auto place = static_cast<size_t>(found - layers.begin());
  ops::gather_rows(exec_, {.in = residual,
                           .out = static_cast<std::byte*>(captures.rows) + row_bytes * place,
                           .num_rows = attention_.rows.num_rows,
                           .width_bytes = static_cast<int64_t>(row_bytes),
                           .out_stride = static_cast<int64_t>(row_bytes * layers.size())});
}

void DecoderPass::norm_of_sums(const RmsNormParams& norm, bool is_read) {
  const PackedLinear& weight = *due_.weight;
  const auto bytes = static_cast<int64_t>(dtype_bytes(norm.dtype));
  const int64_t out_stride = norm.out_stride == 0 ? norm.width : norm.out_stride;
  for (int row = 0; row < norm.num_rows; row += scratch_.round_rows_) {
    RmsNormParams slice = norm;
    slice.num_rows = std::min(scratch_.round_rows_, norm.num_rows - row);
    slice.residual = static_cast<std::byte*>(norm.residual) + row * norm.width * bytes;
    slice.out = static_cast<std::byte*>(norm.out) + row * out_stride * bytes;
    const void* x = static_cast<const std::byte*>(due_.x) + row * weight.num_inputs * bytes;
    slice.num_partials = weight.num_splits;
    scratch_.exchange_->send(exec_, scratch_.linear_params(weight, x, slice.num_rows));
    scratch_.exchange_->take(exec_, slice, is_read);
  }
}

void DecoderPass::project(const PackedLinear& weight, const void* x) {
  due_ = scratch_.delta(exec_, weight, x, attention_.rows.num_rows);
  starts_ = true;
}

void DecoderPass::append(const DecoderLayer& layer, const void* x, const KvLayerView& kv) {
  const LayerGeometry& g = scratch_.geometry_;
  const DecoderScratch::Places& places = scratch_.at_;
  scratch_.linear(exec_, layer.qkv, x, at(places.qkv), attention_.rows.num_rows);
  attention_.kv = kv;
  ops::rope_append(exec_, {.rows = attention_.rows,
                           .qkv = at(places.qkv),
                           .has_gates = g.has_gate,
                           .rotary_dim = g.rotary_dim() < g.head_dim ? g.rotary_dim() : 0,
                           .cos_sin = at<float>(places.cos_sin),
                           .rounds_once = g.norms_from_one,
                           .q_norm = layer.q_norm,
                           .k_norm = layer.k_norm,
                           .q = at(places.q),
                           .kv = kv,
                           .num_q_heads = attention_.num_q_heads,
                           .eps = g.rms_norm_eps,
                           .dtype = scratch_.dtype_});
}

void DecoderPass::append_context(const PackedLinear& context, std::span<const DecoderLayer> layers,
                                 const void* x, std::span<const KvLayerView> kv) {
  const DecoderScratch::Places& places = scratch_.at_;
  scratch_.linear(exec_, context, x, at(places.qkv), attention_.rows.num_rows);
  AppendContextParams params = {.rows = attention_.rows,
                                .kv = at(places.qkv),
                                .cos_sin = at<float>(places.cos_sin),
                                .layers = {},
                                .num_layers = static_cast<int>(layers.size()),
                                .eps = scratch_.geometry_.rms_norm_eps,
                                .dtype = scratch_.dtype_};
  for (size_t i = 0; i < layers.size(); ++i) params.layers[i] = {layers[i].k_norm, kv[i]};
  ops::append_context(exec_, params);
}

void DecoderPass::attend(const DecoderLayer& layer, const void* x, const KvLayerView& kv) {
  append(layer, x, kv);
  plan();
  ops::span_attention(exec_, attention_);
  const LayerGeometry& g = scratch_.geometry_;
  if (g.has_gate) {
    ops::head_gate(exec_, {.x = at(scratch_.at_.attended),
                           .gates = at(scratch_.at_.qkv),
                           .row_stride = g.qkv_width(),
                           .num_rows = attention_.rows.num_rows,
                           .num_heads = attention_.num_q_heads,
                           .head_dim = g.head_dim,
                           .dtype = scratch_.dtype_});
  }
  add_product(layer.o, at(scratch_.at_.attended));
}

void DecoderPass::add_product(const PackedLinear& weight, const void* x) {
  due_ = scratch_.delta(exec_, weight, x, attention_.rows.num_rows);
}

const void* DecoderPass::convolve(const BlockConv& conv, const void* x) {
  const LayerGeometry& g = scratch_.geometry_;
  const int num_rows = attention_.rows.num_rows;
  void* out = at(scratch_.at_.delta);  // free until `attend` or `mlp` have read it
  scratch_.linear(exec_, conv.taps, x, at(scratch_.at_.taps), num_rows);
  ops::block_conv(exec_, {.row_parent = attention_.rows.row_parent,
                          .x = x,
                          .own = at(scratch_.at_.taps),
                          .own_stride = conv.taps.num_outputs,
                          .base = conv.base,
                          .out = out,
                          .num_rows = num_rows,
                          .width = g.hidden_size,
                          .group = conv.group,
                          .dtype = scratch_.dtype_});
  return out;
}

void DecoderPass::convolve_due(const BlockConv& conv) {
  const LayerGeometry& g = scratch_.geometry_;
  const size_t first = static_cast<size_t>(conv.taps.num_outputs / 2);
  ops::block_conv(exec_, {.row_parent = attention_.rows.row_parent,
                          .x = due_.rows,
                          .partials = due_.partials,
                          .num_partials = due_.num_partials,
                          .own = at(scratch_.at_.taps) + first * dtype_bytes(scratch_.dtype_),
                          .own_stride = conv.taps.num_outputs,
                          .base = conv.base + kConvTaps * g.hidden_size,
                          .out = scratch_.normed(),
                          .num_rows = attention_.rows.num_rows,
                          .width = g.hidden_size,
                          .group = conv.group,
                          .dtype = scratch_.dtype_});
  due_ = {.rows = scratch_.normed()};
}

void DecoderPass::mlp(const DecoderLayer& layer, const void* x) {
  void* activated = at(scratch_.at_.activated);
  scratch_.linear(exec_, layer.gate_up, x, activated, attention_.rows.num_rows);
  add_product(layer.down, activated);
}

}  // namespace openspec
