#include "kernels/attention/layout.h"
#include "kernels/attention/span_attention.h"
#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/tile_cpu.h"

// The tokens that a row sees, in order, are cut into blocks of kBlockTokens at fixed places. Per
// block: scores (each a chain over head_dim), their maximum m, p = exp(score - m), the sum of p,
// and the chain of p * v over the tokens. Blocks are merged in order. None of this depends on which
// rows are computed together, so a row's result is a function of its own prefix.
//
// Rows of a span and the q heads of one KV head share the reading of K and V: in a chain all of it,
// in a tree the committed prefix, after which each row reads its own ancestors, at the place of
// their depth.

namespace openspec::OPENSPEC_ISA {

namespace {

using attention::kBlockTokens;
using attention::kMaxQueries;
using attention::kPanelTokens;
using attention::kScoreStride;
using attention::Scratch;

// Units that one pass over the values covers at most.
constexpr int kWeighUnits = 4;

// A few rows of one span and the q heads of one KV head.
struct Item {
  int span;
  int kv_head;
  int first_row;
  int num_rows;
};

// One result of attention: sums [num_queries][head_dim], maximum and normaliser [num_queries].
struct Partial {
  float* sums;
  float* maximum;
  float* normaliser;

  Partial(float* at, int64_t num_queries, int64_t head_dim)
      : sums(at), maximum(at + num_queries * head_dim), normaliser(maximum + num_queries) {}
};

class Attention {
 public:
  explicit Attention(const SpanAttentionParams& params)
      : params_(params),
        head_dim_(params.kv.head_dim),
        group_(params.num_q_heads / params.kv.num_kv_heads),
        rows_per_item_(max_of(1, kMaxQueries / group_)) {}

  // Blocks from the first token that any row of the item sees to the last.
  struct Blocks {
    int begin, end;
    int count() const { return end - begin; }
  };
  Blocks blocks_of(const Item& item) const {
    int first = num_visible(item.first_row), visible = 0;
    for (int row = item.first_row; row < item.first_row + item.num_rows; ++row) {
      first = min_of(first, first_visible(row));
      visible = max_of(visible, num_visible(row));
    }
    return {first / kBlockTokens, static_cast<int>(ceil_div(visible, kBlockTokens))};
  }
  int num_queries(const Item& item) const { return item.num_rows * group_; }
  int64_t partial_floats(const Item& item) const {
    return attention::partial_floats(num_queries(item), head_dim_);
  }

  // Walks the items in order: KV heads fastest, then rows, then spans.
  bool first(Item& item) const {
    item = {0, 0, 0, 0};
    return enter_span(item, 0);
  }
  bool next(Item& item) const {
    if (++item.kv_head < params_.kv.num_kv_heads) return true;
    item.kv_head = 0;
    item.first_row += item.num_rows;
    const int end = params_.rows.span_begin[item.span + 1];
    if (item.first_row >= end) return enter_span(item, item.span + 1);
    item.num_rows = min_of(rows_per_item_, end - item.first_row);
    return true;
  }

  void load_queries(const Item& item, float* queries) const;
  // The result of one block of tokens.
  void attend(const Item& item, int block, Scratch& scratch, const Partial& out) const;
  // total = total + block, for the rows that see some of the block: from nothing, where it is the
  // first that they see.
  void merge(const Item& item, int block, const Partial& from, const Partial& total) const;
  void write(const Item& item, const Partial& total) const;

 private:
  // Tokens that a row sees: its own is the last, or that of its span's last row.
  int num_visible(int row) const {
    const int span = params_.rows.row_span[row];
    const int32_t* begin = params_.rows.span_begin + span;
    const int32_t* position = params_.rows.row_position;
    const int depth =
        params_.is_causal ? position[row] - position[begin[0]] : begin[1] - begin[0] - 1;
    return params_.rows.span_kv_len[span] + depth + 1;
  }
  // The first of them.
  int first_visible(int row) const {
    if (params_.window == 0) return params_.first_token;
    const int end = params_.window_follows_rows
                        ? num_visible(row)
                        : params_.rows.span_kv_len[params_.rows.row_span[row]];
    return max_of(params_.first_token, end - params_.window);
  }

