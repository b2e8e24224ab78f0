#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/drafts/draft_block.h"
#include "kernels/drafts/draft_rows_cpu.h"

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
    out.span_begin[span] = first;
    out.span_kv_len[span] = position;
    out.span_seq[span] = slot;
    for (int k = 0; k < count + params.first_draft_row; ++k, ++row) {
      out.row_token[row] =
          k == 0 ? table.tokens[slot * table.tokens_stride + position] : params.mask_token;
      out.row_position[row] = position + k;
      out.row_span[row] = span;
      out.source[row] = slot;
      out.row_parent[row] = k == 0 ? -1 : row - 1;
      out.row_kv_slot[row] = kv_slot_of(table, slot, position + k, params.page_size);
    }
    for (int d = 0; d < count; ++d, ++sample) {
      params.head_row[sample] = first + d + params.first_draft_row;
      params.sample_row[sample] = first + d;
    }
    ++span;
  }
  pad_rows(out, row, span);
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
  const TableView& table = params.table;
  for (int i = 0; i < params.num_seqs; ++i) {
    const int64_t last = params.seq[i] * table.tokens_stride + table.num_tokens[params.seq[i]] - 1;
    for (int d = 0; d < params.num_drafts[i]; ++d) {
      const int sample = params.first_sample[i] + d;
      const auto* output =
          static_cast<const std::byte*>(params.outputs) +
          int64_t{sample} * params.width * static_cast<int64_t>(dtype_bytes(params.dtype));
      float sum = *params.bias + dot(output, params.dtype, params.weight, params.width);
      if (params.states != nullptr) {
        const int32_t before = d > 0 ? params.chosen[sample - 1] : table.tokens[last];
        const auto* state =
            static_cast<const uint16_t*>(params.states) + int64_t{before} * params.state_width;
        sum += dot(state, DType::kBF16, params.weight + params.width, params.state_width);
      }
      params.confidence[sample] = sum;
    }
  }
}

}  // namespace openspec
