#include <cstring>

#include "kernels/move_kv.h"

namespace openspec {

namespace {

/// The K of a token in head 0 of a layer.
std::byte* key_of(const KvLayerView& kv, const PageTableView& table, int slot, int token,
                  size_t head_bytes) {
  const int64_t page = table.pages[int64_t{slot} * table.max_pages_per_seq + token / kv.page_size];
  const int64_t line = page * 2 * kv.num_kv_heads * kv.page_size + token % kv.page_size;
  return static_cast<std::byte*>(kv.data) + static_cast<size_t>(line) * head_bytes;
}

}  // namespace

void move_kv_cpu(const ExecContext& exec, const MoveKvParams& params) {
  if (params.num_moves == 0) return;
  exec.pool->parallel_for(params.num_layers, [&](int64_t layer) {
    const KvLayerView& kv = params.layers[layer];
    const size_t head_bytes = static_cast<size_t>(kv.head_dim) * dtype_bytes(params.dtype);
    const size_t stride = head_bytes * static_cast<size_t>(kv.page_size);
    for (int i = 0; i < params.num_moves; ++i) {
      const std::byte* from =
          key_of(kv, params.page_table, params.seq[i], params.from[i], head_bytes);
      std::byte* to = key_of(kv, params.page_table, params.seq[i], params.to[i], head_bytes);
      // All heads of K, then all of V.
      for (size_t head = 0; head < static_cast<size_t>(2 * kv.num_kv_heads); ++head) {
        std::memmove(to + head * stride, from + head * stride, head_bytes);
      }
    }
  });
}

}  // namespace openspec