  bool enter_span(Item& item, int span) const {
    for (; span < params_.rows.num_spans; ++span) {
      const int begin = params_.rows.span_begin[span];
      const int end = params_.rows.span_begin[span + 1];
      if (begin == end) continue;
      item = {span, 0, begin, min_of(rows_per_item_, end - begin)};
      return true;
    }
    return false;
  }
  // Whether the item's rows follow each other, so that a row sees tokens [0, position], or see all
  // tokens of their span.
  bool sees_contiguous_tokens(const Item& item) const {
    if (!params_.is_causal) return true;
    const int first = params_.rows.span_begin[item.span];
    bool is_chain = params_.rows.row_parent[first] < 0;
    for (int row = first + 1; row < item.first_row + item.num_rows; ++row) {
      is_chain = is_chain && params_.rows.row_parent[row] == row - 1;
    }
    return is_chain;
  }

  // Lines of K and V of a block, at the place of their token within it.
  struct BlockLines {
    const char* keys[kBlockTokens];
    const float* values[kBlockTokens];
  };
  const char* key_line(const Item& item, int token) const;
  void set_line(const Item& item, int place, int token, Scratch& scratch, BlockLines& lines) const;
  void score_shared(const Item& item, int begin, int num_shared, bool is_chain,
                    const BlockLines& lines, Scratch& scratch) const;
  void score_ancestors(const Item& item, int i, int begin, int num_shared, int count,
                       BlockLines& lines, Scratch& scratch) const;
  void soften_row(int i, int hidden, int count, Scratch& scratch, const Partial& out) const;
  void weigh_row(int i, int hidden, int first, int last, const BlockLines& lines,
                 const Scratch& scratch, const Partial& out) const;
  void transpose_keys(const char* const* lines, int count, float* keys) const;
  void score(const float* queries, int count, const float* keys, float* scores) const;
  void weigh(const float* weights, const float* const* lines, int begin, int end, bool is_first,
             float* sums) const;

