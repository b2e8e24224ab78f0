#include "kernels/linear/splits.h"

#include <algorithm>

#include "check_test.h"

using namespace openspec;

namespace {

struct Shape {
  const char* name;
  int num_outputs, num_inputs;
  int num_splits;
};

// Outputs are a hidden size; inputs are the query heads', the MLP's, or those of captured layers.
constexpr Shape kPublished[] = {
    {"SmolLM2 135M o", 576, 576, 4},
    {"SmolLM2 135M down", 576, 1536, 4},
    {"Qwen3 0.6B o", 1024, 2048, 4},
    {"Qwen3 0.6B down", 1024, 3072, 4},
    {"Qwen3 1.7B o", 2048, 2048, 4},
    {"Qwen3 1.7B down", 2048, 6144, 8},
    {"Qwen3 4B o", 2560, 4096, 4},
    {"Qwen3 4B down", 2560, 9728, 4},
    {"Qwen3 4B fc of three", 2560, 7680, 4},
    {"Qwen3 4B fc of five", 2560, 12800, 4},
    {"Qwen3 8B o", 4096, 4096, 4},
    {"Qwen3 8B down, fc of three", 4096, 12288, 4},
    {"Qwen3 14B o", 5120, 5120, 8},
    {"Qwen3 14B down", 5120, 17408, 8},
    {"Qwen3 14B fc of three", 5120, 15360, 8},
    {"Qwen3 32B o", 5120, 8192, 8},
    {"Qwen3 32B down", 5120, 25600, 8},
    {"Llama 3.2 1B o", 2048, 2048, 4},
    {"Llama 3.2 1B down", 2048, 8192, 8},
    {"Llama 3.2 3B o", 3072, 3072, 4},
    {"Llama 3.2 3B down", 3072, 8192, 4},
    {"Llama 3.1 8B, Mistral 7B o", 4096, 4096, 4},
    {"Llama 3.1 8B, Mistral 7B down", 4096, 14336, 4},
    {"Llama 3.3 70B, Qwen2.5 72B o", 8192, 8192, 8},
    {"Llama 3.3 70B down", 8192, 28672, 8},
    {"Llama 3.1 405B o", 16384, 16384, 8},
    {"Llama 3.1 405B down", 16384, 53248, 8},
    {"Mistral Nemo 12B o", 5120, 4096, 8},
    {"Mistral Nemo 12B down", 5120, 14336, 8},
    {"Mistral Small 24B down", 5120, 32768, 8},
    {"Qwen2.5 0.5B o", 896, 896, 4},
    {"Qwen2.5 0.5B down", 896, 4864, 8},
    {"Qwen2.5 1.5B o", 1536, 1536, 4},
    {"Qwen2.5 1.5B down", 1536, 8960, 8},
    {"Qwen2.5 3B o", 2048, 2048, 4},
    {"Qwen2.5 3B down", 2048, 11008, 8},
    {"Qwen2.5 7B o", 3584, 3584, 4},
    {"Qwen2.5 7B down", 3584, 18944, 4},
    {"Qwen2.5 14B down", 5120, 13824, 8},
    {"Qwen2.5 32B down", 5120, 27648, 8},
    {"Qwen2.5 72B down", 8192, 29568, 8},
    {"embedded o", 320, 512, 4},
    {"embedded down", 320, 1216, 4},
    {"embedded fc of three", 320, 960, 4},
};

}  // namespace

TEST(published_shapes_have_their_splits) {
  for (const Shape& shape : kPublished) {
    const int found = linear_num_splits(shape.num_outputs, shape.num_inputs);
    if (found != shape.num_splits) std::printf("%s has %d splits\n", shape.name, found);
    CHECK_EQ(found, shape.num_splits);
  }
}

TEST(narrow_matrices_have_as_many_splits_as_their_units_allow) {
  CHECK_EQ(linear_num_splits(256, 1024), 8);
  CHECK_EQ(linear_num_splits(128, 256), 8);
  CHECK_EQ(linear_num_splits(128, 255), 4);
  CHECK_EQ(linear_num_splits(96, 168), 4);
  CHECK_EQ(linear_num_splits(96, 100), 2);
  CHECK_EQ(linear_num_splits(64, 32), 1);
  CHECK_EQ(linear_num_splits(64, 1), 1);
}

TEST(splits_cover_all_inputs_in_units) {
  for (int inputs = 1; inputs <= 2100; ++inputs) {
    for (const int num_splits : {1, 2, 3, 4, 8}) {
      int end = 0, least = inputs, most = 0;
      for (int split = 0; split < num_splits; ++split) {
        const InputRange range = split_inputs(inputs, num_splits, split);
        CHECK_EQ(range.begin, end);
        CHECK(range.end == inputs || range.end % kSplitUnit == 0);
        end = range.end;
        least = std::min(least, range.size());
        if (range.end < inputs) most = std::max(most, range.size());
      }
      CHECK_EQ(end, inputs);
      CHECK(num_splits * kSplitUnit > inputs || least > 0);
      CHECK(most - least <= kSplitUnit || inputs % kSplitUnit != 0);
    }
  }
}

TEST(uneven_splits_differ_by_a_unit) {
  const int sizes_of_4[] = {288, 320, 288, 320};  // of 38 units
  for (int i = 0; i < 4; ++i) CHECK_EQ(split_inputs(1216, 4, i).size(), sizes_of_4[i]);
  const int sizes_of_8[] = {128, 160, 160, 160, 128, 160, 160, 160};
  for (int i = 0; i < 8; ++i) CHECK_EQ(split_inputs(1216, 8, i).size(), sizes_of_8[i]);
}
