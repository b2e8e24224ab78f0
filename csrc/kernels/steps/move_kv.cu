#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/steps/move_kv.h"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 8;  // tokens on their way at a time: most paths

/// Where 16 bytes of a token's K or V lie, counted in 16 bytes from the token's K of head 0.
struct Lines {
  const KvLayerView& kv;
  const int32_t* pages;  // of the sequence
  int pieces;            // 16 bytes of a head

  __device__ uint4* at(int token, int piece) const {
    const int64_t page = pages[token / kv.page_size];
    // All heads of K, then all of V.
    const int64_t line =
        (page * 2 * kv.num_kv_heads + piece / pieces) * kv.page_size + token % kv.page_size;
    return static_cast<uint4*>(kv.data) + line * pieces + piece % pieces;
  }
};

/// Blocks by layer and span. A thread moves its part of the span's tokens one after another, so
/// that their order needs no barrier.
__global__ void __launch_bounds__(kThreads) move_kv_kernel(MoveKvParams params, int element_bytes) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const RowBatch& rows = params.rows;
  for (int span = static_cast<int>(blockIdx.y); span < rows.num_spans;
       span += static_cast<int>(gridDim.y)) {
    const int end = params.num_computed[span], begin = rows.span_begin[span];
    const int32_t* committed_row = params.committed_row + begin;
    int first = end;
    while (first > 0 && committed_row[first - 1] != begin + first - 1) --first;
    if (first == end) continue;
    const KvLayerView kv = params.layers[blockIdx.x];
    const int slot = rows.span_seq[span], kv_len = rows.span_kv_len[span];
    const Lines lines{kv,
                      params.page_table.pages + int64_t{slot} * params.page_table.max_pages_per_seq,
                      kv.head_dim * element_bytes / 16};
    const int num_pieces = 2 * kv.num_kv_heads * lines.pieces;
    for (int piece = threadIdx.x; piece < num_pieces; piece += kThreads) {
      for (int i = first; i < end; i += kBatch) {
        uint4 data[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (i + j < end) data[j] = *lines.at(kv_len + committed_row[i + j] - begin, piece);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (i + j < end) *lines.at(kv_len + i + j, piece) = data[j];
        }
      }
    }
  }
}

/// Blocks by span. A thread moves its part of the span's records one after another, so that their
/// order needs no barrier.
__global__ void __launch_bounds__(kThreads) move_records_kernel(MoveRecordsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const RowBatch& rows = params.rows;
  const int span = static_cast<int>(blockIdx.x);
  const int begin = rows.span_begin[span], slot = rows.span_seq[span];
  const int kv_len = rows.span_kv_len[span], end = params.num_computed[span];
  const int num_pieces = static_cast<int>(params.records.record_bytes / sizeof(uint4));
  for (int i = 0; i < end; ++i) {
    const int at = params.committed_row[begin + i] - begin;
    if (at == i) continue;
    const auto* from = reinterpret_cast<const uint4*>(params.records.at(slot, kv_len + at));
    auto* to = reinterpret_cast<uint4*>(params.records.at(slot, kv_len + i));
    for (int piece = threadIdx.x; piece < num_pieces; piece += kThreads) to[piece] = from[piece];
  }
}

}  // namespace

int move_kv_cuda(const MoveKvParams& params, void* stream) {
  if (params.num_layers == 0 || params.rows.num_spans == 0) return cudaSuccess;
  constexpr int kMaxSpanBlocks = 64;
  const dim3 grid(static_cast<unsigned>(params.num_layers),
                  static_cast<unsigned>(std::min(params.rows.num_spans, kMaxSpanBlocks)));
  return cuda::launch(move_kv_kernel, grid, dim3(kThreads), 0, stream, params,
                      static_cast<int>(dtype_bytes(params.dtype)));
}

int move_records_cuda(const MoveRecordsParams& params, void* stream) {
  if (params.rows.num_spans == 0) return cudaSuccess;
  return cuda::launch(move_records_kernel, params.rows.num_spans, kThreads, 0, stream, params);
}

}  // namespace openspec
