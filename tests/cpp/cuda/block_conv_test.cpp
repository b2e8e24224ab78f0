#include "cuda/cuda_testing.h"
#include "kernels/block_conv_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

std::vector<uint16_t> bits_of(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(to_bf16(value));
  return bits;
}

}  // namespace

TEST(block_conv_matches_the_cpu) {
  Rng rng(1);
  struct Shape {
    int num_rows, width, group;
  };
  for (const Shape& shape : {Shape{1, 16, 8}, Shape{9, 320, 16}, Shape{16, 2560, 16},
                             Shape{100, 4096, 16}, Shape{2, 1040, 8}, Shape{300, 5120, 64}}) {
    for (const int num_partials : {0, 1, 2, 7}) {
      const ConvCase c(rng, shape.num_rows, shape.width, shape.group, num_partials);
      const Buffer expected = run_cpu(c, DType::kBF16);
      const DeviceBuffer parents(c.parents), x(bits_of(c.x)), partials(c.partials),
          own(bits_of(c.own)), base(c.base), out(expected.num_bytes());
      BlockConvParams params = c.params(DType::kBF16);
      params.row_parent = parents.as<int32_t>();
      params.x = num_partials == 0 ? x.data() : nullptr;
      params.partials = num_partials == 0 ? nullptr : partials.as<float>();
      params.own = own.as<uint16_t>() + c.num_own();
      params.base = base.as<float>();
      params.out = out.data();
      CHECK_CUDA(block_conv_cuda(params, nullptr));
      const std::vector<uint16_t> found = out.download<uint16_t>();
      for (size_t i = 0; i < found.size(); ++i) CHECK_EQ(from_bf16(found[i]), expected[i]);
      CHECK(out.guard_is_whole());
    }
  }
}

TEST(block_conv_refuses_what_it_cannot_do) {
  Rng rng(2);
  const ConvCase c(rng, 2, 64, 16);
  const DeviceBuffer parents(c.parents), x(bits_of(c.x)), own(bits_of(c.own)), base(c.base),
      out(x.bytes());
  BlockConvParams good = c.params(DType::kBF16);
  good.row_parent = parents.as<int32_t>();
  good.x = x.data();
  good.own = own.data();
  good.base = base.as<float>();
  good.out = out.data();
  const auto result_of = [&](auto change) {
    BlockConvParams params = good;
    change(params);
    return block_conv_cuda(params, nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of([](BlockConvParams& p) { p.dtype = DType::kF32; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { p.group = 4; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { p.group = 24; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { p.x = nullptr; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { p.partials = p.base; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { ++p.base; }), kInvalid);
  CHECK_EQ(result_of([](BlockConvParams& p) { p.num_rows = 0; }), static_cast<int>(cudaSuccess));
  CHECK_EQ(out.download<uint16_t>()[0], 0xffff);
}
