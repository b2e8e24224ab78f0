#include "kernels/attention/head_gate.h"

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Bits = std::vector<uint16_t>;

}  // namespace

TEST(gated_heads_have_the_bits_of_the_cpu) {
  Rng rng(1);
  struct Shape {
    int num_rows, num_heads, head_dim, num_others;  // others: elements of a row besides
  };
  for (const Shape& shape : {Shape{1, 16, 256, 2048}, Shape{37, 24, 256, 2048}, Shape{3, 1, 32, 8},
                             Shape{700, 2, 128, 0}}) {
    const auto width = static_cast<size_t>(shape.num_heads * shape.head_dim);
    const size_t stride = 2 * width + static_cast<size_t>(shape.num_others);
    const auto num_rows = static_cast<size_t>(shape.num_rows);
    const Bits x = to_bf16(rng.normals(num_rows * width, 3));
    // From where the exponential is 0 to where it is 1.
    Bits gates = to_bf16(rng.normals(num_rows * stride, 4));
    for (size_t i = 0; i < gates.size(); i += 7) gates[i] = to_bf16(rng.normal(60.0f));
    HeadGateParams params = {.row_stride = static_cast<int64_t>(stride),
                             .num_rows = shape.num_rows,
                             .num_heads = shape.num_heads,
                             .head_dim = shape.head_dim,
                             .dtype = DType::kBF16};
    const DeviceBuffer device_x(x), device_gates(gates);
    params.x = device_x.data();
    params.gates = device_gates.data();
    CHECK_CUDA(head_gate_cuda(params, nullptr));
    CHECK(device_x.guard_is_whole());
    const Bits got = device_x.download<uint16_t>();
    for_each_isa([&] {
      ThreadPool pool(2);
      Bits expected = x;
      params.x = expected.data();
      params.gates = gates.data();
      head_gate_cpu({.pool = &pool}, params);
      CHECK(got == expected);
    });
  }
}

TEST(what_no_gate_takes_is_refused) {
  const DeviceBuffer memory(4096);
  const HeadGateParams good = {.x = memory.data(),
                               .gates = memory.data(),
                               .row_stride = 512,
                               .num_rows = 0,
                               .num_heads = 1,
                               .head_dim = 256,
                               .dtype = DType::kBF16};
  const auto result_of = [&](auto change) {
    HeadGateParams params = good;
    change(params);
    return head_gate_cuda(params, nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of([](HeadGateParams&) {}), static_cast<int>(cudaSuccess));
  CHECK_EQ(result_of([](HeadGateParams& p) { p.dtype = DType::kF32; }), kInvalid);
  CHECK_EQ(result_of([](HeadGateParams& p) { p.head_dim = 12; }), kInvalid);
  CHECK_EQ(result_of([](HeadGateParams& p) { p.row_stride = 516; }), kInvalid);
  CHECK_EQ(result_of([](HeadGateParams& p) { p.x = static_cast<std::byte*>(p.x) + 8; }), kInvalid);
}
