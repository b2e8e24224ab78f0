#include "kernels/steps/embedding.h"

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

}  // namespace

TEST(embedding_copies_rows_of_the_table) {
  Rng rng(1);
  constexpr int kVocab = 500;
  for (const int width : {8, 320, 1024, 2560, 5120}) {
    for (const int num_rows : {1, 7, 300}) {
      const std::vector<uint16_t> table =
          to_bf16(rng.normals(static_cast<size_t>(kVocab) * static_cast<size_t>(width)));
      std::vector<int32_t> token;
      for (int i = 0; i < num_rows; ++i) token.push_back(rng.integer(0, kVocab - 1));
      token[0] = kVocab - 1;
      std::vector<uint16_t> expected(static_cast<size_t>(num_rows) * static_cast<size_t>(width));
      ThreadPool pool(4);
      embedding_cpu({.pool = &pool},
                    {token.data(), table.data(), expected.data(), num_rows, width, DType::kBF16});
      const DeviceBuffer device_token(token), device_table(table), out(expected.size() * 2);
      CHECK_CUDA(embedding_cuda({device_token.as<int32_t>(), device_table.data(), out.data(),
                                 num_rows, width, DType::kBF16},
                                nullptr));
      CHECK(out.guard_is_whole());
      CHECK(out.download<uint16_t>() == expected);
    }
  }
}

TEST(embedding_refuses_what_it_cannot_do) {
  const DeviceBuffer token(std::vector<int32_t>{0}), table(4096), out(4096);
  const auto result_of = [&](int width, DType dtype) {
    return embedding_cuda({token.as<int32_t>(), table.data(), out.data(), 1, width, dtype},
                          nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of(64, DType::kF32), kInvalid);
  CHECK_EQ(result_of(12, DType::kBF16), kInvalid);
  CHECK_EQ(out.download<uint16_t>()[0], 0xffff);
}
