#include <cuda_runtime_api.h>

#include "kernels/steps/embedding.h"
#include "kernels/steps/gather_rows.h"

namespace openspec {

int embedding_cuda(const EmbeddingParams& params, void* stream) {
  if (params.dtype != DType::kBF16) return cudaErrorInvalidValue;
  GatherRowsParams rows;
  rows.row = params.token;
  rows.in = params.table;
  rows.out = params.out;
  rows.num_rows = params.num_rows;
  rows.width_bytes =
      static_cast<int64_t>(params.width) * static_cast<int64_t>(dtype_bytes(params.dtype));
  rows.out_stride = rows.width_bytes;
  return gather_rows_cuda(rows, stream);
}

}  // namespace openspec
