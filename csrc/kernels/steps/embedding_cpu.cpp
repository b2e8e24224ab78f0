#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/steps/embedding.h"

namespace openspec::OPENSPEC_ISA {

void embedding(const ExecContext& exec, const EmbeddingParams& params) {
  const int64_t width = params.width;
  for_each_row(exec, params.num_rows, width, [&](int64_t row) {
    const uint16_t* from = static_cast<const uint16_t*>(params.table) + params.token[row] * width;
    if (params.dtype == DType::kF32) {
      bf16_to_float(from, static_cast<float*>(params.out) + row * width, width);
    } else {
      std::memcpy(static_cast<uint16_t*>(params.out) + row * width, from, width * sizeof(uint16_t));
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
