#include "kernels/common/finite.h"

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

bool is_finite_on_device(const DeviceBuffer& numbers, size_t bytes, DType dtype) {
  const DeviceBuffer found(std::vector<int32_t>{0});
  CHECK_CUDA(find_non_finite_cuda({numbers.data(), bytes, dtype}, found.as<int32_t>(), nullptr));
  return found.download<int32_t>()[0] == 0;
}

}  // namespace

TEST(non_finite_numbers_are_found_wherever_they_stand) {
  Rng rng(3);
  for (const size_t count : {2u, 6u, 64u, 4098u, 1000000u}) {
    std::vector<uint16_t> numbers(count);
    for (uint16_t& number : numbers) number = static_cast<uint16_t>(rng.integer(0, 0x7f7f));
    CHECK(is_finite_cpu({numbers.data(), 2 * count, DType::kBF16}));
    CHECK(is_finite_on_device(DeviceBuffer(numbers), 2 * count, DType::kBF16));
    for (const uint16_t odd : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
      for (const size_t at : {size_t{0}, size_t{1}, count / 2, count - 1}) {
        std::vector<uint16_t> with = numbers;
        with[at] = odd;
        CHECK(!is_finite_cpu({with.data(), 2 * count, DType::kBF16}));
        CHECK(!is_finite_on_device(DeviceBuffer(with), 2 * count, DType::kBF16));
        // The upper half of a word of fp32 alone holds the exponent.
        const bool is_finite = at % 2 == 0;
        CHECK(is_finite_cpu({with.data(), 2 * count, DType::kF32}) == is_finite);
        CHECK(is_finite_on_device(DeviceBuffer(with), 2 * count, DType::kF32) == is_finite);
      }
    }
  }
}
