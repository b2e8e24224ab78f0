#include "kernels/embedding.h"
#include "kernels/isa_cpu.h"
#include "kernels/row_ops_cpu.h"
#include "kernels/simd_cpu.h"

namespace openspec::OPENSPEC_ISA {

void embedding(const ExecContext& exec, const EmbeddingParams& params) {
  const int64_t width = params.width;
  for_each_row(exec, params.num_rows, width, [&](int64_t row) {
    const int64_t from = params.token[row] * width;
    const int64_t to = row * width;
    if (params.table_dtype == params.dtype) {
      const size_t bytes = dtype_bytes(params.dtype);
      std::memcpy(static_cast<char*>(params.out) + to * bytes,
                  static_cast<const char*>(params.table) + from * bytes, width * bytes);
    } else if (params.dtype == DType::kF32) {
      bf16_to_float(static_cast<const uint16_t*>(params.table) + from,
                    static_cast<float*>(params.out) + to, width);
    } else {
      float_to_bf16(static_cast<const float*>(params.table) + from,
                    static_cast<uint16_t*>(params.out) + to, width);
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
