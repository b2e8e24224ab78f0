#pragma once

#include "kernels/common/exec.h"

namespace openspec {

/// out[i] = in[row[i]], or in[i] without `row`, into rows of `out_stride` bytes. A row of -1 is
/// other_in[other_row[i]], where there is such a thing, and else left alone.
struct GatherRowsParams {
  const int32_t* row = nullptr;  // [num_rows], or null
  const void* in = nullptr;      // [*, width_bytes]
  void* out = nullptr;           // [num_rows, out_stride]
  int num_rows = 0;
  int64_t width_bytes = 0;  // multiple of 4; on CUDA of 16, as are pointers and out_stride
  int64_t out_stride = 0;   // bytes
  const int32_t* other_row = nullptr;  // [num_rows], or null
  const void* other_in = nullptr;      // [*, width_bytes]
};

void gather_rows_cpu(const ExecContext& exec, const GatherRowsParams& params);
int gather_rows_cuda(const GatherRowsParams& params, void* stream);

}  // namespace openspec
