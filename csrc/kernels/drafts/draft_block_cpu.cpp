#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/drafts/draft_block.h"

namespace openspec {

namespace {

/// The most drafts of one sequence for which all blocks fit; 0: not even blocks of one draft.
int common_depth(const BlockRowsParams& params) {
  for (int depth = params.max_depth; depth > 0; --depth) {
    int num_rows = 0;
    for (int i = 0; i < params.num_seqs; ++i) {
      const int count = std::min(params.num_wanted[i], depth);
      num_rows += count > 0 ? count + params.first_draft_row : 0;
    }
    if (num_rows <= params.out.num_rows) return depth;
  }
  return 0;
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float dot(const void* values, DType dtype, const float* weight, int count) {
  float sum = 0.0f;
  for (int k = 0; k < count; ++k) {
    const float value = dtype == DType::kF32 ? static_cast<const float*>(values)[k]
                                             : from_bf16(static_cast<const uint16_t*>(values)[k]);
    sum += value * weight[k];
  }
  return sum;
}

/// log(1 / (1 + e^-x)).
float log_sigmoid(float x) { return std::min(x, 0.0f) - std::log1p(std::exp(-std::fabs(x))); }

/// A node that may come next.
struct Candidate {
  float score;
  float above;  // its parent's score
  int parent, depth;
  int before;  // the parent's place among the tokens of its position
  int rank;    // among its siblings
  int token;   // its own place among the tokens of its position
};

/// Grows one tree; returns its number of nodes.
int grow(const BlockTreesParams& params, int seq) {
  const int64_t to = int64_t{seq} * params.max_drafts;
  const int most = std::min(params.num_wanted[seq], params.max_drafts);
  const int num_children = params.num_children > 0 ? params.num_children : params.top_k;
  std::vector<Candidate> candidates;  // in the order in which they came up
  const auto add = [&](float above, int parent, int depth, int before, int rank) {
    if (depth == params.num_depths[seq] || rank == num_children) return;
    const int64_t sample = int64_t{params.first_sample[seq]} + depth;
    const int64_t pair = (sample * params.top_k + before) * params.top_k + rank;
    const bool has_pairs = params.pair_scores != nullptr;
    const float own =
        has_pairs ? params.pair_scores[pair] : params.scores[sample * params.top_k + rank];
    if (own == -std::numeric_limits<float>::infinity()) return;
    const int token = has_pairs ? params.pair_ranks[pair] : rank;
    candidates.push_back({above + own, above, parent, depth, before, rank, token});
  };
  add(0.0f, -1, 0, 0, 0);
  int count = 0;
  for (; count < most && !candidates.empty(); ++count) {
    const auto best =
        std::max_element(candidates.begin(), candidates.end(),
                         [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
    const Candidate node = *best;
    candidates.erase(best);
    params.drafts[to + count] =
        params.tokens[int64_t{params.first_sample[seq] + node.depth} * params.top_k + node.token];
    params.parents[to + count] = node.parent;
    params.path_scores[to + count] = node.score;
    add(node.above, node.parent, node.depth, node.before, node.rank + 1);
    add(node.score, count, node.depth + 1, node.token, 0);
  }
  return count;
}

}  // namespace

void block_rows_cpu(const ExecContext&, const BlockRowsParams& params) {
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  const int depth = common_depth(params);
  int row = 0, span = 0, sample = 0;
  for (int i = 0; i < params.num_seqs; ++i) {
    int count = std::min(params.num_wanted[i], std::max(depth, 1));
    if (row + count + params.first_draft_row > out.num_rows) count = 0;
    params.num_drafts[i] = count;
    params.first_sample[i] = sample;
    if (count == 0) continue;
    const int slot = params.seq[i];
    const int first = row, position = table.num_tokens[slot] - 1;
    out.set_span(span, first, position, slot);
    for (int k = 0; k < count + params.first_draft_row; ++k, ++row) {
      out.row_token[row] =
          k == 0 ? table.tokens[slot * table.tokens_stride + position] : params.mask_token;
      out.row_position[row] = position + k;
      out.row_span[row] = span;
      out.source[row] = k > 0 && params.mask_source >= 0 ? params.mask_source : slot;
      out.row_parent[row] = k == 0 ? -1 : row - 1;
      out.row_kv_slot[row] = kv_slot_of(table, slot, position + k, params.page_size);
    }
    for (int d = 0; d < count; ++d, ++sample) {
      params.head_row[sample] = first + d + params.first_draft_row;
      params.sample_row[sample] = first + d;
    }
    ++span;
  }
  pad_spans(out, row, span);
  pad_rows(out, row);
  std::fill(params.head_row + sample, params.head_row + params.num_samples, -1);
  std::fill(params.sample_row + sample, params.sample_row + params.num_samples, -1);
}

void store_blocks_cpu(const ExecContext&, const StoreBlocksParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) {
    const int64_t to = int64_t{i} * params.max_drafts;
    float score = 0.0f;
    for (int d = 0; d < params.num_drafts[i]; ++d) {
      const int sample = params.first_sample[i] + d;
      params.drafts[to + d] = params.chosen[sample];
      if (params.confidence == nullptr) continue;
      score += log_sigmoid(params.confidence[sample]);
      params.scores[to + d] = score;
    }
  }
}

void block_confidence_cpu(const ExecContext&, const BlockConfidenceParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) {
    for (int d = 0; d < params.num_drafts[i]; ++d) {
      const int sample = params.first_sample[i] + d;
      const auto* output =
          static_cast<const std::byte*>(params.outputs) +
          int64_t{sample} * params.width * static_cast<int64_t>(dtype_bytes(params.dtype));
      float sum = *params.bias + dot(output, params.dtype, params.weight, params.width);
      if (params.states != nullptr) {
        const int32_t before =
            d > 0 ? params.chosen[sample - 1] : last_token(params.table, params.seq[i]);
        const auto* state =
            static_cast<const uint16_t*>(params.states) + int64_t{before} * params.state_width;
        sum += dot(state, DType::kBF16, params.weight + params.width, params.state_width);
      }
      params.confidence[sample] = sum;
    }
  }
}

void block_trees_cpu(const ExecContext&, const BlockTreesParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) params.num_drafts[i] = grow(params, i);
}

}  // namespace openspec
