#pragma once

/// A step of attention with random rows, as the benchmarks of attention on CUDA time it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_bench.h"
#include "kernels/attention/span_attention.h"

namespace openspec::bench {

constexpr int kNumKvHeads = 8, kPageSize = 16;

struct Case {
  const char* name;
  int num_seqs;
  int num_rows;  // per sequence
  int kv_len;    // before them
  bool is_tree = false;
  int prompt_rows = 0;  // of one more sequence, behind nothing
  int num_q_heads = 32, head_dim = 128;
};

static __global__ void fill_kernel(uint16_t* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    // Sign and mantissa at random, exponent of [0.5, 2).
    to[i] = static_cast<uint16_t>((x & 0x80ffu) | 0x3f00u);
  }
}

inline int num_spans_of(const Case& c) { return c.num_seqs + (c.prompt_rows > 0 ? 1 : 0); }

inline int pages_per_seq_of(const Case& c) {
  return (std::max(c.kv_len + c.num_rows, c.prompt_rows) + kPageSize - 1) / kPageSize;
}

inline size_t layer_elements(const Case& c) {
  const size_t pages = num_spans_of(c) * pages_per_seq_of(c);
  return pages * 2 * kNumKvHeads * kPageSize * c.head_dim;
}

/// Buffers of a step, on the device, and what attention is told of them.
class AttentionStep {
 public:
  AttentionStep(const Case& c, uint16_t* kv, bool may_have_trees, cudaStream_t stream) {
    const int pages_per_seq = pages_per_seq_of(c), num_spans = num_spans_of(c);
    const int num_rows = c.num_seqs * c.num_rows + c.prompt_rows;
    std::vector<int32_t> pages(num_spans * pages_per_seq), span, parent, begin = {0}, kv_len, seq;
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    for (int s = 0; s < num_spans; ++s) {
      const bool is_prompt = s == c.num_seqs;
      for (int row = 0; row < (is_prompt ? c.prompt_rows : c.num_rows); ++row) {
        const int first = static_cast<int>(span.size()) - row;
        const int parent_in_span = c.is_tree && !is_prompt ? (row - 1) / 2 : row - 1;
        parent.push_back(row == 0 ? -1 : first + parent_in_span);
        span.push_back(s);
      }
      begin.push_back(static_cast<int>(span.size()));
      kv_len.push_back(is_prompt ? 0 : c.kv_len);
      seq.push_back(s);
    }
    q_elements = static_cast<size_t>(num_rows) * c.num_q_heads * c.head_dim;
    uint16_t* q = keep(device_copy(std::vector<uint16_t>(q_elements)));
    fill_kernel<<<256, 256, 0, stream>>>(q, q_elements);
    params.rows.num_rows = num_rows;
    params.rows.num_spans = num_spans;
    // As the engine knows it of a graph.
    const int short_len = short_kv_len(num_rows, num_spans);
    const bool is_short = num_spans <= kFewSpans && c.kv_len + c.num_rows <= short_len;
    params.rows.expected_kv_len = is_short ? short_len : 0;
    params.rows.max_span_rows = std::max(c.num_rows, c.prompt_rows);
    params.rows.row_span = keep(device_copy(span));
    params.rows.row_parent = keep(device_copy(parent));
    params.rows.span_begin = keep(device_copy(begin));
    params.rows.span_kv_len = keep(device_copy(kv_len));
    params.rows.span_seq = keep(device_copy(seq));
    params.q = q;
    params.out = keep(device_copy(std::vector<uint16_t>(q_elements)));
    params.page_table = {keep(device_copy(pages)), pages_per_seq};
    params.num_q_heads = c.num_q_heads;
    params.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    params.dtype = DType::kBF16;
    params.max_tokens = 16384;
    params.rows.may_have_trees = may_have_trees || c.is_tree;
    char* workspace = nullptr;
    CHECK_CUDA(cudaMalloc(&workspace,
                          span_attention_workspace_bytes_cuda(num_rows, num_spans, c.num_q_heads,
                                                              c.head_dim, params.max_tokens)));
    params.workspace = reinterpret_cast<float*>(keep(workspace));
    params.kv = {kv, kNumKvHeads, c.head_dim, kPageSize};
    CHECK_CUDA(cudaStreamSynchronize(stream));
  }
  ~AttentionStep() {
    for (void* buffer : buffers_) CHECK_CUDA(cudaFree(buffer));
  }
  AttentionStep(const AttentionStep&) = delete;
  AttentionStep& operator=(const AttentionStep&) = delete;

  SpanAttentionParams params;
  size_t q_elements = 0;  // of the output, too

 private:
  template <typename T>
  T* keep(T* data) {
    buffers_.push_back(data);
    return data;
  }
  std::vector<void*> buffers_;
};

}  // namespace openspec::bench
