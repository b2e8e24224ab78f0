#include <algorithm>
#include <cstring>

#include "kernels/drafts/kept_rows.h"

namespace openspec {

void keep_rows_cpu(const ExecContext&, const KeepRowsParams& params) {
  const auto width = static_cast<size_t>(params.kept.width_bytes);
  for (int span = 0; span < params.rows.num_spans; ++span) {
    if (params.num_computed[span] == 0) continue;
    const int64_t place = int64_t{params.rows.span_seq[span]} * kMaxKeptRows +
                          params.rows.span_kv_len[span] % kMaxKeptRows;
    std::memcpy(static_cast<char*>(params.kept.features) + static_cast<size_t>(place) * width,
                static_cast<const char*>(params.features) +
                    static_cast<size_t>(params.rows.span_begin[span]) * width,
                width);
  }
}

void take_kept_rows_cpu(const ExecContext&, const TakeKeptRowsParams& params) {
  const int most = std::min(kMaxKeptRows, params.num_rows / std::max(1, params.num_slots));
  int row = 0;
  for (int i = 0; i < params.num_slots; ++i) {
    const int slot = params.slot[i], end = params.kv_len[slot];
    const int count = std::clamp(end - params.kept.begin[slot], 0, most);
    params.kept.begin[slot] = end;
    params.span_begin[i] = row;
    params.span_kv_len[i] = end - count;
    params.num_computed[i] = count;
    for (int position = end - count; position < end; ++position) {
      params.source[row++] = slot * kMaxKeptRows + position % kMaxKeptRows;
    }
  }
  params.span_begin[params.num_slots] = row;
  std::fill(params.source + row, params.source + params.num_rows, -1);
}

}  // namespace openspec
