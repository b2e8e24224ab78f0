#include <algorithm>
#include <cstring>

#include "kernels/steps/gather_rows.h"

namespace openspec {

void gather_rows_cpu(const ExecContext& exec, const GatherRowsParams& params) {
  constexpr int64_t kTaskBytes = 65536;  // a few microseconds
  const int64_t num_rows = params.num_rows;
  const int64_t rows_per_task =
      std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, params.width_bytes));
  char* out = static_cast<char*>(params.out);
  exec.pool->parallel_for((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (int64_t to = task * rows_per_task; to < end; ++to) {
      int64_t from = params.row != nullptr ? params.row[to] : to;
      const void* in = params.in;
      if (from < 0 && params.other_row != nullptr) {
        from = params.other_row[to];
        in = params.other_in;
      }
      if (from < 0) continue;
      std::memcpy(out + to * params.out_stride,
                  static_cast<const char*>(in) + from * params.width_bytes,
                  static_cast<size_t>(params.width_bytes));
    }
  });
}

}  // namespace openspec
