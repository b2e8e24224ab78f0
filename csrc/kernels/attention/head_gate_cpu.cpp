#include "kernels/attention/head_gate.h"
#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

void head_gate(const ExecContext& exec, const HeadGateParams& params) {
  const int64_t dim = params.head_dim, width = params.num_heads * dim;
  for_each_row(exec, params.num_rows, 2 * width, [&](int64_t row) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t head = i / dim;
      const int64_t gate = row * params.row_stride + (2 * head + 1) * dim + i % dim;
      const int64_t at = row * width + i;
      float product[kLanes];
      store(product, load_floats(params.dtype, params.x, at) *
                         sigmoid(load_floats(params.dtype, params.gates, gate)));
      if (params.dtype == DType::kF32) {
        std::memcpy(static_cast<float*>(params.x) + at, product, sizeof product);
      } else {
        float_to_bf16(product, static_cast<uint16_t*>(params.x) + at, kLanes);
      }
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