  const SpanAttentionParams& params_;
  const int head_dim_;
  const int group_;
  const int rows_per_item_;
};

const char* Attention::key_line(const Item& item, int token) const {
  const KvLayerView& kv = params_.kv;
  const int64_t slot = params_.rows.span_seq[item.span];
  const int64_t page =
      params_.page_table.pages[slot * params_.page_table.max_pages_per_seq + token / kv.page_size];
  const int64_t line =
      (page * 2 * kv.num_kv_heads + item.kv_head) * kv.page_size + token % kv.page_size;
  return static_cast<const char*>(kv.data) +
         line * head_dim_ * static_cast<int64_t>(dtype_bytes(params_.dtype));
}

void Attention::load_queries(const Item& item, float* queries) const {
  for (int row = 0; row < item.num_rows; ++row) {
    const int64_t from =
        (static_cast<int64_t>(item.first_row + row) * params_.num_q_heads + item.kv_head * group_) *
        head_dim_;
    const int count = group_ * head_dim_;
    float* to = queries + row * count;
    if (params_.dtype == DType::kF32) {
      std::memcpy(to, static_cast<const float*>(params_.q) + from, count * sizeof(float));
    } else {
      bf16_to_float(static_cast<const uint16_t*>(params_.q) + from, to, count);
    }
    for (int i = 0; i < count; ++i) to[i] *= params_.scale;
  }
}

// keys[d][t] of up to kPanelTokens tokens; absent tokens are zero. Two bf16 share a lane, and part
// when they are where they belong.
void Attention::transpose_keys(const char* const* lines, int count, float* keys) const {
  const bool has_pairs = params_.dtype == DType::kBF16;
  const int step = has_pairs ? 2 * kLanes : kLanes;
  for (int first = 0; first < kPanelTokens; first += kLanes) {
    for (int d = 0; d < head_dim_; d += step) {
      const int64_t at = d * static_cast<int64_t>(dtype_bytes(params_.dtype));
      float* to = keys + d * kPanelTokens + first;
      Vf square[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; ++t) {
        square[t] = first + t < count ? as_float(load_bits(lines[first + t] + at)) : Vf{};
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) {
        if (!has_pairs) {
          store(to + i * kPanelTokens, square[i]);
          continue;
        }
        const Vu pairs = as_bits(square[i]);
        store(to + 2 * i * kPanelTokens, as_float(pairs << 16));
        store(to + (2 * i + 1) * kPanelTokens, as_float(pairs & 0xffff0000u));
      }
    }
  }
}

// scores[q][0 .. kPanelTokens) of `count` queries.
void Attention::score(const float* queries, int count, const float* keys, float* scores) const {
  TileArgs args;
  args.x_stride = head_dim_;
  args.num_splits = 1;
  args.ends[0] = head_dim_;
  args.sums_stride = kScoreStride;
  args.from = nullptr;
  args.is_added = false;
  const int num_tiles = static_cast<int>(ceil_div(count, kMaxInPlaceRows));
  for (int t = 0; t < num_tiles; ++t) {
    const int begin = count * t / num_tiles;
    const int rows = count * (t + 1) / num_tiles - begin;
    const int step = min_of(kUnitsPerPanel, max_units(rows));
    args.x = queries + begin * head_dim_;
    args.to = scores + begin * kScoreStride;
    for (int unit = 0; unit < kUnitsPerPanel; unit += step) {
      const int units = min_of(step, kUnitsPerPanel - unit);
      for (int u = 0; u < units; ++u) {
        args.column[u] = unit_column(unit + u);
        args.weight[u] = reinterpret_cast<const char*>(keys + args.column[u]);
      }
      kTiles<Lines::kF32Panel, true, kUnitsPerPanel>.at[rows][units](args);
    }
  }
}

// Turns a query's scores into weights; returns their maximum and sum.
OPENSPEC_INLINE void soften(float* scores, int count, float& maximum, float& normaliser) {
  const int padded = static_cast<int>(ceil_div(count, kLanes)) * kLanes;
  for (int i = count; i < padded; ++i) scores[i] = -__builtin_inff();
  Vf best = splat(-__builtin_inff());
  for (int i = 0; i < padded; i += kLanes) best = max(load(scores + i), best);
  maximum = max_lanes(best);
  Vf sum = {};
  for (int i = 0; i < padded; i += kLanes) {
    const Vf p = exp_nonpositive(load(scores + i) - maximum);
    store(scores + i, p);
    sum += p;
  }
  normaliser = sum_lanes(sum);
}

// sums[q] += weights[q][t] * value line t over tokens [begin, end), for the heads of one row; from
// zero where they are the first.
void Attention::weigh(const float* weights, const float* const* lines, int begin, int end,
                      bool is_first, float* sums) const {
  TileArgs args;
  args.line = lines + begin;
  args.x_stride = kScoreStride;
  args.num_splits = 1;
  args.ends[0] = end - begin;
  args.sums_stride = head_dim_;
  args.is_added = false;
  const int num_units = head_dim_ / kUnitColumns;
  const int num_tiles = static_cast<int>(ceil_div(group_, kMaxInPlaceRows));
  for (int t = 0; t < num_tiles; ++t) {
    const int first_head = group_ * t / num_tiles;
    const int heads = group_ * (t + 1) / num_tiles - first_head;
    args.x = weights + first_head * kScoreStride + begin;
    args.to = sums + first_head * head_dim_;
    args.from = is_first ? nullptr : args.to;
    const int num_steps =
        static_cast<int>(ceil_div(num_units, min_of(kWeighUnits, max_units(heads))));
    for (int step = 0; step < num_steps; ++step) {
      const int unit = num_units * step / num_steps;
      const int units = num_units * (step + 1) / num_steps - unit;
      for (int u = 0; u < units; ++u) args.column[u] = unit_column(unit + u);
      kTiles<Lines::kPointers, true, kWeighUnits>.at[heads][units](args);
    }
  }
}

OPENSPEC_INLINE void Attention::set_line(const Item& item, int place, int token, Scratch& scratch,
                                         BlockLines& lines) const {
  const int64_t value_offset = static_cast<int64_t>(params_.kv.num_kv_heads) *
                               params_.kv.page_size * head_dim_ *
                               static_cast<int64_t>(dtype_bytes(params_.dtype));
  lines.keys[place] = key_line(item, token);
  const char* value = lines.keys[place] + value_offset;
  if (params_.dtype == DType::kF32) {
    lines.values[place] = reinterpret_cast<const float*>(value);
  } else {
    float* wide = scratch.values + place * head_dim_;
    bf16_to_float(reinterpret_cast<const uint16_t*>(value), wide, head_dim_);
    lines.values[place] = wide;
  }
}

// Scores of the first `num_shared` tokens of a block for all rows of the item.
OPENSPEC_INLINE void Attention::score_shared(const Item& item, int begin, int num_shared,
                                             bool is_chain, const BlockLines& lines,
                                             Scratch& scratch) const {
  for (int first = 0; first < num_shared; first += kPanelTokens) {
    // The first rows of a chain end before this token.
    const int num_skipped =
        is_chain ? max_of(0, begin + first + 1 - num_visible(item.first_row)) : 0;
    transpose_keys(lines.keys + first, min_of(kPanelTokens, num_shared - first), scratch.keys);
    score(scratch.queries + num_skipped * group_ * head_dim_,
          (item.num_rows - num_skipped) * group_, scratch.keys,
          scratch.scores + num_skipped * group_ * kScoreStride + first);
  }
}

// Scores of row i of the item for those tokens of a block that it does not share, of `count` that
// it sees: its ancestors, in a tree.
OPENSPEC_INLINE void Attention::score_ancestors(const Item& item, int i, int begin, int num_shared,
                                                int count, BlockLines& lines,
                                                Scratch& scratch) const {
  const int span_first = params_.rows.span_begin[item.span];
  const int kv_len = params_.rows.span_kv_len[item.span];
  for (int node = item.first_row + i; node >= 0; node = params_.rows.row_parent[node]) {
    const int place = num_visible(node) - 1 - begin;
    if (place < num_shared) break;
    if (place < kBlockTokens) set_line(item, place, kv_len + node - span_first, scratch, lines);
  }
  for (int first = num_shared; first < count; first += kPanelTokens) {
    transpose_keys(lines.keys + first, min_of(kPanelTokens, count - first), scratch.keys);
    score(scratch.queries + i * group_ * head_dim_, group_, scratch.keys,
          scratch.scores + i * group_ * kScoreStride + first);
  }
}

// Turns the scores of row i into weights. What lies before the first visible token was perhaps
// never written.
OPENSPEC_INLINE void Attention::soften_row(int i, int hidden, int count, Scratch& scratch,
                                           const Partial& out) const {
  for (int q = i * group_; q < (i + 1) * group_; ++q) {
    float* scores = scratch.scores + q * kScoreStride;
    for (int t = 0; t < hidden; ++t) scores[t] = -__builtin_inff();
    soften(scores, count, out.maximum[q], out.normaliser[q]);
  }
}

// Of places [first, last) of a block those that row i sees, which come after `hidden`.
OPENSPEC_INLINE void Attention::weigh_row(int i, int hidden, int first, int last,
                                          const BlockLines& lines, const Scratch& scratch,
                                          const Partial& out) const {
  const int from = max_of(first, hidden);
  if (from >= last) return;
  weigh(scratch.scores + i * group_ * kScoreStride, lines.values, from, last, from == hidden,
        out.sums + i * group_ * head_dim_);
}

void Attention::attend(const Item& item, int block, Scratch& scratch, const Partial& out) const {
  const int begin = block * kBlockTokens, end = begin + kBlockTokens;
  const bool is_chain = sees_contiguous_tokens(item);
  const int shared_end = is_chain ? num_visible(item.first_row + item.num_rows - 1)
                                  : params_.rows.span_kv_len[item.span];
  const int num_shared = max_of(0, min_of(shared_end, end) - begin);
  const auto num_hidden = [&](int i) {
    return max_of(0, first_visible(item.first_row + i) - begin);
  };
  const auto num_seen = [&](int i) { return min_of(num_visible(item.first_row + i), end) - begin; };
  BlockLines lines;
  for (int i = 0; i < num_shared; ++i) set_line(item, i, begin + i, scratch, lines);
  score_shared(item, begin, num_shared, is_chain, lines, scratch);
  for (int i = 0; i < item.num_rows; ++i) {
    const int count = num_seen(i), hidden = num_hidden(i);
    if (count <= hidden) continue;
    if (count > num_shared) score_ancestors(item, i, begin, num_shared, count, lines, scratch);
    soften_row(i, hidden, count, scratch, out);
    if (!is_chain) weigh_row(i, hidden, 0, count, lines, scratch, out);
  }
  if (!is_chain) return;
  // By slices of value lines that stay in the first-level cache for all rows.
  const int slice = 64 * 128 / head_dim_;
  for (int first = 0; first < num_shared; first += slice) {
    for (int i = 0; i < item.num_rows; ++i) {
      weigh_row(i, num_hidden(i), first, min_of(first + slice, num_seen(i)), lines, scratch, out);
    }
  }
}

void Attention::merge(const Item& item, int block, const Partial& from,
                      const Partial& total) const {
  for (int q = 0; q < num_queries(item); ++q) {
    const int row = item.first_row + q / group_, first_block = first_visible(row) / kBlockTokens;
    if (num_visible(row) <= block * kBlockTokens || block < first_block) continue;
    float* to = total.sums + q * head_dim_;
    const float* sums = from.sums + q * head_dim_;
    if (block == first_block) {
      total.maximum[q] = from.maximum[q];
      total.normaliser[q] = from.normaliser[q];
      for (int d = 0; d < head_dim_; d += kLanes) store(to + d, load(sums + d));
      continue;
    }
    const Vf old_maximum = splat(total.maximum[q]);
    const Vf maximum = max(splat(from.maximum[q]), old_maximum);
    const Vf keep = exp_nonpositive(old_maximum - maximum);
    const Vf add = exp_nonpositive(splat(from.maximum[q]) - maximum);
    total.maximum[q] = maximum[0];
    total.normaliser[q] = fma(from.normaliser[q], add[0], total.normaliser[q] * keep[0]);
    for (int d = 0; d < head_dim_; d += kLanes) {
      store(to + d, fma(load(sums + d), add, load(to + d) * keep));
    }
  }
}

void Attention::write(const Item& item, const Partial& total) const {
  for (int q = 0; q < num_queries(item); ++q) {
    float* sums = total.sums + q * head_dim_;
    const float scale = 1.0f / total.normaliser[q];
    for (int d = 0; d < head_dim_; ++d) sums[d] *= scale;
    const int64_t row = item.first_row + q / group_;
    const int64_t to = (row * params_.num_q_heads + item.kv_head * group_ + q % group_) * head_dim_;
    if (params_.dtype == DType::kF32) {
      std::memcpy(static_cast<float*>(params_.out) + to, sums, head_dim_ * sizeof(float));
    } else {
      float_to_bf16(sums, static_cast<uint16_t*>(params_.out) + to, head_dim_);
    }
  }
}

// What a step's attention amounts to, and so how it is cut.
struct Plan {
  int64_t num_items = 0;
  int64_t num_units = 0;       // (item, block) pairs
  int64_t partial_floats = 0;  // of one unit, for the largest item
  int64_t num_multiplies = 0;
};

Plan plan_of(const Attention& attention, const SpanAttentionParams& params) {
  Plan plan;
  Item item;
  for (bool more = attention.first(item); more; more = attention.next(item)) {
    const int64_t num_blocks = attention.blocks_of(item).count();
    plan.num_items += 1;
    plan.num_units += num_blocks;
    plan.partial_floats = max_of(plan.partial_floats, attention.partial_floats(item));
    plan.num_multiplies +=
        num_blocks * kBlockTokens * attention.num_queries(item) * 2 * int64_t{params.kv.head_dim};
  }
  return plan;
}

Scratch& scratch_of(const SpanAttentionParams& params, int64_t stripe) {
  return reinterpret_cast<Scratch*>(align_workspace(params.workspace))[stripe];
}

void attend_by_items(const ExecContext& exec, const SpanAttentionParams& params,
                     const Attention& attention, int64_t max_stripes) {
  for_each_stripe(exec, max_stripes, [&](int64_t stripe, const auto& claim) {
    Scratch& scratch = scratch_of(params, stripe);
    Item item;
    bool more = attention.first(item);
    int64_t at = 0;
    for (int64_t wanted = claim(); more; wanted = claim()) {
      for (; more && at < wanted; ++at) more = attention.next(item);
      if (!more) return;
      const int64_t num_queries = attention.num_queries(item);
      const Partial total(scratch.total, num_queries, params.kv.head_dim);
      const Partial part(scratch.block, num_queries, params.kv.head_dim);
      attention.load_queries(item, scratch.queries);
      const auto blocks = attention.blocks_of(item);
      attention.attend(item, blocks.begin, scratch, total);
      for (int block = blocks.begin + 1; block < blocks.end; ++block) {
        attention.attend(item, block, scratch, part);
        attention.merge(item, block, part, total);
      }
      attention.write(item, total);
    }
  });
}

// For few items with long contexts: the blocks of an item go to several threads, and are merged
// when all are done, in the same order.
void attend_by_blocks(const ExecContext& exec, const SpanAttentionParams& params,
                      const Attention& attention, const Plan& plan, float* partials) {
  for_each_stripe(exec, plan.num_units, [&](int64_t stripe, const auto& claim) {
    Scratch& scratch = scratch_of(params, stripe);
    Item item;
    bool more = attention.first(item);
    bool has_queries = false;
    int64_t first_unit = 0;  // of the item
    for (int64_t wanted = claim(); more; wanted = claim()) {
      while (more && wanted >= first_unit + attention.blocks_of(item).count()) {
        first_unit += attention.blocks_of(item).count();
        more = attention.next(item);
        has_queries = false;
      }
      if (!more) return;
      if (!has_queries) attention.load_queries(item, scratch.queries);
      has_queries = true;
      const Partial part(partials + wanted * plan.partial_floats, attention.num_queries(item),
                         params.kv.head_dim);
      const int block = attention.blocks_of(item).begin + static_cast<int>(wanted - first_unit);
      attention.attend(item, block, scratch, part);
    }
  });
  Item item;
  float* at = partials;
  for (bool more = attention.first(item); more; more = attention.next(item)) {
    const Partial total(at, attention.num_queries(item), params.kv.head_dim);
    const auto blocks = attention.blocks_of(item);
    for (int i = 1; i < blocks.count(); ++i) {
      const Partial part(at + i * plan.partial_floats, attention.num_queries(item),
                         params.kv.head_dim);
      attention.merge(item, blocks.begin + i, part, total);
    }
    attention.write(item, total);
    at += blocks.count() * plan.partial_floats;
  }
}

}  // namespace

void span_attention(const ExecContext& exec, const SpanAttentionParams& params) {
  constexpr int64_t kMinParallelMultiplies = 200000;  // some 5 microseconds
  const Attention attention(params);
  const Plan plan = plan_of(attention, params);
  if (plan.num_items == 0) return;
  const int num_threads = exec.pool->num_threads();
  const bool is_small = plan.num_multiplies < kMinParallelMultiplies || num_threads == 1;
  const int64_t room = attention::shared_partial_floats(params.num_q_heads, params.max_tokens);
  if (!is_small && plan.num_items < 2 * num_threads && plan.num_units > plan.num_items &&
      plan.num_units * plan.partial_floats <= room) {
    float* partials =
        reinterpret_cast<float*>(align_workspace(params.workspace) + num_threads * sizeof(Scratch));
    attend_by_blocks(exec, params, attention, plan, partials);
  } else {
    attend_by_items(exec, params, attention, is_small ? 1 : plan.num_items);
  }
}

}  // namespace openspec::OPENSPEC_ISA
