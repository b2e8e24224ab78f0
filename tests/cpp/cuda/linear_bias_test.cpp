#include <cstring>

#include "cuda/linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

// The bytes of fp32 `sums` [rows, bias.size()] with the bias, rounded as `out` has it.
std::vector<uint8_t> with_bias(const std::vector<uint8_t>& sums, const std::vector<float>& bias,
                               Out out) {
  std::vector<uint8_t> expected;
  for (size_t i = 0; i < sums.size() / 4; ++i) {
    const float value = element(sums, Out::kF32, i) + bias[i % bias.size()];
    const uint16_t rounded = to_bf16(value);
    const void* from = out == Out::kBF16 ? static_cast<const void*>(&rounded) : &value;
    const size_t bytes = out == Out::kBF16 ? 2 : 4;
    expected.resize(expected.size() + bytes);
    std::memcpy(expected.data() + expected.size() - bytes, from, bytes);
  }
  return expected;
}

}  // namespace

// The fp32 product has the same bits whatever computes it (linear_test.cpp), so with a bias there
// is one answer too: for every kernel and number of rows, and whoever draws the work.
TEST(a_bias_is_added_before_the_rounding) {
  const DeviceBuffer workspace(std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0));
  for (const char* name :
       {"tiny qkv", "1.7B qkv", "4B qkv", "Qwen2.5 0.5B qkv", "Qwen2.5 1.5B qkv", "Qwen2.5 7B qkv",
        "Qwen2.5 14B qkv", "empty chains", "one step", "activations in phases"}) {
    Problem& problem = problem_named(name);
    const std::vector<uint16_t> bits =
        random_bf16(static_cast<size_t>(problem.num_columns()), 30.0f, 5);
    std::vector<float> bias;
    for (const uint16_t x : bits) bias.push_back(from_bf16(x) * 1.001f);
    const DeviceBuffer device_bias(bias);
    for (const int num_rows : {1, 5, 8, 9, 16, 24, 27, 32, 33, 64, 96, 100, 128, 200, 256}) {
      const std::vector<uint8_t> sums = problem.run(0, num_rows, Out::kF32);
      for (const Out out : {Out::kBF16, Out::kF32}) {
        LinearParams params = problem.params(num_rows, out, problem.device_x());
        params.weight.bias = device_bias.as<float>();
        const std::vector<uint8_t> expected = with_bias(sums, bias, out);
        for (const By by : {By::kDispatch, By::kStream, By::kWgmma}) {
          if (by == By::kWgmma && !cuda::linear_wgmma_takes(params.weight, kMaxRows)) continue;
          if (problem.run(params, out, by) != expected) {
            problem.fail("bias, by way " + std::to_string(static_cast<int>(by)), num_rows);
          }
        }
        params.workspace = workspace.as<float>();
        if (problem.run(params, out, By::kDispatch) != expected) {
          problem.fail("bias, work drawn", num_rows);
        }
      }
    }
  }
}

TEST(a_bias_of_split_or_gated_sums_is_refused) {
  const auto refuses = [](const char* name, Out out) {
    Problem& problem = problem_named(name);
    LinearParams params = problem.params(4, out, problem.device_x());
    params.weight.bias = static_cast<const float*>(problem.device_x());
    return linear_cuda(params, nullptr) == static_cast<int>(cudaErrorInvalidValue);
  };
  CHECK(refuses("tiny gate_up", Out::kBF16));
  CHECK(refuses("0.6B o", Out::kBF16));
  CHECK(refuses("tiny o", Out::kPartials));
}
